"""What the server says of itself: health, readiness, metrics, model and server information.

Owns the form of these answers. Must never change anything, and never show a key.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

import ceiba
from ceiba.core.errors import CeibaError, Unavailable
from ceiba.server.front import Front
from ceiba.server.health import Health

SECRETS = {"api_key", "admin_api_key"}
CONTROL_SECONDS = 5.0
"""How long an information route waits for the scheduler."""


def health_body(health: Health) -> tuple[int, dict[str, Any]]:
    """Status and body: 200 when ok, else 503 with the reason."""
    body: dict[str, Any] = {"status": health.state}
    if health.reason:
        body["reason"] = health.reason
    return (200 if health.ok else 503), body


def model_info(front: Front) -> dict[str, Any]:
    config = front.config
    return {
        "model_path": config.model.path,
        "served_model_name": config.model.name,
        "tokenizer_path": config.model.tokenizer_path,
        "is_generation": config.model.task == "generate",
        "preferred_sampling_params": config.server.preferred_sampling_params or None,
        "sampling_defaults": {n: v for n, v in front.sampling_defaults.items() if v is not None},
        "weight_version": config.server.weight_version,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "context_length": config.model.context_len,
        "vocab_size": front.vocab_size,
        "has_chat_template": front.template is not None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


async def server_info(front: Front) -> dict[str, Any]:
    """Configuration without secrets, and the scheduler's state (null with a reason while it cannot answer)."""
    config: dict[str, Any] = msgspec.to_builtins(front.config, str_keys=True)
    server: dict[str, Any] = config["server"]
    for name in SECRETS:
        server[name] = None if server.get(name) is None else "set"
    info: dict[str, Any] = {
        "version": ceiba.__version__,
        "status": front.health().state,
        "pid": os.getpid(),
        "uptime": time.time() - front.started,
        "served_model_name": front.config.model.name,
        "model_path": front.config.model.path,
        "max_total_num_tokens": front.config.scheduler.max_total_tokens,
        "max_running_requests": front.config.scheduler.max_running_requests,
        "chunked_prefill_size": front.config.scheduler.chunked_prefill_size,
        "context_length": front.config.model.context_len,
        "live_requests": front.num_live,
        "stats": dict(front.monitor.stats),
        "config": config,
    }
    try:
        info["internal_states"] = [await front.control("state", seconds=CONTROL_SECONDS)]
    except CeibaError as error:
        info["internal_states"] = []
        info["reason"] = error.message
    return info


async def loads(front: Front) -> list[dict[str, Any]]:
    """One entry per replica: how much it has to do."""
    value = await front.control("load", seconds=CONTROL_SECONDS)
    if not isinstance(value, dict):
        raise Unavailable("the scheduler's answer to load is not understood.")
    return [{"dp_rank": 0, **value}]
