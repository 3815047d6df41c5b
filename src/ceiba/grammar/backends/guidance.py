"""llguidance: exact, lazy, and part of every installation. Its automata grow while masks are made, within limits.

Owns the use of that library. Compiling means checking here: the grammar's text travels, and is built again where masks
are made, once it is known to build quickly.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.core.step import Int32
from ceiba.grammar import schema as schemas
from ceiba.grammar import tags
from ceiba.grammar.base import Compiled, Constraint, Refusal, Spacing, State, Vocabulary
from ceiba.grammar.lark import Writer, from_ebnf
from ceiba.grammar.regex import check_regex, trim_anchors
from ceiba.grammar.rewrite import Rewriter
from ceiba.grammar.schema import Schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NAME = "llguidance"
MAX_PLACES = 200
"""Parts of a schema that are compiled alone to find the one at fault."""


class _Words:
    """A vocabulary in the form llguidance asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = list(vocabulary.tokens)
        for name, token in vocabulary.special.items():
            tokens[token] = name.encode()
        for token in vocabulary.eos_ids:
            tokens[token] = tokens[token] or f"<eos {token}>".encode()
        self.tokens = tokens
        self.special_token_ids = sorted({*vocabulary.special.values(), *vocabulary.eos_ids})
        self.eos_token_id = vocabulary.eos_ids[0]
        self._encode = vocabulary.encode
        self._texts = vocabulary.tokens
        self._longest: dict[bytes, int] = {}
        for token, text in enumerate(vocabulary.tokens):
            if text:
                self._longest.setdefault(text, token)
        self._reach = max(map(len, vocabulary.tokens))

    def __call__(self, data: bytes | str) -> list[int]:
        """Tokens whose bytes are exactly ``data``: the tokenizer's own where it does not add a space or the like."""
        data = data.encode() if isinstance(data, str) else data
        if self._encode is not None:
            with contextlib.suppress(UnicodeDecodeError):
                ids = self._encode(data.decode())
                if b"".join([self._texts[i] for i in ids]) == data:
                    return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            for end in range(min(len(data), at + self._reach), at, -1):
                token = self._longest.get(data[at:end])
                if token is not None:
                    ids.append(token)
                    at = end
                    break
            else:
                return ids  # a byte that no token has: nothing more can be spelled
        return ids


def make_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Words(vocabulary)), eos_token=list(vocabulary.eos_ids))


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=limits.GRAMMAR_STEP_FUEL,
        step_max_items=limits.GRAMMAR_STEP_ITEMS,
        max_items_in_row=limits.GRAMMAR_STEP_ITEMS,
        max_lexer_states=limits.GRAMMAR_LEXER_STATES,
        verbose_errors=False,
    )


class Compiler:
    """Runs in the compiler process: nothing here has a time limit of its own."""

    def __init__(self, vocabulary: Vocabulary, spacing: Spacing) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = make_tokenizer(vocabulary)
        self._options: dict[str, Any] = {"whitespace_flexible": spacing.allowed}
        if spacing.allowed and (spacing.pattern is not None or spacing.most is not None):
            self._options["whitespace_pattern"] = spacing.pattern or f"[ \\t\\n\\r]{{1,{spacing.most}}}"

    def compile(self, constraint: Constraint) -> Compiled:
        """Raises Refusal naming the place at fault."""
        kind, text = constraint.kind, constraint.text
        if kind == "json_schema":
            return self._done(self._schema(schemas.parse(text)))
        if kind == "structural_tag":
            writer = Writer(self._vocabulary.special, lambda schema: json.dumps(self._json(schema)))
            return self._done(self._checked(writer.grammar(tags.parse(text))))
        from llguidance import LLMatcher

        if kind == "regex":
            check_regex(text, keyword="")
        grammar = LLMatcher.grammar_from_regex(trim_anchors(text)) if kind == "regex" else from_ebnf(text)
        return self._done(self._checked(grammar))

    @staticmethod
    def _done(grammar: str) -> Compiled:
        return Compiled(NAME, grammar.encode())

    def _schema(self, schema: Schema) -> str:
        return str(_json_grammar(self._json(schema)))

    def _json(self, schema: Schema) -> dict[str, Any]:
        """The schema in llguidance's keywords, known to build."""
        schemas.check(schema)
        problem = ""
        for exact in (False, True):
            built = Rewriter(schema, exact_one_of=exact).whole()
            if built is False:
                raise Refusal("no value can satisfy the schema", path="#")
            written = self._with_options(built)
            problem = self._problem(_json_grammar(written))
            if "oneOf" not in problem:
                break
        if problem:
            raise self._located(schema, problem)
        return written

    def _with_options(self, schema: Schema) -> dict[str, Any]:
        body = schema if isinstance(schema, dict) else {}
        return {**body, "x-guidance": self._options}

    def _checked(self, grammar: str) -> str:
        problem = self._problem(grammar)
        if problem:
            raise Refusal(_first_line(problem))
        return grammar

    def _problem(self, grammar: str) -> str:
        """What llguidance says against a grammar, its first mask included; empty when it is fine."""
        matcher = _matcher(self._tokenizer, grammar)
        if not matcher.is_error():
            bits = np.zeros(self._vocabulary.words, np.int32)
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return str(matcher.get_error())

    def _located(self, schema: Schema, problem: str) -> Refusal:
        """The innermost part of ``schema`` that is refused alone, with the keyword that the message names."""
        places = list(schemas.walk(schema))[:MAX_PLACES]
        root = schema if isinstance(schema, dict) else {}
        shared: dict[str, Any] = {k: v for k, v in root.items() if k in {"$defs", "definitions", "$id", "$schema"}}
        for path, part in reversed(places):
            try:
                built = Rewriter({**shared, **part}, exact_one_of=True).whole()
            except Refusal:
                continue
            own = self._problem(_json_grammar(self._with_options(built))) if built is not False else problem
            if own:
                return Refusal(_explain(own), path=path, keyword=_keyword(own, part))
        return Refusal(_explain(problem), path="#")


class Engine:
    """The half that fills masks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = make_tokenizer(vocabulary)
        self._vocabulary = vocabulary
        self._executor: Any = None

    def prepare(self, compiled: Compiled) -> Prepared:
        matcher = _matcher(self._tokenizer, compiled.data.decode())
        if matcher.is_error():
            raise BadRequest(f"the grammar cannot be built: {_first_line(matcher.get_error())}")
        return Prepared(matcher, frozenset(self._vocabulary.eos_ids))

    def fill(self, states: Sequence[State], bits: Int32) -> np.ndarray:
        matchers = [state.matcher for state in states if isinstance(state, GuidanceState)]
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(bits.ctypes.data, bits.shape[1] * 4)
        else:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(min(os.cpu_count() or 1, 16))
            pairs = [(matcher, i) for i, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, bits.shape[1] * 4, len(bits))
        broken = np.fromiter((matcher.is_error() for matcher in matchers), bool, len(matchers))
        return bits.any(axis=1) & ~broken


class Prepared:
    def __init__(self, matcher: LLMatcher, eos: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos = eos

    def state(self) -> GuidanceState:
        return GuidanceState(self._matcher.deep_copy(), self._eos)


class GuidanceState:
    def __init__(self, matcher: LLMatcher, eos: frozenset[int]) -> None:
        self.matcher = matcher
        self._eos = eos
        self._ends = 0
        """Ends accepted after the grammar was complete; the library knows nothing of them."""

    @property
    def terminated(self) -> bool:
        return bool(self.matcher.is_stopped())

    @property
    def problem(self) -> str:
        return _first_line(self.matcher.get_error()) if self.matcher.is_error() else ""

    def fill(self, bits: Int32) -> bool:
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bool(bits.any()) and not self.matcher.is_error()

    def accept(self, token: int) -> bool:
        if self.matcher.is_stopped():
            fits = token in self._eos and not self._ends and not self.matcher.is_error()
            self._ends += fits
            return fits
        return bool(self.matcher.try_consume_tokens([token]) == 1)

    def rollback(self, count: int) -> None:
        if count and self._ends:
            self._ends -= 1
            count -= 1
        if count and not self.matcher.rollback(count):
            raise ValueError(f"{count} tokens cannot be taken back: {self.matcher.get_error()}")

    def forced_tokens(self) -> list[int]:
        return list(self.matcher.compute_ff_tokens())


def _matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())


def _json_grammar(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def _first_line(problem: str) -> str:
    return problem.strip().splitlines()[0][:300] if problem.strip() else "unknown problem"


def _explain(problem: str) -> str:
    line = _first_line(problem)
    if "oneOf" in line:
        return "its branches cannot be told apart, so that exactly one of them holds; use anyOf"
    if "Unimplemented keys" in line:
        return "is not available"
    return line


def _keyword(problem: str, part: dict[str, Any]) -> str:
    """The keyword of ``part`` that the message names, if any."""
    named = [key for key in part if f'"{key}"' in problem or f"'{key}'" in problem or key in problem.split()]
    if named:
        return named[0]
    for key, hints in (("pattern", ("regex",)), ("minimum", ("range",)), ("maximum", ("range",)),
                       ("minProperties", ("min/maxProperties",)), ("maxProperties", ("min/maxProperties",)),
                       ("$ref", ("Pointer", "Resource"))):  # fmt: skip
        if key in part and any(hint in problem for hint in hints):
            return key
    return ""
