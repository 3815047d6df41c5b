"""The cache tiers of one rank: made from its configuration, its checkpoint and its KV pool. Owns the identity under
which KV is stored: everything that would make another server's KV wrong here."""

from __future__ import annotations

from typing import Any

from ceiba.checkpoint.base import Checkpoint
from ceiba.checkpoint.fingerprint import fingerprint
from ceiba.config.records import Config
from ceiba.memory.pool import KVPool
from ceiba.memory.tiers import TierEngine


def identity(config: Config, checkpoint: Checkpoint, pool: KVPool, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """What stored KV depends on: weights, their interpretation, arithmetic, shapes, page size and rank.

    KV of two ways to compute is kept apart even where both are right: mixing them would make answers depend on what
    happened to be cached.
    """
    model, runner, shape = config.model, config.runner, pool.shape
    return {
        "weights": fingerprint(checkpoint.files) if checkpoint.files else f"{checkpoint.path}:{checkpoint.load_format}",
        "config": checkpoint.config,
        "override": model.override_args,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "device": runner.device,
        "cpu_kernels": runner.cpu_kernels,
        "int8_activations": runner.int8_activations,
        "deterministic": runner.deterministic,
        "attention": runner.prefill_attention_backend or runner.attention_backend,
        "kv": [shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.v_head_dim, str(shape.dtype)],
        "page": 0 if config.scheduler.hicache is None else config.scheduler.hicache.storage_page,
        "rank": [rank, ranks],
    }


def make_tiers(config: Config, checkpoint: Checkpoint, pool: KVPool) -> TierEngine | None:
    """None where the cache lies on the device only. Raises ConfigError for a storage that cannot be opened."""
    hicache = config.scheduler.hicache
    if hicache is None:
        return None
    return TierEngine(hicache, pool, identity(config, checkpoint, pool))
