"""What the language needs of a backend.

Owns the protocol and its values. Implementations: a server (``http``), an engine in this process (``engine``), and any
OpenAI-compatible service (``openai``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ceiba.frontend.choices import Likelihood


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of both: a text, or messages."""

    text: str = ""
    templated: bool = False
    """The text has the template's markers, so no begin-of-text token is to be added."""
    messages: list[dict[str, Any]] | None = None
    continued: bool = False
    """The last message is the assistant's and goes on."""

    @property
    def empty(self) -> bool:
        return not self.text and not self.messages


@dataclass(frozen=True, slots=True)
class Result:
    """A generated text (in streams: the whole text so far) and what the server says about it."""

    text: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scores:
    """Likelihoods of choices, in their order."""

    entries: list[Likelihood]
    meta: dict[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """Safe to call from several threads. Raises the errors of ``core.errors``."""

    messages_only: bool
    """Takes messages, never text: nothing can be put before a chat template that is not ours to see."""

    def seam(self, roles: tuple[str, ...]) -> str:
        """What the chat template writes before the content of the last of ``roles``; for the assistant, the
        generation prompt. Remembered."""

    def generate(self, prompt: Prompt, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> Result:
        """``sampling`` has the native names of ``/generate``, ``fields`` its other fields."""

    def stream(self, prompt: Prompt, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[Result]:
        """The same, as it grows."""

    def score(self, prompt: Prompt, choices: Sequence[str], unconditional: bool) -> Scores: ...

    def warm(self, prompt: Prompt) -> None:
        """Have ``prompt`` in the prefix cache before several requests need it."""

    def flush_cache(self) -> Any: ...

    def server_info(self) -> dict[str, Any]: ...
