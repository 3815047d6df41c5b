from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from ceiba.core.sampling import SamplingParams
from ceiba.text.detokenizer import Detokenizer
from support import text_vocab

TOKENIZER = text_vocab.byte_level()
END = 0


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special=False).tolist()


def opened(rid: str, stream: bool = True, **sampling: Any) -> DetokOpen:
    return DetokOpen(rid=rid, stream=stream, sampling=SamplingParams(**sampling))


def batch(entries: list[tuple[str, list[int]]], **more: Any) -> TokenBatch:
    return TokenBatch(
        rids=[r for r, _ in entries],
        counts=ids_to_bytes([len(t) for _, t in entries]),
        tokens=ids_to_bytes([t for _, ts in entries for t in ts]),
        **more,
    )


def usage(n: int) -> Usage:
    return Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=n, queue_time=0.5)


class Answer:
    """What a front would gather of one choice."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.finishes: list[Finish] = []
        self.usages: list[Usage] = []
        self.logprobs: list[float] = []
        self.reports = 0


def gather(answers: dict[str, Answer], report: TextBatch | None) -> None:
    if report is None:
        return
    tokens, at = bytes_to_ids(report.tokens).tolist(), 0
    for i, (rid, text, count) in enumerate(zip(report.rids, report.texts, bytes_to_ids(report.counts), strict=True)):
        answer = answers.setdefault(rid, Answer())
        answer.reports += 1
        answer.text += text
        answer.tokens += tokens[at : at + count]
        at += int(count)
        if i in report.finishes:
            answer.finishes.append(report.finishes[i])
        if i in report.usages:
            answer.usages.append(report.usages[i])
        if i in report.logprobs:
            answer.logprobs += np.frombuffer(report.logprobs[i].values, "<f4").tolist()
    assert at == len(tokens)


def run_one(
    text: str, sizes: list[int], stream: bool = True, **sampling: Any
) -> tuple[Answer, list[Abort], Detokenizer]:
    """One choice whose tokens come in bursts of ``sizes``, ended by its length."""
    detokenizer, answers, aborts = Detokenizer(TOKENIZER), {}, []
    ids, at, turn = ids_of(text), 0, 0
    while True:
        burst = ids[at : at + sizes[turn % len(sizes)]]
        at += len(burst)
        turn += 1
        last = at >= len(ids)
        logprobs = TopLogprobs(values=np.arange(at - len(burst), at, dtype="<f4").tobytes())
        report, abort = detokenizer.process(
            batch(
                [("r", burst)],
                opened=[opened("r", stream, **sampling)] if turn == 1 else [],
                finishes={0: Finish(kind="length")} if last else {},
                usages={0: usage(at)} if last or turn == 1 else {},
                logprobs={0: logprobs},
            )
        )
        gather(answers, report)
        if abort is not None:
            aborts.append(abort)
        if last:
            return answers["r"], aborts, detokenizer


@given(st.text(max_size=30), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans(), st.integers(1, 5))
@settings(deadline=None, max_examples=200)
def test_every_burst_and_interval_reports_everything_once(
    text: str, sizes: list[int], stream: bool, interval: int
) -> None:
    answer, aborts, detokenizer = run_one(text, sizes, stream, stream_interval=interval)
    ids = ids_of(text)
    assert answer.text == TOKENIZER.decode(ids)
    assert answer.tokens == ids
    assert answer.logprobs == [float(i) for i in range(len(ids))]
    assert [f.kind for f in answer.finishes] == ["length"]
    assert answer.usages[-1].completion_tokens == len(ids)
    assert not aborts
    assert detokenizer.live == 0
    if not stream:
        assert answer.reports == 1


@given(
    st.text(alphabet="abc é", max_size=30),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.lists(st.text(alphabet="abc é", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_a_stop_string_counts_the_tokens_up_to_its_end(
    text: str, sizes: list[int], stops: list[str], stream: bool
) -> None:
    answer, aborts, detokenizer = run_one(text, sizes, stream, stop=tuple(stops))
    ids = ids_of(text)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    assert len(answer.finishes) == 1
    assert detokenizer.live == 0
    if not ends:
        assert answer.text == text
        assert answer.finishes[0].kind == "length"
        return
    end, length, stop = min(ends)
    needed = next(n for n in range(1, len(ids) + 1) if len(TOKENIZER.decode(ids[:n]).rstrip("\ufffd")) >= end)
    assert answer.finishes[0] == Finish(kind="stop", matched=stop)
    assert answer.text == text[: end + length]
    assert answer.tokens == ids[:needed]
    assert len(answer.logprobs) == needed
    assert answer.usages[-1] == usage(needed)
    assert len(aborts) <= 1
    assert all(a == Abort(rids=["r"], reason="stop") for a in aborts)


def test_the_stop_is_aborted_and_late_tokens_are_dropped() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    report, abort = detokenizer.process(
        batch([("a", ids_of("one STOP two")), ("b", ids_of("fine"))], opened=[opened("a", stop=("STOP",)), opened("b")])
    )
    assert report is not None
    assert report.texts == ["one ", "fine"]
    assert abort == Abort(rids=["a"], reason="stop")
    late, again = detokenizer.process(batch([("a", ids_of("x"))], finishes={0: Finish(kind="abort")}))
    assert late is None
    assert again is None
    assert detokenizer.live == 1


def test_no_stop_trim_keeps_the_stop() -> None:
    answer, _, _ = run_one("one STOP two", [100], stop=("STOP",), no_stop_trim=True)
    assert answer.text == "one STOP"


def test_min_new_tokens_comes_before_stops() -> None:
    text = "ab ab ab ab"
    n = len(ids_of("ab ab "))
    answer, _, _ = run_one(text, [1], stop=("ab",), min_new_tokens=n)
    assert answer.text.startswith("ab ab")
    assert len(answer.tokens) > n
    assert answer.finishes[0].matched == "ab"


@pytest.mark.parametrize(("keep", "expected"), [(False, "hi"), (True, "hi<|end|>")])
def test_the_stop_tokens_text_is_trimmed_unless_kept(keep: bool, expected: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    report, _ = detokenizer.process(
        batch(
            [("a", [*ids_of("hi"), END])],
            opened=[opened("a", skip_special_tokens=False, no_stop_trim=keep)],
            finishes={0: Finish(kind="stop", matched=END)},
            usages={0: usage(2)},
        )
    )
    assert report is not None
    assert report.texts == [expected]
    assert bytes_to_ids(report.tokens).tolist()[-1] == END


@pytest.mark.parametrize("kind", ["abort", "error", "length"])
@pytest.mark.parametrize("stream", [True, False])
def test_what_was_held_comes_out_at_the_end(kind: str, stream: bool) -> None:
    detokenizer, answers = Detokenizer(TOKENIZER), {}
    gather(
        answers, detokenizer.process(batch([("a", ids_of("text ST"))], opened=[opened("a", stream, stop=("STOP",))]))[0]
    )
    if stream:
        assert answers["a"].text == "text "
    finish = Finish(kind=kind, message="m", status=500)
    gather(answers, detokenizer.process(batch([("a", [])], finishes={0: finish}))[0])
    assert answers["a"].text == "text ST"
    assert answers["a"].finishes == [finish]


def test_bad_entries_end_only_themselves() -> None:
    detokenizer, answers = Detokenizer(TOKENIZER), {}
    first = batch(
        [("bad", ids_of("x")), ("stranger", ids_of("y")), ("good", ids_of("fine"))],
        opened=[opened("bad", stop_regex=("(",)), opened("good")],
    )
    report, abort = detokenizer.process(first)
    gather(answers, report)
    assert answers["bad"].finishes[0].kind == "error"
    assert answers["bad"].finishes[0].status == 400
    assert "stop_regex" in answers["bad"].finishes[0].message
    assert abort is not None
    assert abort.rids == ["bad"]
    assert "stranger" not in answers
    assert answers["good"].text == "fine"
    report, _ = detokenizer.process(batch([("never opened", [])], finishes={0: Finish(kind="abort", message="gone")}))
    assert report is not None
    assert report.finishes[0].message == "gone"


def test_ids_outside_the_vocabulary_are_no_text() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    report, _ = detokenizer.process(batch([("a", [-5, 10**6, *ids_of("ok")])], opened=[opened("a")]))
    assert report is not None
    assert report.texts == ["ok"]


def test_a_malformed_batch_ends_its_choices_with_an_error() -> None:
    detokenizer, answers = Detokenizer(TOKENIZER), {}
    bad = TokenBatch(rids=["a"], counts=ids_to_bytes([3]), tokens=ids_to_bytes([1]), opened=[opened("a")])
    report, abort = detokenizer.process(bad)
    gather(answers, report)
    assert answers["a"].finishes[0].kind == "error"
    assert abort == Abort(rids=["a"])
    assert detokenizer.live == 0


def test_logprobs_of_a_choice_that_does_not_stream_come_joined_and_cut() -> None:
    detokenizer = Detokenizer(TOKENIZER)

    def logprobs(n: int, base: int) -> TopLogprobs:
        row = np.arange(base, base + n)
        return TopLogprobs(
            values=row.astype("<f4").tobytes(),
            top=2,
            top_ids=np.stack([row, row + 1], 1).astype("<i4").tobytes(),
            top_values=np.stack([row, -row], 1).astype("<f4").tobytes(),
            fixed_values=np.stack([row, row, row], 1).astype("<f4").tobytes(),
        )

    one, two = ids_of("ab"), [*ids_of("c!"), *ids_of("d")]
    detokenizer.process(
        batch([("a", one)], opened=[opened("a", False, stop=("!",))], logprobs={0: logprobs(len(one), 0)})
    )
    report, _ = detokenizer.process(batch([("a", two)], logprobs={0: logprobs(len(two), len(one))}))
    assert report is not None
    n = len(one) + len(ids_of("c!"))
    got = report.logprobs[0]
    assert np.frombuffer(got.values, "<f4").tolist() == list(range(n))
    assert np.frombuffer(got.top_ids, "<i4").reshape(n, 2)[:, 1].tolist() == list(range(1, n + 1))
    assert np.frombuffer(got.top_values, "<f4").reshape(n, 2)[:, 1].tolist() == [-i for i in range(n)]
    assert np.frombuffer(got.fixed_values, "<f4").reshape(n, 3)[:, 2].tolist() == list(range(n))


class Port:
    """A mailbox pair in memory."""

    def __init__(self, batches: list[TokenBatch], done: threading.Event) -> None:
        self.batches = batches
        self.front: list[TextBatch] = []
        self.scheduler: list[Abort] = []
        self._done = done

    def receive(self, timeout: float) -> list[TokenBatch]:
        if not self.batches:
            self._done.set()
            return []
        return [self.batches.pop(0)]

    def to_front(self, batch: TextBatch) -> None:
        self.front.append(batch)

    def to_scheduler(self, message: Abort) -> None:
        self.scheduler.append(message)


def test_the_loop_serves_until_told_to_stop() -> None:
    done = threading.Event()
    port = Port([batch([("a", ids_of("x!y"))], opened=[opened("a", stop=("!",))])], done)
    Detokenizer(TOKENIZER).run(port, done)
    assert [found.texts for found in port.front] == [[], ["x"]]  # a heartbeat first
    assert port.scheduler == [Abort(rids=["a"], reason="stop")]
