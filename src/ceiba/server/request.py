"""What every protocol translates into: one request of prompts and sampling, and the pieces of answer that come back.

Owns protocol-neutral types only. Must never know HTTP, JSON field names or processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from ceiba.core.messages import Finish, TopLogprobs, Usage
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.server.output import OutputFormat


class Tokenizer(Protocol):
    """What the front needs of ``ceiba.text``'s tokenizer; safe to call from several threads."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special: bool = True) -> np.ndarray:
        """Token ids, int32 [N]."""

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[np.ndarray]: ...

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; not always whole UTF-8 characters."""

    def token_to_id(self, token: str) -> int | None:
        """The id of the token spelled so, None where there is none."""


class Template(Protocol):
    """What the front needs of ``ceiba.text``'s chat template."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the model's chat template turns into text."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template and nothing else."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True


Prompt = TextPrompt | ChatPrompt | np.ndarray
"""A plain text, a conversation, or int32 token ids [N]."""

LengthRule = Literal["exact", "clamp", "fill"]
"""How ``max_new_tokens`` meets the room that is left: ``exact`` refuses a request that does not fit, ``clamp`` (a
default nobody typed) shortens it, ``fill`` ignores it and takes all room."""


@dataclass(slots=True)
class Input:
    """One prompt of a request, and how its ``n`` choices are chosen."""

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprob: LogprobSpec = field(default_factory=LogprobSpec)
    n: int = 1
    rid: str | None = None
    """Its own id, for batches whose caller names each prompt; else it goes by the request's."""
    length: LengthRule = "exact"
    think_tokens: int | None = None
    """Most tokens of thinking, where ``EngineRequest.output`` knows how this model thinks; the end is then forced."""


@dataclass(slots=True)
class EngineRequest:
    """Everything the front needs to know. Choices are numbered input by input: index = position of (input, k)."""

    inputs: list[Input]
    rid: str
    stream: bool = False
    extra_key: str | None = None
    cache_salt: str | None = None
    """Requests whose (extra_key, cache_salt) differ share no KV."""
    priority: int | None = None
    routing_key: str = ""
    tenant: str = ""
    """Whose share it is charged to, where that is not the routing key's."""
    queue_timeout: float | None = None
    """Seconds it may wait in the queue; None: the server's limit."""
    pin: str = ""
    """Name under which its KV stays cached; empty with ``pin_seconds``: a name of its own per choice."""
    pin_seconds: float = 0.0
    pin_output: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    """Native field name -> what this protocol calls it, so that an error names what the caller typed."""
    output: OutputFormat | None = None
    """How the text of a choice is told apart into thinking, answer and calls; None: all of it is answer."""
    internal: bool = False
    """A probe of our own: kept out of metrics and request logs."""

    def name(self, field_name: str) -> str:
        return self.names.get(field_name, field_name)

    @property
    def num_choices(self) -> int:
        return sum(i.n for i in self.inputs)

    def namespace(self) -> str:
        """Unambiguous: no two different pairs give the same string."""
        if self.extra_key is None and self.cache_salt is None:
            return ""
        return msgspec.json.encode([self.extra_key, self.cache_salt]).decode()


class Chunk(msgspec.Struct, gc=False):
    """What one step brought for one choice."""

    index: int
    text: str
    count: int
    tokens: bytes = b""
    """int32 [count]"""
    finish: Finish | None = None
    usage: Usage | None = None
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
