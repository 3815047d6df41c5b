"""Operations on the storage behind the cache while the server runs: attach, detach, clear, and what is there.

Owns their arguments and answers. Attaching and clearing take as long as the store takes, so their replies come later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ceiba.config.available import HICACHE_STORAGE
from ceiba.config.hicache import storage_options
from ceiba.core.tiers import StorageDone
from ceiba.scheduler.hicache import HiCache

PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
ATTACH_SECONDS = 50.0
CLEAR_SECONDS = 50.0

Answer = Callable[[bool, object, str], None]
"""(whether it worked, value, error)."""


class NoHiCache(Exception):
    def __init__(self) -> None:
        super().__init__("there is no host tier: start the server with --enable-hierarchical-cache")


class Refusal(Exception):
    """The operation cannot be done; the text says why."""


def status(tiers: HiCache) -> dict[str, object]:
    """What is attached, how it is, and the policies."""
    found = tiers.io.storage()
    return {
        "hicache_storage_backend": found.backend,
        "hicache_storage_prefetch_policy": tiers.prefetch_policy,
        "hicache_write_policy": tiers.write_policy,
        "prefetch_threshold": tiers.threshold,
        "state": found.state,
        "writable": found.writable,
        "backlog_bytes": found.backlog,
        "busy": tiers.busy,
        "restore_threshold": None if math.isinf(tiers.cost.threshold) else tiers.cost.threshold,
        "page_tokens": tiers.io.info.storage_page,
        "detail": dict(found.detail),
        "host": {"total_tokens": tiers.cache.host.total, "used_tokens": tiers.cache.host_used},
    }


def attach(tiers: HiCache, args: Mapping[str, Any], answer: Answer) -> None:
    """Connect a storage; running requests go on. ``answer`` is called when it is there, or cannot be had."""
    found = tiers.io.storage()
    if found.state != "detached":
        what = found.backend or "a storage"
        raise Refusal(f"{what} is {'being ' if found.state == 'attaching' else ''}attached: detach it first")
    backend = str(args["backend"])
    if backend not in HICACHE_STORAGE:
        raise Refusal(f"storage backend {backend!r} is not available; available: {', '.join(HICACHE_STORAGE)}")
    prefetch = _choice(args, "prefetch_policy", PREFETCH_POLICIES, tiers.prefetch_policy)
    write = _choice(args, "write_policy", WRITE_POLICIES, tiers.write_policy)
    parts = storage_options(backend, _object(args.get("options")), Path(tiers.config.storage_folder))
    if "page_tokens" in parts.knobs:
        raise Refusal("page_tokens is fixed when the server starts")
    if backend == "dynamic":
        _check_class(tiers, parts.options)
    ticket = tiers.io.attach(backend, parts.options)

    def done(news: StorageDone) -> None:
        if news.error:
            answer(False, None, news.error)
            return
        tiers.prefetch_policy = prefetch  # type: ignore[assignment]
        tiers.set_write_policy(write)
        tiers.set_knobs(parts.knobs)
        tiers.offer_all()
        answer(True, status(tiers), "")

    tiers.expect(ticket, ATTACH_SECONDS, done)


def detach(tiers: HiCache) -> dict[str, object]:
    """Give the storage up; what it holds stays there."""
    if tiers.io.storage().state == "detached":
        raise Refusal("no storage is attached")
    tiers.detach()
    return status(tiers)


def clear(tiers: HiCache, answer: Answer) -> None:
    """Delete what this model has stored. Host and device keep what they have."""
    if tiers.io.storage().state in {"detached", "attaching"}:
        raise Refusal("no storage is attached")
    tiers.unmark()

    def done(news: StorageDone) -> None:
        answer(not news.error, {"deleted_pages": news.stored}, news.error)

    tiers.expect(tiers.io.clear(), CLEAR_SECONDS, done)


def _check_class(tiers: HiCache, options: Mapping[str, object]) -> None:
    """Which code runs in this process is decided where the server is started, never by a request."""
    started = tiers.config.storage_options if tiers.config.storage_backend == "dynamic" else {}
    names = ("module_path", "class_name")
    if not started or any(options.get(name) != started.get(name) for name in names):
        raise Refusal("dynamic loads code, so it can only be attached again as --hicache-storage-backend named it")


def _choice(args: Mapping[str, Any], name: str, choices: tuple[str, ...], default: str) -> str:
    value = args.get(name)
    if value is None:
        return default
    if value not in choices:
        raise Refusal(f"{name} {value!r}: choose from {', '.join(choices)}")
    return str(value)


def _object(value: object) -> object:
    """Options, as an object or as its JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the extra configuration is no JSON: {error}") from None
