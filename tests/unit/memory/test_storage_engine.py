"""The threads in front of a store: what a slow, full, broken, lying or dead store costs, which is hits and no more."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ceiba.memory.storage import engine as module
from ceiba.memory.storage.engine import StorageEngine
from support.page_store import FakeStore

PAGE = 4
TOKENS = np.arange(40, dtype=np.int32)
BLOBS = [np.full(100, i, np.uint8) for i in range(10)]


def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


class World:
    def __init__(self, threads: int = 1) -> None:
        self.store = FakeStore()
        self.store.threads = threads
        self.engine = StorageEngine(self.store, {"model": 1}, PAGE)
        self.news = []
        self.ticket = 0

    def run(self, what: str, *args) -> list:
        """One job to its end."""
        self.ticket += 1
        getattr(self.engine, what)(self.ticket, *args)
        return self.heard(self.ticket)

    def heard(self, ticket: int) -> list:
        def ended() -> bool:
            self.news += self.engine.poll()
            return any(news.ticket == ticket and news.final for news in self.news)

        until(ended)
        return [news for news in self.news if news.ticket == ticket]


@pytest.fixture
def world():
    made = World()
    yield made
    made.store.gate.set()
    made.engine.close()


@pytest.fixture(params=[1, 3])
def either(request):
    """A store that bears one reader, or three."""
    made = World(request.param)
    yield made
    made.store.gate.set()
    made.engine.close()


def pages(news: list) -> list[bytes]:
    return [bytes(blob) for entry in news for blob in entry.blobs]


def test_pages_come_back_as_they_were_and_in_order(either):
    assert either.run("store", "ns", TOKENS, 0, BLOBS)[-1].stored == 10
    news = either.run("fetch", "ns", TOKENS, 0, 1)
    assert news[0].found == 10
    assert pages(news) == [blob.tobytes() for blob in BLOBS]
    assert [entry.first for entry in news if entry.blobs] == [0, 8]
    later = either.run("fetch", "ns", TOKENS, 7, 1)  # pages are named by what stands before them as well
    assert pages(later) == [blob.tobytes() for blob in BLOBS[7:]]


def test_less_than_the_threshold_is_not_read(world):
    world.run("store", "", TOKENS[: 3 * PAGE], 0, BLOBS[:3])
    news = world.run("fetch", "", TOKENS, 0, 4)
    assert (news[-1].found, pages(news)) == (3, [])
    assert "get" not in world.store.calls


def test_another_namespace_and_another_beginning_share_nothing(world):
    world.run("store", "a", TOKENS, 0, BLOBS)
    assert world.run("fetch", "b", TOKENS, 0, 1)[0].found == 0
    changed = TOKENS.copy()
    changed[0] += 1
    assert world.run("fetch", "a", changed, 5, 1)[0].found == 0


@pytest.mark.parametrize("at", [0, 30, 45, 60])
def test_a_flipped_byte_ends_the_run_there_and_the_page_is_written_anew(either, at):
    either.run("store", "", TOKENS, 0, BLOBS)
    name = list(either.store.pages)[6]
    data = bytearray(either.store.pages[name])
    data[at] ^= 1
    either.store.pages[name] = bytes(data)
    news = either.run("fetch", "", TOKENS, 0, 1)
    assert pages(news) == [blob.tobytes() for blob in BLOBS[:6]]
    assert either.engine.corrupt == 1
    assert name not in either.store.pages
    either.run("store", "", TOKENS, 6, BLOBS[6:])
    assert len(pages(either.run("fetch", "", TOKENS, 0, 1))) == 10


def test_a_page_under_another_pages_name_is_noticed(world):
    world.run("store", "", TOKENS, 0, BLOBS)
    names = list(world.store.pages)
    world.store.pages[names[0]] = world.store.pages[names[1]]
    assert pages(world.run("fetch", "", TOKENS, 0, 1)) == []


def test_a_failing_store_is_left_alone_after_a_few_times_and_tried_again(either, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE", 1.0)
    either.engine._pause = 1.0
    either.store.fail = lambda operation: True
    for _ in range(module.FAILURES):
        assert either.engine.status().state == "ok"
        assert either.run("fetch", "", TOKENS, 0, 1)[-1].error
    assert either.engine.status().state == "suspended"
    either.store.fail = lambda operation: False
    until(lambda: either.engine.status().state == "ok")
    assert not either.run("fetch", "", TOKENS, 0, 1)[-1].error


def test_a_full_store_is_not_written_to_for_a_while_and_still_read(either):
    either.run("store", "", TOKENS[: 2 * PAGE], 0, BLOBS[:2])
    either.store.capacity = 0
    assert "full" in either.run("store", "", TOKENS, 2, BLOBS[2:])[-1].error
    status = either.engine.status()
    assert (status.state, status.writable) == ("ok", False)
    assert len(pages(either.run("fetch", "", TOKENS, 0, 1))) == 2


def test_a_hanging_store_blocks_nobody_and_is_asked_no_more(either, monkeypatch):
    monkeypatch.setattr(module, "HUNG", 0.05)
    either.store.gate.clear()
    started = time.monotonic()
    either.engine.fetch(1, "", TOKENS, 0, 1)
    either.engine.store(2, "", TOKENS, 0, BLOBS)
    assert time.monotonic() - started < 5
    until(lambda: either.engine.status().state == "suspended")
    assert either.engine.poll() == []
    either.engine.cancel(1)
    either.store.gate.set()
    either.heard(2)
    assert [news.ticket for news in either.news] == [2]  # nothing is heard of a cancelled job
    until(lambda: either.engine.status().state == "ok")  # once the reader, too, is back from the store


def test_closing_while_the_store_hangs_returns_and_closes_it_later(either):
    either.store.gate.clear()
    either.engine.fetch(1, "", TOKENS, 0, 1)
    until(lambda: "exists" in either.store.calls)
    either.engine.close()
    assert not either.store.closed
    either.store.gate.set()
    until(lambda: either.store.closed)


def test_the_reader_waits_while_nobody_takes_what_it_read(world, monkeypatch):
    monkeypatch.setattr(module, "UNREAD_BYTES", 300)
    monkeypatch.setattr(module, "GROUP", 1)
    world.run("store", "", TOKENS, 0, BLOBS)
    world.engine.fetch(99, "", TOKENS, 0, 1)
    until(lambda: world.store.calls.count("get") >= 3)
    time.sleep(0.05)
    assert world.store.calls.count("get") <= 4
    assert len(pages(world.heard(99))) == 10


def test_clear_deletes_and_the_backlog_counts_down(either):
    either.store.gate.clear()
    either.engine.store(5, "", TOKENS, 0, BLOBS)
    assert either.engine.status().backlog == 1000
    either.store.gate.set()
    either.heard(5)
    assert either.run("clear")[-1].stored == 10
    until(lambda: either.engine.status().backlog == 0)
    assert either.store.pages == {}
