"""Speculation at the scheduler: answers stay those of one token a step, drafts cost nobody room, and stop where they do
not pay. Random walks with drafts are in ``support.long_walk``."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ceiba.core.sampling import LogprobSpec
from ceiba.scheduler.drafts import LONGEST_PAUSE
from ceiba.spec.fake import FakeDrafter
from support.scheduler_world import VOCAB, World, continued, make_world, prompt


def world_of(right: float, most: int = 8, **config: object) -> World:
    return make_world(drafter=FakeDrafter(continued, right, VOCAB), num_draft_tokens=most, **config)


SHAPES = {
    "waits": {},
    "eager": {"eager": True},
    "no overlap": {"overlap": False},
    "pages": {"page": 4},
    "mixed": {"enable_mixed_chunk": True, "chunked_prefill_size": 16},
    "small steps": {"chunked_prefill_size": 9},
    "short of room": {"pool": 150, "conservativeness": 0.05},
    "no cache": {"disable_radix_cache": True},
    "fair": {"fair_share": "routing-key"},
}


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_those_without_drafts(shape: str, right: float) -> None:
    world = world_of(right, **SHAPES[shape])
    for i in range(8):
        fields = {"ignore_eos": i % 2 == 0, "min_new_tokens": 9 * (i % 3), "stream": i % 3 == 0}
        world.ask(f"{i}", prompt(i % 6, 9 + i), max_new_tokens=1 + 9 * i, stop_token_ids=(11,) * (i % 4 == 1), **fields)
    world.finish()
    for i in range(8):
        world.check(f"{i}")
    counters = world.scheduler.counters
    assert counters.spec_accepted_tokens <= counters.spec_draft_tokens
    assert (counters.spec_accepted_tokens > 0) == (right > 0)
    if shape == "short of room":
        assert counters.retractions
    if right == 1.0:
        assert counters.spec_accepted_tokens == counters.spec_draft_tokens, "what is not accepted is not guessed"
        assert shape in {"short of room", "small steps"} or counters.accept_length() > 2


@pytest.mark.parametrize("overlap", [True, False])
def test_wrong_guesses_are_given_up(overlap: bool) -> None:
    world = world_of(0.0, overlap=overlap, context=1000, pool=2000)
    world.ask("a", prompt(1, 10), max_new_tokens=600, ignore_eos=True)
    planned = []
    build = world.scheduler.planner.build
    world.scheduler.planner.build = lambda now, in_flight: planned.append(in_flight) or build(now, in_flight=in_flight)
    world.finish()
    world.check("a")
    assert world.scheduler.counters.spec_draft_tokens < 600 / LONGEST_PAUSE + 15
    assert (np.mean(planned) > 0.9) == overlap, "steps overlap again once guessing does not pay"


def test_the_last_token_and_the_context_are_not_passed() -> None:
    world = world_of(1.0, 16, context=60)
    for i in range(1, 12):
        world.ask(f"short{i}", prompt(i, 10), max_new_tokens=i, ignore_eos=True)
        world.ask(f"full{i}", prompt(30 + i, 49 - i), max_new_tokens=100, ignore_eos=True)
    world.finish()
    for i in range(1, 12):
        world.check(f"short{i}")
        world.check(f"full{i}")


def test_a_second_asking_is_guessed_from_the_cache() -> None:
    class Silent:
        def begin(self):
            return self

        def propose(self, tokens, most):
            return np.empty(0, np.int32)

    world = make_world(drafter=Silent(), num_draft_tokens=16)
    for rid, salt in (("first", ""), ("salted", "other"), ("again", "")):
        before = world.scheduler.counters.spec_accepted_tokens
        world.ask(rid, prompt(5, 12), max_new_tokens=50, ignore_eos=True, namespace=salt)
        world.finish()
        world.check(rid)
        found = world.scheduler.counters.spec_accepted_tokens - before
        assert (found > 35) == (rid == "again"), "namespaces share no guesses either"


def test_a_burst_is_one_report_with_all_its_log_probabilities() -> None:
    plain, drafted = make_world(), world_of(1.0)
    for world in (plain, drafted):
        spec = LogprobSpec(output=True, top=3, token_ids=(1, 2))
        world.ask("a", prompt(2, 10), max_new_tokens=30, ignore_eos=True, stream=True, logprob=spec)
        world.finish()
        world.check("a")
    one, other = plain.answer("a"), drafted.answer("a")
    assert other.reports < one.reports / 2
    for name in ("values", "top_ids", "top_values", "fixed_values"):
        joined = [b"".join(getattr(part, name) for part in answer.logprobs) for answer in (one, other)]
        assert joined[0] == joined[1], name


def test_a_fault_ends_one_request_only() -> None:
    world = world_of(1.0, overlap=False)
    for name in "ab":
        world.ask(name, prompt(ord(name), 10), max_new_tokens=60, ignore_eos=True)
    world.step(4)
    row = world.scheduler._requests["a"].row
    world.runner.fault_rows[row] = "broken"
    world.finish()
    assert world.answer("a").finish.message == "broken"
    world.check("b")


def test_what_drafts_bring_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = world_of(1.0, decode_log_interval=5)
    with caplog.at_level(logging.INFO, "ceiba.scheduler"):
        world.ask("a", prompt(2, 10), max_new_tokens=100, ignore_eos=True)
        world.finish()
    stats = world.scheduler.stats()
    assert stats["spec_accept_length"] == pytest.approx(99 / stats["decode_rows"])
    assert stats["spec_accept_rate"] == 1.0
    assert stats["spec_num_draft_tokens"] == 8
    assert stats["spec_verify_calls"] >= 10
    assert "accept len: " in caplog.text
    assert "accept rate: 1.00" in caplog.text
    assert "spec_accept_length" not in make_world().scheduler.stats()
