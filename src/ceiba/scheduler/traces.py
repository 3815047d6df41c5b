"""Request traces for ``ceiba simulate``: read from JSONL or made up. Owns their format; knows no scheduler.

A line is an object: ``timestamp`` (seconds), ``input_ids`` or ``input_length``, ``output_length``, and optionally
``prefix_id`` with ``prefix_length`` (requests of one prefix id share their first tokens; without a length, three
quarters of the shorter input) and ``abort_after`` (seconds after arrival at which the client leaves).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    moved = [TraceRequest(r.at - first, r.ids, r.output, r.abort_after) for r in requests]
    return sorted(moved, key=lambda request: request.at)


def _parse(line: dict[str, object], number: int, seed: int) -> TraceRequest:
    known = {"timestamp", "input_ids", "input_length", "output_length", "prefix_id", "prefix_length", "abort_after"}
    if not isinstance(line, dict) or not set(line) <= known:
        raise ValueError(f"a line is an object with fields out of {', '.join(sorted(known))}")
    if "input_ids" in line:
        ids = np.asarray(line["input_ids"], np.int32)
    else:
        length = _count(line, "input_length", 1)
        ids = np.random.default_rng((seed, 1, number)).integers(0, VOCAB, length).astype(np.int32)
        if line.get("prefix_id") is not None:
            shared = _count(line, "prefix_length", 0) if "prefix_length" in line else length * 3 // 4
            shared = min(shared, length)
            ids[:shared] = _prefix(str(line["prefix_id"]), shared, seed)
    if ids.ndim != 1 or not len(ids) or ids.min() < 0:
        raise ValueError("input_ids wants at least one id, none of them negative")
    leaves = line.get("abort_after")
    return TraceRequest(
        at=float(line["timestamp"]),  # type: ignore[arg-type]
        ids=ids,
        output=_count(line, "output_length", 1),
        abort_after=None if leaves is None else float(leaves),  # type: ignore[arg-type]
    )


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
    """Short questions behind one of 4 long example lists; short answers."""
    examples = [make.tokens(2500) for _ in range(4)]
    for at in make.arrivals():
        question = make.tokens(make.length(40))
        yield TraceRequest(at, np.concatenate([examples[int(make.rng.integers(4))], question]), make.length(16))


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


SYNTHETIC: dict[str, Callable[[_Maker], Iterator[TraceRequest]]] = {
    "chat": _chat,
    "agents": _agents,
    "fewshot": _fewshot,
    "long": _long,
    "mixed": _mixed,
}


def make_trace(kind: str, count: int, rate: float, seed: int) -> list[TraceRequest]:
    """``count`` made-up requests of one kind; ``rate``: arrivals (of requests, sessions or bursts) per second."""
    found: list[TraceRequest] = []
    for request in SYNTHETIC[kind](_Maker(count, rate, seed)):
        found.append(request)
        if len(found) == count:
            break
    return sorted(found, key=lambda request: request.at)
