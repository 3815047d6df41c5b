"""From what a request says to one constraint, and what can be refused at once, by reading alone.

Owns the rule "one constraint for each request" and the quick checks; the front calls it, so it imports no library.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.core.sampling import SamplingParams
from ceiba.grammar import schema, tags
from ceiba.grammar.base import KINDS, Constraint, Refusal
from ceiba.grammar.regex import check_regex, escape

ANY_OBJECT = '{"type":"object"}'


def constraint_of(sampling: SamplingParams) -> Constraint | None:
    """The one constraint of a request; None for none. Raises BadRequest for more than one."""
    given = [Constraint(kind, text) for kind in KINDS if (text := getattr(sampling, kind)) is not None]
    if len(given) > 1:
        names = " and ".join(constraint.kind for constraint in given)
        raise BadRequest(f"{names} exclude each other: give one of them.", param=given[1].kind)
    return given[0] if given else None


def check(constraint: Constraint, param: str) -> None:
    """Raise BadRequest for what no backend can serve, in time linear in the text. ``param``: the caller's name."""
    kind, text = constraint.kind, constraint.text
    if len(text) > limits.MAX_GRAMMAR_CHARS:
        raise BadRequest(
            f"{param} has {len(text)} characters; the limit is {limits.MAX_GRAMMAR_CHARS}: use a smaller one.",
            param=param,
        )
    try:
        if kind == "json_schema":
            schema.check(schema.parse(text))
        elif kind == "regex":
            check_regex(text, keyword="")
        elif kind == "structural_tag":
            tags.parse(text)
        elif not text.strip():
            raise Refusal("the grammar is empty")
    except Refusal as refusal:
        raise refused(refusal, param) from None


def refused(refusal: Refusal, param: str) -> BadRequest:
    return BadRequest(f"{param}: {refusal}", param=param, code="invalid_grammar")


def as_text(value: Any, param: str) -> str:
    """A schema or tag that came as text or as JSON, as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict | bool):
        return msgspec.json.encode(value).decode()
    raise BadRequest(f"{param} must be an object or its text, not {type(value).__name__}.", param=param)


def choice_regex(choices: Any, param: str = "choice") -> str:
    """An expression for exactly these strings."""
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise BadRequest(f"{param} must be a list of texts that are not empty.", param=param)
    if len(choices) > limits.MAX_CHOICES:
        raise BadRequest(f"{param} has {len(choices)} entries; the limit is {limits.MAX_CHOICES}.", param=param)
    pattern = "|".join(escape(text) for text in dict.fromkeys(choices))
    if len(pattern) > limits.MAX_REGEX_CHARS:
        raise BadRequest(
            f"{param} has {len(pattern)} characters in all; the limit is {limits.MAX_REGEX_CHARS}: send fewer.",
            param=param,
        )
    return f"({pattern})"
