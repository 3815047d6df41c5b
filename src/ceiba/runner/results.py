"""Sampled values as the scheduler takes them; from an accelerator they are on their way, tokens written by a kernel and
the rest copied at once, and waited for when the scheduler asks.

Knows device tensors and the step contract, never logits or models.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ceiba.core.step import PromptLogprobs, StepOutput
from ceiba.runner.logprobs import Logprobs, PromptBlock
from ceiba.runner.sampler import FAULTS

Tensor = torch.Tensor


_NONE = torch.empty(0)


@dataclass(slots=True)
class DeviceValues:
    """What a step computed, on the device or copied from there."""

    step: int
    rows: np.ndarray
    tokens: Tensor = _NONE
    """int64 [S]"""
    faults: Tensor = _NONE
    """uint8 [S]"""
    packed: Tensor | None = None
    """int32 [2, S], on the host: tokens and faults, where a kernel writes them there; counts instead of the two"""
    logprobs: Logprobs | None = None
    logprob_segments: np.ndarray | None = None
    fixed_rows: dict[int, int] = field(default_factory=dict)
    """index in the log-probabilities -> row"""
    prompt: list[tuple[int, PromptBlock]] = field(default_factory=list)
    """(row, positions), in order of position within a row"""


class ReadyResult:
    """Values that are on the host already."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        return True

    def wait(self) -> StepOutput:
        return self._output


class PendingResult:
    """See ``core.step.StepResult``: of values on an accelerator, of which what a kernel does not write to the host is
    copied here."""

    def __init__(self, values: DeviceValues) -> None:
        assert values.packed is not None  # a kernel writes tokens and faults where the host reads them
        self._copies = replace(
            values,
            logprobs=None if values.logprobs is None else _copy_logprobs(values.logprobs),
            prompt=[(row, _copy_block(block)) for row, block in values.prompt],
        )
        self._event = torch.cuda.Event()
        self._event.record()
        self._output: StepOutput | None = None

    def ready(self) -> bool:
        return self._event.query()

    def wait(self) -> StepOutput:
        if self._output is None:
            self._event.synchronize()
            self._output = output_of(self._copies)
        return self._output


def output_of(values: DeviceValues) -> StepOutput:
    """The step contract's form of values that lie on the host."""
    rows = values.rows
    tokens, faults = (values.tokens, values.faults) if values.packed is None else values.packed
    output = StepOutput(
        step=values.step, rows=rows, counts=np.ones(len(rows), np.int32), tokens=tokens.numpy().astype(np.int32)
    )
    wrong = faults.numpy()
    if np.count_nonzero(wrong):
        output.faults = {int(rows[index]): FAULTS[int(wrong[index])] for index in np.flatnonzero(wrong)}
    if values.logprobs is not None and values.logprob_segments is not None:
        _add_logprobs(output, values, values.logprobs, values.logprob_segments)
    for row, block in values.prompt:
        piece = _prompt_piece(block)
        before = output.prompt_logprobs.get(row)
        output.prompt_logprobs[row] = piece if before is None else _join(before, piece)
    return output


def _add_logprobs(output: StepOutput, values: DeviceValues, found: Logprobs, segments: np.ndarray) -> None:
    count = len(output.rows)
    output.logprobs = np.full(count, np.nan, np.float32)
    output.logprobs[segments] = found.values.numpy()
    if found.top_ids is not None and found.top_values is not None:
        top = found.top_ids.shape[1]
        output.top_ids = np.zeros((count, top), np.int32)
        output.top_values = np.full((count, top), np.nan, np.float32)
        output.top_ids[segments] = found.top_ids.numpy()
        output.top_values[segments] = found.top_values.numpy()
    for index, fixed in found.fixed.items():
        output.fixed_values[values.fixed_rows[index]] = fixed.numpy()[None]


def _copy(value: Tensor) -> Tensor:
    target = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return target.copy_(value, non_blocking=True)


def _copied(value: Tensor | None) -> Tensor | None:
    return None if value is None else _copy(value)


def _copy_logprobs(found: Logprobs) -> Logprobs:
    return Logprobs(
        _copy(found.values),
        _copied(found.top_ids),
        _copied(found.top_values),
        {index: _copy(value) for index, value in found.fixed.items()},
    )


def _copy_block(block: PromptBlock) -> PromptBlock:
    return PromptBlock(
        block.start, _copy(block.values), _copied(block.top_ids), _copied(block.top_values), _copied(block.fixed)
    )


def _prompt_piece(block: PromptBlock) -> PromptLogprobs:
    return PromptLogprobs(
        block.start,
        block.values.numpy(),
        None if block.top_ids is None else block.top_ids.numpy().astype(np.int32),
        None if block.top_values is None else block.top_values.numpy(),
        None if block.fixed is None else block.fixed.numpy(),
    )


def _join(first: PromptLogprobs, second: PromptLogprobs) -> PromptLogprobs:
    """Two consecutive pieces of one row as one."""

    def both(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
        return None if a is None or b is None else np.concatenate((a, b))

    return PromptLogprobs(
        first.start,
        np.concatenate((first.values, second.values)),
        both(first.top_ids, second.top_ids),
        both(first.top_values, second.top_values),
        both(first.fixed_values, second.fixed_values),
    )
