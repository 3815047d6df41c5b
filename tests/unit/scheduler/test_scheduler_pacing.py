"""Mixed chunks cut to a time: the rule on costs that are known, and the rule in the scheduler on a simulated device."""

from __future__ import annotations

import numpy as np
import pytest

from ceiba.config.records import SchedulerConfig
from ceiba.scheduler.costs import StepCosts
from ceiba.scheduler.fake import CostModel
from ceiba.scheduler.pacing import GRAIN, WHOLE, Chunk, Pacer
from ceiba.scheduler.simulate import simulate
from ceiba.scheduler.traces import TraceRequest
from support.scheduler_world import make_world, prompt


def known(base: float, token: float, target: float = 0.03) -> Pacer:
    costs = StepCosts()
    for _ in range(200):
        costs.observe(0, 40, base)
        costs.observe(4000, 40, base + 4000 * token)
    return Pacer(costs, target)


def beside(pacer: Pacer, waiting: int, most: int, decode: int) -> Chunk:
    pacer.see(0)
    pacer.see(waiting)
    return pacer.beside(most, decode)


def alone(pacer: Pacer, waiting: int, most: int) -> Chunk:
    pacer.see(0)
    pacer.see(waiting)
    return pacer.alone(most)


def test_costs_are_those_of_the_steps():
    costs = known(6e-3, 2e-5).costs
    assert costs.base == pytest.approx(6e-3)
    assert costs.token == pytest.approx(2e-5)
    assert costs.expected(500, 8) == pytest.approx(16e-3)
    assert costs.expected(500, 0) == pytest.approx(10e-3)
    for _ in range(200):
        costs.observe(0, 40, 12e-3)
        costs.observe(2000, 0, 2000 * 3e-5)
    assert costs.base == pytest.approx(12e-3)
    assert costs.token == pytest.approx(3e-5)


def test_a_chunk_fits_the_target_until_prompts_pile_up():
    pacer = known(6e-3, 2e-5)
    # 24 ms are left for prefill: 1,200 tokens, down to the grain.
    assert beside(pacer, 1000, 8192, 40).tokens + 40 == 1240 // GRAIN * GRAIN
    assert beside(pacer, 1000, 700, 40).tokens == 700
    # Two targets are 3,000 tokens; beyond, a quarter of what waits.
    assert pacer.pile == pytest.approx(3000, abs=1)
    assert beside(pacer, 20_000, 8192, 40).tokens + 40 == 5040 // GRAIN * GRAIN
    assert beside(pacer, 10**9, 8192, 0).tokens == 8192
    sizes = [beside(pacer, n, 8192, 40).tokens for n in range(0, 40_000, 500)]
    assert sizes == sorted(sizes)


def test_some_prompts_that_wait_are_computed_alone():
    pacer = known(6e-3, 2e-5)
    found = []
    for waiting in (0, 1000, 2990, 3010, 11_900, 1000, 12_100, 1000, 1, 0, 1000):
        pacer.see(waiting)
        found.append(pacer.piled_up)
    # Very many are computed so to the last.
    assert found == [False, False, False, True, True, False, True, True, True, False, False]
    # A step for each or two of them, none cut that a step can take.
    assert alone(pacer, 1000, 8192) == Chunk(pacer.pile, uncut=8192)  # a long one, while nobody else is there
    assert alone(pacer, 5000, 8192) == Chunk(pacer.pile, uncut=pacer.pile)
    assert alone(pacer, 20_000, 8192).uncut == 8192
    assert alone(pacer, 20_000, 8192).tokens == 5000
    assert alone(pacer, 10**9, 8192).tokens == 8192


def test_a_step_that_stalled_says_little():
    """A kernel compiled on the way: two seconds count as four steps of the kind."""
    costs = known(6e-3, 2e-5).costs
    costs.observe(1000, 40, 2.0)
    costs.observe(0, 40, 2.0)
    assert costs.token < 2e-5 * 1.5
    assert costs.base == pytest.approx(6e-3 * 1.3)


def test_steps_slower_than_the_target_still_prefill():
    """And may take twice as long: 50 ms are 2,500 tokens."""
    assert beside(known(50e-3, 2e-5), 100, 8192, 0).tokens == 2500 // GRAIN * GRAIN
    assert beside(known(50e-3, 1e-3), 100, 8192, 100).tokens == GRAIN


def test_small_prompts_tell_nothing_where_they_hide_behind_the_weights():
    costs = known(6e-3, 2e-5).costs
    for _ in range(100):
        costs.observe(100, 40, 6.2e-3)
        costs.observe(100, 0, 6e-3)
    assert costs.token == pytest.approx(2e-5)


def test_what_the_first_steps_took_to_compile_is_forgotten_at_once():
    costs = StepCosts()
    for seconds in (5.0, 6e-3, 6e-3):
        costs.observe(0, 8, seconds)
    assert costs.base == 6e-3
    for seconds in (3.0, 0.02, 0.02):
        costs.observe(1000, 0, seconds)
    assert costs.token == pytest.approx(2e-5)


def test_a_host_that_comes_late_changes_little():
    """The end of one step is seen 5 ms late, so that the next seems to take next to nothing."""
    costs = known(6e-3, 2e-5).costs
    costs.observe(0, 8, 11e-3)
    costs.observe(0, 8, 1e-3)
    assert costs.base == pytest.approx(6e-3, rel=0.02)


def test_unknown_costs_leave_the_chunk_whole():
    costs = StepCosts()
    pacer = Pacer(costs, 0.03)
    assert beside(pacer, 100, 8192, 4) == alone(pacer, 100, 8192) == Chunk(8192)
    costs.observe(0, 4, 6e-3)
    assert beside(pacer, 100, 8192, 4) == alone(pacer, 100, 8192) == Chunk(8192)
    assert not costs.expected(100, 4)
    costs.observe(10, 4, 7e-3)  # too few tokens to tell
    assert beside(pacer, 100, 8192, 4) == alone(pacer, 100, 8192) == Chunk(8192)


def test_a_prompt_little_longer_than_the_target_is_not_cut():
    pacer = known(6e-3, 2e-5)
    assert beside(pacer, 1000, 8192, 40).uncut == (WHOLE * 1200 + 40) // GRAIN * GRAIN - 40
    assert beside(pacer, 1000, 2000, 40).uncut == 2000
    assert beside(pacer, 50_000, 8192, 40) == Chunk(8192, uncut=8192)


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
    assert longest[0.02] < 0.038  # a prompt's part may take twice what the target leaves
    assert ends[0.02] < 1.3 * ends[0.0]


def steps_of(
    trace: list[TraceRequest], target: float, device: CostModel, pool: int = 400_000
) -> tuple[list[tuple[int, int]], dict]:
    """(prompt tokens, decoding rows) of every step under mixed chunks of ``target``, and the figures."""
    config = SchedulerConfig(
        max_running_requests=64, max_total_tokens=pool, chunked_prefill_size=8192, enable_mixed_chunk=True,
        mixed_chunk_target=target,
    )  # fmt: skip
    steps: list[tuple[int, int]] = []
    original = CostModel.seconds

    def seconds(self, plan):
        decode = plan.num_segments - plan.num_prefill
        steps.append((plan.num_tokens - decode, decode))
        return original(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostModel, "seconds", seconds)
        figures = simulate(trace, config, cost=device)
    assert figures["finished"] == len(trace)
    return steps, figures


DEVICE = CostModel(step=4e-3, prefill_token=2e-5, decode_row=1e-5, context_token=0.0, host=1e-4, hidden=True)
RNG = np.random.default_rng(1)


def ids(length: int) -> np.ndarray:
    return RNG.integers(0, 30000, length).astype(np.int32)


def test_running_requests_wait_for_four_steps_of_prompts_at_most():
    """Prompts that come twenty at a time beside requests that decode: some steps are of prompts alone, but never five
    in a row; and a prompt that a step can take is never cut."""
    trace = [TraceRequest(0.0, ids(64), 2000) for _ in range(4)]
    trace += [TraceRequest(1.0 + 0.6 * (i // 20), ids(900), 10) for i in range(60)]
    steps, _ = steps_of(trace, 0.02, DEVICE)
    later = steps[steps.index(next(s for s in steps if s[1] == 4 and not s[0])) :]
    kinds = "".join("m" if p and d else "p" if p else "d" for p, d in later)
    assert "pppp" in kinds
    assert "ppppp" not in kinds
    assert {p % 900 for p, d in later if p} == {0}


def test_a_long_prompt_alone_is_no_pile():
    """20,000 tokens beside requests that decode, nobody else waiting: every step decodes, and takes twice the target at
    most."""
    trace = [TraceRequest(0.0, ids(64), 600) for _ in range(4)]
    trace += [TraceRequest(0.3, ids(900), 4), TraceRequest(0.6, ids(20_000), 4)]
    steps, _ = steps_of(trace, 0.02, DEVICE)
    long = [(p, d) for p, d in steps if p and d >= 4][1:]
    assert sum(p for p, _ in long) >= 20_000
    assert max(p for p, _ in long) <= 1.2 * 2 * (0.02 - 0.004) / 2e-5  # costs are measured, weights partly hidden


def test_long_prompts_that_pile_up_are_computed_in_whole_chunks():
    """Where decoding requests would otherwise make chunks odd, which are slower on the device."""
    trace = [TraceRequest(0.0, ids(900), 300)]
    trace += [TraceRequest(0.5, ids(16_384), 30) for _ in range(16)]
    steps, _ = steps_of(trace, 0.02, DEVICE)
    large = [(p, d) for p, d in steps if p > 1000]
    assert {p for p, _ in large} == {8192}
    assert len(large) == 32
    assert sum(d > 0 for _, d in large) == 6  # one in five, whose rows come on top of the chunk


def test_cached_prompts_make_no_pile():
    """Thirty questions behind one manual: what they have in common is not counted, so every step decodes."""
    manual = ids(6000)
    trace = [TraceRequest(0.0, ids(64), 400) for _ in range(4)]
    trace += [TraceRequest(0.2, manual, 2)]
    trace += [TraceRequest(1.0, np.concatenate([manual, ids(20)]), 4) for _ in range(30)]
    steps, figures = steps_of(trace, 0.02, DEVICE)
    assert figures["cached_tokens"] >= 30 * 6000
    assert [(p, d) for p, d in steps if p == 600] == [(600, 4)]


def test_who_cannot_be_admitted_is_no_pile():
    """A prompt that fills the pool is computed beside requests that decode, and twenty more that find no room wait:
    every step decodes. Nor are requests that wait for their twin's prefill a pile."""
    running = [TraceRequest(0.0, ids(64), 400) for _ in range(4)]
    warm = TraceRequest(0.3, ids(3000), 2)
    blocked = [TraceRequest(0.6 + 1e-3 * i, ids(30_000), 4) for i in range(20)]
    manual = ids(30_000)
    twins = [TraceRequest(0.6 + 1e-3 * i, np.concatenate([manual, ids(10)]), 4) for i in range(20)]
    for trace, pool in (([*running, warm, *blocked], 36_000), ([*running, warm, *twins], 400_000)):
        steps, _ = steps_of(trace, 0.02, DEVICE, pool)
        beside = [d for p, d in steps if p > 1000][4:15]  # the first costs; and that twins are such, once one has begun
        assert len(beside) > 10
        assert min(beside) > 0


def test_a_batch_no_larger_than_a_chunk_leaves_prefill_its_share():
    """Where decoding rows would fill the most that a batch may have, a quarter is the prompt's."""
    config = {"enable_mixed_chunk": True, "mixed_chunk_target": 0.027, "chunked_prefill_size": 64}
    world = make_world(rows=48, pool=9000, context=200, max_prefill_tokens=32, **config)
    for i in range(40):
        world.ask(str(i), prompt(i, 3), max_new_tokens=150, ignore_eos=True)
    world.step(50)
    assert world.scheduler.rows.num_used == 40
    world.ask("new", prompt(50, 30), max_new_tokens=2, ignore_eos=True)
    world.step(8)
    assert world.answer("new").finish is not None
    world.finish()


def test_short_prompts_keep_their_share_beside_a_long_one():
    config = {"enable_mixed_chunk": True, "mixed_chunk_target": 0.02, "chunked_prefill_size": 400}
    world = make_world(rows=8, pool=9000, context=4000, policy="shortest-prefill-first", **config)
    pacer = world.scheduler.admission.pacer
    pacer.costs = known(6e-3, 2e-4).costs  # 70 tokens fit the target
    world.ask("run", prompt(1, 10), max_new_tokens=150, ignore_eos=True)
    world.step(3)
    world.ask("long", prompt(2, 3000), max_new_tokens=2, ignore_eos=True)
    world.step(3)
    world.ask("short", prompt(3, 12), max_new_tokens=1, ignore_eos=True)
    world.step(4)
    assert world.answer("short").finish is not None
    assert "long" not in world.port.answers or world.answer("long").finish is None
    world.finish()


def test_no_step_takes_more_than_a_chunk_where_short_prompts_keep_a_share():
    config = {"enable_mixed_chunk": True, "mixed_chunk_target": 0.02, "chunked_prefill_size": 400}
    world = make_world(
        rows=30, pool=40_000, context=4000, policy="shortest-prefill-first", max_prefill_tokens=400, **config
    )
    world.scheduler.admission.pacer.costs = known(6e-3, 2e-4).costs
    sizes = []
    original = world.runner.forward
    world.runner.forward = lambda plan: (sizes.append(plan.num_tokens), original(plan))[1]
    world.ask("run", prompt(1, 10), max_new_tokens=60, ignore_eos=True)
    world.step(3)
    for i in range(6):
        world.ask(f"long {i}", prompt(i, 3000), max_new_tokens=2, ignore_eos=True)
    world.step(2)
    for i in range(20):
        world.ask(f"short {i}", prompt(100 + i, 60), max_new_tokens=2, ignore_eos=True)
    world.finish()
    assert max(sizes) <= 400


def test_a_few_tokens_beside_a_long_prompt_are_no_pile():
    """Every step decodes while a long prompt is computed, whether or not short ones come in."""
    trace = [TraceRequest(0.0, ids(64), 800) for _ in range(4)]
    trace += [TraceRequest(0.3, ids(3000), 4), TraceRequest(0.6, ids(30_000), 4)]
    trace += [TraceRequest(0.7 + 0.05 * i, ids(20), 2) for i in range(5)]
    steps, _ = steps_of(trace, 0.02, DEVICE)
    long = [d for p, d in steps if p > 1000][4:]
    assert len(long) > 12
    assert min(long) >= 4


def test_prompts_whose_cached_part_would_have_to_stay_find_no_room():
    """Their prefix may be evicted until they hold it, so it takes room as well: no pile while a prompt goes on."""
    manual = ids(9000)
    trace = [TraceRequest(0.0, manual, 2)]
    trace += [TraceRequest(0.5, ids(64), 600) for _ in range(4)]
    trace += [TraceRequest(1.0, ids(16_000), 4)]
    trace += [TraceRequest(1.01 + 1e-3 * i, np.concatenate([manual, ids(10_000)]), 4) for i in range(8)]
    steps, _ = steps_of(trace, 0.02, DEVICE, 36_000)
    long = [d for p, d in steps if p > 1000][1:11]  # behind the manual, until the long prompt is computed
    assert min(long) >= 4
