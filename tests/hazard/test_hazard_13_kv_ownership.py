"""Hazard 13, component level: duplicates, overlap's extra slot, uncommitted tokens."""

from __future__ import annotations

import numpy as np
import pytest

from ceiba.cache.ledger import assert_ledger
from support.scheduler_world import make_world, prompt


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page", [1, 4])
def test_the_same_prefix_computed_twice_is_kept_once_and_freed_once(overlap, page):
    """Twins are prefilled in one batch (de-duplication off): both insert the same prefix while both still run."""
    world = make_world(overlap=overlap, page=page, in_batch_check_threshold=-1)
    for rid in "abc":
        world.ask(rid, prompt(1, 40), max_new_tokens=30, ignore_eos=True)
    world.step(6)
    leases = world.scheduler.leases
    duplicated = [r for r in world.scheduler.rows.live() if leases.has_duplicates(r.row)]
    assert len(duplicated) == 2
    for request in duplicated:  # what the runner's table names must not be handed out again
        held = leases.slots[request.row, : leases.launched[request.row]]
        assert not np.isin(held, leases.allocator.free_slots()).any()
    world.finish()
    for rid in "abc":
        world.check(rid)
    tree = leases.cache.handles()
    assert len(tree) == (40 + 29) // page * page
    assert leases.allocator.free == leases.allocator.total - len(tree)


def test_duplicates_never_block_a_request_that_fits_alone():
    """Pool of 60: two twins of 20 + 30 each hold a copy of the prompt; in the end one of them must run alone."""
    world = make_world(pool=60, context=60, in_batch_check_threshold=-1, conservativeness=0.0)
    for rid in "ab":
        world.ask(rid, prompt(1, 20), max_new_tokens=39, ignore_eos=True)
    world.finish()
    for rid in "ab":
        world.check(rid)


def test_the_extra_slot_of_a_stopped_request_is_freed_once():
    world = make_world(overlap=True)
    for i in range(12):
        world.ask(str(i), prompt(i, 10), max_new_tokens=100)
    world.finish()
    assert world.scheduler.counters.dropped_tokens > 0
    assert_ledger(world.scheduler.leases, idle=True)
    for i in range(12):
        world.check(str(i))


def test_only_accepted_tokens_are_committed():
    """The token after the end was computed on the device; the cache must not know it."""
    world = make_world(overlap=True)
    world.ask("a", prompt(0, 10), max_new_tokens=100)
    world.finish()
    assert world.scheduler.counters.dropped_tokens == 1
    cached = world.scheduler.leases.cache.handles()
    assert len(cached) == 10 + len(world.answer("a").tokens) - 1
