"""The resolved configuration for people: the start-up line and a copy without secrets."""

from __future__ import annotations

from typing import Any

import msgspec

from ceiba.config.records import Config
from ceiba.config.sizing import GiB

SECRETS = ("api_key", "admin_api_key")


def startup_line(config: Config, available_bytes: int, num_slots: int | None = None) -> str:
    """The line printed once the pool is allocated. ``available_bytes``: what is then free on the device, or on the host
    for a CPU; ``num_slots``: KV slots that the device really holds, where that may be fewer than planned."""
    scheduler = config.scheduler
    place = "available_host_mem" if config.runner.device == "cpu" else "available_gpu_mem"
    return (
        f"max_total_num_tokens={num_slots or scheduler.max_total_tokens}, "
        f"chunked_prefill_size={scheduler.chunked_prefill_size}, "
        f"max_prefill_tokens={scheduler.max_prefill_tokens}, "
        f"max_running_requests={scheduler.max_running_requests}, "
        f"context_len={config.model.context_len}, "
        f"{place}={available_bytes / GiB:.2f} GB, "
        f"mem_fraction_static={config.runner.mem_fraction_static:g}"
    )


def public(config: Config) -> dict[str, Any]:
    """The configuration as plain values, keys masked: what logs and /server_info may show."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    for secret in SECRETS:
        if plain["server"].get(secret) is not None:
            plain["server"][secret] = "***"
    return plain
