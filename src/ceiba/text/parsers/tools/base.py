"""What every tool-call format answers: what opens a call, how to read it, and what a grammar must force.

Owns the base class. A format reads from the source and hands each whole call to ``calls``; it never sees content,
reasoning or requests.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from ceiba.core.errors import BadRequest
from ceiba.text.parsers.arguments import Tools
from ceiba.text.parsers.literals import begun
from ceiba.text.parsers.source import Source, Wait


class Calls(Protocol):
    """Where a format puts the calls it has read."""

    def add(self, name: str, arguments: str, call_id: str | None = None) -> None:
        """One whole call; ``arguments`` is the text of a JSON object, ``call_id`` what the model wrote as its id."""
        ...


class ToolFormat:
    """One family's way to write tool calls, for the tools of one request."""

    openers: tuple[str, ...] = ()
    """Markers at which a call, or a section of calls, may begin. Any opener is read before `region` runs."""
    noise: tuple[str, ...] = ()
    """Markers that are no part of the answer wherever they stand outside of calls."""
    inner: tuple[str, ...] = ()
    """Further markers inside calls that are single tokens in the family's vocabulary."""
    trim: bool = False
    """Whether whitespace before a call belongs to the format instead of the answer."""
    in_reasoning: bool = False
    """Whether the model calls tools while it thinks."""
    short_ids: ClassVar[bool] = False
    """Whether ids must be nine letters and digits."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    def bare(self, source: Source) -> Wait[bool]:
        """Whether the answer, at its start, looks like a call without an opener. Reads whitespace at most."""
        return False
        yield

    def region(self, source: Source, opener: str, calls: Calls) -> Wait[None]:
        """Read a call or a section of calls behind ``opener`` ("" for a bare one). Raises Malformed."""
        raise NotImplementedError
        yield

    def begun(self, name: str, body: str) -> tuple[str, int | None]:
        """The arguments of a call of ``name`` whose text between the frame is ``body`` and what follows it: JSON text,
        and where in ``body`` they end. Where ``body`` ends first, what it says of them (the beginning of the JSON text
        that they would have been), and None. ``body`` is as a grammar of `body` makes it. Raises Malformed."""
        return begun(body)

    def own_id(self, begin: str) -> str | None:
        """The id that the model gave a call, which stands in the begin of its frame."""
        return None

    def new_id(self) -> str:
        if self.short_ids:
            return "".join(random.choices(string.ascii_letters + string.digits, k=9))
        return f"call_{uuid.uuid4().hex[:24]}"

    # ── what generation needs ───────────────────────────────────────────────

    section: tuple[str, str] = ("", "")
    """What stands around all calls of an answer."""
    separator: str = ""
    """What stands between two calls."""
    single: bool = False
    """Whether an answer can hold one call only."""

    bare_start: str = ""
    bare_end: str = ""
    """What ends bare calls."""
    """An expression for the beginnings of answers that `bare` may take for a call, up to where that is clear."""
    opened: tuple[str, str] = ("", "")
    """What stands around calls that an opener announces, where ``section`` and ``frame`` are the bare form."""

    def bare_frames(self, name: str) -> list[tuple[str, str, str]]:
        """The forms of a bare call: expressions for what stands before the arguments of the first call, before those of
        a further one, and after them."""
        return []

    def frame(self, name: str) -> tuple[str, str]:
        """What stands before and after the arguments of a call of ``name``."""
        raise NotImplementedError

    def body(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """How the arguments between the frame are written."""
        return {"type": "json", "schema": schema}

    def constraint(
        self, choice: str | Mapping[str, Any] = "auto", *, parallel: bool = True, strict: bool = False
    ) -> dict[str, Any] | None:
        """The structural tags that a grammar must hold to, free of any grammar library's own form; None for none.

        ``choice``: ``auto`` (constrained only when a tool is strict, or all are by ``strict``), ``required``,
        ``none``, a tool's name, or OpenAI's named form. Keys of the answer: ``begin`` and ``end`` (around all calls),
        ``separator``, ``triggers`` (where free text turns into a call), ``required`` (no free text, at least one
        call), ``parallel`` (more than one call) and ``tags``, each with ``name``, ``begin``, ``content``, ``end``.
        Where calls may stand bare at the start of an answer, ``bare``: ``start`` (an expression for what begins so),
        ``end`` and ``tags`` of such calls, whose ``begin``, ``more`` (``begin`` of a further call) and ``end`` are
        expressions: models space them in many ways.
        ``content`` is ``{"type": "json", "schema"}``, or names the family's notation and how to write it
        (``elements``, ``tree``, ``pythonic``, ``gemma``). Of ``begin``, ``{index}`` and ``{index0}`` stand for the
        number of the call, from 1 and from 0; of an element's ``open``, ``{key}``, ``{type}`` (a JSON type) and
        ``{is_string}`` (true or false) for the argument's.
        Raises BadRequest for a tool that is not offered.
        """
        named = _named(choice)
        if named == "none" or not self.tools.names:
            return None
        required = named != "auto"
        names = self.tools.names
        if named not in {"auto", "required"}:
            if named not in self.tools:
                raise BadRequest(
                    f"tool_choice names {named!r}, which is not among the tools of the request", param="tool_choice"
                )
            names = (named,)
        firm = {n: required or strict or self.tools.strict(n) for n in names}
        if not any(firm.values()):
            return None
        contents = {n: self.body(self.tools.schema(n) if firm[n] else {"type": "object"}) for n in names}

        def tag(name: str, frame: tuple[str, str]) -> dict[str, Any]:
            return {"name": name, "begin": frame[0], "content": contents[name], "end": frame[1]}

        tags = [tag(name, self.frame(name)) for name in names]
        section = self.opened if self.opened[0] and not required else self.section
        found: dict[str, Any] = {
            "type": "tags",
            "begin": section[0],
            "end": section[1],
            "separator": self.separator,
            "triggers": [section[0]] if section[0] else _triggers([t["begin"] for t in tags], self.openers),
            "required": required,
            "parallel": parallel and not self.single and named in {"auto", "required"},
            "tags": tags,
        }
        if self.bare_start and not required:
            bare = [
                {"name": name, "begin": begin, "more": more, "content": contents[name], "end": end}
                for name in names
                for begin, more, end in self.bare_frames(name)
            ]
            found["bare"] = {"start": self.bare_start, "end": self.bare_end, "tags": bare}
        return found


def _named(choice: str | Mapping[str, Any]) -> str:
    if isinstance(choice, str):
        return choice
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise BadRequest("tool_choice must be none, auto, required or name a function", param="tool_choice")
    return name


def _triggers(begins: list[str], openers: tuple[str, ...]) -> list[str]:
    """The openers that the frames begin with; a frame without one is its own trigger."""
    found = {next((o for o in openers if b.startswith(o)), b): None for b in begins}
    return list(found)
