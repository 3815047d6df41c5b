"""xgrammar: masks prepared while compiling, the fastest at run time, for the constraints that it keeps exactly.

Owns the use of that library and the list of what it keeps. Outside of that list it would accept more than the schema
allows (it drops bounds, ``not``, parts of ``allOf``), so those constraints go to llguidance instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ceiba.core.errors import BadRequest
from ceiba.core.step import Int32
from ceiba.grammar import schema as schemas
from ceiba.grammar import tags
from ceiba.grammar.base import Compiled, Constraint, Refusal, Spacing, State, Vocabulary
from ceiba.grammar.masks import packed
from ceiba.grammar.regex import check_regex, trim_anchors
from ceiba.grammar.schema import Schema
from ceiba.grammar.spaces import Spaces, SpaceTable
from ceiba.grammar.spelling import Speller

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo

NAME = "xgrammar"
EXACT = frozenset(
    {"type", "properties", "required", "items", "additionalProperties", "enum", "const", "anyOf", "$ref", "$defs",
     "definitions", "minItems", "maxItems", "minLength", "maxLength"}
)  # fmt: skip
"""Keywords that hold exactly, measured against marked instances of real schemas (tests/unit/grammar)."""
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated", "readOnly", "writeOnly",
     "strict", "name"}
)  # fmt: skip


def make_info(vocabulary: Vocabulary) -> TokenizerInfo:
    from xgrammar import TokenizerInfo, VocabType

    return TokenizerInfo(
        vocabulary.tokens,
        VocabType.RAW,
        vocab_size=len(vocabulary.tokens),
        stop_token_ids=list(vocabulary.eos_ids),
    )


def exact(schema: Schema) -> bool:
    """Whether the library keeps every keyword of ``schema`` to the letter."""
    if isinstance(schema, bool):
        return schema
    for _, part in schemas.walk(schema):
        keys = part.keys() - ANNOTATIONS
        if keys - EXACT:
            return False
        if "$ref" in keys and len(keys - {"$defs", "definitions"}) > 1:
            return False
        if isinstance(part.get("items"), list) or ("anyOf" in keys and len(keys - {"$defs", "definitions"}) > 1):
            return False
        if ("enum" in keys or "const" in keys) and keys - {"enum", "const", "type"}:
            return False
        declared = part.get("properties", {})
        if not set(part.get("required", ())) <= declared.keys():
            return False
    return True


def takes(constraint: Constraint, spacing: Spacing, vocabulary: Vocabulary) -> bool:
    """Whether the library keeps this constraint exactly. Raises Refusal for one that cannot be read."""
    if constraint.kind == "json_schema":
        return spacing.pattern is None and exact(schemas.parse(constraint.text))
    if constraint.kind == "structural_tag":
        tree = tags.parse(constraint.text)
        if any(name in text for text in tags.texts(tree) for name in vocabulary.special):
            return False  # a control token is a token, not its spelling
        parts = list(tags.nodes(tree))
        if any(isinstance(node, tags.Until | tags.Repeat) or getattr(node, "never", "") for node in parts):
            return False  # it knows no text without a mark
        objects = [node.schema for node in parts if isinstance(node, tags.Json)]
        free = spacing.allowed and spacing.pattern is None and spacing.most is None
        return all(exact(schema) for schema in objects) and (free or not objects)
    return True


class Compiler:
    """Runs in the compiler process."""

    def __init__(self, vocabulary: Vocabulary, spacing: Spacing) -> None:
        from xgrammar import GrammarCompiler

        self._compiler = GrammarCompiler(make_info(vocabulary), max_threads=1, cache_enabled=False)
        self._spacing = spacing

    def compile(self, constraint: Constraint) -> Compiled:
        kind, text = constraint.kind, constraint.text
        try:
            if kind == "json_schema":
                grammar = self._json(text)
            elif kind == "regex":
                check_regex(text, keyword="")
                grammar = self._compiler.compile_regex(trim_anchors(text))
            elif kind == "ebnf":
                grammar = self._compiler.compile_grammar(text)
            else:
                tree = tags.parse(text)
                grammar = self._compiler.compile_structural_tag({"type": "structural_tag", "format": written(tree)})
        except (RuntimeError, ValueError, TypeError) as error:
            raise Refusal(_explain(str(error))) from None
        spaces = self._spacing.most if kind == "json_schema" and self._spacing.allowed else None
        return Compiled(NAME, grammar.serialize_json().encode(), spaces or 0)

    def _json(self, text: str) -> CompiledGrammar:
        schemas.check(schemas.parse(text))
        spacing = self._spacing
        return self._compiler.compile_json_schema(
            text,
            any_whitespace=spacing.allowed,
            separators=None if spacing.allowed else (",", ":"),
            strict_mode=False,
        )


def _explain(message: str) -> str:
    """The library's message without its time stamp and the place in its own source."""
    lines = [line for line in message.strip().splitlines() if line.strip()]
    if not lines:
        return "it cannot be compiled"
    text = lines[-1].rpartition("] ")[2]
    place, _, rest = text.partition(": ")
    return (rest if ".cc:" in place or ".h:" in place else text)[:300]


def written(node: tags.Node) -> dict[str, Any]:
    """A tree in xgrammar's own form."""
    match node:
        case tags.Text(value):
            return {"type": "const_string", "value": value}
        case tags.Json(schema):
            return {"type": "json_schema", "json_schema": schema}
        case tags.Regex(pattern):
            return {"type": "regex", "pattern": trim_anchors(pattern)}
        case tags.Ebnf(grammar):
            return {"type": "grammar", "grammar": grammar}
        case tags.AnyText():
            return {"type": "any_text"}
        case tags.Sequence(parts):
            return {"type": "sequence", "elements": [written(p) for p in parts if p != tags.Text("")]}
        case tags.Either(parts):
            return {"type": "or", "elements": [written(p) for p in parts]}
        case tags.Tag(begin, content, end):
            return {"type": "tag", "begin": begin, "content": written(content), "end": end}
        case tags.Triggered():
            return {
                "type": "triggered_tags",
                "triggers": list(node.triggers),
                "tags": [written(tag) for tag in node.tags],
                "at_least_one": node.at_least_one,
                "stop_after_first": node.stop_after_first,
            }
        case tags.TagList():
            return {
                "type": "tags_with_separator",
                "tags": [written(tag) for tag in node.tags],
                "separator": node.separator,
                "at_least_one": node.at_least_one,
                "stop_after_first": node.stop_after_first,
            }
    raise AssertionError(node)


class Engine:
    """The half that fills masks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._info = make_info(vocabulary)
        self._ends = packed(vocabulary.eos_ids, vocabulary.words)
        texts = (i for i, data in enumerate(vocabulary.tokens) if data)
        self._usable = packed(texts, vocabulary.words) | self._ends
        self._speller = None if vocabulary.encode is None else Speller(vocabulary)
        self._vocabulary = vocabulary
        self._table: SpaceTable | None = None
        self._batch: Any = None

    def prepare(self, compiled: Compiled) -> Prepared:
        from xgrammar import CompiledGrammar

        try:
            grammar = CompiledGrammar.deserialize_json(compiled.data.decode(), self._info)
        except (RuntimeError, ValueError) as error:
            raise BadRequest(f"the compiled grammar cannot be read: {str(error)[:300]}") from error
        return Prepared(grammar, self._ends, self._usable, self._speller, self._spaces(compiled.spaces))

    def _spaces(self, limit: int) -> SpaceTable | None:
        if limit and (self._table is None or self._table.limit != limit):
            self._table = SpaceTable(self._vocabulary, limit)
        return self._table if limit else None

    def fill(self, states: Sequence[State], bits: Int32) -> np.ndarray:
        matchers = [state.matcher for state in states if isinstance(state, XGrammarState)]
        bits[:] = self._usable  # a matcher that allows everything leaves its row alone
        if len(matchers) == 1:
            matchers[0].fill_next_token_bitmask(bits, 0)
        else:
            if self._batch is None:
                from xgrammar import BatchGrammarMatcher

                self._batch = BatchGrammarMatcher(min(os.cpu_count() or 1, 16))
            self._batch.batch_fill_next_token_bitmask(matchers, bits)
        bits &= self._usable
        for state, row in zip(states, bits, strict=True):
            if isinstance(state, XGrammarState) and state.spaces is not None:
                state.spaces.limit(row)
        return np.asarray(bits.any(axis=1))


class Prepared:
    def __init__(
        self, grammar: CompiledGrammar, ends: Int32, usable: Int32, speller: Speller | None, table: SpaceTable | None
    ) -> None:
        self._grammar = grammar
        self._table = table
        self._speller = speller
        self._ends = ends
        self._usable = usable

    def state(self) -> XGrammarState:
        from xgrammar import GrammarMatcher

        spaces = None if self._table is None else Spaces(self._table)
        return XGrammarState(GrammarMatcher(self._grammar), self._ends, self._usable, self._speller, spaces)


class XGrammarState:
    def __init__(
        self, matcher: GrammarMatcher, ends: Int32, usable: Int32, speller: Speller | None, spaces: Spaces | None
    ) -> None:
        self.matcher = matcher
        self.spaces = spaces
        self._speller = speller
        self._ends = ends
        self._usable = usable

    @property
    def terminated(self) -> bool:
        """Also where an end token is all that may follow: that one need not be sampled."""
        if self.matcher.is_terminated():
            return True
        if not self.matcher.is_completed():
            return False
        bits = np.zeros_like(self._ends)
        self.fill(bits)
        return not (bits & ~self._ends).any()

    @property
    def problem(self) -> str:
        return ""  # everything was built ahead

    def fill(self, bits: Int32) -> bool:
        bits[:] = self._usable
        self.matcher.fill_next_token_bitmask(bits[None, :], 0)
        bits &= self._usable
        if self.spaces is not None:
            self.spaces.limit(bits)
        return bool(bits.any())

    def accept(self, token: int) -> bool:
        if self.matcher.is_terminated() or (self.spaces is not None and not self.spaces.fits(token)):
            return False
        if not self.matcher.accept_token(token):
            return False
        if self.spaces is not None:
            self.spaces.accept(token)
        return True

    def rollback(self, count: int) -> None:
        if count:
            self.matcher.rollback(count)
            if self.spaces is not None:
                self.spaces.rollback(count)

    def forced_tokens(self) -> list[int]:
        """As the tokenizer spells the forced text: the masks would allow other spellings, which no model was trained
        on."""
        if self._speller is None or self.matcher.is_completed():
            return []
        text = self.matcher.find_jump_forward_string()
        return self._speller.certain(text) if text else []
