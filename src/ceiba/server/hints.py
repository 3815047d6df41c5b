"""Fields that are advice by nature: taken, without effect here, and said so in the answer's header ``x-ceiba-hints``.

Owns how they are found: a field whose description begins with "Hint:" is one, in every protocol and at every depth, so
that what the document says and what the header says cannot differ. Must never know a field by name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, get_type_hints

import msgspec

from ceiba.core import limits

HEADER = "x-ceiba-hints"


def hints_of(body: msgspec.Struct, prefix: str = "") -> list[str]:
    """Names of the hints that ``body`` gives, those of objects inside of it with their path."""
    found: list[str] = []
    advice = _advice(type(body))
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if value is None:
            continue
        if name in advice:
            found.append(prefix + name)
        elif isinstance(value, msgspec.Struct):
            found += hints_of(value, f"{prefix}{name}.")
    return found


@functools.cache
def _advice(kind: type[msgspec.Struct]) -> frozenset[str]:
    types = get_type_hints(kind, include_extras=True)
    return frozenset(name for name, declared in types.items() if _description(declared).startswith("Hint"))


def _description(declared: Any) -> str:
    metas = [meta for meta in getattr(declared, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    return next((meta.description for meta in metas if meta.description), "")


def hint_header(names: Sequence[str]) -> dict[str, str]:
    """The header for these names; as many as fit a header, then an ellipsis."""
    text = ",".join(name for name in names if name.isascii() and name.isprintable())
    if len(text) > limits.MAX_HINTS_CHARS:
        text = text[: limits.MAX_HINTS_CHARS].rpartition(",")[0] + ",..."
    return {HEADER: text} if text else {}
