"""What the cache holds, why a prompt misses, and which prefixes are pinned: the operations behind ``/cache/…``.

Owns the form of these answers, in token ids; texts are the front's. Looking changes nothing but the order of pins.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ceiba.cache.base import Node, Tier
from ceiba.cache.keys import CacheKey, Int32
from ceiba.cache.radix import RadixCache
from ceiba.cache.tiers import TieredCache, TierNode
from ceiba.core.messages import bytes_to_ids

if TYPE_CHECKING:
    from ceiba.scheduler.loop import Scheduler

MAX_DEPTH = 32
MAX_WIDTH = 256
MAX_SHOWN = 2000
"""Nodes in one answer."""
SAMPLE = 16
"""Token ids shown of a node, and around the place where a prompt diverges."""
MAX_EVICTIONS = 32


class NothingCached(Exception):
    """The cache is off, so there is nothing to look at or to pin."""

    def __init__(self) -> None:
        super().__init__("the prefix cache is off: start the server without --disable-radix-cache")


def explain(scheduler: Scheduler, args: Mapping[str, Any], answered: Callable[[dict[str, object]], None]) -> None:
    """Explain a prompt; ``answered`` gets the answer, later where a storage has to be asked (see ``explain_now``)."""
    answer = explain_now(scheduler, args)
    tiers = scheduler.hicache
    key = CacheKey(str(args.get("namespace", "")), np.array(bytes_to_ids(args["input_ids"]), np.int32))
    known = int(answer["cached_tokens"])  # type: ignore[call-overload]

    def heard(tokens: int) -> None:
        if tokens:
            split: dict[str, int] = answer["cached_by_tier"]  # type: ignore[assignment]
            answer["cached_by_tier"] = {**split, "storage": tokens}
        answered(answer)

    if tiers is None or not tiers.look(key, known, len(key) - 1, heard):
        answered(answer)


def explain_now(scheduler: Scheduler, args: Mapping[str, Any]) -> dict[str, object]:
    """How far ``input_ids`` (int32 bytes) of ``namespace`` matches, where and why the match ends.

    ``reason``: ``cached`` (all of it, as far as a cache may serve), ``evicted``, ``diverges`` (the cache goes on with
    other tokens), ``new`` (nothing goes on from there), ``off``.
    """
    tokens = np.array(bytes_to_ids(args["input_ids"]), np.int32)
    key = CacheKey(str(args.get("namespace", "")), tokens)
    cache = scheduler.leases.cache
    answer: dict[str, object] = {
        "prompt_tokens": len(tokens),
        "cached_tokens": 0,
        "cached_by_tier": {},
        "usable_tokens": 0,
        "reason": "off",
        "evictions": [],
    }
    if not isinstance(cache, RadixCache):
        return answer
    match = cache.match(key)
    path, at = match.path, match.length
    if isinstance(cache, TieredCache):
        both = cache.match_tiers(key)
        path, at = [*path, *both.beyond], both.length
    now = scheduler.clock()
    evictions = [
        {"start": run.start, "tokens": run.length, "seconds_ago": now - run.at, "for": run.cause}
        for run in scheduler.history.missing(key, at)[:MAX_EVICTIONS]
    ]
    others = _continuations(cache, key, path, at)
    limit = len(tokens) - 1
    if at >= limit - limit % cache.page_size:
        reason = "cached"
    else:
        reason = "evicted" if evictions else ("diverges" if others else "new")
    answer |= {
        "cached_tokens": at,
        "cached_by_tier": _tiers(path, at),
        "usable_tokens": min(at, limit - limit % cache.page_size),
        "pinned_tokens": sum(len(node) for node in path if node.pins),
        "reason": reason,
        "evictions": evictions,
        "elsewhere": max((len_ for len_ in _elsewhere(cache, key)), default=0),
    }
    if at < len(tokens):
        answer |= {
            "diverges_at": at,
            "before": tokens[max(0, at - SAMPLE) : at].tolist(),
            "token": int(tokens[at]),
            "after": tokens[at : at + SAMPLE].tolist(),
            "cached_instead": [part.tolist() for part in others[:4]],
        }
    return answer


def _continuations(cache: RadixCache, key: CacheKey, path: list[Node], at: int) -> list[Int32]:
    """What the cache holds after the first ``at`` tokens of ``key``, most used first."""
    node = path[-1] if path else cache.roots.get(key.namespace)
    if node is None:
        return []
    inside = at - node.start if path else 0
    if path and inside < len(node):
        return [node.tokens[inside : inside + SAMPLE]]
    children = heapq.nlargest(4, node.children.values(), key=lambda child: (child.hits, child.last_access))
    return [child.tokens[:SAMPLE] for child in children]


def _elsewhere(cache: RadixCache, key: CacheKey) -> list[int]:
    """Match lengths in other namespaces (salts, adapters), which are never shared."""
    names = [name for name in cache.roots if name != key.namespace][:MAX_WIDTH]
    return [cache.match(CacheKey(name, key.tokens)).length for name in names]


def _tiers(path: list[Node], length: int) -> dict[str, int]:
    tiers: dict[str, int] = {}
    for node in path:
        used = min(node.end, length) - node.start
        tier = next((tier for tier in Tier if tier in node.residence), Tier.DEVICE)
        name = (tier.name or "device").lower()
        tiers[name] = tiers.get(name, 0) + used
    return tiers


def tree(scheduler: Scheduler, args: Mapping[str, Any]) -> dict[str, object]:
    """Sizes, hits, locks and pins of the tree, by subtree, the largest first. ``depth`` and ``width`` bound it."""
    cache = scheduler.leases.cache
    if not isinstance(cache, RadixCache):
        raise NothingCached
    depth = min(max(int(args.get("depth", 3)), 0), MAX_DEPTH)
    width = min(max(int(args.get("width", 8)), 1), MAX_WIDTH)
    sizes = _sizes(cache)
    budget = [MAX_SHOWN]
    roots = sorted(cache.roots.values(), key=lambda root: -sizes[root][0])
    leases = scheduler.leases
    return {
        "tokens": leases.cache.evictable + leases.cache.locked,
        "tokens_locked": leases.cache.locked,
        "tokens_pinned": leases.pins.tokens,
        "tokens_by_tier": _resident(cache),
        "nodes": sum(sizes[root][1] for root in roots) - len(roots),
        "capacity": leases.allocator.total,
        "evicted_tokens": leases.evicted_tokens,
        "eviction_policy": scheduler.config.radix_eviction_policy,
        "namespaces": [_describe(root, sizes, depth, width, budget) for root in roots[:width]],
        "namespaces_omitted": max(0, len(roots) - width),
    }


def _resident(cache: RadixCache) -> dict[str, int]:
    """Tokens by tier; what lies in several counts in each."""
    found: dict[str, int] = {}
    for node in cache.nodes():
        for tier in Tier:
            if tier in node.residence:
                name = (tier.name or "").lower()
                found[name] = found.get(name, 0) + len(node)
    return found


def _sizes(cache: RadixCache) -> dict[Node, tuple[int, int]]:
    """Tokens and nodes of every subtree, its own root counted."""
    order: list[Node] = []
    stack = list(cache.roots.values())
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children.values())
    sizes: dict[Node, tuple[int, int]] = {}
    for node in reversed(order):
        tokens, nodes = len(node), 1
        for child in node.children.values():
            more = sizes[child]
            tokens, nodes = tokens + more[0], nodes + more[1]
        sizes[node] = (tokens, nodes)
    return sizes


def _describe(
    node: Node, sizes: dict[Node, tuple[int, int]], depth: int, width: int, budget: list[int]
) -> dict[str, object]:
    budget[0] -= 1
    entry: dict[str, object] = {"tokens": len(node), "subtree_tokens": sizes[node][0], "subtree_nodes": sizes[node][1]}
    if node.parent is None:
        entry["namespace"] = node.namespace
    else:
        if isinstance(node, TierNode):
            entry["state"] = node.state.value
        entry |= {
            "start": node.start,
            "hits": node.hits,
            "locks": node.locks - node.pins,
            "pins": node.pins,
            "priority": node.priority,
            "tiers": [(tier.name or "").lower() for tier in Tier if tier in node.residence],
            "token_ids": node.tokens[:SAMPLE].tolist(),
        }
    shown: list[dict[str, object]] = []
    if depth > 0:
        for child in heapq.nlargest(width, node.children.values(), key=lambda child: sizes[child][0]):
            if budget[0] <= 0:
                break
            shown.append(_describe(child, sizes, depth - 1, width, budget))
    entry["children"] = shown
    entry["children_omitted"] = len(node.children) - len(shown)
    return entry


def pin(scheduler: Scheduler, args: Mapping[str, Any]) -> dict[str, object]:
    """Pin the cached prefix of ``input_ids`` under ``name``, for ``seconds`` (0: until it is released).

    The answer's ``pinned_tokens`` is 0 when the budget has no room for it.
    """
    cache = scheduler.leases.cache
    if not cache.enabled:
        raise NothingCached
    pins = scheduler.leases.pins
    key = CacheKey(str(args.get("namespace", "")), np.array(bytes_to_ids(args["input_ids"]), np.int32))
    seconds = float(args.get("seconds", 0.0))
    match = cache.match(key)
    expires = scheduler.clock() + seconds if seconds else math.inf
    done = pins.pin(str(args["name"]), match, expires=expires)
    return {
        "name": args["name"],
        "pinned_tokens": match.length if done else 0,
        "cached_tokens": match.length,
        "budget": pins.budget,
        "budget_used": pins.tokens,
    }


def unpin(scheduler: Scheduler, args: Mapping[str, Any]) -> dict[str, object]:
    """Release the pin ``name``, or all with ``everything``."""
    pins = scheduler.leases.pins
    if args.get("everything"):
        return {"released": pins.clear()}
    name = str(args["name"])
    known = name in pins
    pins.unpin(name)
    return {"released": int(known)}


def list_pins(scheduler: Scheduler, args: Mapping[str, Any]) -> dict[str, object]:
    """Every pin, oldest first."""
    pins, now = scheduler.leases.pins, scheduler.clock()
    return {
        "budget": pins.budget,
        "budget_used": pins.tokens,
        "gave_way": pins.released,
        "pins": [
            {
                "name": name,
                "tokens": entry.length,
                "expires_in": None if math.isinf(entry.expires) else max(0.0, entry.expires - now),
            }
            for name, entry in pins.items()
        ],
    }
