"""A scheduler port that lies in memory, for tests, simulation and the offline engine's unit tests.

Owns an inbox and what came out, joined per request; no process, no socket, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ceiba.core.messages import (
    Finish,
    Heartbeat,
    Reply,
    TokenBatch,
    TopLogprobs,
    ToScheduler,
    Usage,
    bytes_to_ids,
)


@dataclass
class Answer:
    """Everything that was reported of one choice, in order."""

    tokens: list[int] = field(default_factory=list)
    reports: int = 0
    opened: int = 0
    finish: Finish | None = None
    usages: list[Usage] = field(default_factory=list)
    logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TopLogprobs] = field(default_factory=list)


class MemoryPort:
    """``on_batch`` sees each batch as well. Raises on a report after the end or before the opening of a choice."""

    def __init__(self, on_batch: Callable[[TokenBatch], None] | None = None) -> None:
        self.inbox: list[ToScheduler] = []
        self.answers: dict[str, Answer] = {}
        self.replies: list[Reply] = []
        self.beats: list[Heartbeat] = []
        self.batches = 0
        self._on_batch = on_batch

    def push(self, *messages: ToScheduler) -> None:
        self.inbox.extend(messages)

    def receive(self, timeout: float) -> list[ToScheduler]:
        messages, self.inbox = self.inbox, []
        return messages

    def to_front(self, message: Reply | Heartbeat) -> None:
        if isinstance(message, Reply):
            self.replies.append(message)
        else:
            self.beats.append(message)

    def to_detokenizer(self, batch: TokenBatch) -> None:
        self.batches += 1
        for opening in batch.opened:
            self.answers.setdefault(opening.rid, Answer()).opened += 1
        counts, tokens = bytes_to_ids(batch.counts).tolist(), bytes_to_ids(batch.tokens).tolist()
        if sum(counts) != len(tokens) or len(counts) != len(batch.rids):
            raise AssertionError("a batch's counts do not match its tokens")
        at = 0
        for i, (rid, count) in enumerate(zip(batch.rids, counts, strict=True)):
            answer = self.answers.get(rid)
            if answer is None or answer.finish is not None:
                raise AssertionError(f"{rid} is reported {'before its opening' if answer is None else 'after its end'}")
            answer.reports += 1
            answer.tokens += tokens[at : at + count]
            answer.finish = batch.finishes.get(i)
            for found, into in (
                (batch.usages, answer.usages),
                (batch.logprobs, answer.logprobs),
                (batch.prompt_logprobs, answer.prompt_logprobs),
            ):
                if i in found:
                    into.append(found[i])  # type: ignore[arg-type]
            at += count
        if self._on_batch is not None:
            self._on_batch(batch)
