"""Edges of a step: what is sampled behind, values that kernels packed, plans that the compiled kernels refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.step import RowOpen, StepPlan
from ceiba.kernels import cpu
from ceiba.runner.results import DeviceValues, output_of
from ceiba.runner.worker import ModelRunner
from plan_driver import GREEDY, make_config
from tiny_models import logits_of, reference

I32 = np.int32
KERNELS = pytest.mark.skipif(not cpu.available, reason="the compiled CPU kernels are not built")


def plan_of(tokens: list[int], slots: list[int], row: int = 0, start: int = 0, **fields: object) -> StepPlan:
    """A prefill of one row."""
    arrays = {"rows": [row], "starts": [start], "lengths": [len(tokens)], "tokens": tokens, "slots": slots}
    values = {name: np.array(value, I32) for name, value in arrays.items()}
    return StepPlan(step=0, samples=np.array([True]), num_prefill=1, **values, **fields)  # type: ignore[arg-type]


def test_selected_tokens() -> None:
    """The last of each sampled segment, and those before its drafts."""
    lengths = np.array([3, 4, 2, 1, 1], I32)
    plan = StepPlan(
        step=0,
        rows=np.arange(5, dtype=I32),
        starts=np.zeros(5, I32),
        lengths=lengths,
        samples=np.array([False, True, True, True, True]),
        tokens=np.zeros(11, I32),
        slots=np.zeros(11, I32),
        num_prefill=3,
        num_jumps=2,
    )
    assert plan.selected.tolist() == [6, 8, 9, 10]
    drafted = replace(plan, drafts=np.array([3, 0], I32))
    assert drafted.lanes.tolist() == [4, 1, 1, 1]
    assert drafted.selected.tolist() == [3, 4, 5, 6, 8, 9, 10]


def test_values_that_kernels_packed() -> None:
    packed = torch.tensor([[7, 0, 9], [0, 1, 0]], dtype=torch.int32)
    output = output_of(DeviceValues(4, np.array([2, 5, 3], I32), packed=packed))
    assert (output.step, output.rows.tolist(), output.counts.tolist()) == (4, [2, 5, 3], [1, 1, 1])
    assert (output.tokens.tolist(), output.tokens.dtype) == ([7, 0, 9], I32)
    assert list(output.faults) == [5]


@KERNELS
def test_a_refused_plan_costs_nothing(tmp_path: Path) -> None:
    model = reference("llama")
    model.save_pretrained(tmp_path)
    runner = ModelRunner(make_config(str(tmp_path)), open_checkpoint(str(tmp_path)))
    info = runner.info
    for tokens, slots, places, message in (
        ([1, 2], [0, 2 * info.num_slots], {}, "outside the pool"),
        ([1, 2], [0, -1], {}, "outside the pool"),
        ([1, info.vocab_size], [0, 1], {}, "outside the vocabulary"),
        ([1, 2, 3], [0, 1], {}, "one entry per token"),
        ([1], [0], {"row": info.max_rows + 1}, "row is out of range"),
        ([1, 2], [0, 1], {"start": info.context_len - 1}, "leaves the slot table"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.forward(plan_of(tokens, slots, **places))
    prompt = np.random.default_rng().integers(0, 320, 40).astype(I32)
    opened = RowOpen(0, prompt, len(prompt), np.empty(0, I32), GREEDY, 0)
    handle = runner.forward(plan_of(prompt.tolist(), list(range(40)), opened=[opened]))
    torch.testing.assert_close(handle.logits[0], logits_of(model, prompt.tolist())[-1], atol=2e-4, rtol=2e-4)
