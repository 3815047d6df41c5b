"""Mixed chunks cut to a time: the rule on costs that are known, and the rule in the scheduler on a simulated device."""

from __future__ import annotations

import numpy as np
import pytest

from ceiba.config.records import SchedulerConfig
from ceiba.scheduler.fake import CostModel
from ceiba.scheduler.pacing import GRAIN, Pacer
from ceiba.scheduler.simulate import simulate
from ceiba.scheduler.traces import TraceRequest


def known(base: float, token: float, target: float = 0.03, clear: float = 0.2) -> Pacer:
    pacer = Pacer(target, clear)
    for _ in range(200):
        pacer.observe(0, 40, base)
        pacer.observe(1000, 40, base + 1000 * token)
    return pacer


def test_costs_are_those_of_the_steps():
    pacer = known(6e-3, 2e-5)
    assert pacer.base == pytest.approx(6e-3)
    assert pacer.token == pytest.approx(2e-5)
    for _ in range(200):
        pacer.observe(0, 40, 12e-3)
        pacer.observe(2000, 0, 2000 * 3e-5)
    assert pacer.base == pytest.approx(12e-3)
    assert pacer.token == pytest.approx(3e-5)


def test_a_chunk_fits_the_target_until_prompts_pile_up():
    pacer = known(6e-3, 2e-5)
    # 24 ms are left for prefill: 1,200 tokens, down to the grain.
    assert pacer.chunk(1000, 8192, 40) + 40 == 1240 // GRAIN * GRAIN
    assert pacer.chunk(1000, 700, 40) + 40 == 740 // GRAIN * GRAIN
    # 8,000 tokens take 160 ms of the 200, so the decode steps in them may take 40: 6 ms for each 1,200 tokens.
    assert pacer.chunk(8000, 8192, 40) + 40 == (6e-3 * 8000 / 0.04 + 40) // GRAIN * GRAIN
    assert pacer.chunk(10_000, 8192, 0) == 8192
    assert [pacer.chunk(n, 8192, 40) for n in range(0, 12_000, 500)] == sorted(
        pacer.chunk(n, 8192, 40) for n in range(0, 12_000, 500)
    )


def test_a_step_that_stalled_says_little():
    """A kernel compiled on the way: two seconds count as four steps of the kind."""
    pacer = known(6e-3, 2e-5)
    pacer.observe(1000, 40, 2.0)
    pacer.observe(0, 40, 2.0)
    assert pacer.token < 2e-5 * 1.5
    assert pacer.base == pytest.approx(6e-3 * 1.3)


def test_counting_the_waiting_may_stop_where_chunks_are_whole():
    for token in (1e-6, 1.3e-5, 2e-5):
        pacer = known(6e-3, token)
        assert pacer.chunk(pacer.most_waiting, 8192, 40) == pacer.chunk(10**9, 8192, 40) == 8192 - 40 % GRAIN
    assert Pacer(0.03, 0.2).most_waiting == 1


def test_steps_slower_than_the_target_still_prefill():
    """And may take twice as long: 50 ms are 2,500 tokens."""
    assert known(50e-3, 2e-5).chunk(100, 8192, 0) == 2500 // GRAIN * GRAIN
    assert known(50e-3, 1e-3).chunk(100, 8192, 100) == GRAIN


def test_unknown_costs_leave_the_chunk_whole():
    pacer = Pacer(0.03, 0.2)
    assert pacer.chunk(100, 8192, 4) == 8192
    pacer.observe(0, 4, 6e-3)
    assert pacer.chunk(100, 8192, 4) == 8192
    pacer.observe(10, 4, 7e-3)  # too few tokens to tell
    assert pacer.chunk(100, 8192, 4) == 8192


def test_tokens_come_evenly_while_prompts_trickle_in():
    """Sixteen prompts of 3,000 tokens, 150 ms apart, beside requests that decode: steps never take much longer than the
    target, where whole chunks take four times as long; everyone is served, in about the same time."""
    device = CostModel(step=4e-3, prefill_token=3e-5, decode_row=1e-5, context_token=0.0, host=1e-4, hidden=True)
    rng = np.random.default_rng(0)
    trace = [TraceRequest(0.0, rng.integers(0, 30000, 64).astype(np.int32), 400) for _ in range(8)]
    trace += [TraceRequest(0.3 + 0.15 * i, rng.integers(0, 30000, 3000).astype(np.int32), 20) for i in range(16)]
    longest, ends = {}, {}
    for target in (0.0, 0.02):
        config = SchedulerConfig(
            max_running_requests=64, max_total_tokens=100_000, chunked_prefill_size=8192,
            enable_mixed_chunk=True, mixed_chunk_target=target,
        )  # fmt: skip
        seen: list[float] = []
        original = CostModel.seconds

        def seconds(self, plan, seen=seen, original=original):
            found = original(self, plan)
            if plan.num_segments > plan.num_prefill:
                seen.append(found)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CostModel, "seconds", seconds)
            figures = simulate(trace, config, cost=device)
        assert figures["finished"] == len(trace)
        # The first prompts beside decodes come before the costs are known.
        longest[target], ends[target] = sorted(seen)[-2], figures["simulated_s"]
    assert longest[0.0] > 0.08
    assert longest[0.02] < 0.025
    assert ends[0.02] < 1.3 * ends[0.0]
