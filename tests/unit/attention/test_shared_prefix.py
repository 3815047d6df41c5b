"""The plan of shared prefix reads covers each member's prefix exactly once, whatever the nesting."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ceiba.attention.shared_prefix import LEAST_TOKENS, MAX_PARTS, plan_shared
from ceiba.core.step import PrefixGroup


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[PrefixGroup], np.ndarray, int]:
    """Nested groups over B decode segments that stand after ``first`` prefill segments."""
    batch, first = draw(st.integers(2, 60)), draw(st.integers(0, 5))
    groups: list[PrefixGroup] = []
    depth = np.zeros(batch, np.int32)

    def split(lo: int, hi: int, length: int, level: int) -> None:
        if level == 4 or hi - lo < 2:
            return
        cut = draw(st.integers(lo, hi))
        for a, b in ((lo, cut), (cut, hi)):
            if b - a >= 2 and draw(st.booleans()):
                longer = length + draw(st.integers(1, 3000))
                groups.append(PrefixGroup(longer, np.arange(a + first, b + first, dtype=np.int32)))
                depth[a:b] = longer
                split(a, b, longer, level + 1)

    split(0, batch, 0, 0)
    own = np.array(draw(st.lists(st.integers(1, 500), min_size=batch, max_size=batch)), np.int32)
    draw(st.randoms()).shuffle(groups)
    return groups, depth + own, first


@settings(max_examples=200, deadline=None)
@given(forests(), st.sampled_from([8, 16, 9, 2]), st.sampled_from([1, 4, 8]))
def test_each_prefix_is_covered_once(
    forest: tuple[list[PrefixGroup], np.ndarray, int], tile: int, kv_heads: int
) -> None:
    groups, kv_lens, first = forest
    batch = len(kv_lens)
    rows = np.arange(100, 100 + batch, dtype=np.int32)
    plan = plan_shared(groups, first, rows, kv_lens, tile, kv_heads, 132)
    if plan is None:
        return
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(batch)]
    for at, members, row, begin, end, part in plan.items.tolist():
        some = plan.members[at : at + members]
        assert 1 <= members <= tile
        assert row - 100 in together_with(some, groups, first, end)
        for segment in some.tolist():
            pieces[segment].append((begin, end, part))
    for segment in range(batch):
        covered = sorted(pieces[segment])
        assert plan.own_starts[segment] < kv_lens[segment]
        assert [b for b, _, _ in covered] == [0, *[e for _, e, _ in covered]][: len(covered)]
        assert (covered[-1][1] if covered else 0) == plan.own_starts[segment]
        assert sorted(p for _, _, p in covered) == list(range(plan.counts[segment]))
        assert plan.counts[segment] <= MAX_PARTS


def together_with(some: np.ndarray, groups: list[PrefixGroup], first: int, end: int) -> set[int]:
    """Segments that share at least ``end`` tokens with all of ``some``."""
    fitting = [set((g.segments - first).tolist()) for g in groups if g.length >= end]
    return {s for group in fitting if set(some.tolist()) <= group for s in group}


def test_sharing_little_is_not_worth_a_launch() -> None:
    rows = np.arange(4, dtype=np.int32)
    lens = np.full(4, 500, np.int32)
    assert plan_shared([PrefixGroup(LEAST_TOKENS - 1, rows)], 0, rows, lens, 16, 8, 132) is None
    assert plan_shared([PrefixGroup(300, rows)], 0, rows, lens, 16, 8, 132) is None
    assert plan_shared([PrefixGroup(3000, rows)], 0, rows, lens + 3000, 16, 8, 132) is not None


def test_a_stretch_never_covers_a_segments_last_token() -> None:
    rows = np.arange(3, dtype=np.int32)
    plan = plan_shared([PrefixGroup(4000, rows)], 0, rows, np.array([4000, 4001, 4500], np.int32), 16, 8, 132)
    assert plan is not None
    assert plan.own_starts.tolist() == [0, 4000, 4000]
