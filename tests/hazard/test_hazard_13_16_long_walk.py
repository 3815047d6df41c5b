"""HAZARDS 13 to 16 at once and at random: whatever is asked in whatever order, under every policy, the KV ledger
balances after each step, everyone is served, and everyone gets the answer they get alone (``support.long_walk``).

``CEIBA_WALK_STEPS`` makes the slow walk longer: a nightly run takes a million.
"""

from __future__ import annotations

import os
import time

import pytest

from ceiba.cache.ledger import LedgerError
from support.long_walk import EPISODE, Walk


def test_a_short_walk() -> None:
    walk = Walk(seed=int(time.time()) // 86400)  # another one every day; the failure names it
    walk.run(4 * EPISODE)
    assert walk.seen["length"] + walk.seen["stop"] > 0


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_a_long_walk() -> None:
    steps = int(os.environ.get("CEIBA_WALK_STEPS", "20000"))
    walk = Walk(seed=time.time_ns() % 2**32)
    walk.run(steps)
    print(dict(walk.did), dict(walk.seen))
    assert walk.did.total() >= steps
    # What it is for does happen in it.
    for event in ("retractions", "evicted tokens", "right drafts", "wrong drafts", "length", "stop", "abort"):
        assert walk.seen[event] > 0, event


def test_the_walk_finds_a_lost_slot() -> None:
    """Guards the two above: one slot that is neither freed nor owned ends the walk within an episode."""
    walk = Walk(seed=3)
    original = walk._round
    taken = []

    def leaky() -> None:
        original()
        allocator = walk.world.scheduler.leases.allocator
        if not taken and allocator.free > 16:
            taken.append(allocator.alloc(1))

    walk._round = leaky  # type: ignore[method-assign]
    with pytest.raises(LedgerError, match="lost"):
        walk.run(EPISODE)
