"""The stage between scheduler and front: one batch of tokens in, one batch of text out, per step.

Owns, per choice, the incremental text, the stop search and what a choice that does not stream has gathered so far; a
choice's memory goes with its finish. Must never know prompts, KV or HTTP. A bad entry ends its own choice with an
error and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ceiba.core.errors import CeibaError
from ceiba.core.messages import (
    Abort,
    DetokOpen,
    Finish,
    TextBatch,
    TokenBatch,
    TopLogprobs,
    Usage,
    bytes_to_ids,
    ids_to_bytes,
)
from ceiba.core.ports import DetokenizerPort
from ceiba.text.incremental import TextStream
from ceiba.text.stop import StopCompiler, StopMatcher
from ceiba.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_BEAT_SECONDS = 0.5
_REMEMBERED = 65_536
"""Ended rids kept so that what the scheduler still sends for them is known to be late, not unknown."""


class StopFlag(Protocol):
    """What ``run`` asks whether it should end: threading.Event or its like."""

    def is_set(self) -> bool: ...


class _Choice:
    """One live choice: its text so far and what has not been reported yet."""

    __slots__ = (
        "interval",
        "logprobs",
        "matcher",
        "min_tokens",
        "prompt_logprobs",
        "reported",
        "seen",
        "stream",
        "text",
        "texts",
        "tokens",
        "trim",
        "unreported",
        "usage",
        "usage_due",
    )

    def __init__(self, text: TextStream, matcher: StopMatcher | None, opened: DetokOpen, interval: int) -> None:
        self.text = text
        self.matcher = matcher
        self.stream = opened.stream
        self.trim = not opened.sampling.no_stop_trim
        self.min_tokens = opened.sampling.min_new_tokens
        self.interval = interval
        self.seen = 0
        """Completion tokens so far, up to a stop."""
        self.unreported = 0
        self.reported = False
        self.texts: list[str] = []
        self.tokens: list[bytes] = []
        self.logprobs: list[TopLogprobs] = []
        self.prompt_logprobs: list[TopLogprobs] = []
        self.usage: Usage | None = None
        self.usage_due = False

    def read(self, ids: Sequence[int], finish: Finish | None) -> tuple[int, str | None]:
        """Take in tokens; (how many count, the stop that matched or None)."""
        last = len(ids)
        if finish is not None and self.trim and last and finish.kind == "stop" and finish.matched == ids[-1]:
            last -= 1  # The stop token counts as a token and is no part of the text.
        matcher = self.matcher
        if matcher is None:
            for i in ids[:last]:
                piece = self.text.push(i)
                if piece:
                    self.texts.append(piece)
            return len(ids), None
        for at in range(last):
            piece = self.text.push(ids[at])
            if not piece:
                continue
            if self.seen + at < self.min_tokens:
                self.texts.append(piece)
                continue
            piece, matched = matcher.feed(piece)
            if piece:
                self.texts.append(piece)
            if matched is not None:
                return at + 1, matched
        return len(ids), None

    def flush(self) -> None:
        tail = self.text.flush()
        if self.matcher is not None:
            if tail:
                tail, _ = self.matcher.feed(tail)
            tail += self.matcher.flush()
        if tail:
            self.texts.append(tail)

    def due(self) -> bool:
        """Whether a choice that streams has something to say now."""
        if not self.stream:
            return False
        if not self.texts:
            return bool(self.prompt_logprobs) and not self.reported
        return not self.reported or self.unreported >= self.interval


class _Report:
    """A TextBatch in the making."""

    def __init__(self) -> None:
        self.rids: list[str] = []
        self.texts: list[str] = []
        self.counts: list[int] = []
        self.tokens: list[bytes] = []
        self.finishes: dict[int, Finish] = {}
        self.usages: dict[int, Usage] = {}
        self.logprobs: dict[int, TopLogprobs] = {}
        self.prompt_logprobs: dict[int, TopLogprobs] = {}

    def add(self, rid: str, choice: _Choice, finish: Finish | None) -> None:
        entry = len(self.rids)
        self.rids.append(rid)
        self.texts.append("".join(choice.texts))
        choice.texts.clear()
        self.counts.append(choice.unreported)
        choice.unreported = 0
        self.tokens += choice.tokens
        choice.tokens.clear()
        choice.reported = True
        if choice.logprobs:
            self.logprobs[entry] = joined(choice.logprobs)
            choice.logprobs.clear()
        if choice.prompt_logprobs:
            self.prompt_logprobs[entry] = joined(choice.prompt_logprobs)
            choice.prompt_logprobs.clear()
        if finish is not None:
            self.finishes[entry] = finish
        if choice.usage is not None and (choice.usage_due or finish is not None):
            usage = choice.usage
            if usage.completion_tokens != choice.seen:
                usage = msgspec.structs.replace(usage, completion_tokens=choice.seen)
            self.usages[entry] = usage
            choice.usage_due = False

    def finish_only(self, rid: str, finish: Finish, usage: Usage | None) -> None:
        entry = len(self.rids)
        self.rids.append(rid)
        self.texts.append("")
        self.counts.append(0)
        self.finishes[entry] = finish
        if usage is not None:
            self.usages[entry] = usage

    def batch(self) -> TextBatch | None:
        if not self.rids:
            return None
        return TextBatch(
            rids=self.rids,
            texts=self.texts,
            counts=ids_to_bytes(self.counts),
            tokens=b"".join(self.tokens),
            finishes=self.finishes,
            usages=self.usages,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class Detokenizer:
    """Turns TokenBatch into TextBatch. One per thread.

    ``stream_interval``: tokens between two reports of a streaming choice that does not say its own. The first token
    with text is reported at once.
    """

    def __init__(self, tokenizer: Tokenizer, *, stream_interval: int = 1) -> None:
        self._tokenizer = tokenizer
        self._interval = max(1, stream_interval)
        self._stops = StopCompiler()
        self._live: dict[str, _Choice] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    @property
    def live(self) -> int:
        """Choices in flight."""
        return len(self._live)

    def process(self, batch: TokenBatch) -> tuple[TextBatch | None, Abort | None]:
        """(what the front should hear, what the scheduler should end). Never raises for what a batch holds."""
        report = _Report()
        stopped: list[str] = []
        failed: list[str] = []
        for opened in batch.opened:
            self._open(opened, report, failed)
        try:
            counts = bytes_to_ids(batch.counts).tolist()
            ids = bytes_to_ids(batch.tokens).tolist()
            if len(counts) != len(batch.rids) or min(counts, default=0) < 0 or sum(counts) != len(ids):
                raise ValueError(f"{len(batch.rids)} entries, {len(counts)} counts, {len(ids)} tokens")
        except ValueError as error:
            log.error("a token batch is malformed and its choices end: %s", error)
            for rid in batch.rids:
                self._fail(rid, "the engine sent a malformed batch", 500, report, failed)
            return report.batch(), Abort(rids=failed) if failed else None
        begin = 0
        for entry, rid in enumerate(batch.rids):
            end = begin + counts[entry]
            choice = self._live.get(rid)
            finish = batch.finishes.get(entry)
            if choice is None:
                self._unknown(rid, finish, batch.usages.get(entry), report)
            else:
                try:
                    if self._advance(rid, choice, entry, ids[begin:end], begin, batch, report):
                        stopped.append(rid)
                except CeibaError as error:
                    self._fail(rid, error.message, error.status, report, failed)
                except Exception:
                    log.exception("detokenizing %s failed", rid)
                    self._fail(rid, "the text of this answer could not be made", 500, report, failed)
            begin = end
        # One message; a failed choice is gone for the scheduler exactly as a stopped one is.
        abort = Abort(rids=stopped + failed, reason="stop") if stopped or failed else None
        return report.batch(), abort

    def run(self, port: DetokenizerPort, stop: StopFlag) -> None:
        """Serve ``port`` until ``stop`` is set. An empty batch every half second says that the loop still turns."""
        beat = time.monotonic() - _BEAT_SECONDS
        while not stop.is_set():
            if time.monotonic() - beat >= _BEAT_SECONDS:
                beat = time.monotonic()
                port.to_front(TextBatch(rids=[], texts=[], counts=b"", tokens=b""))
            for batch in port.receive(0.1):
                try:
                    text, abort = self.process(batch)
                except Exception:
                    log.exception("a token batch of %d entries was lost", len(batch.rids))
                    continue
                if abort is not None:  # first: a client that has read the end may use the name again
                    port.to_scheduler(abort)
                if text is not None:
                    port.to_front(text)

    # ── one choice ───────────────────────────────────────────────────────────

    def _open(self, opened: DetokOpen, report: _Report, failed: list[str]) -> None:
        sampling = opened.sampling
        self._ended.pop(opened.rid, None)
        try:
            stops = self._stops.compile(sampling.stop, sampling.stop_regex)
            text = TextStream(
                self._tokenizer,
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
                prompt_tail=bytes_to_ids(opened.prompt_tail).tolist(),
            )
            matcher = StopMatcher(stops, trim=not sampling.no_stop_trim) if stops is not None else None
            interval = sampling.stream_interval or self._interval
            self._live[opened.rid] = _Choice(text, matcher, opened, max(1, interval))
        except CeibaError as error:
            self._fail(opened.rid, error.message, error.status, report, failed)
        except Exception:
            log.exception("opening %s failed", opened.rid)
            self._fail(opened.rid, "the text of this answer could not be made", 500, report, failed)

    def _advance(
        self, rid: str, choice: _Choice, entry: int, ids: list[int], begin: int, batch: TokenBatch, report: _Report
    ) -> bool:
        """Returns whether a stop matched that the scheduler does not know of."""
        finish = batch.finishes.get(entry)
        usage = batch.usages.get(entry)
        if usage is not None:
            choice.usage_due = choice.usage_due or choice.usage is None
            choice.usage = usage
        taken, matched = choice.read(ids, finish)
        if taken:
            choice.seen += taken
            choice.unreported += taken
            choice.tokens.append(batch.tokens[4 * begin : 4 * (begin + taken)])
        logprobs = batch.logprobs.get(entry)
        if logprobs is not None:
            choice.logprobs.append(first(logprobs, taken) if taken < len(ids) else logprobs)
        prompt = batch.prompt_logprobs.get(entry)
        if prompt is not None:
            choice.prompt_logprobs.append(prompt)
        ours = matched is not None
        known = finish is not None
        if ours:
            finish = Finish(kind="stop", matched=matched)
        if finish is None:
            if choice.due():
                report.add(rid, choice, None)
            return False
        if not ours:
            choice.flush()
        report.add(rid, choice, finish)
        self._forget(rid)
        return ours and not known

    def _unknown(self, rid: str, finish: Finish | None, usage: Usage | None, report: _Report) -> None:
        """Late tokens of an ended choice are dropped; the end of one that we never saw still reaches its client."""
        if finish is not None and rid not in self._ended:
            report.finish_only(rid, finish, usage)
            self._forget(rid)

    def _fail(self, rid: str, message: str, status: int, report: _Report, failed: list[str]) -> None:
        if rid in self._ended:
            return
        choice = self._live.get(rid)
        finish = Finish(kind="error", message=message, status=status)
        if choice is None:
            report.finish_only(rid, finish, None)
        else:
            report.add(rid, choice, finish)
        self._forget(rid)
        failed.append(rid)

    def _forget(self, rid: str) -> None:
        self._live.pop(rid, None)
        self._ended[rid] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)


def joined(parts: list[TopLogprobs]) -> TopLogprobs:
    """Consecutive stretches as one. The stretches of one choice have the same widths."""
    if len(parts) == 1:
        return parts[0]
    return TopLogprobs(
        values=b"".join(p.values for p in parts),
        top=max(p.top for p in parts),
        top_ids=b"".join(p.top_ids for p in parts),
        top_values=b"".join(p.top_values for p in parts),
        fixed_values=b"".join(p.fixed_values for p in parts),
    )


def first(logprobs: TopLogprobs, n: int) -> TopLogprobs:
    """The first ``n`` positions."""
    positions = len(logprobs.values) // 4
    if n >= positions:
        return logprobs
    fixed = len(logprobs.fixed_values) // positions
    row = 4 * logprobs.top
    return TopLogprobs(
        values=logprobs.values[: 4 * n],
        top=logprobs.top,
        top_ids=logprobs.top_ids[: row * n],
        top_values=logprobs.top_values[: row * n],
        fixed_values=logprobs.fixed_values[: fixed * n],
    )
