"""What any request may say about its place in the queue and the cache: a deadline, a tenant, a pin.

Owns the meaning of ``queue_timeout`` and ``cache_control`` on every protocol, and how a tenant is told by its key.
Must never know what the scheduler does with them.
"""

from __future__ import annotations

import math
from typing import Any

from starlette.types import Scope

from ceiba.core.errors import BadRequest
from ceiba.core.tenants import key_digest
from ceiba.server.auth import bearer
from ceiba.server.front import Front
from ceiba.server.request import EngineRequest

PIN_TTLS = {"5m": 300.0, "1h": 3600.0}
MAX_QUEUE_TIMEOUT = 86400.0


def apply(body: Any, front: Front, request: EngineRequest) -> EngineRequest:
    """Take ``queue_timeout`` and ``cache_control`` over from a decoded body. Raises BadRequest naming the field."""
    timeout = body.queue_timeout
    if timeout is not None and not (math.isfinite(timeout) and 0 < timeout <= MAX_QUEUE_TIMEOUT):
        raise BadRequest(
            f"queue_timeout is {timeout}; it must be above 0 and at most {MAX_QUEUE_TIMEOUT:g} seconds.",
            param="queue_timeout",
        )
    request.queue_timeout = timeout
    if body.cache_control is not None:
        request.pin_seconds = pin_seconds(body.cache_control, front)
    return request


def is_mark(control: Any) -> bool:
    """Whether ``control`` marks a prompt to be kept, for one of the times that we know."""
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        return False
    ttl = control.get("ttl", "5m")
    return isinstance(ttl, str) and ttl in PIN_TTLS


def pin_seconds(control: dict[str, Any], front: Front) -> float:
    """How long ``{"type": "ephemeral", "ttl": "5m" | "1h"}`` keeps a prompt cached."""
    if not is_mark(control) or set(control) - {"type", "ttl"}:
        raise BadRequest(
            'cache_control must be {"type": "ephemeral"}, with "ttl": "5m" (the default) or "1h".',
            param="cache_control",
        )
    if not front.config.scheduler.cache_pin_budget:
        raise BadRequest(
            "cache_control: nothing can be pinned on this server (--cache-pin-budget 0, or the prefix cache is off). "
            "Leave it out.",
            param="cache_control",
            code="not_available",
        )
    return PIN_TTLS[control.get("ttl", "5m")]


def tenant(scope: Scope, front: Front) -> str:
    """Whose share a request is charged to, where API keys tell tenants apart; empty otherwise."""
    if front.config.scheduler.fair_share != "api-key":
        return ""
    key = bearer(scope)
    return "" if key is None else key_digest(key.decode("utf-8", "surrogateescape"))
