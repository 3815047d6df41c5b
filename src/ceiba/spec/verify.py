"""Finds out how far each row's drafts were right, by sampling them one after the other as if there were none.

Owns the order of sampling and the putting together of the results; how tokens are chosen is the runner's. A draft is
right when it is the token that the row samples before it, with the row's own noise, penalties and masks: so an answer
with drafts is the answer without them, and nothing about distributions has to be argued.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ceiba.core.step import Int32, StepOutput, StepPlan, TokenMasks

Choose = Callable[[Int32, Int32, "TokenMasks | None", bool], StepOutput]
"""(rows [N], lines [N], masks, first) → their tokens. ``lines`` index what the step computed to sample from, one line a
lane in plan order. Records the tokens as the rows' output; unless it is their ``first`` in this step, not those of rows
at fault."""


def verify(plan: StepPlan, masks: TokenMasks | None, choose: Choose) -> StepOutput:
    """Sample every segment of ``plan``, behind as many of its drafts as prove right."""
    lanes = plan.lanes
    first = np.cumsum(lanes) - lanes
    rows = plan.rows[plan.samples]
    drafts = _drafts(plan, int(lanes.max()) - 1)
    active = np.arange(len(rows))
    members, outputs = [], []
    lane = 0
    while len(active):
        output = choose(rows[active], (first[active] + lane).astype(np.int32), _masks(masks, lane), lane == 0)
        at_fault = np.isin(output.rows, list(output.faults)) if output.faults else np.zeros(len(active), bool)
        members.append(active if not lane else active[~at_fault])
        outputs.append(output if not lane or not at_fault.any() else _without(output, at_fault))
        goes_on = (lane + 1 < lanes[active]) & ~at_fault
        if lane < drafts.shape[1]:
            goes_on &= output.tokens == drafts[active, lane]
        active = active[goes_on]
        lane += 1
    return _join(plan, rows, members, outputs)


def _drafts(plan: StepPlan, most: int) -> np.ndarray:
    """int32 [S, most]: each sampled segment's drafts, -1 where it has none."""
    found = np.full((plan.num_segments, most), -1, np.int32)
    ends = np.cumsum(plan.lengths)
    for index, count in zip(plan.jumps, plan.drafts.tolist(), strict=True):
        found[index, :count] = plan.tokens[ends[index] - count : ends[index]]
    return found[plan.samples]


def _masks(masks: TokenMasks | None, lane: int) -> TokenMasks | None:
    if masks is None or masks.lanes is None:
        return masks if lane == 0 else None
    at = masks.lanes == lane
    return TokenMasks(masks.rows[at], masks.bits[at]) if at.any() else None


def _without(output: StepOutput, left_out: np.ndarray) -> StepOutput:
    kept = ~left_out
    gone = set(output.rows[left_out].tolist())

    def part(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[kept]

    return StepOutput(
        step=output.step,
        rows=output.rows[kept],
        counts=output.counts[kept],
        tokens=output.tokens[kept],
        logprobs=part(output.logprobs),
        top_ids=part(output.top_ids),
        top_values=part(output.top_values),
        fixed_values={row: values for row, values in output.fixed_values.items() if row not in gone},
    )


def _join(plan: StepPlan, rows: Int32, members: list[np.ndarray], outputs: list[StepOutput]) -> StepOutput:
    """The lanes' outputs as one; ``members``: the sampled segments of each."""
    segments = np.concatenate(members)
    order = np.argsort(segments, kind="stable")
    joined = StepOutput(
        step=plan.step,
        rows=rows,
        counts=np.bincount(segments, minlength=len(rows)).astype(np.int32),
        tokens=np.concatenate([output.tokens for output in outputs])[order],
        faults=outputs[0].faults,
        prompt_logprobs=outputs[0].prompt_logprobs,
    )
    for name in ("logprobs", "top_ids", "top_values"):
        values = _stacked([getattr(output, name) for output in outputs], members)
        setattr(joined, name, None if values is None else values[order])
    for row in {row for output in outputs for row in output.fixed_values}:
        joined.fixed_values[row] = np.concatenate(
            [output.fixed_values[row] for output in outputs if row in output.fixed_values]
        )
    return joined


def _stacked(parts: list[np.ndarray | None], members: list[np.ndarray]) -> np.ndarray | None:
    """The lanes' values one below the other, as wide as the widest; where there are none NaN, or 0 of whole numbers."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    blank = np.nan if known[0].dtype.kind == "f" else 0
    total, width = sum(map(len, members)), max(part.shape[1:] for part in known)
    stacked = np.full((total, *width), blank, known[0].dtype)
    at = 0
    for part, segments in zip(parts, members, strict=True):
        if part is not None:
            stacked[(slice(at, at + len(segments)), *(slice(size) for size in part.shape[1:]))] = part
        at += len(segments)
    return stacked
