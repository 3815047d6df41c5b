"""The only reader of environment variables. It owns their names, their spellings and their meaning, and turns them into
one immutable ``Env``; it must never write to the environment, and nothing else in the package may read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ceiba.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Env:
    """What the environment says. ``None``: not set, the flag or the default decides."""

    in_batch_check_threshold: int | None = None
    """Cached tokens up to which a queued request is compared with those ahead of it."""
    in_batch_deprioritize_threshold: int | None = None
    """Shared tokens from which it then waits a round."""
    disable_consecutive_prefill_overlap: bool = False
    log_level: str | None = None
    timeout_keep_alive: int | None = None
    """Seconds an idle HTTP connection stays open."""
    hf_token: str | None = None
    cache_dir: Path = Path(".cache/ceiba")
    """Where models are kept."""
    visible_gpus: str | None = None
    """CUDA_VISIBLE_DEVICES as it stands."""
    notes: tuple[str, ...] = ()
    """Lines for the start-up log: variables that change nothing here, and why."""
    warnings: tuple[str, ...] = ()
    """Variables nobody knows: most likely misspelt."""

    def __repr__(self) -> str:
        token = "set" if self.hf_token else "unset"
        return f"Env(cache_dir={str(self.cache_dir)!r}, hf_token={token}, log_level={self.log_level!r})"


LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def _count(name: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise ConfigError(f"{name}={text!r} is not a whole number from 0 up: correct it or unset it.", param=name)
    return value


def _switch(name: str, text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off", ""}:
        return False
    raise ConfigError(f"{name}={text!r} is neither true nor false: set it to 1 or 0.", param=name)


def _level(name: str, text: str) -> str:
    level = text.strip().lower()
    level = "warning" if level == "warn" else level
    if level not in LOG_LEVELS:
        raise ConfigError(f"{name}={text!r} is not a log level: use one of {', '.join(LOG_LEVELS)}.", param=name)
    return level


# Bare name (after SGLANG_ or CEIBA_, or the whole name where the seeds' spelling has no prefix) -> field, parser.
_SETTINGS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD": ("in_batch_check_threshold", _count),
    "IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD": ("in_batch_deprioritize_threshold", _count),
    "DISABLE_CONSECUTIVE_PREFILL_OVERLAP": ("disable_consecutive_prefill_overlap", _switch),
    "LOG_LEVEL": ("log_level", _level),
    "TIMEOUT_KEEP_ALIVE": ("timeout_keep_alive", _count),
}
_UNPREFIXED = {"IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD", "IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD"}

# Known, but the feature they tune is not in this build: each says what it belongs to.
_IDLE = {
    "DISAGGREGATION_BOOTSTRAP_TIMEOUT": "it tunes prefill/decode separation (--disaggregation-mode), which is off",
    "DISAGGREGATION_WAITING_TIMEOUT": "it tunes prefill/decode separation (--disaggregation-mode), which is off",
    "MAMBA_SSM_DTYPE": "it sets the state type of recurrent models, which are not available yet",
    "USE_CUDA_IPC_TRANSPORT": "it moves media features between processes; multimodal models are not available yet",
}
# Platform switches of other hardware, by their full names.
_PLATFORM = {
    "SGLANG_USE_AITER": "an AMD GPU with ROCm and the aiter package",
    "SGLANG_USE_AITER_UNIFIED_ATTN": "an AMD GPU with ROCm and the aiter package",
    "AITER_FLYDSL_FORCE": "an AMD GPU with ROCm and the aiter package",
    "VLLM_ROCM_USE_AITER": "an AMD GPU with ROCm and the aiter package",
    "ROCM_QUICK_REDUCE_QUANTIZATION": "several AMD GPUs with ROCm",
    "SGLANG_USE_MLX": "an Apple GPU with the mlx package",
    "SGLANG_OPT_USE_TOPK_V2": "an NVIDIA GPU and a sparse-attention (DSA) model",
}
_OURS = {"CEIBA_CACHE_DIR"}


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where models are kept: CEIBA_CACHE_DIR, else $XDG_CACHE_HOME/ceiba, else ~/.cache/ceiba. Not created here."""
    env = os.environ if environ is None else environ
    own = env.get("CEIBA_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = env.get("XDG_CACHE_HOME") or ""
    # The XDG specification says that a relative path is to be ignored.
    root = Path(base) if base.startswith("/") else Path(env.get("HOME") or Path.home()) / ".cache"
    return root / "ceiba"


def read_env(environ: Mapping[str, str] | None = None) -> Env:
    """Read every variable that means something. Where CEIBA_X and SGLANG_X are both set, CEIBA_X wins.

    Raises ConfigError, naming the variable, for a value that does not parse.
    """
    env = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for bare, (field, parse) in _SETTINGS.items():
        for name in _spellings(bare):
            if name in env:
                values[field] = parse(name, env[name])
                break
    notes, warnings = _remarks(env)
    return Env(
        **values,
        hf_token=env.get("HF_TOKEN") or None,
        cache_dir=cache_dir(env),
        visible_gpus=env.get("CUDA_VISIBLE_DEVICES"),
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _spellings(bare: str) -> list[str]:
    """All names of one setting, the winning one first."""
    names = [f"CEIBA_{bare}", f"SGLANG_{bare}"]
    return [*names, bare] if bare in _UNPREFIXED else names


def _ours(name: str) -> str:
    return f"CEIBA_{name.removeprefix('SGLANG_')}"


def _remarks(env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    notes: list[str] = []
    warnings: list[str] = []
    known = {name for bare in _SETTINGS for name in _spellings(bare)} | _OURS
    platform = {spelling: needs for name, needs in _PLATFORM.items() for spelling in (name, _ours(name))}
    for name in sorted(env):
        bare = name.removeprefix("CEIBA_").removeprefix("SGLANG_")
        if name in platform:
            notes.append(f"{name} has no effect here: it needs {platform[name]}.")
        elif name.startswith(("SGLANG_", "CEIBA_")):
            if bare in _IDLE:
                notes.append(f"{name} has no effect here: {_IDLE[bare]}.")
            elif name not in known:
                warnings.append(f"{name} is not a variable that Ceiba knows: check the spelling or unset it.")
    return notes, warnings


def variables() -> list[tuple[str, str]]:
    """(name, what it does) of every variable, for the generated reference."""
    rows = [
        (
            "CEIBA_IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD",
            "A queued request with at most this many cached tokens is compared with those ahead of it (32).",
        ),
        (
            "CEIBA_IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD",
            "It waits a round when it shares at least this many tokens with one of them (32).",
        ),
        (
            "CEIBA_DISABLE_CONSECUTIVE_PREFILL_OVERLAP",
            "1: no overlap of two prefills in a row (now: of any two steps).",
        ),
        ("CEIBA_LOG_LEVEL", "The level where --log-level is not given."),
        ("CEIBA_TIMEOUT_KEEP_ALIVE", "Seconds an idle HTTP connection stays open (5)."),
        ("CEIBA_CACHE_DIR", "Where models are kept ($XDG_CACHE_HOME/ceiba, else ~/.cache/ceiba)."),
        ("HF_TOKEN", "The token for private models of the hub."),
        ("CUDA_VISIBLE_DEVICES", "The GPUs that may be used, as for every CUDA program."),
    ]
    rows += [(f"CEIBA_{bare}", f"Has no effect: {why}.") for bare, why in _IDLE.items()]
    rows += [(name, f"Has no effect: it needs {needs}.") for name, needs in _PLATFORM.items()]
    return rows
