"""Which prefix groups of a decode batch are read once for all their members, and how that work is cut up. Numpy only;
knows lengths and segment indices, never tensors or trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ceiba.core.step import PrefixGroup

MAX_PARTS = 16
"""Partial results that one segment may receive from shared stretches."""
LEAST_TOKENS = 64
"""A stretch shorter than this is cheaper to read again than to merge."""
LEAST_SAVED = 2048
"""Token reads that sharing must save in a step (over all its groups) to pay for its launch."""
BLOCK = 64


@dataclass(slots=True)
class SharedPlan:
    """Work of one step. All arrays int32; segments are counted from the first decode segment."""

    items: np.ndarray
    """[n, 6]: first entry in ``members``, members, slot-table row, first position, end position, part"""
    members: np.ndarray
    """Segment indices"""
    own_starts: np.ndarray
    """[B]: first position that each segment must read by itself"""
    counts: np.ndarray
    """[B]: parts that each segment receives"""


def plan_shared(
    groups: Sequence[PrefixGroup],
    first_segment: int,
    rows: np.ndarray,
    kv_lens: np.ndarray,
    tile: int,
    kv_heads: int,
    multiprocessors: int,
) -> SharedPlan | None:
    """Cut ``groups`` into items, or None where sharing does not pay.

    ``first_segment``: the plan's index of the first decode segment; rows, kv_lens int32 [B] of the decode segments;
    ``tile``: members an item may have. Groups nest: the stretch of a group starts where the last shorter group that
    holds the same segments ended. A stretch never covers a segment's last token.
    """
    batch = len(rows)
    covered = np.zeros(batch, np.int32)
    counts = np.zeros(batch, np.int32)
    stretches: list[tuple[np.ndarray, int, int]] = []
    for group in sorted(groups, key=lambda g: g.length):
        segments = np.asarray(group.segments, np.int32) - first_segment
        segments = segments[(segments >= 0) & (segments < batch)]
        segments = segments[kv_lens[segments] > group.length]
        for begin in np.unique(covered[segments]):
            same = segments[covered[segments] == begin]
            if len(same) >= 2 and group.length - begin >= LEAST_TOKENS:
                stretches.append((same, int(begin), group.length))
                covered[same] = group.length
    saved = sum((len(same) - 1) * (end - begin) for same, begin, end in stretches)
    if saved < LEAST_SAVED:
        return None
    work = sum(-(-len(same) // tile) * (end - begin) for same, begin, end in stretches)
    chunk = max(4 * BLOCK, -(-work * kv_heads // multiprocessors))
    depth = np.zeros(batch, np.int32)
    for same, _, _ in stretches:
        depth[same] += 1
    per_stretch = max(1, MAX_PARTS // int(depth.max()))
    if int(depth.max()) > MAX_PARTS:
        return None
    items: list[tuple[int, int, int, int, int, int]] = []
    members: list[np.ndarray] = []
    placed = 0
    for same, begin, end in stretches:
        size = max(chunk, -(-(end - begin) // per_stretch))
        size = -(-size // BLOCK) * BLOCK
        part = int(counts[same].max())
        splits = -(-(end - begin) // size)
        for lo in range(0, len(same), tile):
            some = same[lo : lo + tile]
            for i in range(splits):
                stop = min(end, begin + (i + 1) * size)
                items.append((placed, len(some), int(rows[same[0]]), begin + i * size, stop, part + i))
            members.append(some)
            placed += len(some)
        counts[same] = part + splits
    return SharedPlan(np.array(items, np.int32).reshape(-1, 6), np.concatenate(members), covered, counts)
