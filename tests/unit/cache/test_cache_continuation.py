"""What follows a key in the tree, against the list of all that was inserted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceiba.cache.base import FULL
from ceiba.cache.keys import CacheKey
from ceiba.cache.none import NoCache
from ceiba.cache.radix import RadixCache


def key(tokens: list[int]) -> CacheKey:
    return CacheKey("", np.array(tokens, np.int32))


@pytest.mark.parametrize("page", [1, 3])
@given(st.data())
def test_a_continuation_is_one_that_was_inserted(page: int, data: st.DataObject) -> None:
    cache = RadixCache(page)
    texts = data.draw(st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=6))
    for text in texts:
        cache.insert(key(text), {FULL: np.arange(len(text), dtype=np.int32)})
    held = [text[: len(text) // page * page] for text in texts]
    asked = data.draw(st.one_of(st.sampled_from(held), st.lists(st.integers(0, 2), max_size=8)))
    asked = asked[: data.draw(st.integers(0, 14))]
    most = data.draw(st.integers(0, 7))
    before = [(node.data, node.last_access, node.locks) for node in cache.nodes()]
    got = cache.continuation(key(asked), most).tolist()
    after = [text[len(asked) :] for text in held if text[: len(asked)] == asked and len(text) > len(asked)]
    if not after or not most or len(asked) < page:
        assert not got or got in [text[: len(got)] for text in after]
    else:
        assert got in [text[: len(got)] for text in after]
        assert len(got) == most or got in after
    assert before == [(node.data, node.last_access, node.locks) for node in cache.nodes()]


def test_the_way_used_last_is_taken() -> None:
    cache = RadixCache()
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6]):
        cache.insert(key(tokens), {FULL: np.arange(4, dtype=np.int32)})
    assert cache.continuation(key([1, 2]), 9).tolist() == [5, 6]
    cache.insert(key([1, 2, 3, 4]), {FULL: np.arange(4, dtype=np.int32)})
    assert cache.continuation(key([1, 2]), 1).tolist() == [3]
    assert not len(cache.continuation(CacheKey("salt", np.array([1, 2], np.int32)), 9)), "another namespace"
    assert not len(NoCache().continuation(key([1, 2]), 9))
