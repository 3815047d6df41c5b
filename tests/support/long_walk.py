"""A random walk over everything a scheduler can be asked, for as many steps as one has time for: tree, allocator,
leases, pins, drafts and scheduler together, on the strict fake runner.

After every step the KV ledger is recounted from the structures themselves; at the end of an episode (a few hundred
steps under one random configuration) every answer must be the one the request gets alone, and the flushed pool must be
whole. As a command: ``python -m support.long_walk --steps 1000000`` from ``tests``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from ceiba.cache import eviction
from ceiba.cache.ledger import assert_ledger
from ceiba.core.messages import Control, ids_to_bytes
from ceiba.core.sampling import LogprobSpec
from ceiba.scheduler import policy
from ceiba.scheduler.costs import LEAST_TOKENS, StepCosts
from ceiba.spec.fake import FakeDrafter
from support.scheduler_world import VOCAB, World, continued, make_world, oracle

EPISODE = 300
"""Steps under one configuration."""


def random_config(rng: np.random.Generator) -> dict[str, Any]:
    """Fields of ``make_world``; pools are small, so that everything is short all the time."""

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    name = pick(*policy.POLICIES)
    prioritized = name == "priority" or (name in {"fcfs", "lof"} and rng.random() < 0.4)
    pool = pick(64, 100, 160, 400)
    evict = pick(*eviction.POLICIES)
    options = {name: int(rng.integers(1, 60)) for name in eviction.OPTIONS.get(evict, ())}
    mixed = rng.random() < 0.3
    return {
        "pool": pool,
        "page": pick(1, 1, 4, 16),
        "rows": pick(1, 2, 5, 12),
        "context": 60,
        "eager": pick(True, False),
        "overlap": pick(True, False),
        "policy": name,
        "radix_eviction_policy": evict,
        "eviction_options": options if rng.random() < 0.5 else {},
        "cache_pin_budget": pick(0, pool // 4, pool // 2),
        "chunked_prefill_size": pick(-1, 3, 17, 64),
        "max_prefill_tokens": pick(32, 200),
        "prefill_max_requests": pick(None, 1, 3),
        "enable_mixed_chunk": mixed,
        "mixed_chunk_target": pick(0.0, 0.001, 0.01, 0.1) if mixed else 0.0,
        "prefill_decode_interval": 0 if mixed else pick(0, 0, 1, 5),
        "disable_radix_cache": rng.random() < 0.1,
        "enable_priority_scheduling": prioritized,
        "preemption_threshold": pick(0, 3, 10, None),
        "retraction_policy": pick("length", "priority"),
        "fair_share": "off" if prioritized else pick("off", "routing-key"),
        "conservativeness": pick(0.0, 0.1, 1.0),
        "max_queued_requests": pick(None, None, 4),
        "queue_timeout": pick(None, None, 5.0),
        "in_batch_check_threshold": pick(32, 4, -1),
        "in_batch_deprioritize_threshold": pick(32, 4),
        "consecutive_prefill_overlap": pick(True, False),
        "num_draft_tokens": pick(0, 2, 6, 16),
        "drafter": FakeDrafter(continued, pick(0.0, 0.5, 0.9, 1.0), VOCAB, int(rng.integers(1 << 30))),
    }


class Walk:
    """``seed`` fixes everything. ``did`` counts the steps by kind."""

    KINDS = ("ask", "round", "abort", "pin", "unpin", "wait", "flush", "look", "abort all")
    WEIGHTS = (0.22, 0.60, 0.05, 0.03, 0.02, 0.03, 0.02, 0.025, 0.005)

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.did: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        """What happened inside: retractions, evictions, ends by kind."""
        self.world: World
        self.aborted: set[str]
        self.families: list[np.ndarray]

    def run(self, steps: int, progress: Any = None) -> None:
        """At least ``steps`` steps, in whole episodes."""
        while self.did.total() < steps:
            self.episode()
            if progress is not None:
                progress(self)

    def episode(self) -> None:
        config = random_config(self.rng)
        try:
            self._begin(config)
            for kind in self.rng.choice(self.KINDS, EPISODE, p=self.WEIGHTS).tolist():
                getattr(self, "_" + kind.replace(" ", "_"))()
                self.did[kind] += 1
                assert_ledger(self.world.scheduler.leases)
            self._finish()
        except BaseException as error:
            error.add_note(f"seed {self.seed}, after {self.did.total()} steps, configured {config}")
            raise

    def _begin(self, config: dict[str, Any]) -> None:
        self.world = make_world(**config)
        pacer = self.world.scheduler.admission.pacer
        if pacer is not None:  # the fake device takes no time: what it would have learnt
            pacer.costs = StepCosts()
            pacer.costs.observe(0, 1, float(self.rng.choice([1e-4, 1e-3, 1e-2])))
            pacer.costs.observe(LEAST_TOKENS, 0, LEAST_TOKENS * float(self.rng.choice([1e-5, 1e-4, 1e-3])))
        self.aborted = set()
        self.families = [self.rng.integers(0, VOCAB, 50) for _ in range(4)]

    def _tokens(self) -> list[int]:
        head = self.families[int(self.rng.integers(4))][: int(self.rng.integers(0, 45))]
        return np.concatenate([head, self.rng.integers(0, 3, int(self.rng.integers(1, 12)))]).tolist()

    def _ask(self) -> None:
        rng, world = self.rng, self.world
        tokens = self._tokens()
        fields: dict[str, Any] = {"max_new_tokens": int(rng.integers(1, 40))}
        if rng.random() < 0.2:
            fields["min_new_tokens"] = int(rng.integers(0, fields["max_new_tokens"] + 1))
        if rng.random() < 0.2:
            fields["stop_token_ids"] = tuple(rng.integers(0, VOCAB, 3).tolist())
        if rng.random() < 0.3:
            fields["ignore_eos"] = True
        if rng.random() < 0.1:
            fields |= {"pin": str(int(rng.integers(3))), "pin_seconds": float(rng.choice([0.0, 3.0]))}
            fields["pin_output"] = bool(rng.random() < 0.5)
        spec = None
        if rng.random() < 0.15:
            spec = LogprobSpec(output=True, top=2, prompt_start=int(rng.integers(-1, len(tokens))))
        world.ask(
            str(len(world.asked)),
            tokens,
            logprob=spec,
            stream=bool(rng.random() < 0.5),
            namespace=str(rng.choice(["", "", "salt"])),
            priority=int(rng.integers(-20, 20)) if rng.random() < 0.5 else None,
            routing_key=str(rng.integers(3)),
            tenant=str(rng.integers(3)),
            arrival=world.now[0],
            **fields,
        )

    def _round(self) -> None:
        self.world.now[0] += 0.01
        self.world.scheduler.step(wait=0.0)

    def _some(self) -> list[str]:
        alive = list(self.world.scheduler._requests)
        return [alive[int(self.rng.integers(len(alive)))]] if alive else []

    def _abort(self) -> None:
        victims = self._some()
        self.aborted.update(victims)
        self.world.abort(*victims)

    def _abort_all(self) -> None:
        self.aborted.update(self.world.asked)
        self.world.abort(everything=True)

    def _control(self, op: str, **args: object) -> None:
        self.world.port.push(Control(id=0, op=op, args=args))
        self.world.scheduler.step(wait=0.0)
        self.world.port.replies.clear()

    def _pin(self) -> None:
        ids = ids_to_bytes(np.array(self._tokens(), np.int32))
        seconds = float(self.rng.choice([0.0, 2.0]))
        self._control("cache_pin", input_ids=ids, name=str(int(self.rng.integers(4))), seconds=seconds)

    def _unpin(self) -> None:
        self._control("cache_unpin", name=str(int(self.rng.integers(4))), everything=bool(self.rng.random() < 0.2))

    def _wait(self) -> None:
        self.world.now[0] += float(self.rng.choice([0.5, 3.0, 20.0]))

    def _flush(self) -> None:
        self._control("flush_cache")

    def _look(self) -> None:
        ids = ids_to_bytes(np.array(self._tokens(), np.int32))
        self._control(str(self.rng.choice(["cache_explain", "cache_tree", "cache_pins", "idle_check"])), input_ids=ids)

    def _finish(self) -> None:
        world, scheduler = self.world, self.world.scheduler
        for _ in range(20_000):
            if scheduler.idle and not world.port.inbox:
                break
            scheduler.step(wait=0.0)
        else:
            raise AssertionError(f"it does not come to rest: {scheduler.admission.describe()}")
        assert_ledger(scheduler.leases, idle=True)
        self.seen["retractions"] += scheduler.counters.retractions
        self.seen["right drafts"] += scheduler.counters.spec_accepted_tokens
        self.seen["wrong drafts"] += scheduler.counters.spec_draft_tokens - scheduler.counters.spec_accepted_tokens
        self.seen["pre-emptions"] += scheduler.counters.preemptions
        self.seen["evicted tokens"] += scheduler.leases.evicted_tokens
        self.seen["pins that gave way"] += scheduler.leases.pins.released
        for rid in world.asked:
            self._check(rid)
        self._control("flush_cache")
        assert scheduler.leases.allocator.free == scheduler.leases.allocator.total

    def _check(self, rid: str) -> None:
        """The whole answer, or a beginning of it where the request was ended early."""
        world = self.world
        answer = world.answer(rid)
        assert answer.finish is not None
        self.seen[f"{answer.finish.kind} {answer.finish.status or ''}".strip()] += 1
        if answer.finish.kind in {"stop", "length"}:
            world.check(rid)
            return
        assert rid in self.aborted or answer.finish.status in {503, 504}, answer.finish
        prompt, sampling = world.asked[rid]
        whole, _ = oracle(prompt, sampling, limit=world.scheduler.intake.max_len)
        assert answer.tokens == whole[: len(answer.tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m support.long_walk", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("ceiba.scheduler").setLevel(logging.ERROR)
    walk, start = Walk(args.seed), time.monotonic()
    hidden = not sys.stderr.isatty()

    def progress(walk: Walk) -> None:
        if not hidden or walk.did.total() % (10 * EPISODE) == 0:
            print(f"{walk.did.total():,} steps, {time.monotonic() - start:,.0f} s", file=sys.stderr, flush=True)

    walk.run(args.steps, progress)
    print(f"{walk.did.total():,} steps in {time.monotonic() - start:,.0f} s: {dict(walk.did)}; {dict(walk.seen)}")


if __name__ == "__main__":
    main()
