"""Hazard 15, component level: retraction during chunked prefill, and an abort that races a result."""

from __future__ import annotations

import numpy as np
import pytest

from ceiba.core.sampling import LogprobSpec
from support.scheduler_world import make_world, prompt

SPEC = LogprobSpec(output=True, top=1, prompt_start=1)


def values(messages):
    return np.concatenate([np.frombuffer(message.values, np.float32) for message in messages])


def alone(tokens, new):
    world = make_world(disable_radix_cache=True, overlap=False, chunked_prefill_size=-1)
    world.ask("a", tokens, max_new_tokens=new, ignore_eos=True, logprob=SPEC)
    world.finish()
    return world.answer("a")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_retraction_during_chunked_prefill_shifts_no_logprob(overlap, mixed):
    world = make_world(
        pool=80, context=80, chunked_prefill_size=4, conservativeness=0.0, overlap=overlap, enable_mixed_chunk=mixed
    )
    world.ask("long output", prompt(1, 10), max_new_tokens=60, ignore_eos=True, logprob=SPEC)
    world.step(3)
    world.ask("long input", prompt(2, 60), max_new_tokens=15, ignore_eos=True, logprob=SPEC)
    partly = []
    original = world.scheduler.planner.retractor.retract

    def record(request):
        partly.append(request is world.scheduler.admission.partial)
        original(request)

    world.scheduler.planner.retractor.retract = record
    world.finish()
    assert world.scheduler.counters.retractions > 0
    if mixed:  # without mixing, decode steps do not run between the chunks of a prefill
        assert any(partly)
    for rid in ("long output", "long input"):
        tokens, sampling = world.asked[rid]
        expected, got = alone(tokens, sampling.max_new_tokens), world.answer(rid)
        assert got.tokens == expected.tokens
        assert len(values(got.logprobs)) == len(got.tokens)
        assert np.array_equal(values(got.logprobs), values(expected.logprobs))
        assert np.array_equal(values(got.prompt_logprobs), values(expected.prompt_logprobs))
        assert len(values(got.prompt_logprobs)) == len(tokens) - 1


@pytest.mark.parametrize("steps", range(1, 8))
def test_abort_wins_before_commit(steps):
    """The result of a step in flight, and what it wrote, is nobody's once the abort is in."""
    world = make_world(overlap=True, chunked_prefill_size=8)
    world.ask("a", prompt(1, 20), max_new_tokens=50, ignore_eos=True, stream=True)
    world.step(steps)
    committed = int(world.scheduler.leases.committed[0])
    told = len(world.answer("a").tokens) if "a" in world.port.answers else 0
    world.abort("a")
    world.finish()
    answer = world.answer("a")
    assert answer.finish.kind == "abort"
    assert len(answer.tokens) == told
    assert len(world.scheduler.leases.cache.handles()) == committed
    world.ask("b", prompt(1, 20), max_new_tokens=20)
    world.finish()
    world.check("b")
