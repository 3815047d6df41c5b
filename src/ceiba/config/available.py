"""What exists in this version: the one place where the builder of a policy, backend or format adds its name. A value
that ``flags.tsv`` lists as a choice and that is missing here is known and refused; it must never be silently replaced.
"""

from __future__ import annotations

from typing import Final

POLICIES: Final = ("fcfs", "lpm")
CACHE_AWARE_POLICIES: Final = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
"""Policies that look into the prefix tree, existing or to come."""
PRIORITY_POLICIES: Final = ("fcfs", "lof")
"""Policies that priorities go with."""
EVICTION_POLICIES: Final = ("lru",)
RETRACTION_POLICIES: Final = ("length",)
ATTENTION_BACKENDS: Final[dict[str, tuple[str, ...]]] = {
    "cpu": ("cpu",),
    "torch_native": ("cpu", "cuda", "hip", "mps", "xpu"),
    "triton": ("cuda", "hip"),
}
"""Attention backend -> device kinds it runs on."""
ATTENTION_ALIASES: Final = {"intel_amx": "cpu"}
LOAD_FORMATS: Final = ("auto", "safetensors", "gguf", "dummy")
QUANTIZATIONS: Final = ("gguf",)
KV_CACHE_DTYPES: Final = ("auto", "bf16", "bfloat16")
SAMPLING_BACKENDS: Final = ("pytorch",)
GRAMMAR_BACKENDS: Final = ("none",)
GRAPH_BACKENDS: Final = ("disabled",)
"""CUDA graph modes the runner can capture; ``full`` (decode) and ``breakable`` (prefill) are preferred once here."""
MODEL_IMPLS: Final = ("auto",)

VALUES: Final[dict[str, tuple[str, ...]]] = {
    "--schedule-policy": POLICIES,
    "--radix-eviction-policy": EVICTION_POLICIES,
    "--retraction-policy": RETRACTION_POLICIES,
    "--attention-backend": (*ATTENTION_BACKENDS, *ATTENTION_ALIASES),
    "--prefill-attention-backend": (*ATTENTION_BACKENDS, *ATTENTION_ALIASES),
    "--decode-attention-backend": (*ATTENTION_BACKENDS, *ATTENTION_ALIASES),
    "--load-format": LOAD_FORMATS,
    "--quantization": QUANTIZATIONS,
    "--kv-cache-dtype": KV_CACHE_DTYPES,
    "--sampling-backend": SAMPLING_BACKENDS,
    "--grammar-backend": GRAMMAR_BACKENDS,
    "--cuda-graph-backend-decode": GRAPH_BACKENDS,
    "--cuda-graph-backend-prefill": GRAPH_BACKENDS,
    "--model-impl": MODEL_IMPLS,
}
"""Flag -> the values that work, where not every choice does."""
