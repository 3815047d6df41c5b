"""The named workloads: fixed traffic whose prompts depend on the name alone, so that every engine gets the same ones.

Owns shapes, seeds and pacing; knows nothing of HTTP.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ceiba.bench.client import Job

FIRST_ID = 1000
"""Prompts are drawn from [FIRST_ID, vocab): low ids are special tokens in many vocabularies."""
NAMES = ("warm", "single", "burst", "prefix", "prefill", "long", "online")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How far a run is scaled: ``scale`` the number of requests, ``len_scale`` their lengths (at least 4 tokens)."""

    vocab: int = 49000
    scale: float = 1.0
    len_scale: float = 1.0
    burst_concurrency: int = 256
    prefix_concurrency: int = 64
    rate: float = 16.0
    """Requests per second of ``online``, Poisson arrivals."""

    def length(self, tokens: int) -> int:
        return max(4, int(tokens * self.len_scale))

    def count(self, requests: int, least: int = 1) -> int:
        return max(least, 1, int(requests * self.scale))


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    jobs: list[Job]
    concurrency: int | None = None
    """At most so many at once; None: no limit."""
    rate: float | None = None
    """Mean arrivals per second; None: all at once."""


def random_ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(FIRST_ID, vocab) for _ in range(count)]


def build(name: str, sizes: Sizes) -> Workload:
    """The workload called ``name``. Raises KeyError for another name."""
    return _BUILDERS[name](random.Random("load-" + name), sizes)


def _fixed(rng: random.Random, sizes: Sizes, count: int, prompt: int, output: int) -> list[Job]:
    return [Job(random_ids(rng, prompt, sizes.vocab), output) for _ in range(count)]


def _mixed(rng: random.Random, sizes: Sizes, count: int) -> list[Job]:
    """Prompts of 512–1536 and answers of 128–384 tokens, before scaling."""
    jobs = []
    for _ in range(count):
        prompt = random_ids(rng, sizes.length(rng.randint(512, 1536)), sizes.vocab)
        jobs.append(Job(prompt, sizes.length(rng.randint(128, 384))))
    return jobs


def _warm(rng: random.Random, sizes: Sizes) -> Workload:
    return Workload("warm", _fixed(rng, sizes, sizes.count(16), sizes.length(512), 16))


def _single(rng: random.Random, sizes: Sizes) -> Workload:
    jobs = _fixed(rng, sizes, sizes.count(4, least=2), sizes.length(1024), sizes.length(256))
    return Workload("single", jobs, concurrency=1)


def _burst(rng: random.Random, sizes: Sizes) -> Workload:
    return Workload("burst", _mixed(rng, sizes, sizes.count(512)), concurrency=sizes.burst_concurrency)


def _prefix(rng: random.Random, sizes: Sizes) -> Workload:
    shared = random_ids(rng, sizes.length(3000), sizes.vocab)
    jobs = [
        Job(shared + random_ids(rng, sizes.length(30), sizes.vocab), sizes.length(64)) for _ in range(sizes.count(512))
    ]
    return Workload("prefix", jobs, concurrency=sizes.prefix_concurrency)


def _prefill(rng: random.Random, sizes: Sizes) -> Workload:
    return Workload("prefill", _fixed(rng, sizes, sizes.count(64, least=4), 1024, 1), concurrency=1)


def _long(rng: random.Random, sizes: Sizes) -> Workload:
    return Workload("long", _fixed(rng, sizes, sizes.count(32), sizes.length(16384), sizes.length(32)), concurrency=32)


def _online(rng: random.Random, sizes: Sizes) -> Workload:
    return Workload("online", _mixed(rng, sizes, sizes.count(480)), rate=sizes.rate)


_BUILDERS: dict[str, Callable[[random.Random, Sizes], Workload]] = {
    "warm": _warm,
    "single": _single,
    "burst": _burst,
    "prefix": _prefix,
    "prefill": _prefill,
    "long": _long,
    "online": _online,
}
