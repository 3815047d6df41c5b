"""Request traces for ``ceiba simulate``: read from JSONL or made up. Owns their format; knows no scheduler.

A line is an object: ``timestamp`` (seconds), ``input_ids`` or ``input_length``, ``output_length``, and optionally
``prefix_id`` with ``prefix_length`` (requests of one prefix id share their first tokens; without a length, three
quarters of the shorter input), ``abort_after`` (seconds after arrival at which the client leaves), ``routing_key``,
``priority`` and ``queue_timeout``. Lines with ``hash_ids`` are read as the published Mooncake traces are: timestamps in
milliseconds, and one id per block of 512 tokens, the same for the same content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ceiba.cache.keys import Int32

VOCAB = 32000
"""Token ids of made-up prompts are below this."""


class TraceError(ValueError):
    """A trace that cannot be read; names file, line and field."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at: float
    """Seconds since the start of the trace."""
    ids: Int32
    output: int
    abort_after: float | None = None
    tenant: str = ""
    """Also its routing key."""
    priority: int | None = None
    queue_timeout: float | None = None


HASH_BLOCK = 512
"""Tokens that one of ``hash_ids`` stands for."""

_FIELDS = {
    "timestamp", "input_ids", "input_length", "output_length", "prefix_id", "prefix_length", "abort_after",
    "routing_key", "priority", "queue_timeout", "hash_ids", "type",
}  # fmt: skip


def read_trace(path: Path, seed: int = 0) -> list[TraceRequest]:
    """The requests of a JSONL file in order of arrival. Made-up token ids depend on ``seed`` and the line only."""
    requests = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    requests.append(_parse(json.loads(line), number, seed))
                except (ValueError, TypeError, KeyError) as error:
                    raise TraceError(f"{path}:{number}: {error}") from error
    if not requests:
        raise TraceError(f"{path}: no requests in it")
    first = min(request.at for request in requests)
    return sorted((replace(request, at=request.at - first) for request in requests), key=lambda request: request.at)


def _parse(line: dict[str, object], number: int, seed: int) -> TraceRequest:
    if not isinstance(line, dict) or not set(line) <= _FIELDS:
        raise ValueError(f"a line is an object with fields out of {', '.join(sorted(_FIELDS))}")
    at = float(line["timestamp"])  # type: ignore[arg-type]
    if "input_ids" in line:
        ids = np.asarray(line["input_ids"], np.int32)
    elif "hash_ids" in line:
        at /= 1000
        ids = _blocks(line["hash_ids"], _count(line, "input_length", 1), seed)
    else:
        length = _count(line, "input_length", 1)
        ids = np.random.default_rng((seed, 1, number)).integers(0, VOCAB, length).astype(np.int32)
        if line.get("prefix_id") is not None:
            shared = _count(line, "prefix_length", 0) if "prefix_length" in line else length * 3 // 4
            shared = min(shared, length)
            ids[:shared] = _prefix(str(line["prefix_id"]), shared, seed)
    if ids.ndim != 1 or not len(ids) or ids.min() < 0:
        raise ValueError("input_ids wants at least one id, none of them negative")
    return TraceRequest(
        at=at,
        ids=ids,
        output=_count(line, "output_length", 1),
        abort_after=_seconds(line, "abort_after"),
        tenant=str(line.get("routing_key") or ""),
        priority=None if line.get("priority") is None else _count(line, "priority", -(2**31)),
        queue_timeout=_seconds(line, "queue_timeout"),
    )


def _seconds(line: dict[str, object], name: str) -> float | None:
    value = line.get(name)
    return None if value is None else float(value)  # type: ignore[arg-type]


def _blocks(hashes: object, length: int, seed: int) -> Int32:
    """Tokens of a prompt whose blocks are known by their hashes only."""
    if not isinstance(hashes, list) or not all(type(value) is int for value in hashes):
        raise ValueError("hash_ids wants a list of integers")
    blocks = [np.random.default_rng((seed, 3, value % 2**63)).integers(0, VOCAB, HASH_BLOCK) for value in hashes]
    ids = np.concatenate([*blocks, np.empty(0, np.int64)]).astype(np.int32)[:length]
    if len(ids) < length:
        raise ValueError(f"{len(hashes)} hash_ids stand for {len(ids)} tokens, input_length is {length}")
    return ids


def _count(line: dict[str, object], name: str, least: int) -> int:
    value = line.get(name)
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} wants an integer of at least {least}, got {value!r}")
    return value


def _prefix(name: str, length: int, seed: int) -> Int32:
    """The beginning that all requests of one prefix id share; a longer one starts with the shorter one."""
    digest = np.frombuffer(name.encode(), np.uint8).tolist()
    return np.random.default_rng((seed, 2, *digest)).integers(0, VOCAB, length).astype(np.int32)


class _Maker:
    """Draws prompts, lengths and arrival times from one generator."""

    def __init__(self, count: int, rate: float, seed: int) -> None:
        self.count = count
        self.rng = np.random.default_rng(seed)
        self.rate = rate

    def tokens(self, length: int) -> Int32:
        return self.rng.integers(0, VOCAB, length).astype(np.int32)

    def length(self, mean: int, low: int = 1, high: int | None = None) -> int:
        """Log-normal around ``mean`` with a long tail, as real prompts have."""
        value = int(self.rng.lognormal(np.log(mean), 0.6))
        return min(max(value, low), high or 20 * mean)

    def arrivals(self) -> Iterator[float]:
        at = 0.0
        while True:
            at += float(self.rng.exponential(1 / self.rate))
            yield at


def _chat(make: _Maker) -> Iterator[TraceRequest]:
    """Conversations of a few turns under one of 8 system prompts; each turn repeats the ones before."""
    systems = [make.tokens(make.length(400)) for _ in range(8)]
    for start in make.arrivals():
        history, at = systems[int(make.rng.integers(8))], start
        for _ in range(int(make.rng.integers(1, 7))):
            history = np.concatenate([history, make.tokens(make.length(60))])
            output = make.length(120, high=600)
            yield TraceRequest(at, history, output)
            history = np.concatenate([history, make.tokens(output)])
            at += 2.0 + output * 0.03 + float(make.rng.exponential(8.0))


def _agents(make: _Maker) -> Iterator[TraceRequest]:
    """Agents with a long shared tool description and many short steps in quick succession."""
    tools = make.tokens(3000)
    for start in make.arrivals():
        history, at = np.concatenate([tools, make.tokens(make.length(300))]), start
        for _ in range(int(make.rng.integers(5, 20))):
            yield TraceRequest(at, history, make.length(50, high=200))
            history = np.concatenate([history, make.tokens(make.length(200))])
            at += 0.5 + float(make.rng.exponential(1.5))


def _fewshot(make: _Maker) -> Iterator[TraceRequest]:
    """Short questions behind one of 16 long example lists; short answers."""
    examples = [make.tokens(2500) for _ in range(16)]
    for at in make.arrivals():
        question = make.tokens(make.length(40))
        yield TraceRequest(at, np.concatenate([examples[int(make.rng.integers(16))], question]), make.length(16))


def _long(make: _Maker) -> Iterator[TraceRequest]:
    """Long documents, nothing shared, short summaries."""
    for at in make.arrivals():
        yield TraceRequest(at, make.tokens(make.length(8000, high=30000)), make.length(100))


def _mixed(make: _Maker) -> Iterator[TraceRequest]:
    """Bursts, shared prefixes, all lengths, and clients that leave."""
    prefixes = [make.tokens(make.length(500)) for _ in range(20)]
    for at in make.arrivals():
        for _ in range(int(make.rng.integers(1, 9))):
            shared = prefixes[int(make.rng.integers(20))] if make.rng.random() < 0.6 else make.tokens(0)
            leaves = float(make.rng.exponential(3.0)) if make.rng.random() < 0.1 else None
            ids = np.concatenate([shared, make.tokens(make.length(150))])
            yield TraceRequest(at, ids, make.length(80), leaves)


def _priorities(make: _Maker) -> Iterator[TraceRequest]:
    """Interactive requests (priority 100) beside batch work (0) and something between (50), more than fits."""
    systems = [make.tokens(600) for _ in range(3)]
    for at in make.arrivals():
        kind = make.rng.random()
        if kind < 0.2:
            ids = np.concatenate([systems[0], make.tokens(make.length(60))])
            yield TraceRequest(at, ids, make.length(80, high=300), priority=100, tenant="interactive")
        elif kind < 0.5:
            ids = np.concatenate([systems[1], make.tokens(make.length(300))])
            yield TraceRequest(at, ids, make.length(150, high=600), priority=50, tenant="product")
        else:
            ids = np.concatenate([systems[2], make.tokens(make.length(1500, high=8000))])
            yield TraceRequest(at, ids, make.length(400, high=1500), priority=0, tenant="batch")


def _tenants(make: _Maker) -> Iterator[TraceRequest]:
    """One tenant that sends far more than can be served, in bursts of 8, and one that sends a request now and then."""
    for at in make.arrivals():
        for _ in range(8):
            ids = make.tokens(make.length(800, high=4000))
            yield TraceRequest(at, ids, make.length(200, high=600), tenant="heavy")
        if make.rng.random() < 0.5:
            yield TraceRequest(at, make.tokens(make.length(200, high=1000)), make.length(80, high=300), tenant="light")


SYNTHETIC: dict[str, Callable[[_Maker], Iterator[TraceRequest]]] = {
    "chat": _chat,
    "agents": _agents,
    "fewshot": _fewshot,
    "long": _long,
    "mixed": _mixed,
    "priorities": _priorities,
    "tenants": _tenants,
}


def make_trace(kind: str, count: int, rate: float, seed: int) -> list[TraceRequest]:
    """``count`` made-up requests of one kind; ``rate``: arrivals (of requests, sessions or bursts) per second."""
    found: list[TraceRequest] = []
    for request in SYNTHETIC[kind](_Maker(count, rate, seed)):
        found.append(request)
        if len(found) == count:
            break
    return sorted(found, key=lambda request: request.at)
