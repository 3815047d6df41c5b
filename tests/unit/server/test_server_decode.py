"""JSON depth counted without parsing agrees with a parser; field names in messages."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceiba.core.errors import BadRequest
from ceiba.server import decode

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(alphabet='"\\[]{}a é', max_size=20))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(alphabet=chr(34) + "\\[{a", max_size=4), inner, max_size=3)
    ),
    max_leaves=30,
)


def depth(value) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 0


@given(VALUES, st.booleans(), st.integers(1, 6))
def test_depth_agrees_with_a_parser(value, ascii_only, limit):
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    if depth(value) <= limit:
        decode.check_depth(data, limit)
    else:
        with pytest.raises(BadRequest):
            decode.check_depth(data, limit)


@given(VALUES, st.integers(1, 7))
def test_depth_is_the_same_in_blocks_of_any_size(value, block):
    data = json.dumps([value] * 3).encode()
    old = decode._BLOCK
    decode._BLOCK = block
    try:
        decode.check_depth(data, max(1, depth([value])))
        if depth([value]) > 1:
            with pytest.raises(BadRequest):
                decode.check_depth(data, depth([value]) - 1)
    finally:
        decode._BLOCK = old


@given(st.binary(max_size=300))
def test_bytes_of_any_kind_are_counted_without_error(data):
    with contextlib.suppress(BadRequest):
        decode.check_depth(data, 3)
