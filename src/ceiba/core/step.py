"""The step contract: what the scheduler asks of a runner, and what comes back. The seam between brain and muscle.

A request in the running batch owns a *row*, a small integer that indexes every persistent buffer of the runner (slot
table, last token, sampling state, penalty counts). A ``StepPlan`` carries row deltas and flat arrays, never request
objects, so a steady decode step costs the same however long its requests are. Values come back later: a ``StepResult``
is a handle, and a plan may name a token that is not known yet (``FUTURE``) because the device still computes it.

Array types are exact: ``int32`` numpy unless stated otherwise; B segments, T tokens, S sampled segments in a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ceiba.core.sampling import LogprobSpec, SamplingParams

FUTURE = -1
"""In ``StepPlan.tokens``: the token that this row sampled last, which only the device knows yet."""

Int32 = np.ndarray
"""Alias for readability: a contiguous int32 array."""


@dataclass(slots=True)
class RowOpen:
    """A request takes a row, at admission and again after a retraction."""

    row: int
    tokens: Int32
    """All known tokens: the prompt and, after a retraction, the output so far."""
    prompt_len: int
    """How many of ``tokens`` are prompt. Penalties count output only; noise is drawn by output position."""
    prefix_slots: Int32
    """KV slots of the positions that the cache already holds, [0, len(prefix_slots))."""
    sampling: SamplingParams
    seed: int
    """Never None here: the scheduler drew one if the request did not give one."""
    logprob: LogprobSpec = field(default_factory=LogprobSpec)
    eos_ids: tuple[int, ...] = ()
    """Every id that would end this row (model's and request's): held back until ``min_new_tokens``."""
    adapter: int = 0
    """LoRA slot, 0 for none."""


@dataclass(slots=True)
class PrefixGroup:
    """Decode segments whose first ``length`` KV slots are the same ones, so one read can serve all of them.

    Groups nest: a longer prefix's segments may be a subset of a shorter one's. ``segments`` index the plan's segments.
    """

    length: int
    segments: Int32


@dataclass(slots=True)
class StepPlan:
    """One forward pass over B segments: prefill segments first, then decode segments (one token each).

    The last ``num_jumps`` prefill segments are of rows that decode: each begins with the token that its row sampled
    last. Of the others some were forced by a grammar, output that was not sampled: they count for penalties and for the
    position of noise as if they were. The last ``drafts`` of them are guesses: the runner samples behind each, goes on
    while what it sampled is the next guess, and what it computed behind a wrong one was never there.

    Segment i computes positions [starts[i], starts[i] + lengths[i]) of row rows[i]; its tokens and the KV slots that
    receive them lie back to back in ``tokens`` and ``slots``. The runner appends the slots to the row's slot table, and
    writes none of the arrays.
    """

    step: int
    rows: Int32
    starts: Int32
    lengths: Int32
    samples: np.ndarray
    """bool [B]: whether the segment ends in a sampled token (not so for a chunk that is not the last)."""
    tokens: Int32
    slots: Int32
    num_prefill: int
    """How many of the B segments are prefill."""
    opened: list[RowOpen] = field(default_factory=list)
    closed: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """Rows that are free from this step on; a row in both lists is closed first."""
    positions: Int32 | None = None
    """[3, T] for mrope; None means starts + offset."""
    groups: list[PrefixGroup] = field(default_factory=list)
    num_jumps: int = 0
    drafts: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """[num_jumps]: how many of each jump's tokens are guesses; empty where none of the step's are."""

    @property
    def lanes(self) -> Int32:
        """[S]: behind how many of its last tokens each sampled segment is sampled."""
        lanes = np.ones(len(self.rows), np.int32)
        if len(self.drafts):
            lanes[self.num_prefill - self.num_jumps : self.num_prefill] += self.drafts
        return lanes[self.samples]

    @property
    def selected(self) -> Int32:
        """[sum of lanes]: the tokens behind which something is sampled, the last of each sampled segment and those
        before its drafts."""
        last = np.cumsum(self.lengths, dtype=np.int32)[self.samples] - 1
        if not len(self.drafts):
            return last
        lanes = self.lanes
        ends = np.cumsum(lanes, dtype=np.int32)
        return np.repeat(last - ends + 1, lanes) + np.arange(ends[-1], dtype=np.int32)

    @property
    def jumps(self) -> range:
        """Indices of the segments that jump."""
        return range(self.num_prefill - self.num_jumps, self.num_prefill)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_segments(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class TokenMasks:
    """Allowed tokens of the constrained rows. ``bits`` is int32 [M, ceil(vocab / 32)], bit t%32 of word t//32."""

    rows: Int32
    bits: Int32
    lanes: Int32 | None = None
    """[M]: behind how many of its drafts the row is sampled with these; None: behind none."""


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt positions [start, start + N) of one row, computed in this step."""

    start: int
    values: np.ndarray
    """float32 [N]; NaN at position 0."""
    top_ids: Int32 | None = None
    """[N, top]"""
    top_values: np.ndarray | None = None
    fixed_values: np.ndarray | None = None
    """[N, len(token_ids)]"""


@dataclass(slots=True)
class StepOutput:
    """Values of one step. Sampled segments appear in plan order; ``counts`` > 1 only with speculative decoding."""

    step: int
    rows: Int32
    """[S]"""
    counts: Int32
    """[S]: how many of ``tokens`` belong to each."""
    tokens: Int32
    """[sum(counts)]"""
    logprobs: np.ndarray | None = None
    """float32 [sum(counts)], present when any row wants them (NaN for rows that do not)."""
    top_ids: Int32 | None = None
    """[sum(counts), max top]"""
    top_values: np.ndarray | None = None
    fixed_values: dict[int, np.ndarray] = field(default_factory=dict)
    """row -> float32 [its count, len(token_ids)]"""
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    """row -> why this row alone failed (non-finite logits, empty mask). A fault behind a draft is none: the row stops
    before it, and its next step meets it again if that is where it goes."""


class StepHandle(Protocol):
    """A forward pass in flight whose tokens have not been sampled."""

    plan: StepPlan


class StepResult(Protocol):
    """Sampled values on their way."""

    def ready(self) -> bool:
        """Whether ``wait`` would return at once."""

    def wait(self) -> StepOutput:
        """Block until the values are on the host."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the scheduler must know of a runner, read once at start."""

    num_slots: int
    """KV slots the pool holds, numbered [0, num_slots)."""
    max_rows: int
    vocab_size: int
    context_len: int
    page_size: int = 1
    eos_ids: tuple[int, ...] = ()
    device: str = "cpu"
    available_memory: float = 0.0
    """Bytes left on the device after weights and pool."""


class Runner(Protocol):
    """Executes plans. Implementations: ``runner.worker.ModelRunner`` and, for tests and simulation, ``FakeRunner``."""

    info: RunnerInfo

    def forward(self, plan: StepPlan) -> StepHandle:
        """Launch the forward pass; returns without waiting for the device."""

    def sample(self, handle: StepHandle, masks: TokenMasks | None) -> StepResult:
        """Launch sampling for the segments that end in a token, and what brings the values to the host."""

    def stats(self) -> dict[str, float]:
        """Counters for metrics and /server_info: forwards, tokens, graph hits."""

    def close(self) -> None:
        """Release the device."""
