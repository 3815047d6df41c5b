"""Steps of a fused decoder on the CPU: one call of the compiled kernels from a plan to its logits.

A decode step of a small model takes a few milliseconds, so the arrays of a step go to the kernels as they come, and
tokens still to come, positions and the slot table are theirs to see to. Knows plans and rows; never a request.
"""

from __future__ import annotations

import numpy as np
import torch

from ceiba.core.step import StepPlan
from ceiba.kernels import cpu
from ceiba.models.fused import FusedDecoder
from ceiba.runner.rows import Rows

Tensor = torch.Tensor


class _Lines:
    """A float32 matrix that grows to the most lines ever asked for."""

    def __init__(self, width: int) -> None:
        self._data = torch.empty(0, width)

    def first(self, count: int) -> Tensor:
        """[count, width], overwritten by the next step."""
        if count > len(self._data):
            width = self._data.shape[1]
            self._data = torch.empty(0, width)  # let go before more is taken
            self._data = torch.empty(count, width)
        return self._data[:count]


class HostPath:
    """See the module. Holds the last step's hidden states and logits until the next."""

    def __init__(self, model: FusedDecoder, rows: Rows) -> None:
        self._model = model
        self._state = cpu._cpu.RowState(rows.slot_table.numpy(), rows.last_token.numpy())
        self._hidden, self._logits = _Lines(model.spec.hidden_size), _Lines(model.spec.vocab_size)

    def forward(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """(logits [sum of lanes, vocab], hidden states [T, hidden] before the final norm) of a plan, which the next one
        overwrites."""
        everything = plan.num_prefill == 0 and np.count_nonzero(plan.samples) == plan.num_segments
        select = None if everything else plan.selected
        hidden = self._hidden.first(plan.num_tokens)
        logits = self._logits.first(plan.num_tokens if select is None else len(select))
        self._model.step(self._state, plan, select, hidden.numpy(), logits.numpy())
        return logits, hidden
