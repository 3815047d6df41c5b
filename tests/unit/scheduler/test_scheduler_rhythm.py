"""When prefill and decode take turns: the interval between prefills, and how much of a mixed step each may take."""

from __future__ import annotations

import itertools

import pytest

from support.scheduler_world import make_world, prompt


def record(world):
    """(prefill segments, decode segments, tokens) of every step."""
    steps = []
    original = world.runner.forward

    def forward(plan):
        steps.append((plan.num_prefill, plan.num_segments - plan.num_prefill, plan.num_tokens))
        return original(plan)

    world.runner.forward = forward
    return steps


@pytest.mark.parametrize("interval", [0, 1, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_running_requests_get_their_decode_steps_between_two_prefills(interval, overlap):
    world = make_world(rows=6, context=200, prefill_decode_interval=interval, chunked_prefill_size=16, overlap=overlap)
    world.ask("run", prompt(1, 10), max_new_tokens=60, ignore_eos=True)
    world.step(2)
    steps = record(world)
    world.ask("long", prompt(2, 80), max_new_tokens=2, ignore_eos=True)
    world.finish()
    prefills = [i for i, (prefill, _, _) in enumerate(steps) if prefill]
    assert len(prefills) == 5
    assert {b - a - 1 for a, b in itertools.pairwise(prefills)} == {interval}
    for rid in ("run", "long"):
        world.check(rid)


def test_the_interval_counts_only_when_enough_decode():
    world = make_world(rows=6, context=200, prefill_decode_interval=5, prefill_decode_interval_min_bs=3)
    for i in range(2):
        world.ask(str(i), prompt(i, 10), max_new_tokens=50, ignore_eos=True)
    world.step(2)
    steps = record(world)
    for i in range(2, 4):
        world.ask(str(i), prompt(i, 10), max_new_tokens=50, ignore_eos=True)
        world.step()
    # The third comes in at once, beside two; the fourth has to wait for five decode steps of the three.
    assert [prefill for prefill, _, _ in steps] == [1, 0]
    world.step(4)
    assert [prefill for prefill, _, _ in steps] == [1, 0, 0, 0, 0, 0]
    world.step()
    assert steps[-1][0] == 1
    world.finish()


@pytest.mark.parametrize("chunk", [4, 7, 8])
def test_a_mixed_step_never_has_more_tokens_than_the_chunk_while_someone_waits(chunk):
    """12 rows decode and the chunk holds fewer: the rows take turns, and the prompt still advances in every step."""
    world = make_world(rows=16, pool=3000, context=300, chunked_prefill_size=chunk, enable_mixed_chunk=True)
    for i in range(12):
        world.ask(str(i), prompt(i, 3), max_new_tokens=120, ignore_eos=True)
    world.step(60)
    assert world.scheduler.rows.num_used == 12
    steps = record(world)
    before = world.scheduler.leases.launched[:12].copy()
    world.ask("new", prompt(50, 40), max_new_tokens=2, ignore_eos=True)
    world.step(12)
    assert all(tokens <= chunk for prefill, _, tokens in steps if prefill)
    assert all(prefill == 1 for prefill, _, _ in steps)
    grown = world.scheduler.leases.launched[:12] - before
    assert grown.max() - grown.min() <= 1  # everyone in turn
    world.finish()
    for rid in world.asked:
        world.check(rid)


def test_the_partly_prefilled_request_is_not_forgotten_when_a_short_one_comes_in_beside_it():
    """KV leaves room for less than a chunk of it: what is left of the budget goes to others, and then it goes on."""
    world = make_world(context=600, pool=900, policy="shortest-prefill-first", chunked_prefill_size=32)
    world.ask("long", prompt(1, 500), max_new_tokens=3, ignore_eos=True)
    world.step()
    for i in range(12):
        world.ask(str(i), prompt(10 + i, 6), max_new_tokens=3, ignore_eos=True)
        world.step()
    world.finish()
    for rid in world.asked:
        world.check(rid)
