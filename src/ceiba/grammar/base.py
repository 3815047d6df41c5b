"""What the parts of ``grammar`` share: a constraint, the vocabulary it runs on, and what a backend must be able to do.

Owns types only, so that the compiler process can import them quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
import numpy as np

from ceiba.core.step import Int32

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
KINDS: tuple[Kind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """One grammar as it was asked for; equal constraints share a compiled grammar."""

    kind: Kind
    text: str


class Spacing(msgspec.Struct, frozen=True, array_like=True):
    """The space allowed between the parts of JSON (see ``config.records.GrammarConfig``)."""

    pattern: str | None = None
    allowed: bool = True
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's tokens as bytes."""

    tokens: list[bytes]
    """One entry for each id of the model, padding included; empty where an id is no text (padding, control tokens)."""
    eos_ids: tuple[int, ...]
    special: dict[str, int] = field(default_factory=dict)
    """Spelling -> id of the control tokens: allowed only where a grammar names them."""
    encode: Callable[[str], list[int]] | None = None
    """The tokenizer itself: says how a forced text is spelled in tokens."""

    @property
    def words(self) -> int:
        """int32 words of a mask."""
        return -(-len(self.tokens) // 32)


class WireVocabulary(msgspec.Struct, array_like=True):
    """A vocabulary on its way to the compiler process."""

    tokens: list[bytes]
    eos_ids: list[int]
    special: dict[str, int]


class Compiled(msgspec.Struct, array_like=True):
    """What a compiler process hands back: enough to rebuild the grammar without its dangers."""

    engine: str
    """Which library's form ``data`` has."""
    data: bytes
    spaces: int = 0
    """Where the library does not hold the limit on space in JSON itself: that limit."""


class State(Protocol):
    """Where one choice stands in its grammar. Used from one thread."""

    @property
    def terminated(self) -> bool:
        """Whether nothing can follow any more."""

    @property
    def problem(self) -> str:
        """Why the grammar cannot go on (a limit was reached); empty while it can."""

    def fill(self, bits: Int32) -> bool:
        """Write the allowed tokens into ``bits``, int32 [words]; False when none is allowed."""

    def accept(self, token: int) -> bool:
        """Advance; False, and unchanged, when the grammar does not allow the token."""

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens."""

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, where there is only one way to go on; often none."""


class Prepared(Protocol):
    """A compiled grammar in the process that fills masks."""

    def state(self) -> State: ...


class Engine(Protocol):
    """One library in the process that fills masks."""

    def prepare(self, compiled: Compiled) -> Prepared:
        """Raises BadRequest when the library does not take it after all."""

    def fill(self, states: Sequence[State], bits: Int32) -> np.ndarray:
        """The masks of several states of this engine, in parallel where the library can. Row i of ``bits``,
        int32 [N, words], belongs to state i; returns bool [N]: whether any token is allowed."""


class Refusal(Exception):
    """A constraint that cannot be served: where in it, which keyword, and why. Becomes a 400."""

    def __init__(self, why: str, *, path: str = "", keyword: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.path = path
        self.keyword = keyword

    def __str__(self) -> str:
        where = f"{self.path or '#'}" if self.path or self.keyword else ""
        return ": ".join(part for part in (where, self.keyword, self.why) if part)
