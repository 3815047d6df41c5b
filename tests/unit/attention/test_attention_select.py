"""Choosing a backend: what can serve, what is refused, and what the refusal says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ceiba.attention.base import AttentionLayer, Capabilities
from ceiba.attention.select import Needs, SplitAttention, objections, select, select_pair
from ceiba.core.errors import ConfigError

NEEDS = Needs(device="cpu", dtype=torch.float32, kv_dtype=torch.float32, head_dims=frozenset({64}))


def test_names_and_aliases() -> None:
    assert select("auto", NEEDS).name == "cpu"
    assert select("intel_amx", NEEDS).name == "cpu"
    assert select("torch_native", NEEDS).name == "torch_native"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"fa3.*torch_native"):
        select("fa3", NEEDS)


def test_a_refusal_lists_every_candidate_and_why() -> None:
    with pytest.raises(ConfigError) as caught:
        select("cpu", replace(NEEDS, device="cuda"))
    text = str(caught.value)
    assert "runs on cpu, not cuda" in text
    assert all(f"  {name}: " in text for name in ("cpu", "triton", "torch_native"))
    with pytest.raises(ConfigError, match="no KV cache dtype uint8"):
        select("auto", replace(NEEDS, kv_dtype=torch.uint8))


def test_every_need_is_compared() -> None:
    has = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16}),
        kv_dtypes=frozenset({torch.bfloat16}),
        head_dims=frozenset({128}),
        page_sizes=frozenset({64}),
    )
    needs = replace(NEEDS, sliding_window=True, softcap=True, sinks=True, cuda_graph=True)
    found = objections(needs, has)
    assert len(found) == 9
    assert objections(replace(NEEDS, head_dims=frozenset({128})), replace(has, head_dims=None))[0].startswith("runs on")


def test_needs_come_from_the_layers() -> None:
    layers = [AttentionLayer(0, 4, 2, 64, 0.1), AttentionLayer(1, 4, 2, 64, 0.1, v_head_dim=32, window=8, softcap=1.0)]
    needs = Needs.of(layers, torch.device("cpu"), torch.bfloat16, torch.bfloat16, 16)
    assert needs.head_dims == {64, 32}
    assert needs.sliding_window
    assert needs.softcap
    assert needs.page_size == 16


def test_a_pair_for_prefill_and_decode() -> None:
    assert select_pair("cpu", None, None, NEEDS).name == "cpu"
    pair = select_pair("cpu", "torch_native", None, NEEDS)
    assert isinstance(pair, SplitAttention)
    assert (pair.prefill.name, pair.decode.name) == ("torch_native", "cpu")
