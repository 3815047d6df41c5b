"""Environment variables: both spellings, ours wins, unknown ones are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ceiba.config.env import cache_dir, read_env, variables
from ceiba.core.errors import ConfigError


def test_nothing_set_means_nothing_decided() -> None:
    env = read_env({})
    assert (env.log_level, env.timeout_keep_alive, env.in_batch_check_threshold) == (None, None, None)
    assert env.notes == ()
    assert env.warnings == ()


@pytest.mark.parametrize("prefix", ["SGLANG_", "CEIBA_"])
def test_both_spellings(prefix: str) -> None:
    env = read_env(
        {
            f"{prefix}LOG_LEVEL": "WARN",
            f"{prefix}TIMEOUT_KEEP_ALIVE": "9",
            f"{prefix}DISABLE_CONSECUTIVE_PREFILL_OVERLAP": "1",
        }
    )
    assert (env.log_level, env.timeout_keep_alive, env.disable_consecutive_prefill_overlap) == ("warning", 9, True)
    assert env.warnings == ()


def test_ours_wins() -> None:
    assert read_env({"SGLANG_LOG_LEVEL": "debug", "CEIBA_LOG_LEVEL": "error"}).log_level == "error"
    name = "IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD"
    assert read_env({name: "5"}).in_batch_check_threshold == 5
    assert read_env({name: "5", f"CEIBA_{name}": "6"}).in_batch_check_threshold == 6


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SGLANG_TIMEOUT_KEEP_ALIVE", "soon"),
        ("SGLANG_TIMEOUT_KEEP_ALIVE", "-1"),
        ("CEIBA_LOG_LEVEL", "loud"),
        ("SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP", "maybe"),
        ("IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD", "x"),
    ],
)
def test_bad_values_name_the_variable(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_env({name: text})


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("SGLANG_USE_AITER", "ROCm"),
        ("SGLANG_USE_AITER_UNIFIED_ATTN", "ROCm"),
        ("AITER_FLYDSL_FORCE", "ROCm"),
        ("VLLM_ROCM_USE_AITER", "ROCm"),
        ("ROCM_QUICK_REDUCE_QUANTIZATION", "ROCm"),
        ("SGLANG_USE_MLX", "Apple"),
        ("CEIBA_USE_MLX", "Apple"),
        ("SGLANG_OPT_USE_TOPK_V2", "NVIDIA"),
        ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "--disaggregation-mode"),
        ("CEIBA_DISAGGREGATION_WAITING_TIMEOUT", "--disaggregation-mode"),
        ("SGLANG_MAMBA_SSM_DTYPE", "recurrent"),
        ("SGLANG_USE_CUDA_IPC_TRANSPORT", "multimodal"),
    ],
)
def test_known_ones_that_change_nothing_get_a_line(name: str, needs: str) -> None:
    env = read_env({name: "1"})
    assert len(env.notes) == 1
    assert name in env.notes[0]
    assert needs in env.notes[0]
    assert env.warnings == ()


def test_unknown_ones_get_a_warning_and_others_none() -> None:
    env = read_env({"SGLANG_LOG_LEVLE": "debug", "CEIBA_X": "1", "PATH": "/bin", "CEIBA_CACHE_DIR": "/c"})
    assert [line.split()[0] for line in env.warnings] == ["CEIBA_X", "SGLANG_LOG_LEVLE"]
    assert env.notes == ()


def test_cache_directory() -> None:
    assert cache_dir({"CEIBA_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/h"}) == Path("/own")
    assert cache_dir({"XDG_CACHE_HOME": "/xdg", "HOME": "/h"}) == Path("/xdg/ceiba")
    assert cache_dir({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/ceiba")
    assert cache_dir({"HOME": "/h"}) == Path("/h/.cache/ceiba")


def test_the_token_never_shows() -> None:
    env = read_env({"HF_TOKEN": "hf_secret"})
    assert env.hf_token == "hf_secret"
    assert "hf_secret" not in repr(env)
    assert "hf_secret" not in str(env)


def test_every_documented_variable_is_known() -> None:
    for name, _ in variables():
        env = read_env({name: "info" if name.endswith("LOG_LEVEL") else "1"})
        assert env.warnings == (), name
