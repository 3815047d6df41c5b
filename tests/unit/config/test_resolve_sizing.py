"""Memory sizing against figures worked out by hand or published for the models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_facts import LLAMA33_70B, QWEN3_8B, SMOLLM2, GiB, cpu, gpu

from ceiba.config import sizing
from ceiba.config.env import Env
from ceiba.config.flags import make_flags
from ceiba.config.records import Config, DeviceFacts, ModelFacts
from ceiba.config.report import public, startup_line
from ceiba.config.resolve import resolve
from ceiba.core.errors import ConfigError


def config(model: ModelFacts, device: DeviceFacts, **flags: object) -> Config:
    given_flags = make_flags([(f"--{name.replace('_', '-')}", value) for name, value in flags.items()])
    return resolve(given_flags, model, device, Env(), path="/models/m")


@pytest.mark.parametrize(
    ("gib", "chunk", "graph", "graph_tp4"),
    [
        (14.7, 2048, 8, 8),  # T4
        (15.9, 2048, 8, 8),  # 4080
        (22.0, 4096, 48, 160),  # A10
        (23.6, 4096, 48, 160),  # 4090
        (31.8, 4096, 48, 160),  # 5090
        (39.4, 4096, 32, 160),  # A100 40 GB
        (44.4, 4096, 32, 160),  # L40
        (79.2, 8192, 256, 512),  # A100 80 GB
        (79.6, 8192, 256, 512),  # H100
        (95.6, 8192, 256, 512),  # H20
        (139.8, 8192, 256, 512),  # H200
        (179.1, 16384, 512, 512),  # B200
        (191.7, 16384, 512, 512),  # MI300X
    ],
)
def test_tiers(gib: float, chunk: int, graph: int, graph_tp4: int) -> None:
    memory = int(gib * GiB)
    assert sizing.tier(memory).chunk == chunk
    assert sizing.graph_max_bs(memory) == graph
    assert sizing.graph_max_bs(memory, tp=3) == graph
    assert sizing.graph_max_bs(memory, tp=4) == graph_tp4


@pytest.mark.parametrize("edge", [20, 35, 60, 90, 160])
def test_a_tier_begins_at_its_edge(edge: int) -> None:
    assert sizing.tier(edge * GiB - 1) != sizing.tier(edge * GiB)


def test_kv_bytes_of_published_models() -> None:
    assert QWEN3_8B.kv_bytes_per_token(2) == 144 * 1024
    assert LLAMA33_70B.kv_bytes_per_token(2) == 327_680
    assert sizing.mla_kv_bytes_per_token(61, 512, 64, 2) == 70_272  # DeepSeek-V3
    assert sizing.mla_kv_bytes_per_token(78, 512, 64, 1) == 44_928  # GLM-5 in FP8


def test_qwen3_8b_on_an_h100() -> None:
    found = config(QWEN3_8B, gpu(79.6), context_length=32768)
    assert found.runner.mem_fraction_static == pytest.approx(0.83, abs=0.01)
    assert found.scheduler.max_total_tokens == pytest.approx(370_000, rel=0.02)
    assert found.scheduler.chunked_prefill_size == 8192
    assert found.scheduler.max_running_requests == 4096
    assert found.scheduler.max_prefill_tokens == 32768
    assert found.model.context_len == 32768
    assert found.model.dtype == "bfloat16"
    assert found.runner.kv_cache_dtype == "bfloat16"


def test_the_reserve_of_an_80_gb_card_is_at_least_10_gib() -> None:
    assert sizing.reserve_bytes(int(79.6 * GiB), 1024, 8) == 10 * GiB
    assert sizing.reserve_bytes(int(23.6 * GiB), 1024, 8) < 3 * GiB


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"131\.\d+ GiB.*smaller model"):
        config(LLAMA33_70B, gpu(79.6))


def test_what_others_hold_on_the_gpu_is_not_ours() -> None:
    alone = config(QWEN3_8B, gpu(79.6)).scheduler.max_total_tokens
    shared = config(QWEN3_8B, gpu(79.6, free=69.6)).scheduler.max_total_tokens
    # Not to the token: the slot table grows with the requests that a pool admits.
    assert alone - shared == pytest.approx(10 * GiB / (144 * 1024), rel=0.01)


@pytest.mark.parametrize(
    ("capacity", "context", "expected"),
    [
        (370_000, 32_768, 4096),  # 5781 before the bound
        (665_690, 65_536, 4096),
        (100_000, 32_768, 2048),  # 1562 before the bound
        (200_000, 32_768, 3125),
        (3_000, 4_096, 1_500),  # half the capacity
        (1, 4096, 1),
    ],
)
def test_default_running_requests_of_an_accelerator(capacity: int, context: int, expected: int) -> None:
    assert sizing.accelerator_running(capacity, context) == expected


@pytest.mark.parametrize(("cores", "expected"), [(1, 32), (2, 64), (8, 256), (64, 256)])
def test_default_running_requests_of_a_cpu(cores: int, expected: int) -> None:
    assert config(SMOLLM2, cpu(cores=cores)).scheduler.max_running_requests == expected


def test_smollm2_on_a_small_machine() -> None:
    found = config(SMOLLM2, cpu(free_gib=4))
    assert found.runner.device == "cpu"
    assert found.runner.attention_backend == "cpu"
    assert found.model.dtype == "bfloat16"
    assert found.model.quantization == "gguf"
    per_token = 2 * 30 * 3 * 64 * 2
    assert found.scheduler.max_total_tokens == (2 * GiB - 98_000_000) // per_token
    assert found.runner.mem_fraction_static == 0.5
    assert found.scheduler.max_prefill_tokens == 16384
    assert found.scheduler.page_size == 1


def test_the_pool_of_a_big_host_is_no_larger_than_requests_can_use() -> None:
    found = config(SMOLLM2, cpu(free_gib=1000, cores=2))
    assert found.scheduler.max_total_tokens == 64 * 8192


def test_weights_are_unpacked_without_the_compiled_kernels() -> None:
    packed = config(SMOLLM2, cpu(free_gib=4), dtype="float32").scheduler.max_total_tokens
    plain = config(SMOLLM2, cpu(free_gib=4), dtype="float32", disable_cpu_kernels=True)
    assert not plain.runner.cpu_kernels
    difference = (134_515_008 * 4 - 98_000_000) / (2 * 30 * 3 * 64 * 4)
    assert packed - plain.scheduler.max_total_tokens == pytest.approx(difference, abs=1)


def test_max_total_tokens_overrides_the_pool_up_to_what_there_is() -> None:
    found = config(SMOLLM2, cpu(), max_total_tokens=600)
    assert found.scheduler.max_total_tokens == 600
    assert found.model.context_len == 600
    assert any("context_len lowered from 8192 to 600" in note for note in found.notes)
    with pytest.raises(ConfigError, match="room for"):
        config(SMOLLM2, cpu(free_gib=1), max_total_tokens=100_000_000)


@pytest.mark.parametrize(("tokens", "page", "expected"), [(600, 16, 592), (600, 1, 600), (640, 64, 640)])
def test_the_pool_is_whole_pages(tokens: int, page: int, expected: int) -> None:
    assert config(SMOLLM2, cpu(), max_total_tokens=tokens, page_size=page).scheduler.max_total_tokens == expected


def test_a_host_without_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="No room for a KV cache"):
        config(SMOLLM2, cpu(free_gib=0.1))


def test_startup_line() -> None:
    found = config(QWEN3_8B, gpu(79.6), max_total_tokens=300_000, context_length=4096)
    assert startup_line(found, int(13.5 * GiB)) == (
        "max_total_num_tokens=300000, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=4096, context_len=4096, available_gpu_mem=13.50 GB, mem_fraction_static=0.835"
    )
    assert "available_host_mem=1.00 GB" in startup_line(config(SMOLLM2, cpu()), GiB)


def test_keys_are_masked_in_what_may_be_shown() -> None:
    found = config(SMOLLM2, cpu(), api_key="secret-one")
    assert found.server.api_key == "secret-one"
    assert "secret-one" not in repr(public(found))
    assert public(found)["server"]["admin_api_key"] is None


@given(
    free=st.floats(0.2, 2000), cores=st.integers(1, 256), page=st.sampled_from([1, 16, 64]),
    chunk=st.sampled_from([-1, 64, 2048]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_host_gets_a_sound_configuration_or_a_refusal(
    free: float, cores: int, page: int, chunk: int, seed: int
) -> None:
    device = cpu(free, cores)
    try:
        found = config(SMOLLM2, device, page_size=page, chunked_prefill_size=chunk, random_seed=seed)
    except ConfigError:
        assert free < 1
        return
    scheduler = found.scheduler
    assert scheduler.max_total_tokens % page == 0
    pool = scheduler.max_total_tokens * SMOLLM2.kv_bytes_per_token(4)
    assert pool + SMOLLM2.weight_bytes <= device.host_free_bytes
    assert 1 <= scheduler.max_running_requests <= min(256, 32 * cores)
    assert found.model.context_len <= scheduler.max_total_tokens
    assert found == config(SMOLLM2, device, page_size=page, chunked_prefill_size=chunk, random_seed=seed)


def test_graphs_by_device_and_flag() -> None:
    on = config(QWEN3_8B, gpu(139.8)).runner
    assert (on.cuda_graph_backend_decode, on.cuda_graph_max_bs_decode) == ("full", 256)
    assert (on.cuda_graph_backend_prefill, on.cuda_graph_max_bs_prefill) == ("full", 2048)
    chosen = config(QWEN3_8B, gpu(139.8), cuda_graph_max_bs_decode=64, disable_prefill_cuda_graph=True).runner
    assert (chosen.cuda_graph_max_bs_decode, chosen.cuda_graph_backend_prefill) == (64, "disabled")
    off = config(QWEN3_8B, gpu(139.8), disable_cuda_graph=True).runner
    assert (off.cuda_graph_backend_decode, off.cuda_graph_backend_prefill) == ("disabled", "disabled")
    assert (off.cuda_graph_max_bs_decode, off.cuda_graph_max_bs_prefill) == (0, 0)
    host = config(SMOLLM2, cpu()).runner
    assert (host.cuda_graph_backend_decode, host.cuda_graph_max_bs_decode) == ("disabled", 0)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        config(SMOLLM2, cpu(), cuda_graph_backend_decode="full")
    with pytest.raises(ConfigError, match="give one of them"):
        config(QWEN3_8B, gpu(139.8), cuda_graph_backend_decode="full", disable_cuda_graph=True)


def test_the_slot_table_is_part_of_the_memory_plan() -> None:
    """Four bytes a position for every request that may run: 4096 × 40960 × 4 = 640 MiB on this device."""
    few = config(QWEN3_8B, gpu(139.8), max_running_requests=1).scheduler.max_total_tokens
    many = config(QWEN3_8B, gpu(139.8), max_running_requests=4097).scheduler.max_total_tokens
    assert (few - many) * 147456 == pytest.approx(4096 * 40960 * 4, abs=147456)
