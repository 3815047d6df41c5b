"""Sampled values on their way to the host: copies launched at once, waited for when the scheduler asks.

Knows device tensors and the step contract, never logits or models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ceiba.core.step import PromptLogprobs, StepOutput
from ceiba.runner.logprobs import Logprobs, PromptBlock
from ceiba.runner.sampler import FAULTS

Tensor = torch.Tensor


_NONE = torch.empty(0)


@dataclass(slots=True)
class DeviceValues:
    """What a step computed, still on the device."""

    step: int
    rows: np.ndarray
    tokens: Tensor = _NONE
    """int64 [S]"""
    faults: Tensor = _NONE
    """uint8 [S]"""
    packed: Tensor | None = None
    """int32 [2, S]: tokens and faults, where a kernel made them together; counts instead of the two"""
    logprobs: Logprobs | None = None
    logprob_segments: np.ndarray | None = None
    fixed_rows: dict[int, int] = field(default_factory=dict)
    """index in the log-probabilities -> row"""
    prompt: list[tuple[int, PromptBlock]] = field(default_factory=list)
    """(row, positions), in order of position within a row"""


class Copier:
    """Launches device-to-host copies; ``host`` returns the arrays once ``done`` has passed."""

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type == "cuda"
        self._event = torch.cuda.Event() if self._asynchronous else None

    def take(self, value: Tensor) -> Tensor:
        if not self._asynchronous:
            return value.cpu()
        target = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return target.copy_(value, non_blocking=True)

    def launched(self) -> None:
        if self._event is not None:
            self._event.record()

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class ReadyResult:
    """Values that are on the host already."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        return True

    def wait(self) -> StepOutput:
        return self._output


class PendingResult:
    """See ``core.step.StepResult``."""

    def __init__(self, values: DeviceValues, device: torch.device) -> None:
        self._values = values
        self._copier = copier = Copier(device)
        if values.packed is not None:
            self._tokens, self._faults = copier.take(values.packed)
        else:
            self._tokens, self._faults = copier.take(values.tokens), copier.take(values.faults)
        found = values.logprobs
        self._logprobs = None if found is None else _map_logprobs(found, copier)
        self._prompt = [(row, _map_block(block, copier)) for row, block in values.prompt]
        copier.launched()
        self._output: StepOutput | None = None

    def ready(self) -> bool:
        return self._copier.ready()

    def wait(self) -> StepOutput:
        if self._output is None:
            self._copier.wait()
            self._output = self._assemble()
        return self._output

    def _assemble(self) -> StepOutput:
        values, rows = self._values, self._values.rows
        count = len(rows)
        output = StepOutput(
            step=values.step,
            rows=rows,
            counts=np.ones(count, np.int32),
            tokens=self._tokens.numpy().astype(np.int32),
        )
        faults = self._faults.numpy()
        if faults.any():
            output.faults = {int(rows[index]): FAULTS[int(faults[index])] for index in np.flatnonzero(faults)}
        if self._logprobs is not None and values.logprob_segments is not None:
            self._add_logprobs(output, self._logprobs, values.logprob_segments, count)
        for row, block in self._prompt:
            piece = _prompt_piece(block)
            before = output.prompt_logprobs.get(row)
            output.prompt_logprobs[row] = piece if before is None else _join(before, piece)
        return output

    def _add_logprobs(self, output: StepOutput, found: Logprobs, segments: np.ndarray, count: int) -> None:
        output.logprobs = np.full(count, np.nan, np.float32)
        output.logprobs[segments] = found.values.numpy()
        if found.top_ids is not None and found.top_values is not None:
            top = found.top_ids.shape[1]
            output.top_ids = np.zeros((count, top), np.int32)
            output.top_values = np.full((count, top), np.nan, np.float32)
            output.top_ids[segments] = found.top_ids.numpy()
            output.top_values[segments] = found.top_values.numpy()
        for index, fixed in found.fixed.items():
            output.fixed_values[self._values.fixed_rows[index]] = fixed.numpy()[None]


def _optional(value: Tensor | None, copier: Copier) -> Tensor | None:
    return None if value is None else copier.take(value)


def _map_logprobs(found: Logprobs, copier: Copier) -> Logprobs:
    return Logprobs(
        copier.take(found.values),
        _optional(found.top_ids, copier),
        _optional(found.top_values, copier),
        {index: copier.take(value) for index, value in found.fixed.items()},
    )


def _map_block(block: PromptBlock, copier: Copier) -> PromptBlock:
    return PromptBlock(
        block.start,
        copier.take(block.values),
        _optional(block.top_ids, copier),
        _optional(block.top_values, copier),
        _optional(block.fixed, copier),
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
