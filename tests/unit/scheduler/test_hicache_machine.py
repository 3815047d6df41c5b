"""Random operations on the scheduler with fake lower tiers: after each, device and host books balance, and every answer
is what the request gets alone."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from support.scheduler_world import prompt
from support.tier_world import PAGE, make_tier_world

POLICIES = ("write_through", "write_through_selective", "write_back")


class Tiers(RuleBasedStateMachine):
    """Prompts are drawn from a few families with common beginnings, so that nodes split and come back."""

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        page=st.sampled_from([1, 2, 4]),
        pool=st.sampled_from([44, 52, 64, 100]),
        host=st.sampled_from([24, 80, 400, 400]),
        policy=st.sampled_from(POLICIES),
        prefetch=st.sampled_from(["best_effort", "wait_complete", "timeout"]),
        eviction=st.sampled_from(["lru", "lfu", "slru", "priority", "tlru"]),
        schedule=st.sampled_from(["fcfs", "lpm", "random"]),
        chunk=st.sampled_from([16, 2048]),
        mixed=st.booleans(),
        overlap=st.booleans(),
        instant=st.booleans(),
        stored=st.booleans(),
        failing=st.sampled_from([0.0, 0.0, 0.1]),
        drafts=st.sampled_from([0, 4]),
    )
    def start(
        self,
        seed,
        page,
        pool,
        host,
        policy,
        prefetch,
        eviction,
        schedule,
        chunk,
        mixed,
        overlap,
        instant,
        stored,
        failing,
        drafts,
    ):
        import random

        self.random = random.Random(seed)
        self.shared = {} if stored else None
        if stored:  # what an earlier server has left
            earlier = make_tier_world(pool=64, host=400, context=40, page=page, storage=self.shared)
            for family in range(4):
                earlier.serve(f"before{family}", prompt(family, 34))
        self.world = make_tier_world(
            pool=pool,
            host=host,
            rows=4,
            context=40,
            page=page,
            eager=False,
            storage=self.shared,
            instant=instant,
            num_draft_tokens=drafts,
            hicache={"write_policy": policy, "prefetch_policy": prefetch, "prefetch_retry_interval": 1},
            policy=schedule,
            radix_eviction_policy=eviction,
            eviction_options={"threshold": 16, "next_prompt": 4} if eviction == "tlru" else {},
            chunked_prefill_size=chunk,
            enable_mixed_chunk=mixed,
            overlap=overlap,
            cache_pin_budget=pool // 4,
        )
        self.world.tiers.fail = lambda kind: self.random.random() < failing
        self.count = 0
        self.aborted = set()

    def _prompt(self, family: int, shared: int, length: int, tail: int) -> list[int]:
        base = prompt(family, 40)
        return (base[:shared] + prompt(1000 + tail, 40))[:length]

    @rule(
        family=st.integers(0, 3), shared=st.sampled_from([10, 22, 34, 34]), length=st.integers(8, 34),
        tail=st.integers(0, 2),
        new=st.integers(1, 6), namespace=st.sampled_from(["", "", "b"]), pin=st.sampled_from(["", "", "", "p"]),
    )  # fmt: skip
    def ask(self, family, shared, length, tail, new, namespace, pin):
        self.count += 1
        ids = self._prompt(family, shared, length, tail)
        self.world.ask(f"r{self.count}", ids, max_new_tokens=new, ignore_eos=True, namespace=namespace, pin=pin)
        self._rounds(4)

    def _rounds(self, times):
        for _ in range(times):
            self.world.now[0] += 0.01
            self.world.step()

    @rule(times=st.integers(1, 12))
    def step(self, times):
        self._rounds(times)

    @rule(copies=st.integers(0, 8), pages=st.integers(0, 8), times=st.integers(1, 3))
    def tick(self, copies, pages, times):
        for _ in range(times):
            self.world.tiers.tick(copies, pages)
            self._rounds(1)

    @rule(rounds=st.integers(1, 8))
    def flow(self, rounds):
        """As it is mostly: copies are quick."""
        for _ in range(rounds):
            self.world.tiers.tick(20, 20)
            self._rounds(1)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 40.0]))
    def wait(self, seconds):
        self.world.now[0] += seconds

    @rule(back=st.integers(0, 3))
    def abort(self, back):
        rid = f"r{self.count - back}"
        if self.count - back > 0:
            self.aborted.add(rid)
            self.world.abort(rid)

    @rule()
    def flush(self):
        """Works when nothing runs or waits; storage and answers do not mind."""
        self._rounds(8)
        self.world.control("flush_cache")

    @rule()
    def spoil(self):
        if self.shared:
            self.world.tiers.corrupt.add(self.random.choice(sorted(self.shared)))

    @rule(attached=st.booleans())
    def storage(self, attached):
        tiers = self.world.scheduler.hicache
        if attached and self.shared is not None and tiers.io.storage().state == "detached":
            tiers.io.attach("file", {})
            tiers.offer_all()
        elif not attached:
            tiers.detach()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.tiers.eager = True
        for _ in range(3000):
            world.now[0] += 0.05
            world.step()
            if world.scheduler.idle and not world.port.inbox and not world.scheduler.hicache.busy:
                break
        else:
            raise AssertionError(f"it does not come to rest: {world.scheduler.admission.describe()}")
        world.finish()
        from ceiba.cache.ledger import assert_ledger, read_host_ledger

        assert_ledger(world.scheduler.leases, idle=True)
        host = read_host_ledger(world.scheduler.leases.cache)
        assert (host.locked, host.in_flight) == (0, 0)
        for rid in world.asked:
            answer = world.answer(rid)
            if rid in self.aborted and answer.finish.kind == "abort":
                continue
            world.check(rid)
            usage = answer.usages[-1]
            assert sum(usage.cached_by_tier.values()) == usage.cached_tokens
        assert world.control("flush_cache").ok
        assert world.scheduler.leases.cache.host.free == world.scheduler.leases.cache.host.total


Tiers.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTiers = Tiers.TestCase


@pytest.mark.slow
def test_many_random_runs():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Tiers,
        settings=settings(
            max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


assert PAGE == 8
