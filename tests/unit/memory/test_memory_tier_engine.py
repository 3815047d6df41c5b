"""The engine that moves KV between tiers, on CPU tensors: order, completion, fences, errors, storage."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from ceiba.config.records import HiCacheConfig
from ceiba.core.errors import ConfigError
from ceiba.memory.pool import KVPool, KVShape
from ceiba.memory.storage.engine import StorageEngine
from ceiba.memory.tiers import TierEngine

SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=4, v_head_dim=4, dtype=torch.float32)
IDENTITY = {"weights": "a"}


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.fixture
def engine():
    pool = KVPool(SHAPE, 32, 1, "cpu")
    made = TierEngine(HiCacheConfig(host_tokens=64, storage_page=4), pool, IDENTITY)
    made.pool = pool
    yield made
    made.close()


def fill(pool: KVPool, slot: int, value: float) -> None:
    for layer in (*pool.k, *pool.v):
        layer[slot] = value


def wait_storage(engine: TierEngine, seconds: float = 20.0):
    """All news until a job's end."""
    news, deadline = [], time.monotonic() + seconds
    while not news or not news[-1].final:
        news += engine.poll_storage()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return news


def test_copies_are_carried_out_in_the_order_of_the_calls(engine):
    fill(engine.pool, 1, 5.0)
    tickets = [
        engine.backup(slots(1), slots(10)),
        engine.restore(slots(10), slots(2)),
        engine.backup(slots(2), slots(11)),
        engine.restore(slots(11), slots(3)),
    ]
    done = engine.drain()
    assert [entry.ticket for entry in done] == tickets
    assert not any(entry.error for entry in done)
    assert all(entry.size == SHAPE.bytes_per_token for entry in done)
    assert all((layer[3] == 5.0).all() for layer in (*engine.pool.k, *engine.pool.v))


def test_calls_return_before_the_copy_and_a_fence_waits_for_it(engine):
    gate = threading.Event()
    copy = engine._copier.backup

    def slow(device, host):
        assert gate.wait(20)
        copy(device, host)

    engine._copier.backup = slow
    fill(engine.pool, 4, 1.0)
    ticket = engine.backup(slots(4), slots(0))
    assert engine.poll() == []  # under way: whoever polls goes on
    threading.Timer(0.05, gate.set).start()
    engine.fence(ticket)
    fill(engine.pool, 4, 2.0)  # the slot's new owner
    engine.drain()
    engine.restore(slots(0), slots(5))
    engine.drain()
    assert (engine.pool.k[0][5] == 1.0).all()


def test_a_failed_copy_is_told_and_the_next_one_works(engine):
    engine.backup(slots(1), slots(1000))
    fine = engine.backup(slots(1), slots(1))
    bad, good = engine.drain()
    assert "1000" in bad.error or "index" in bad.error.lower()
    assert (good.ticket, good.error) == (fine, "")


def test_what_is_stored_comes_back_after_a_restart_and_for_this_model_only(engine, tmp_path):
    options = {"path": str(tmp_path)}
    engine.attach("file", options)
    assert not wait_storage(engine)[-1].error
    for slot in range(8):
        fill(engine.pool, slot, float(slot))
    engine.backup(np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32))
    tokens = np.arange(100, 108, dtype=np.int32)
    engine.pack([slots(0, 1, 2, 3), slots(4, 5, 6, 7)])
    blobs = engine.drain()[-1].blobs
    engine.store("salt", tokens, 0, blobs)
    assert wait_storage(engine)[-1].stored == 2
    for identity, namespace, expected in ((IDENTITY, "salt", 2), (IDENTITY, "", 0), ({"weights": "b"}, "salt", 0)):
        pool = KVPool(SHAPE, 32, 1, "cpu")
        config = HiCacheConfig(host_tokens=64, storage_page=4, storage_backend="file", storage_options=options)
        other = TierEngine(config, pool, identity)
        try:
            assert other.storage().state == "ok"
            other.fetch(namespace, tokens, 0, 1)
            news = wait_storage(other)
            assert news[0].found == expected
            if expected:
                pages = [blob for entry in news for blob in entry.blobs]
                other.unpack(pages, [slots(9, 8, 7), slots(3, 2, 1, 0)], [1, 0])
                other.restore(slots(9, 8, 7, 3, 2, 1, 0), np.arange(1, 8, dtype=np.int32))
                assert not any(entry.error for entry in other.drain())
                assert pool.k[1][1:8, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
        finally:
            other.close()


@pytest.mark.parametrize("by", ["a detach", "running out of time"])
@pytest.mark.parametrize("connected", [False, True])
def test_an_attach_that_is_given_up_attaches_nothing(engine, tmp_path, monkeypatch, by: str, connected: bool):
    opening, closed, opened = threading.Event(), threading.Event(), []
    real = engine._connect

    def slow(backend, options):
        opening.wait(10)
        opened.append(real(backend, options))
        return opened[0]

    monkeypatch.setattr(engine, "_connect", slow)
    monkeypatch.setattr(StorageEngine, "close", lambda self: closed.set())
    ticket = engine.attach("file", {"path": str(tmp_path)})
    assert engine.storage().state == "attaching"
    if connected:
        opening.set()
        while engine._attached is None:
            time.sleep(0.001)
    engine.cancel(ticket) if by == "running out of time" else engine.detach()
    assert engine.storage().state == "detached"
    opening.set()
    assert closed.wait(10)
    assert engine.storage().state == "detached"
    assert not engine.poll_storage()
    monkeypatch.undo()
    opened[0].close()


def test_attaching_what_cannot_be_opened_says_so(engine, tmp_path):
    with pytest.raises(ConfigError, match="not available"):
        engine.attach("hf3fs", {})
    (tmp_path / "file").write_text("")
    engine.attach("file", {"path": str(tmp_path / "file")})
    assert "cannot be used" in wait_storage(engine)[-1].error
    assert engine.storage().state == "detached"
    engine.fetch("", np.arange(8, dtype=np.int32), 0, 1)
    assert "no storage" in wait_storage(engine)[-1].error
