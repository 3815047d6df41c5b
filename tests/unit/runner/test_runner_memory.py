"""KV slots from measured device memory, by hand-computed examples."""

from __future__ import annotations

import pytest

from ceiba.core.errors import ConfigError
from ceiba.runner.memory_check import GIB, final_slots


def test_what_was_planned_is_kept_where_it_fits() -> None:
    got = final_slots(
        total_bytes=80 * GIB, free_bytes=60 * GIB, fraction=0.9, bytes_per_token=1 << 17, planned=1000, page_size=1
    )
    assert got == 1000


def test_less_where_the_device_has_less() -> None:
    # 80 GiB x 0.75 = 60 may be used, 20 are: 40 GiB / 128 KiB = 327,680 tokens.
    got = final_slots(
        total_bytes=80 * GIB, free_bytes=60 * GIB, fraction=0.75, bytes_per_token=1 << 17, planned=10**6, page_size=1
    )
    assert got == 327_680


def test_whole_pages() -> None:
    got = final_slots(
        total_bytes=10_000, free_bytes=10_000, fraction=1.0, bytes_per_token=10, planned=1000, page_size=64
    )
    assert got == 960


def test_no_room_names_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"20\.00 GiB.*--mem-fraction-static 0\.8 allows 19\.20 GiB"):
        final_slots(
            total_bytes=24 * GIB, free_bytes=4 * GIB, fraction=0.8, bytes_per_token=1 << 17, planned=99, page_size=1
        )
