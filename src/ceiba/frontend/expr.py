"""What a program adds to its state: constants, generations, selections, roles, images.

Owns these values and how ``+`` joins them. Must never know a backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ceiba.core.errors import BadRequest
from ceiba.frontend.choices import Method

ROLES = ("system", "user", "assistant")


class Expr:
    """Something that can be added to a state. ``+`` with strings and other expressions keeps the order."""

    def __add__(self, other: Expr | str) -> Sequel:
        return Sequel([self, as_expr(other)])

    def __radd__(self, other: str) -> Sequel:
        return Sequel([as_expr(other), self])

    def flat(self) -> Iterator[Expr]:
        """The single steps, in order."""
        yield self

    def names(self) -> Iterator[str]:
        """Variables that this will set."""
        return iter(())


class Sequel(Expr):
    """Expressions one after the other."""

    def __init__(self, parts: Sequence[Expr]) -> None:
        self._parts = list(parts)

    def flat(self) -> Iterator[Expr]:
        for part in self._parts:
            yield from part.flat()

    def names(self) -> Iterator[str]:
        for part in self._parts:
            yield from part.names()


@dataclass(frozen=True)
class Constant(Expr):
    text: str


@dataclass(frozen=True)
class Image(Expr):
    """A picture inside a turn, as a URL that the server can take."""

    url: str


@dataclass(frozen=True)
class RoleBegin(Expr):
    role: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise BadRequest(f"unknown role {self.role!r}; known: {', '.join(ROLES)}.")


@dataclass(frozen=True)
class RoleEnd(Expr):
    role: str


@dataclass(frozen=True)
class Gen(Expr):
    """Let the model write. ``sampling`` has the native names; ``fields`` are the request's other fields."""

    name: str | None
    sampling: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    value_type: Any = None
    """int, float, bool, str or ``"json"``: what ``parsed`` makes of the text."""

    def names(self) -> Iterator[str]:
        if self.name is not None:
            yield self.name


@dataclass(frozen=True)
class Select(Expr):
    """Let the model choose among ``choices`` by their likelihood."""

    name: str | None
    choices: tuple[str, ...]
    method: Method

    def __post_init__(self) -> None:
        if not self.choices or any(not isinstance(choice, str) or not choice for choice in self.choices):
            raise BadRequest("choices must be a list of texts, none of them empty.", param="choices")

    def names(self) -> Iterator[str]:
        if self.name is not None:
            yield self.name


def as_expr(value: Any) -> Expr:
    """Raises BadRequest for what is neither text nor an expression."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Constant(value)
    raise BadRequest(
        f"a state takes text and expressions (gen, select, user, …), not {type(value).__name__}: wrap it in str()."
    )
