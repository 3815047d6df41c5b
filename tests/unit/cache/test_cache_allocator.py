from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceiba.cache.allocator import OutOfSlots, SlotAllocator
from ceiba.core.lazy import sparse_table


def test_pages_are_whole_aligned_and_together():
    allocator = SlotAllocator(18, page_size=4)
    assert (allocator.total, allocator.free) == (16, 16)
    slots = allocator.alloc(2)
    for page in slots.reshape(2, 4):
        assert page[0] % 4 == 0
        assert (np.diff(page) == 1).all()


def test_too_much_takes_nothing():
    allocator = SlotAllocator(4)
    allocator.alloc(3)
    with pytest.raises(OutOfSlots, match="2 pages of 1"):
        allocator.alloc(2)
    assert allocator.free == 1


@pytest.mark.parametrize("page", [1, 4])
def test_double_free_is_an_error(page):
    allocator = SlotAllocator(32, page)
    slots = allocator.alloc(2)
    allocator.release(slots)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.release(slots)
    assert allocator.free == 32


def test_part_of_a_page_cannot_be_freed():
    allocator = SlotAllocator(8, 4)
    slots = allocator.alloc(1)
    with pytest.raises(ValueError, match="whole pages"):
        allocator.release(slots[:3])


def test_pool_smaller_than_a_page_is_refused():
    with pytest.raises(ValueError, match="one page of 16"):
        SlotAllocator(8, 16)


RESIDENT = """
import mmap
import numpy as np
from pathlib import Path
from ceiba.core.lazy import sparse_table

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

before = resident()
table = sparse_table(1024, 131072)
table[:, 0] = np.arange(1024)
print(resident() - before)
"""


def test_wide_tables_take_memory_where_they_are_written():
    """Measured in a process that does nothing else."""
    table = sparse_table(1024, 131072)
    table[:, 0] = np.arange(1024)
    assert table[:, :2].tolist() == [[i, 0] for i in range(1024)]
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    taken = int(subprocess.check_output([sys.executable, "-c", RESIDENT], timeout=120))
    assert 1024 * mmap.PAGESIZE <= taken < 64 << 20  # of 512 MiB


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40), st.sampled_from([1, 3]))
def test_slots_are_never_handed_out_twice(events, page):
    allocator = SlotAllocator(36, page)
    held: list[np.ndarray] = []
    for take, count in events:
        if take and count * page <= allocator.free:
            held.append(allocator.alloc(count))
        elif not take and held:
            allocator.release(held.pop(count % len(held)))
        out = np.concatenate([*held, np.empty(0, np.int32)])
        everything = np.concatenate([out, allocator.free_slots()])
        assert sorted(everything.tolist()) == list(range(36))
