"""Outlines, through its own package ``outlines-core``: a finite automaton over the vocabulary, built ahead.

Owns the use of that library. It knows regular expressions and JSON schemas that can be said as one; no EBNF, no
structural tags, no recursion, and none of the keywords that it would drop in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ceiba.core.errors import BadRequest
from ceiba.core.step import Int32
from ceiba.grammar import schema as schemas
from ceiba.grammar.base import Compiled, Constraint, Refusal, Spacing, State, Vocabulary
from ceiba.grammar.regex import check_regex, trim_anchors
from ceiba.grammar.schema import Schema
from ceiba.grammar.spaces import Spaces, SpaceTable

if TYPE_CHECKING:
    from outlines_core import Guide, Index

NAME = "outlines"
EXACT = frozenset(
    {"type", "properties", "required", "items", "enum", "const", "anyOf", "$ref", "$defs", "definitions", "minItems",
     "maxItems", "minLength", "maxLength", "additionalProperties"}
)  # fmt: skip
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "$schema", "$id", "strict", "name"})
ANY_SPACE = r"[ \t\n\r]*"
MAX_ROLLBACK = 64


class Compiler:
    """Runs in the compiler process: the library has no limit of its own, and large automata take minutes."""

    def __init__(self, vocabulary: Vocabulary, spacing: Spacing) -> None:
        from outlines_core import Vocabulary as Words

        table: dict[bytes, list[int]] = {}
        for token, data in enumerate(vocabulary.tokens):
            if data and token not in vocabulary.eos_ids:
                table.setdefault(data, []).append(token)
        self._words = Words(vocabulary.eos_ids[0], table)
        self._space = ANY_SPACE
        if not spacing.allowed:
            self._space = ""
        elif spacing.pattern is not None:
            self._space = f"({spacing.pattern})?"
        self._most = spacing.most if spacing.allowed and spacing.pattern is None else None

    def compile(self, constraint: Constraint) -> Compiled:
        from outlines_core import Index

        if constraint.kind == "json_schema":
            pattern = self._expression(schemas.parse(constraint.text), constraint.text)
        elif constraint.kind == "regex":
            pattern = trim_anchors(constraint.text)
            check_regex(pattern, keyword="")
        else:
            raise Refusal(
                f"{constraint.kind} is not available with --grammar-backend outlines: use a regex, or start the server "
                "with llguidance"
            )
        try:
            index: Index = Index(pattern, self._words)
        except (ValueError, RuntimeError, TypeError) as error:
            raise Refusal(str(error).strip().splitlines()[0][:300]) from None
        # The library's only way out of a process is the binary form behind __reduce__; nothing of it is executed.
        spaces = self._most if constraint.kind == "json_schema" else None
        return Compiled(NAME, bytes(index.__reduce__()[1][0]), spaces or 0)

    def _expression(self, schema: Schema, text: str) -> str:
        from outlines_core.json_schema import build_regex_from_schema

        schemas.check(schema)
        _check(schema)
        try:
            return str(build_regex_from_schema(text, whitespace_pattern=self._space))
        except (ValueError, RuntimeError, TypeError) as error:
            raise Refusal(str(error).strip().splitlines()[0][:300], path="#") from None


def _check(schema: Schema) -> None:
    """Raise Refusal at the first keyword that the library would not keep."""
    hint = "not available with --grammar-backend outlines"
    for path, part in schemas.walk(schema):
        for keyword in part:
            if keyword not in EXACT and keyword not in ANNOTATIONS:
                raise Refusal(hint, path=path, keyword=keyword)
        if part.get("type") == "object" and "properties" not in part and part.get("additionalProperties") is not False:
            raise Refusal(f"an object without properties is {hint}", path=path, keyword="type")
        if isinstance(part.get("additionalProperties"), dict):
            raise Refusal(hint, path=path, keyword="additionalProperties")


class Engine:
    """The half that fills masks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._eos = vocabulary.eos_ids
        self._vocabulary = vocabulary
        self._table: SpaceTable | None = None

    def prepare(self, compiled: Compiled) -> Prepared:
        from outlines_core import Index

        limit = compiled.spaces
        if limit and (self._table is None or self._table.limit != limit):
            self._table = SpaceTable(self._vocabulary, limit)
        try:
            return Prepared(Index.from_binary(compiled.data), self._eos, self._table if limit else None)
        except (ValueError, RuntimeError) as error:
            raise BadRequest(f"the compiled grammar cannot be read: {str(error)[:300]}") from error

    def fill(self, states: Sequence[State], bits: Int32) -> np.ndarray:
        return np.array([state.fill(row) for state, row in zip(states, bits, strict=True)], bool)


class Prepared:
    def __init__(self, index: Index, eos: tuple[int, ...], table: SpaceTable | None) -> None:
        self._index = index
        self._table = table
        self._eos = eos

    def state(self) -> OutlinesState:
        from outlines_core import Guide

        spaces = None if self._table is None else Spaces(self._table)
        return OutlinesState(Guide(self._index, MAX_ROLLBACK), self._eos, spaces)


class OutlinesState:
    def __init__(self, guide: Guide, eos: tuple[int, ...], spaces: Spaces | None) -> None:
        self._guide = guide
        self._spaces = spaces
        self._eos = eos
        self._ended = False

    @property
    def terminated(self) -> bool:
        """Also where the library's end token is all that may follow."""
        return self._ended or (self._guide.is_finished() and set(self._guide.get_tokens()) <= {self._eos[0]})

    def fill(self, bits: Int32) -> bool:
        bits[:] = 0
        if not self._ended:
            self._guide.write_mask_into(bits.ctypes.data, len(bits), 4)
            if self._spaces is not None:
                self._spaces.limit(bits)
        words = bits.view(np.uint32)
        allowed = self._ended or self._guide.is_finished()
        for token in self._eos:
            bit = np.uint32(1 << (token & 31))
            words[token >> 5] = words[token >> 5] | bit if allowed else words[token >> 5] & ~bit
        return bool(bits.any())

    def accept(self, token: int) -> bool:
        if token in self._eos:
            fits = not self._ended and bool(self._guide.is_finished())
            self._ended = self._ended or fits
            return fits
        if self._ended or not self._guide.accepts_tokens([token]):
            return False
        if self._spaces is not None:
            if not self._spaces.fits(token):
                return False
            self._spaces.accept(token)
        self._guide.advance(token, return_tokens=False)
        return True

    def rollback(self, count: int) -> None:
        if count and self._ended:
            self._ended = False
            count -= 1
        if count:
            self._guide.rollback_state(count)
            if self._spaces is not None:
                self._spaces.rollback(count)

    def forced_tokens(self) -> list[int]:
        """The tokens along which there is one way only."""
        forced: list[int] = []
        while len(forced) < MAX_ROLLBACK and not self.terminated:
            tokens = self._guide.get_tokens()
            if len(tokens) != 1 or self._guide.is_finished() or self._guide.get_allowed_rollback() >= MAX_ROLLBACK - 1:
                break
            forced.append(tokens[0])
            self._guide.advance(tokens[0], return_tokens=False)
        if forced:
            self._guide.rollback_state(len(forced))
        return forced
