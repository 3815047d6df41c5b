"""What exists in this version: the one place where the builder of a policy, backend or format adds its name. A value
that ``flags.tsv`` lists as a choice and that is missing here is known and refused; it must never be silently replaced.
"""

from __future__ import annotations

from typing import Final

POLICIES: Final = (
    "fcfs", "lof", "random", "routing-key", "priority", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first",
)  # fmt: skip
CACHE_AWARE_POLICIES: Final = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
"""Policies that look into the prefix tree."""
PRIORITY_POLICIES: Final = ("fcfs", "lof", "priority")
"""Policies that priorities go with."""
EVICTION_POLICIES: Final = ("lru", "lfu", "slru", "priority", "tlru")
EVICTION_OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "slru": ("protected_hits", "protected_percent"),
    "tlru": ("threshold", "next_prompt"),
}
"""Eviction policy -> what --radix-eviction-policy-config may set."""
RETRACTION_POLICIES: Final = ("length", "priority")
ATTENTION_BACKENDS: Final[dict[str, tuple[str, ...]]] = {
    "cpu": ("cpu",),
    "torch_native": ("cpu", "cuda", "hip", "mps", "xpu"),
    "triton": ("cuda", "hip"),
}
"""Attention backend -> device kinds it runs on."""
ATTENTION_ALIASES: Final = {"intel_amx": "cpu"}
LOAD_FORMATS: Final = ("auto", "safetensors", "gguf", "dummy")
POOLING_ARCHITECTURES: Final = tuple(
    f"{family}{head}" for family in ("Bert", "Roberta", "XLMRoberta") for head in ("Model", "ForSequenceClassification")
)
"""Models that give numbers instead of text."""
QUANTIZATIONS: Final = ("gguf", "fp8")
"""How a checkpoint's weights may be packed; fp8 is also what --quantization makes of plain weights, both on CUDA."""
ONLINE_QUANTIZATIONS: Final = ("int8", "int4")
"""What --quantization makes of plain weights while it loads them, on a CPU with the compiled kernels."""
EIGHT_BIT_KV: Final = ("fp8_e4m3", "fp8_e5m2", "int8")
"""Eight-bit types of the KV cache: all on a CPU, floats on CUDA."""
KV_CACHE_DTYPES: Final = ("auto", "bf16", "bfloat16", *EIGHT_BIT_KV)
SAMPLING_BACKENDS: Final = ("pytorch",)
GRAMMAR_BACKENDS: Final = ("xgrammar", "llguidance", "outlines", "none")
GRAPH_BACKENDS: Final = {"decode": ("full", "disabled"), "prefill": ("full", "disabled")}
"""CUDA graph modes the runner can capture, by phase, the preferred one first."""
MODEL_IMPLS: Final = ("auto",)
HICACHE_IO_BACKENDS: Final = ("kernel", "direct")
HICACHE_LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct")
SPECULATIVE_ALGORITHMS: Final = ("NGRAM",)
HICACHE_STORAGE: Final = ("file", "mooncake", "nixl", "dynamic")

VALUES: Final[dict[str, tuple[str, ...]]] = {
    "--schedule-policy": POLICIES,
    "--radix-eviction-policy": EVICTION_POLICIES,
    "--retraction-policy": RETRACTION_POLICIES,
    "--attention-backend": (*ATTENTION_BACKENDS, *ATTENTION_ALIASES),
    "--prefill-attention-backend": (*ATTENTION_BACKENDS, *ATTENTION_ALIASES),
    "--decode-attention-backend": (*ATTENTION_BACKENDS, *ATTENTION_ALIASES),
    "--load-format": LOAD_FORMATS,
    "--quantization": (*QUANTIZATIONS, *ONLINE_QUANTIZATIONS),
    "--kv-cache-dtype": KV_CACHE_DTYPES,
    "--sampling-backend": SAMPLING_BACKENDS,
    "--grammar-backend": GRAMMAR_BACKENDS,
    "--cuda-graph-backend-decode": GRAPH_BACKENDS["decode"],
    "--cuda-graph-backend-prefill": GRAPH_BACKENDS["prefill"],
    "--model-impl": MODEL_IMPLS,
    "--speculative-algorithm": SPECULATIVE_ALGORITHMS,
    "--hicache-host-memory-mode": ("cache",),
    "--hicache-io-backend": HICACHE_IO_BACKENDS,
    "--hicache-mem-layout": HICACHE_LAYOUTS,
    "--hicache-storage-backend": HICACHE_STORAGE,
}
"""Flag -> the values that work, where not every choice does."""
