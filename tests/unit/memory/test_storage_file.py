"""Pages as files: whole or not at all, within a budget, across restarts, on full disks and with killed writers."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ceiba.memory.storage.base import StoreError, StoreFull
from ceiba.memory.storage.file import FileStore, PlainIO
from ceiba.memory.storage.pages import CorruptPage, frame, identity_digest, page_keys, unframe

KEYS = page_keys(identity_digest({"m": 1}), "", np.arange(400, dtype=np.int32), 4)


def page(i: int, size: int = 1000) -> bytes:
    return bytes([i % 251]) * size


class FullDisk(PlainIO):
    """A disk that takes ``left`` more bytes."""

    def __init__(self, left: int) -> None:
        self.left = left

    def write(self, path, parts):
        size = sum(len(part) for part in parts)
        if size > self.left:
            Path(path).write_bytes(b"x" * self.left)  # what fits is written before the error comes
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(path, parts)
        self.left -= size


def test_put_get_exists_delete(tmp_path):
    store = FileStore(tmp_path / "kv", 10**6)
    assert store.put(KEYS[0], [b"head", page(0)]) == 1004
    assert store.put(KEYS[0], [b"something else"]) == 0  # what is there stays
    store.put(KEYS[1], [page(1)])
    assert bytes(store.get(KEYS[0])) == b"head" + page(0)
    assert store.get(KEYS[5]) is None
    assert (store.exists(KEYS[:3]), store.exists(KEYS[2:4]), store.exists([])) == (2, 0, 0)
    store.delete(KEYS[0])
    store.delete(KEYS[0])
    assert store.exists(KEYS[:2]) == 0
    mode = os.stat(store._path(KEYS[1])).st_mode & 0o777
    assert mode == 0o600  # prompts can be read out of KV


def test_the_oldest_pages_go_when_the_budget_is_reached_and_reading_keeps_young(tmp_path):
    store = FileStore(tmp_path, 10_000)
    for i in range(10):
        store.put(KEYS[i], [page(i)])
    store.get(KEYS[0])
    store.put(KEYS[10], [page(10)])
    assert store.exists([KEYS[0]]) == 1
    assert store.exists([KEYS[1]]) == 0
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.kv")) <= 10_000
    with pytest.raises(StoreFull):
        store.put(KEYS[11], [page(0, 20_000)])


def test_several_writers_at_a_time_keep_the_budget_and_the_books(tmp_path):
    most = []

    def size_of(file: Path) -> int:
        with contextlib.suppress(FileNotFoundError):
            return file.stat().st_size
        return 0  # it went meanwhile

    class Watched(PlainIO):
        def write(self, path, parts):
            super().write(path, parts)
            most.append(sum(map(size_of, list(tmp_path.rglob("*.*")))))

    store = FileStore(tmp_path, 10_000, Watched(), threads=4)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: store.put(KEYS[i], [page(i)]), range(60)))
    files = list(tmp_path.rglob("*.kv"))
    assert store.stats()["bytes"] == sum(file.stat().st_size for file in files) == 1000 * len(files)
    assert store.evicted == 60 - len(files)
    assert len(most) == 60
    assert 8_000 <= max(most) <= 10_000
    for file in files:
        assert file.read_bytes() == page(KEYS.index(file.stem))


def test_a_restart_knows_sizes_and_ages(tmp_path):
    first = FileStore(tmp_path, 10_000)
    for i in range(8):
        first.put(KEYS[i], [page(i)])
        os.utime(first._path(KEYS[i]), (1000 + i, 1000 + i))
    first.get(KEYS[0])
    again = FileStore(tmp_path, 10_000)
    assert again.stats()["bytes"] == 8000
    for i in range(8, 12):
        again.put(KEYS[i], [page(i)])
    assert again.exists([KEYS[0]]) == 1
    assert again.exists([KEYS[1]]) == 0


def test_two_stores_share_a_folder(tmp_path):
    a, b = FileStore(tmp_path, 10**6), FileStore(tmp_path, 10**6)
    a.put(KEYS[0], [page(0)])
    assert b.exists(KEYS[:1]) == 1
    assert bytes(b.get(KEYS[0])) == page(0)
    a.delete(KEYS[0])
    assert b.get(KEYS[0]) is None
    assert b.stats()["bytes"] == 0


def test_a_full_disk_makes_room_or_says_so_and_leaves_nothing_half_written(tmp_path):
    disk = FullDisk(3500)
    store = FileStore(tmp_path, 10**6, disk)
    for i in range(3):
        store.put(KEYS[i], [page(i)])

    def unlink_gives_room(wanted, evict=store._evict):
        gone = evict(wanted)
        disk.left += gone
        return gone

    store._evict = unlink_gives_room
    assert store.put(KEYS[3], [page(3)]) == 1000  # older pages went
    assert store.exists([KEYS[0]]) == 0
    store._evict = lambda wanted: 0
    disk.left = 10
    with pytest.raises(StoreFull):
        store.put(KEYS[4], [page(4)])
    assert store.exists([KEYS[4]]) == 0
    assert not list(tmp_path.rglob("*.tmp"))


def test_other_errors_of_the_disk_are_errors_of_the_store(tmp_path):
    class Broken(PlainIO):
        def read(self, path):
            raise OSError(errno.EIO, "Input/output error")

        def write(self, path, parts):
            raise OSError(errno.EROFS, "Read-only file system")

    store = FileStore(tmp_path, 10**6, Broken())
    with pytest.raises(StoreError, match="Read-only"):
        store.put(KEYS[0], [b"x"])
    with pytest.raises(StoreError, match="Input/output"):
        store.get(KEYS[0])
    with pytest.raises(StoreError, match="cannot be used"):
        FileStore(Path("/proc/nowhere"), 10**6)


WRITER = """
import sys
from pathlib import Path
from ceiba.memory.storage.file import FileStore
from ceiba.memory.storage.pages import frame
keys = sys.argv[2:]
store = FileStore(Path(sys.argv[1]), 1 << 40)
print("ready", flush=True)
while True:
    for i, key in enumerate(keys):
        store.put(key, frame(key, bytes([i]) * 3_000_000))
        if i > 1:
            store.delete(keys[i - 2])
"""


def test_a_writer_killed_in_the_middle_leaves_whole_pages_only(tmp_path):
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), *KEYS[:20]], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        until = time.monotonic() + 20
        while not list(tmp_path.rglob("*.tmp")) and time.monotonic() < until:
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for file in tmp_path.rglob("*.kv"):
            payload = unframe(file.name[:-3], file.read_bytes())
            assert len(payload) == 3_000_000
        FileStore(tmp_path, 10**9)
        assert not list(tmp_path.rglob("*.tmp"))  # the dead writer's rest is gone


def test_clear_empties_this_folder_only(tmp_path):
    a, b = FileStore(tmp_path / "a", 10**6), FileStore(tmp_path / "b", 10**6)
    a.put(KEYS[0], [page(0)])
    b.put(KEYS[0], [page(0)])
    assert a.clear() == 1
    assert (a.exists(KEYS[:1]), b.exists(KEYS[:1])) == (0, 1)


# ── keys and frames ──────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 5), min_size=8, max_size=24), st.integers(0, 23), st.integers(0, 5))
@settings(deadline=None)
def test_keys_depend_on_every_token_before_them_and_on_none_behind(tokens, at, value):
    seed = identity_digest({})
    a = np.array(tokens, np.int32)
    b = a.copy()
    if at < len(b):
        b[at] = value
    ka, kb = page_keys(seed, "n", a, 4), page_keys(seed, "n", b, 4)
    assert len(ka) == len(tokens) // 4
    for i, (x, y) in enumerate(zip(ka, kb, strict=True)):
        assert (x == y) == np.array_equal(a[: 4 * (i + 1)], b[: 4 * (i + 1)])


def test_namespaces_and_identities_never_meet():
    tokens = np.arange(8, dtype=np.int32)
    names = [("", {}), ("a", {}), ("ab", {}), ("", {"x": 1}), ("", {"x": 2}), ("", {"y": 1})]
    keys = [tuple(page_keys(identity_digest(identity), name, tokens, 4)) for name, identity in names]
    assert len({key for pair in keys for key in pair}) == 2 * len(names)
    assert identity_digest({"a": 1, "b": 2}) == identity_digest({"b": 2, "a": 1})


@given(st.binary(min_size=0, max_size=200), st.integers(0, 10**6), st.integers(1, 255))
@settings(deadline=None)
def test_any_changed_byte_and_any_cut_is_noticed(payload, at, flip):
    data = bytearray(b"".join(bytes(part) for part in frame(KEYS[0], payload)))
    assert bytes(unframe(KEYS[0], data)) == payload
    with pytest.raises(CorruptPage):
        unframe(KEYS[1], data)
    with pytest.raises(CorruptPage):
        unframe(KEYS[0], data[:-1])
    data[at % len(data)] ^= flip
    with pytest.raises(CorruptPage):
        unframe(KEYS[0], data)
