"""Outlines, through its own package ``outlines-core``: a finite automaton over the vocabulary, built ahead.

Owns the use of that library. It knows regular expressions and JSON schemas that can be said as one; no EBNF, no
structural tags, no recursion, and none of the keywords that it would drop in silence.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ceiba.core.errors import BadRequest
from ceiba.core.step import Int32
from ceiba.grammar import schema as schemas
from ceiba.grammar.base import Compiled, Constraint, Refusal, Spacing, State, Vocabulary
from ceiba.grammar.masks import packed
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
MAX_ROLLBACK = 256
MAX_FORCED = 64
"""Tokens looked ahead at a time: what a look forgets of the history still leaves room for any draft."""
MASK_BYTES = 32 << 20
"""Masks kept, of all grammars together."""


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


class Place(NamedTuple):
    """What may follow in one state of an automaton."""

    bits: Int32
    """The allowed tokens with every end, int32 [words]; without the limit on space."""
    only: int
    """The token, where exactly one may follow and the answer may not end; else -1."""
    closed: bool
    """Whether only an end may follow."""


class Places:
    """What may follow, by grammar and state: listing a state's tokens costs the library up to a millisecond, and text
    stands in the same few states most of the time. The least used are dropped beyond MASK_BYTES."""

    def __init__(self, words: int, eos: tuple[int, ...]) -> None:
        self._words = words
        self._library_end = eos[0]
        self._ends = packed(eos, words)
        self._most = max(64, MASK_BYTES // (4 * words))
        self._kept: OrderedDict[tuple[int, int], Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def at(self, grammar: int, guide: Guide) -> Place:
        """The place where ``guide`` stands; ``grammar`` tells the automata apart."""
        key = (grammar, guide.get_state())
        place = self._kept.get(key)
        if place is None:
            place = self._kept[key] = self._look(guide)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return place

    def _look(self, guide: Guide) -> Place:
        bits = np.zeros(self._words, np.int32)
        guide.write_mask_into(bits.ctypes.data, len(bits), 4)
        final = bool(guide.is_finished())
        bits[self._library_end >> 5] &= ~np.uint32(1 << (self._library_end & 31)).view(np.int32)
        filled = np.flatnonzero(bits)
        only, closed = -1, final and not len(filled)
        if final:
            bits |= self._ends
        elif len(filled) == 1:
            word = int(bits[filled[0]]) & 0xFFFFFFFF
            only = (int(filled[0]) << 5) + word.bit_length() - 1 if word & (word - 1) == 0 else -1
        bits.flags.writeable = False
        return Place(bits, only, closed)


class Engine:
    """The half that fills masks. Places are looked up by the thread that fills only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._eos = vocabulary.eos_ids
        self._vocabulary = vocabulary
        self._table: SpaceTable | None = None
        self.places = Places(vocabulary.words, vocabulary.eos_ids)
        self._numbers = itertools.count()

    def prepare(self, compiled: Compiled) -> Prepared:
        from outlines_core import Index

        limit = compiled.spaces
        if limit and (self._table is None or self._table.limit != limit):
            self._table = SpaceTable(self._vocabulary, limit)
        try:
            index = Index.from_binary(compiled.data)
        except (ValueError, RuntimeError) as error:
            raise BadRequest(f"the compiled grammar cannot be read: {str(error)[:300]}") from error
        return Prepared(index, next(self._numbers), self._eos, self.places, self._table if limit else None)

    def fill(self, states: Sequence[State], bits: Int32) -> np.ndarray:
        return np.array([state.fill(row) for state, row in zip(states, bits, strict=True)], bool)


class Prepared:
    def __init__(
        self, index: Index, number: int, eos: tuple[int, ...], places: Places, table: SpaceTable | None
    ) -> None:
        self.index = index
        self.number = number
        self.eos = eos
        self.places = places
        self.table = table

    def state(self) -> OutlinesState:
        return OutlinesState(self)


class OutlinesState:
    """Holds its grammar, so that one can tell which grammars are in use."""

    def __init__(self, grammar: Prepared) -> None:
        from outlines_core import Guide

        self._guide = Guide(grammar.index, MAX_ROLLBACK)
        self._grammar = grammar
        self._eos = grammar.eos
        self._spaces = None if grammar.table is None else Spaces(grammar.table)
        self._ended = False

    @property
    def terminated(self) -> bool:
        """Also where the library's end token is all that may follow."""
        return self._ended or (self._guide.is_finished() and self._place().closed)

    @property
    def problem(self) -> str:
        return ""  # everything was built ahead

    def fill(self, bits: Int32) -> bool:
        if self._ended:
            bits[:] = packed(self._eos, len(bits))
            return True
        bits[:] = self._place().bits
        if self._spaces is not None:
            self._spaces.limit(bits)  # ends are no space: they stay
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
        while len(forced) < MAX_FORCED and not self._ended and (only := self._place().only) >= 0:
            forced.append(only)
            self._guide.advance(only, return_tokens=False)
        if forced:
            self._guide.rollback_state(len(forced))
        return forced

    def _place(self) -> Place:
        return self._grammar.places.at(self._grammar.number, self._guide)
