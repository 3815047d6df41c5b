"""The calls in the text of an answer that a grammar forced to be calls and that the length limit cut.

Such a text is known by its frames, piece by piece, so what it says of its last call can be told although the call is
not whole. Owns that reading; formats read their own arguments (``ToolFormat.begun``). Must never know events or a
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ceiba.text.parsers.source import Malformed
from ceiba.text.parsers.tools.base import ToolFormat


@dataclass(frozen=True, slots=True)
class Begun:
    """A call as far as it was written. ``arguments``: JSON text, or the beginning of it where it is not ``whole``."""

    name: str
    arguments: str
    whole: bool
    id: str | None = None


def read(tool: ToolFormat, names: Sequence[str], text: str, before: int = 0) -> list[Begun]:
    """The calls of ``text``, which begins where the grammar began, or behind ``before`` calls of the same section; only
    the last one may be cut.

    ``names``: the tools that may be called. A call whose frame is cut counts if it can be of one tool only. Raises
    Malformed for a text that the grammar would not have let through.
    """
    if not text:
        return []
    opening = "" if before else tool.section[0]
    if not text.startswith(opening):
        return _guess([n for n in names if (opening + _begin(tool, n, 0)).startswith(text)], text)
    rest = _behind_call(tool, names, text) if before else text[len(opening) :]
    found: list[Begun] = []
    while True:
        rest = rest.lstrip()
        begins = {name: _begin(tool, name, before + len(found)) for name in names}
        name = max((n for n in names if rest.startswith(begins[n])), key=lambda n: len(begins[n]), default=None)
        if name is None:
            over = before + len(found) > 0 and tool.section[1].strip().startswith(rest)
            left = [] if over else [n for n in names if begins[n].startswith(rest)]
            return [*found, *_guess(left, rest, sure=before + len(found) > 0)]
        rest = rest[len(begins[name]) :]
        arguments, end = tool.begun(name, rest)
        found.append(Begun(name, arguments, end is not None, tool.own_id(begins[name])))
        if end is None:
            return found
        close = tool.frame(name)[1].strip()
        rest = rest[end:].lstrip()
        if not rest.startswith(close):
            return found
        rest = rest[len(close) :].lstrip().removeprefix(tool.separator.strip())


def _guess(names: list[str], rest: str, *, sure: bool = False) -> list[Begun]:
    """A call of which not even the frame is whole: ``names`` are left for it. ``sure``: calls came before it, so the
    text may as well be what ends them."""
    if not names and not sure:
        raise Malformed
    return [Begun(names[0], "", False)] if (rest or not sure) and len(names) == 1 else []


def _behind_call(tool: ToolFormat, names: Sequence[str], text: str) -> str:
    """``text`` without what of a call's frame and of the separator it begins with: formats differ in how much of the
    end they read before a call counts."""
    rest = text.lstrip()
    ends = {tool.frame(name)[1].strip() for name in names}
    tails = [end[i:] for end in ends for i in range(len(end))]
    if any(tail.startswith(rest) for tail in tails):
        return ""
    left = max((tail for tail in tails if rest.startswith(tail)), key=len, default="")
    return rest[len(left) :].lstrip().removeprefix(tool.separator.strip())


def _begin(tool: ToolFormat, name: str, index: int) -> str:
    return tool.frame(name)[0].replace("{index}", str(index + 1)).replace("{index0}", str(index))
