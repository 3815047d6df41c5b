"""Assembles what one choice has got so far, step by step: the same code whether the client streams or not.

Owns usage counts, the one finish reason, echo and the joining of log-probabilities. Protocols format what comes out:
a ``Delta`` per chunk for streams, the accumulated ``Choice`` at the end for whole answers. Must never know JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ceiba.core.messages import Finish, TopLogprobs, bytes_to_ids
from ceiba.core.sampling import LogprobSpec
from ceiba.server.output import OutputFormat
from ceiba.server.request import Chunk, EngineRequest
from ceiba.text.parsers.events import Answer, Arguments, CallEnd, CallStart, Content, Event
from ceiba.text.parsers.events import join as join_events

TAIL = 512
"""Characters of a prompt's end that a parser looks at."""


@dataclass(slots=True)
class Positions:
    """Log-probabilities of N consecutive tokens."""

    ids: np.ndarray
    """int32 [N]"""
    values: np.ndarray
    """float32 [N]; NaN where there is none (the first token of a prompt)."""
    top_ids: np.ndarray
    """int32 [N, top]"""
    top_values: np.ndarray
    fixed_values: np.ndarray
    """float32 [N, len(LogprobSpec.token_ids)]"""

    def __len__(self) -> int:
        return len(self.ids)


def positions(ids: np.ndarray, wire: TopLogprobs, spec: LogprobSpec) -> Positions:
    """Arrays from the wire form. ``ids`` [N] are the tokens the values belong to."""
    n = len(ids)

    def table(data: bytes, dtype: str, width: int, keep: int) -> np.ndarray:
        return np.frombuffer(data, dtype).reshape(n, width)[:, :keep] if data else np.empty((n, 0), dtype)

    return Positions(
        ids,
        np.frombuffer(wire.values, "<f4"),
        table(wire.top_ids, "<i4", wire.top, spec.top),
        table(wire.top_values, "<f4", wire.top, spec.top),
        table(wire.fixed_values, "<f4", len(spec.token_ids), len(spec.token_ids)),
    )


def join(parts: list[Positions]) -> Positions | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return Positions(
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("ids", "values")),
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("top_ids", "top_values", "fixed_values")),
    )


@dataclass(slots=True)
class Delta:
    """What one chunk adds to one choice."""

    text: str
    count: int
    """Tokens that came with it."""
    tokens: bytes
    first: bool
    """Nothing of this choice was reported before."""
    logprobs: Positions | None
    finish: Finish | None
    events: list[Event] | None = None
    """The text told apart, for requests that have an output format; it may lag behind ``text``."""

    @property
    def parts(self) -> list[Event]:
        """The events, or the text as content where nothing is told apart."""
        if self.events is not None:
            return self.events
        return [Content(self.text)] if self.text else []


class Choice:
    """One choice as assembled so far. ``feed`` it every chunk, in order; a second finish is a bug and raises."""

    def __init__(
        self,
        index: int,
        prompt: np.ndarray,
        spec: LogprobSpec,
        output: OutputFormat | None = None,
        prompt_text: str = "",
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.finish: Finish | None = None
        self.cached_tokens = 0
        self.queue_time = 0.0
        self.cached_by_tier: dict[str, int] = {}
        self.pinned_tokens = 0
        self.completion_tokens = 0
        self._spec = spec
        self._started = False
        self._texts: list[str] = []
        self._tokens: list[bytes] = []
        self._logprobs: list[Positions] = []
        self._prompt_logprobs: list[Positions] = []
        self._output = output
        self._parser = output.parser(prompt_text) if output is not None else None
        self._events: list[Event] = []
        self._answer: Answer | None = None

    def feed(self, chunk: Chunk) -> Delta:
        if self.finish is not None:
            raise RuntimeError(f"choice {self.index} got a chunk after its end")
        usage = chunk.usage
        if usage is not None:
            self.cached_tokens, self.queue_time = usage.cached_tokens, usage.queue_time
            self.cached_by_tier, self.pinned_tokens = usage.cached_by_tier, usage.pinned_tokens
        if chunk.count:
            self.completion_tokens += chunk.count
            self._tokens.append(chunk.tokens)
        if chunk.text:
            self._texts.append(chunk.text)
        logprobs = None
        if chunk.logprobs is not None and chunk.count:
            logprobs = positions(bytes_to_ids(chunk.tokens), chunk.logprobs, self._spec)
            self._logprobs.append(logprobs)
        if chunk.prompt_logprobs is not None:
            self._add_prompt_logprobs(chunk.prompt_logprobs)
        first, self._started = not self._started, True
        self.finish = chunk.finish
        events = self._parse(chunk) if self._parser is not None else None
        return Delta(chunk.text, chunk.count, chunk.tokens, first, logprobs, chunk.finish, events)

    def _parse(self, chunk: Chunk) -> list[Event]:
        assert self._parser is not None
        assert self._output is not None
        events = self._parser.feed(chunk.text, bytes_to_ids(chunk.tokens).tolist() if chunk.count else ())
        if chunk.finish is not None:
            events += self._parser.finish(cut=chunk.finish.kind != "stop")
        if self._output.one_call:
            events = [e for e in events if not (isinstance(e, CallStart | Arguments | CallEnd) and e.index > 0)]
        self._events += events
        return events

    def _add_prompt_logprobs(self, wire: TopLogprobs) -> None:
        start = max(self._spec.prompt_start, 0) + sum(len(p) for p in self._prompt_logprobs)
        ids = self.prompt[start : start + len(wire.values) // 4]
        self._prompt_logprobs.append(positions(ids, wire, self._spec))

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def answer(self) -> Answer:
        """Thinking, answer and calls so far; for requests without an output format all text is answer."""
        if self._parser is None:
            return Answer(content=self.text)
        if self._answer is None or self.finish is None:
            self._answer = join_events(self._events)
        return self._answer

    @property
    def events(self) -> list[Event]:
        """Everything that was told apart so far, in order."""
        if self._parser is None:
            return [Content(self.text)] if self.text else []
        return self._events

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return self._parser is not None and self._parser.called

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thinking, its end marker included; where the marker cannot be found, in proportion to text."""
        if self._output is None or not self.completion_tokens:
            return 0
        thought = self.answer.reasoning
        if not thought:
            return 0
        tokens, end = self.token_ids, list(self._output.think_end_ids())
        for at in range(len(tokens) - len(end) + 1) if end else ():
            if tokens[at : at + len(end)] == end:
                return at + len(end)
        return round(self.completion_tokens * len(thought) / max(len(self.text), 1))

    @property
    def token_ids(self) -> list[int]:
        return bytes_to_ids(b"".join(self._tokens)).tolist()

    @property
    def logprobs(self) -> Positions | None:
        """Of the generated tokens, None when none were asked for."""
        return join(self._logprobs)

    @property
    def prompt_logprobs(self) -> Positions | None:
        """Of the prompt's tokens from ``LogprobSpec.prompt_start`` on."""
        return join(self._prompt_logprobs)


def choices_of(request: EngineRequest, prompts: list[np.ndarray], texts: Sequence[str] = ()) -> list[Choice]:
    """Empty choices for a request whose prompts have been tokenized, in index order.

    ``texts``: the prompts as they were rendered, where they are known; they say whether the model is thinking.
    """
    places = [position for position, entry in enumerate(request.inputs) for _ in range(entry.n)]
    return [
        Choice(i, prompts[at], request.inputs[at].logprob, request.output, texts[at][-TAIL:] if texts else "")
        for i, at in enumerate(places)
    ]


@dataclass(slots=True)
class Totals:
    """Token counts of a whole request: each prompt counts once, however many choices it has."""

    prompt: int
    completion: int
    cached: int
    reasoning: int
    cached_by_tier: dict[str, int]
    pinned: int


def totals(request: EngineRequest, choices: list[Choice]) -> Totals:
    prompt = cached = pinned = at = 0
    tiers: dict[str, int] = {}
    for entry in request.inputs:
        prompt += choices[at].prompt_tokens
        cached += choices[at].cached_tokens
        pinned += choices[at].pinned_tokens
        for tier, count in choices[at].cached_by_tier.items():
            tiers[tier] = tiers.get(tier, 0) + count
        at += entry.n
    reasoning = sum(c.reasoning_tokens for c in choices) if request.output is not None else 0
    return Totals(prompt, sum(c.completion_tokens for c in choices), cached, reasoning, tiers, pinned)
