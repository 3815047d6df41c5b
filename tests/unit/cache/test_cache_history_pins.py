"""The log of evictions, and pins, against the simplest models there are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ceiba.cache.base import FULL
from ceiba.cache.history import EvictionHistory, hash_before, prefix_hashes
from ceiba.cache.keys import CacheKey
from ceiba.cache.pins import PinBoard
from ceiba.cache.radix import RadixCache


def make(**history):
    now = [0.0]
    log = EvictionHistory(lambda: now[0], **history)
    return RadixCache(history=log), log, now


def put(cache, tokens, namespace=""):
    key = CacheKey(namespace, np.array(tokens, np.int32))
    cache.insert(key, {FULL: np.arange(len(tokens), dtype=np.int32)})
    return key


def test_the_hash_of_a_prefix_does_not_depend_on_where_edges_are_cut():
    rng = np.random.default_rng(0)
    cache, _, _ = make()
    tokens = rng.integers(0, 1000, 60).tolist()
    put(cache, tokens)
    for cut in (40, 13, 27):
        put(cache, [*tokens[:cut], 5000 + cut])
    whole = prefix_hashes(np.array(tokens, np.int32))
    power, value = 1, 0
    for token, got in zip(tokens, whole.tolist(), strict=True):  # the definition, in Python's integers
        value = (value + (token + 1) * power) % 2**64
        power = power * 6364136223846793005 % 2**64
        assert got == value
    starts = sorted(node.start for node in cache.nodes() if node.tokens[0] < 5000)
    assert starts == [0, 13, 27, 40]
    for node in cache.nodes():
        assert hash_before(node) == (int(whole[node.start - 1]) if node.start else 0)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_was_cached_and_is_gone_is_found_in_the_log(seed):
    rng = np.random.default_rng(seed)
    cache, log, _ = make()
    ever: set[tuple[int, ...]] = set()
    for _ in range(150):
        tokens = rng.integers(0, 3, int(rng.integers(1, 12))).tolist()
        key = put(cache, tokens)
        ever |= {tuple(tokens[: i + 1]) for i in range(len(tokens))}
        cache.evict(int(rng.integers(0, 8)))
        probe = rng.integers(0, 3, 10).tolist()
        key = CacheKey("", np.array(probe, np.int32))
        matched = cache.match(key).length
        known = matched
        while known < 10 and tuple(probe[: known + 1]) in ever:
            known += 1
        runs = log.missing(key, matched)
        covered = matched
        for run in runs:
            assert run.start == covered
            assert run.tokens.tolist() == probe[run.start : run.start + run.length]
            covered += run.length
        assert covered == known


def test_an_eviction_says_when_and_for_whom():
    cache, log, now = make()
    key = put(cache, range(30))
    now[0] = 5.0
    cache.evict(10, "request-7")
    now[0] = 9.0
    cache.evict(5, "request-8")
    runs = log.missing(key, cache.match(key).length)
    assert [(run.start, run.length, run.at, run.cause) for run in runs] == [
        (15, 5, 9.0, "request-8"),
        (20, 10, 5.0, "request-7"),
    ]
    assert log.missing(CacheKey("other", key.tokens), 0) == []


def test_the_log_is_bounded():
    cache, log, _ = make(max_runs=10, max_bytes=400)
    for i in range(50):
        put(cache, range(100 * i, 100 * i + 20))
        cache.evict(20)
    assert len(log) == 5


def board(budget=100):
    now = [0.0]
    cache = RadixCache()
    return cache, PinBoard(cache, budget, lambda: now[0]), now


def test_pinned_tokens_survive_eviction_and_count_once():
    cache, pins, _ = board()
    a, b = put(cache, [*range(20), 100]), put(cache, [*range(20), 200, 201])
    assert pins.pin("a", cache.match(a))
    assert pins.pin("b", cache.match(b))
    assert pins.tokens == 23
    cache.evict(1000)
    assert [cache.match(key).length for key in (a, b)] == [21, 22]
    assert pins.unpin("a") == 21
    assert pins.tokens == 22
    cache.evict(1000)
    assert [cache.match(key).length for key in (a, b)] == [20, 22]
    pins.unpin("b")
    assert (pins.tokens, cache.locked) == (0, 0)
    assert pins.unpin("b") == 0


def test_the_budget_is_kept_and_only_displaceable_pins_make_room():
    cache, pins, _ = board(budget=30)
    keys = [put(cache, range(100 * i, 100 * i + 15)) for i in range(4)]
    assert pins.pin("kept", cache.match(keys[0]))
    assert pins.pin("old", cache.match(keys[1]), displaceable=True)
    assert pins.pin("new", cache.match(keys[2]), displaceable=True)
    assert ("kept" in pins, "old" in pins, "new" in pins) == (True, False, True)
    assert pins.pin("last", cache.match(keys[3]))
    assert not pins.pin("none", cache.match(keys[1]), displaceable=True)
    assert sorted(name for name, _ in pins.items()) == ["kept", "last"]
    assert pins.tokens == 30


def test_a_pin_grows_in_place_within_the_budget():
    cache, pins, _ = board(budget=30)
    pins.pin("s", cache.match(put(cache, range(20))), displaceable=True)
    assert pins.pin("s", cache.match(put(cache, range(30))), displaceable=True)
    assert (pins.tokens, len(pins)) == (30, 1)
    assert not pins.pin("s", cache.match(put(cache, range(31))), displaceable=True)
    assert pins.tokens == 30


def test_pins_end_with_their_time():
    cache, pins, _ = board()
    pins.pin("short", cache.match(put(cache, range(10))), expires=5.0)
    pins.pin("long", cache.match(put(cache, range(50, 60))), expires=9.0)
    pins.pin("ever", cache.match(put(cache, range(70, 80))), expires=math.inf)
    pins.touch("short", 7.0)
    for now, left in ((6.9, 3), (7.0, 2), (9.5, 1), (1e9, 1)):
        pins.expire(now)
        assert len(pins) == left


def test_giving_way_releases_no_more_than_needed_displaceable_first():
    cache, pins, _ = board()
    for i, displaceable in enumerate((False, True, True)):
        pins.pin(str(i), cache.match(put(cache, range(100 * i, 100 * i + 10))), displaceable=displaceable)
    assert pins.give_way(10)
    assert [name for name, _ in pins.items()] == ["0", "2"]
    assert pins.give_way(15)
    assert len(pins) == 0
    assert not pins.give_way(1)
