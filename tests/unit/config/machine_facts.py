"""Models (from their published config.json) and machines that the tests of ``resolve`` share."""

from __future__ import annotations

from ceiba.config.choose import CPU_KERNELS
from ceiba.config.records import DeviceFacts, ModelFacts

GiB = 1 << 30

QWEN3_8B = ModelFacts(
    architecture="Qwen3ForCausalLM", num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=151936, context_len=40960, weight_bytes=16_381_470_720, num_params=8_190_735_360,
)  # fmt: skip
LLAMA33_70B = ModelFacts(
    architecture="LlamaForCausalLM", num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128,
    vocab_size=128256, context_len=131072, weight_bytes=141_107_412_992, num_params=70_553_706_496,
)  # fmt: skip
SMOLLM2 = ModelFacts(
    architecture="LlamaForCausalLM", num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64,
    vocab_size=49152, context_len=8192, weight_bytes=98_000_000, num_params=134_515_008, quantized="gguf",
)  # fmt: skip


def gpu(gib: float, capability: tuple[int, int] = (9, 0), free: float | None = None) -> DeviceFacts:
    total = int(gib * GiB)
    return DeviceFacts(
        kind="cuda", name="GPU", count=1, memory_bytes=total, free_bytes=int(free * GiB) if free else total,
        capability=capability, host_memory_bytes=128 * GiB, host_free_bytes=100 * GiB, cores=16,
    )  # fmt: skip


def cpu(free_gib: float = 16, cores: int = 2, isa: tuple[str, ...] = ("avx2",), compiled: bool = True) -> DeviceFacts:
    return DeviceFacts(
        kind="cpu", host_memory_bytes=32 * GiB, host_free_bytes=int(free_gib * GiB), cores=cores, isa=isa,
        packages=(CPU_KERNELS,) if compiled else (),
    )  # fmt: skip
