"""The file of packed weights: what is written is found again, and whatever is odd about a file is noticed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from ceiba.checkpoint import packed_cache
from ceiba.checkpoint.packed_cache import PackedCache, identity_of

IDENTITY = '{"a": 1}'


@pytest.fixture(autouse=True)
def small_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)


def parts() -> dict[str, np.ndarray]:
    rng = np.random.default_rng()
    return {f"layer.{i} [0:{i}] Q4_1": rng.integers(0, 256, 64 * i + 320, dtype=np.uint8) for i in range(40)}


def written(folder: Path, data: dict[str, np.ndarray], identity: str = IDENTITY) -> Path:
    cache = PackedCache(folder, identity)
    for name, values in data.items():
        assert cache.take(name, len(values)) is None
        cache.keep(name, values)
    thread = cache.finish()
    assert thread is not None
    thread.join()
    return cache.path


def test_what_was_kept_is_taken_and_nothing_is_written_again(tmp_path: Path) -> None:
    data = parts()
    path = written(tmp_path / "new" / "packed", data)
    stamp = path.stat().st_ino
    cache = PackedCache(path.parent, IDENTITY)
    assert cache.ready
    for name, values in data.items():
        found = cache.take(name, len(values))
        assert found is not None
        assert np.array_equal(found, values)
        assert found.ctypes.data % 64 == 0
    assert cache.take("layer.1 [0:1] Q4_1", 5) is None
    assert cache.take("layer.99", 320) is None
    assert cache.bytes_taken == sum(map(len, data.values()))
    assert cache.finish() is None
    assert path.stat().st_ino == stamp
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_mapped_bytes_outlive_the_file(tmp_path: Path) -> None:
    data = parts()
    path = written(tmp_path, data)
    cache = PackedCache(tmp_path, IDENTITY)
    assert cache.ready
    path.unlink()
    name, values = next(iter(data.items()))
    assert np.array_equal(cache.take(name, len(values)), values)


def test_every_damage_is_noticed_and_the_file_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = parts()
    path = written(tmp_path, data)
    good = path.read_bytes()
    header = good.index(b'"entries"')
    last = len(good) - 4096  # the last part is 2,816 bytes long: this is its first byte
    damages = {
        "one bit of the data": good[:last] + bytes([good[last] ^ 1]) + good[last + 1 :],
        "a letter of the header": good[:header] + b"X" + good[header + 1 :],
        "cut": good[:-4096],
        "longer": good + bytes(4096),
        "empty": b"",
        "another file": b"GGUF" + good[4:],
        "a header without end": good[:8] + b"\xff" * 12 + good[20:],
    }
    for what, content in damages.items():
        path.write_bytes(content)
        assert not PackedCache(tmp_path, IDENTITY).ready, what
        assert not path.exists(), what
        assert written(tmp_path, data).read_bytes() == good, what
    assert "packed and written again" in caplog.text


def test_a_file_of_another_checkpoint_under_this_name_is_not_used(tmp_path: Path) -> None:
    other = written(tmp_path, parts(), '{"b": 2}')
    os.rename(other, PackedCache(tmp_path, IDENTITY).path)
    assert not PackedCache(tmp_path, IDENTITY).ready


def test_the_folder_is_bounded_and_what_was_not_used_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for index in range(4):
        paths.append(written(tmp_path, parts(), f'{{"n": {index}}}'))
        os.utime(paths[-1], (1000 + index, 1000 + index))
    cache = PackedCache(tmp_path, '{"n": 0}')
    assert cache.ready
    cache.finish()  # used now
    size = paths[0].stat().st_size
    monkeypatch.setattr(packed_cache, "FOLDER_BYTES", 3 * size + 5000)
    newest = written(tmp_path, parts(), '{"n": 4}')
    assert set(tmp_path.iterdir()) == {paths[0], paths[3], newest}
    monkeypatch.setattr(packed_cache, "FOLDER_BYTES", size)
    cache = PackedCache(tmp_path, '{"n": 5}')
    cache.keep("too large", np.zeros(size, np.uint8))
    assert cache.finish() is None


def test_leftovers_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    old, young = (tmp_path / f"{'0' * 32}.packed.{pid}.tmp" for pid in (1, 2))
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    path = written(tmp_path, parts())
    assert set(tmp_path.iterdir()) == {path, young}


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    cache = PackedCache(blocked / "packed", IDENTITY)
    assert not cache.ready
    cache.keep("a", np.zeros(10, np.uint8))
    thread = cache.finish()
    assert thread is not None
    thread.join()
    assert not (blocked / "packed").exists()


def test_the_identity_follows_the_weights_and_the_kernels(tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(bytes(300_000))
    os.utime(weights, (5000, 5000))
    files = (str(weights),)

    def identity(build: bytes = b"one", **options: str) -> str:
        return identity_of(files, build, {"quantization": None, **options})

    first = identity()
    assert identity() == first
    assert identity(b"two") != first
    assert identity(quantization="int4") != first
    with open(weights, "r+b") as file:  # the same size and time, another byte in the middle
        file.seek(140_000)
        file.write(b"x" * 20_000)
    os.utime(weights, (5000, 5000))
    assert identity() != first
    weights.write_bytes(bytes(300_000))
    os.utime(weights, (5001, 5001))
    assert identity() != first
