"""The fake runner must notice what a real device would silently compute wrong."""

from __future__ import annotations

import numpy as np
import pytest

from ceiba.core.sampling import SamplingParams
from ceiba.core.step import FUTURE, RowOpen, RunnerInfo, StepPlan
from ceiba.scheduler import fake
from ceiba.scheduler.fake import CostModel, FakeRunner, PlanError, SimClock
from support.scheduler_world import VOCAB, make_world, mix, prompt


def ints(*values):
    return np.array(values, np.int32)


def runner(**fields):
    return FakeRunner(RunnerInfo(num_slots=32, max_rows=4, vocab_size=VOCAB, context_len=32), **fields)


def opening(row, tokens, prefix=()):
    return RowOpen(
        row=row, tokens=ints(*tokens), prompt_len=len(tokens), prefix_slots=ints(*prefix),
        sampling=SamplingParams(), seed=0,
    )  # fmt: skip


def prefill(row, tokens, slots, start=0, **fields):
    return StepPlan(
        step=1, rows=ints(row), starts=ints(start), lengths=ints(len(tokens)), samples=np.array([True]),
        tokens=ints(*tokens), slots=ints(*slots), num_prefill=1, **fields,
    )  # fmt: skip


def decode(row, start, slot, token=FUTURE, **fields):
    return StepPlan(
        step=2, rows=ints(row), starts=ints(start), lengths=ints(1), samples=np.array([True]), tokens=ints(token),
        slots=ints(slot), num_prefill=0, **fields,
    )  # fmt: skip


def started():
    made = runner()
    made.sample(made.forward(prefill(0, [1, 2, 3], [5, 6, 7], opened=[opening(0, [1, 2, 3])])), None)
    return made


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (decode(0, 3, 6), "live rows read"),
        (decode(0, 2, 9), "continues at 2, but 3"),
        (decode(0, 3, 32), "outside the pool"),
        (decode(0, 3, 9, token=49), "not the one its row sampled last"),
        (decode(1, 3, 9), "not open"),
        (decode(0, 3, 9, closed=ints(0)), "not open"),
        (decode(0, 3, 9, closed=ints(2)), "was not open"),
        (decode(0, 3, 9, opened=[opening(0, [1])]), "continues at 3, but 0"),
        (prefill(1, [1, 2], [9, 9], opened=[opening(1, [1, 2])]), "appears twice"),
        (prefill(1, [1, 4], [8, 9], opened=[opening(1, [1, 2])]), "not the ones it was opened with"),
        (prefill(1, [4], [8], start=2, opened=[opening(1, [1, 9, 4], prefix=[5, 6])]), "other tokens' KV"),
        (prefill(1, [4], [8], start=1, opened=[opening(1, [4], prefix=[5])]), "none is left"),
    ],
)
def test_bad_plans_are_noticed(plan, message):
    with pytest.raises(PlanError, match=message):
        started().forward(plan)


def test_kv_overwritten_under_a_live_row_is_noticed():
    made = started()
    made._kv[6] += 1
    with pytest.raises(PlanError, match="position 1 of 4"):
        made.forward(decode(0, 3, 9))


def test_a_shared_prefix_continues_the_same_sequence():
    made = started()
    made.forward(prefill(1, [3, 4], [10, 11], start=2, opened=[opening(1, [1, 2, 3, 4], prefix=[5, 6])]))
    other = runner()
    other.forward(prefill(0, [1, 2, 3, 4], [0, 1, 2, 3], opened=[opening(0, [1, 2, 3, 4])]))
    assert made._kv[11] == other._kv[3]


def test_mix_agrees_with_plain_integers():
    values = np.array([0, 1, 2**63, 2**64 - 1, 123456789], np.uint64)
    assert fake.mix(values).tolist() == [mix(int(v)) for v in values]


def test_vectorised_and_strict_runners_agree():
    for overlap in (True, False):
        strict, loose = make_world(overlap=overlap), make_world(overlap=overlap)
        loose.runner.strict = False
        for world in (strict, loose):
            for i in range(6):
                world.ask(str(i), prompt(i, 9), max_new_tokens=30, logprob=None)
            world.finish()
        assert [strict.answer(str(i)).tokens for i in range(6)] == [loose.answer(str(i)).tokens for i in range(6)]


def test_simulated_time_passes_on_the_device_and_overlaps_the_host():
    clock = SimClock()
    made = runner(clock=clock, cost=CostModel(step=1.0, prefill_token=0.1, decode_row=0, context_token=0, host=0.01))
    first = made.sample(made.forward(prefill(0, [1, 2, 3], [5, 6, 7], opened=[opening(0, [1, 2, 3])])), None)
    assert not first.ready()
    second = made.sample(made.forward(decode(0, 3, 9)), None)
    first.wait()
    assert clock.now == pytest.approx(0.01 + 1.3)
    second.wait()
    assert clock.now == pytest.approx(0.01 + 1.3 + 1.0)


def test_a_step_with_prompts_costs_whole_tiles():
    cost = CostModel(step=0.0, prefill_token=1e-3, decode_row=0.0, context_token=0.0, tile=4)
    plan = prefill(0, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert cost.seconds(plan) == pytest.approx(8e-3)
    assert cost.seconds(decode(0, 3, 8)) == 0.0
