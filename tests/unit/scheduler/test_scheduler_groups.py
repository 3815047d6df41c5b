"""Prefix groups of decode rows: found under shared nodes, nested, never over slots that differ, cheap when steady."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from ceiba.core.step import StepPlan
from ceiba.scheduler.groups import LEAST_SAVED, LEAST_TOKENS, PrefixGroups
from support.scheduler_world import World, make_world


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 50, length).tolist()


@contextmanager
def plans(world: World) -> Iterator[list[StepPlan]]:
    """Every plan from here on, each checked: nested or disjoint groups over slots that are the same ones."""
    seen: list[StepPlan] = []
    forward, leases = world.runner.forward, world.scheduler.leases

    def spy(plan: StepPlan) -> object:
        seen.append(plan)
        for group in plan.groups:
            assert len(group.segments) > 1
            assert group.segments.min() >= plan.num_prefill
            rows = plan.rows[group.segments]
            assert (plan.starts[group.segments] >= group.length).all()
            slots = leases.slots[rows, : group.length]
            assert (slots == slots[0]).all()
        for a in plan.groups:
            for b in plan.groups:
                both = np.intersect1d(a.segments, b.segments)
                if a.length < b.length and len(both):
                    assert len(both) == len(b.segments)
        return forward(plan)

    world.runner.forward = spy  # type: ignore[method-assign]
    yield seen


def ask_tree(world: World, root: list[int], branches: int, depth: int, leaves: int, new: int = 12) -> None:
    """``leaves`` requests under each branch of a tree that is cached already."""
    for b in range(branches):
        world.ask(f"warm {b}", root + prompt(100 + b, depth), max_new_tokens=1)
        world.finish()
    for b in range(branches):
        branch = root + prompt(100 + b, depth)
        for leaf in range(leaves):
            world.ask(f"{b}.{leaf}", branch + prompt(1000 + 10 * b + leaf, 5), max_new_tokens=new, ignore_eos=True)


def lengths(plan: StepPlan) -> list[tuple[int, int]]:
    return sorted((group.length, len(group.segments)) for group in plan.groups)


@pytest.mark.parametrize("mixed", [False, True])
def test_nested_groups(mixed: bool) -> None:
    world = make_world(pool=30000, rows=32, context=2000, enable_mixed_chunk=mixed, chunked_prefill_size=512)
    with plans(world) as seen:
        ask_tree(world, prompt(1, 700), branches=3, depth=600, leaves=4)
        world.ask("alone", prompt(5, 900), max_new_tokens=12, ignore_eos=True)
        world.finish()
    found = {tuple(lengths(plan)) for plan in seen}
    assert ((700, 12), (1300, 4), (1300, 4), (1300, 4)) in found
    for rid in world.asked:
        world.check(rid)


def test_a_whole_chain_is_one_group() -> None:
    """A prefix that the tree holds in several pieces is named once, at its end."""
    world = make_world(pool=30000, rows=16, context=4000)
    root = prompt(2, 900)
    for i, length in enumerate((400, 900)):
        world.ask(f"first {i}", root[:length], max_new_tokens=1)
        world.finish()
    with plans(world) as seen:
        for i in range(6):
            world.ask(f"r{i}", root + prompt(50 + i, 4), max_new_tokens=8, ignore_eos=True)
        world.finish()
    assert {tuple(lengths(plan)) for plan in seen if len(plan.rows) == 6 and not plan.num_prefill} == {((900, 6),)}


def test_short_or_lonely_prefixes_make_no_group() -> None:
    world = make_world(pool=30000, rows=16, context=4000)
    with plans(world) as seen:
        for i in range(8):
            world.ask(f"s{i}", prompt(3, LEAST_TOKENS - 1) + prompt(60 + i, 9), max_new_tokens=6)
        world.ask("lonely", prompt(4, 2000), max_new_tokens=6)
        world.finish()
    assert all(not plan.groups for plan in seen)
    assert LEAST_TOKENS * 2 < LEAST_SAVED


def test_duplicates_are_left_out() -> None:
    """Two requests that computed the same prefix side by side hold different slots for it."""
    world = make_world(pool=30000, rows=16, context=4000, chunked_prefill_size=8192, max_prefill_tokens=16384,
                       in_batch_check_threshold=0, in_batch_deprioritize_threshold=10**9)  # fmt: skip
    with plans(world) as seen:
        shared = prompt(6, 1500)
        for i in range(5):
            world.ask(f"d{i}", shared + prompt(70 + i, 4), max_new_tokens=10, ignore_eos=True)
        world.finish()
    assert any(plan.num_prefill > 1 for plan in seen)
    for rid in world.asked:
        world.check(rid)


def test_off() -> None:
    world = make_world(pool=30000, rows=16, context=4000, shared_prefix=False)
    with plans(world) as seen:
        ask_tree(world, prompt(1, 1200), branches=1, depth=10, leaves=5)
        world.finish()
    assert all(not plan.groups for plan in seen)


def test_cost() -> None:
    """256 rows of 3 levels: a steady step costs microseconds, a changed one below a millisecond or so."""
    world = make_world(pool=600000, rows=256, context=4000, chunked_prefill_size=8192)
    ask_tree(world, prompt(1, 1000), branches=16, depth=300, leaves=16, new=400)
    for _ in range(400):
        world.scheduler.step(wait=0.0)
        if len(world.scheduler.rows.running()) == 256:
            break
    rows = world.scheduler.rows.running()
    assert len(rows) == 256
    finder = PrefixGroups(world.scheduler.leases)

    def best(call: object) -> float:
        times = []
        for _ in range(20):
            begun = time.perf_counter()
            call()  # type: ignore[operator]
            times.append(time.perf_counter() - begun)
        return min(times)

    assert len(finder.find(rows)) == 17
    assert best(lambda: finder.find(rows)) < 2e-4
    assert best(lambda: PrefixGroups(world.scheduler.leases).find(rows)) < 5e-3
