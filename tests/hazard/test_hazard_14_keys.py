"""HAZARDS 14: what makes KV different is part of its key, so nothing is shared across it at any tier: extra keys (LoRA
ids travel as such), salts, and another way to compute the same model."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceiba.server.request import EngineRequest
from support.scheduler_world import prompt
from support.tier_world import make_tier_world

KEY = st.one_of(st.none(), st.text(max_size=6), st.sampled_from(["a", "b", '","', "null", '["a"]']))


def namespace(extra_key: str | None, salt: str | None) -> str:
    return EngineRequest([], rid="", extra_key=extra_key, cache_salt=salt).namespace()


@given(st.tuples(KEY, KEY), st.tuples(KEY, KEY))
def test_two_pairs_of_extra_key_and_salt_never_make_the_same_namespace(a, b):
    assert (namespace(*a) == namespace(*b)) == (a == b)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_nothing_is_shared_across_namespaces_on_the_device_the_host_or_a_storage(policy):
    """The same 50 tokens under three namespaces; six other prompts push them out of the device."""
    storage: dict = {}
    names = ["", namespace("adapter-1", None), namespace(None, "adapter-1")]
    manual = prompt(1, 50)

    def world():
        return make_tier_world(pool=100, host=600, storage=storage, hicache={"write_policy": policy})

    first = world()
    for i, name in enumerate(names):
        assert first.serve(f"cold {i}", manual, namespace=name) == {}
    for i in range(6):
        first.serve(f"other {i}", prompt(10 + i, 50))
    for i, name in enumerate(names):
        tiers = first.serve(f"again {i}", manual, namespace=name)
        assert tiers.get("host", 0) + tiers.get("storage", 0) > 40, tiers
    assert first.serve("stranger", manual, namespace=namespace("adapter-2", None)) == {}

    restarted = world()
    assert restarted.serve("stranger", manual, namespace=namespace("adapter-3", None)) == {}
    for i, name in enumerate(names):
        assert restarted.serve(f"restarted {i}", manual, namespace=name)["storage"] >= 48


def test_kv_that_was_computed_another_way_has_another_identity_in_storage():
    pytest.importorskip("torch")
    import torch

    from ceiba.checkpoint.opening import open_checkpoint
    from ceiba.memory.pool import KVPool, KVShape
    from ceiba.memory.storage.pages import identity_digest
    from ceiba.runner.tiers import identity
    from plan_driver import make_config

    checkpoint = open_checkpoint(None)

    def digest(kv: torch.dtype = torch.float32, **options: object) -> bytes:
        pool = KVPool(KVShape(1, 1, 32, 32, kv), 8, 1, torch.device("cpu"))
        return identity_digest(identity(make_config(checkpoint.path, **options), checkpoint, pool))

    ways = [
        digest(),
        digest(torch.bfloat16),
        digest(deterministic=True),
        digest(int8_activations=True),
        digest(cpu_kernels=False),
        digest(attention_backend="torch_native"),
        digest(dtype="bfloat16"),
    ]
    assert len(set(ways)) == len(ways)
    assert digest() == ways[0]


def test_the_key_is_json_that_a_person_can_read():
    assert msgspec.json.decode(namespace("lora-7", "tenant")) == ["lora-7", "tenant"]
