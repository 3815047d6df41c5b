"""A scheduler world (``scheduler_world``) whose cached KV may lie in a fake host pool and a fake storage."""

from __future__ import annotations

import numpy as np

from ceiba.config.records import HiCacheConfig, SchedulerConfig
from ceiba.core.step import RunnerInfo
from ceiba.core.tiers import TierInfo
from ceiba.scheduler.fake import FakeRunner
from ceiba.scheduler.fake_tiers import FakeTiers
from ceiba.scheduler.loop import Scheduler
from ceiba.scheduler.memory_port import MemoryPort
from ceiba.spec.fake import FakeDrafter
from support.scheduler_world import EOS, VOCAB, World, continued, make_world

PAGE = 8
"""Tokens of a storage page in these tests."""


class TierWorld(World):
    @property
    def tiers(self) -> FakeTiers:
        return self.scheduler.hicache.io

    def settle(self, rounds: int = 200) -> None:
        """Step until the tiers have nothing to do any more."""
        for _ in range(rounds):
            self.step()
            if not self.scheduler.hicache.busy:
                return
        raise AssertionError("the tiers do not come to rest")

    def serve(self, rid: str, prompt: list[int], **fields: object) -> dict[str, int]:
        """One request alone, checked; returns its cached tokens by tier."""
        self.ask(rid, prompt, **{"max_new_tokens": 2, "ignore_eos": True, **fields})
        self.finish()
        self.settle()
        self.check(rid)
        return self.answer(rid).usages[-1].cached_by_tier

    def finish(self, rounds: int = 5000) -> None:
        """As ``World.finish``; waiting for a transfer is no stall."""
        for _ in range(rounds):
            self.step()
            if self.scheduler.idle and not self.port.inbox:
                return
        raise AssertionError(f"{rounds} rounds were not enough: {self.scheduler.admission.describe()}")


def make_tier_world(
    *,
    pool: int = 100,
    host: int = 400,
    rows: int = 8,
    context: int = 80,
    page: int = 1,
    eager: bool = True,
    storage: dict | None = None,
    hicache: dict | None = None,
    always: bool = True,
    instant: bool = True,
    **config: object,
) -> TierWorld:
    """``hicache``: fields of ``HiCacheConfig``; ``storage``: a shared one, attached at once. ``always``: restore
    however little is cached. ``instant``: whether steps are known as soon as they are launched."""
    info = RunnerInfo(num_slots=pool, max_rows=rows, vocab_size=VOCAB, context_len=context, page_size=page, eos_ids=EOS)
    runner, port, now = FakeRunner(info, eager=instant), MemoryPort(), [0.0]
    settings = HiCacheConfig(host_tokens=host, storage_page=PAGE, **{"prefetch_threshold": PAGE, **(hicache or {})})
    tiers = FakeTiers(runner._kv, TierInfo(host, 1, PAGE), eager=eager, stored={} if storage is None else storage)
    if storage is not None:
        tiers.attach("file", {})
        tiers.poll_storage()
    scheduler_config = SchedulerConfig(
        **{"max_running_requests": rows, "page_size": page, "hicache": settings, **config}
    )
    drafter = FakeDrafter(continued, 0.8, VOCAB)
    scheduler = Scheduler(scheduler_config, runner, port, clock=lambda: now[0], tiers=tiers, drafter=drafter)
    if always:
        scheduler.hicache.cost.worth = lambda tokens: tokens > 0
    return TierWorld(scheduler, runner, port, now)


__all__ = ["PAGE", "TierWorld", "make_tier_world", "make_world", "np"]
