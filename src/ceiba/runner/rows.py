"""What persists between steps, by row: slot table, last token, and how each row samples.

Device tensors are updated in place when rows open and when tokens are sampled. ``batch`` gathers what one step's
sampled rows need and keeps it while the same rows sample again, so a steady decode step gathers nothing. Knows rows,
never requests or logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.core.step import RowOpen, StepPlan
from ceiba.memory.zeros import lazy_zeros
from ceiba.runner.noise import signed_seed
from ceiba.runner.staging import Staging

Tensor = torch.Tensor


@dataclass(slots=True)
class Penalties:
    """Of P penalized segments of a step."""

    segments: Tensor
    """int64 [P]"""
    counts: Tensor
    """int64 [P]: lines of the count tables"""
    frequency: Tensor
    presence: Tensor
    repetition: Tensor
    """float32 [P, 1] each"""


@dataclass(slots=True)
class Draws:
    """Of N segments that sample with noise. Float columns are [N, 1], integer vectors [N]."""

    segments: Tensor | None
    """int64 [N]; None: all of the step's"""
    rows: Tensor
    seeds: Tensor
    temperature: Tensor
    top_p: Tensor | None
    """None where no row limits it; likewise below"""
    min_p: Tensor | None
    top_k: Tensor | None
    """int64 [N, 1]; the vocabulary's size where a row does not limit it"""


@dataclass(slots=True)
class DenseDraws:
    """How all S segments of a step choose, for a kernel that takes every row."""

    temperature: Tensor
    """float32 [S], 0 for greedy"""
    seeds: Tensor
    """int64 [S]"""
    limited: Tensor | None
    """int64 [R]: segments with a top-k, top-p or min-p; None where there are none"""
    limits: tuple[Tensor, Tensor, Tensor, Tensor]
    """Of those: temperature float32, top_k int32, top_p and min_p float32, [R] each"""


@dataclass(slots=True)
class SamplingBatch:
    """How the S sampled segments of a step sample; None for what no row asks for."""

    rows: np.ndarray
    rows_device: Tensor
    """int64 [S]; empty for a batch that is greedy and asks for nothing else"""
    draws: Draws | None = None
    dense: DenseDraws | None = None
    """In place of ``draws`` on an accelerator"""
    penalties: Penalties | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    """segments, ids, values of every biased token"""
    hold: tuple[Tensor, Tensor, Tensor] | None = None
    """segments, end ids, and the output position from which they are allowed"""
    logprob_segments: np.ndarray | None = None
    """int64 [L]: segments that want log-probabilities"""
    top: int = 0
    fixed: list[tuple[int, int, Tensor]] | None = None
    """(index into logprob_segments, row, int64 token ids)"""

    @property
    def edits(self) -> bool:
        """Whether logits change before the choice, grammar masks aside."""
        return self.penalties is not None or self.bias is not None or self.hold is not None


class CountTables:
    """Tokens seen by the penalized rows: a line of output counts and of seen flags each, allocated as needed."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """int32 [lines, vocab]: occurrences in the output"""
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        """bool [lines, vocab]: occurs in prompt or output"""
        self.line: dict[int, int] = {}
        self._free: list[int] = []

    def open(self, row: int, tokens: np.ndarray, prompt_len: int) -> None:
        if not self._free:
            self._grow()
        line = self.line[row] = self._free.pop()
        device = self.output.device
        known = torch.from_numpy(tokens.astype(np.int64)).to(device)
        output = known[prompt_len:]
        self.output[line].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self.seen[line].zero_().index_fill_(0, known, True)

    def close(self, row: int) -> None:
        line = self.line.pop(row, None)
        if line is not None:
            self._free.append(line)

    def add(self, lines: Tensor, tokens: Tensor) -> None:
        """One more output token of each line; lines and tokens int64 [P]. A line may come several times."""
        one = torch.ones_like(tokens, dtype=torch.int32)
        self.output.index_put_((lines, tokens), one, accumulate=True)
        self.seen.index_put_((lines, tokens), torch.ones_like(tokens, dtype=torch.bool))

    def _grow(self) -> None:
        old = len(self.output)
        extra = max(4, old)
        for name in ("output", "seen"):
            table = getattr(self, name)
            setattr(self, name, torch.cat((table, table.new_zeros(extra, self.vocab_size))))
        self._free.extend(range(old, old + extra))


class Rows:
    """Persistent state of rows [0, max_rows); row ``max_rows`` exists for the padding of graphs."""

    def __init__(self, max_rows: int, context_len: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows, self.vocab_size, self.device = max_rows, vocab_size, device
        size = max_rows + 1
        self.slot_table = lazy_zeros(size, context_len, dtype=torch.int32, device=device)
        """int32 [rows, context]: zero pages, so host memory is taken only as it is written"""
        self.last_token = torch.zeros(size, dtype=torch.int32, device=device)
        self.out_pos = torch.zeros(size, dtype=torch.int64, device=device)
        """Output tokens sampled so far."""
        self.counts = CountTables(vocab_size, device)
        self._sampling: list[SamplingParams] = [SamplingParams()] * size
        self._logprob: list[LogprobSpec] = [LogprobSpec()] * size
        self._eos: list[tuple[int, ...]] = [()] * size
        self._seed = np.zeros(size, np.int64)
        self._prompt: dict[int, np.ndarray] = {}
        self._special = np.zeros(size, bool)
        """Rows that need anything but greedy choice."""
        self._batch: SamplingBatch | None = None
        self._staging = None if device.type == "cpu" else Staging(1 << 14, device)

    def close(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.counts.close(row)
            self._prompt.pop(row, None)

    def open(self, opened: Sequence[RowOpen]) -> None:
        """Rows are taken: their known slots, their counts and parameters."""
        for one in opened:
            self._set(one)
        if self._staging is not None:
            if opened:
                self._send(opened, self._staging)
            return
        for one in opened:
            prefix = len(one.prefix_slots)
            if prefix:
                slots = torch.from_numpy(np.ascontiguousarray(one.prefix_slots, np.int32))
                self.slot_table[one.row, :prefix].copy_(slots)
            self.out_pos[one.row].fill_(len(one.tokens) - one.prompt_len)

    def _send(self, opened: Sequence[RowOpen], staging: Staging) -> None:
        """Slots and positions of all rows opened in a step, in one transfer and one launch."""
        from ceiba.kernels.triton.step import open_rows

        total = sum(len(one.prefix_slots) for one in opened)
        staging.begin(4 * len(opened) + total)
        heads, heads_device = staging.take(4 * len(opened))
        slots, slots_device = staging.take(total)
        at = 0
        for index, one in enumerate(opened):
            prefix = len(one.prefix_slots)
            heads[4 * index : 4 * index + 4] = (one.row, at, prefix, len(one.tokens) - one.prompt_len)
            slots[at : at + prefix] = one.prefix_slots
            at += prefix
        staging.send()
        open_rows(heads_device.view(-1, 4), slots_device, self.slot_table, self.out_pos)

    def _set(self, opened: RowOpen) -> None:
        row, sampling = opened.row, opened.sampling
        self._batch = None
        self.counts.close(row)
        self._prompt.pop(row, None)
        self._sampling[row], self._logprob[row], self._eos[row] = sampling, opened.logprob, opened.eos_ids
        self._seed[row] = signed_seed(opened.seed)
        held = bool(sampling.min_new_tokens > 0 and opened.eos_ids)
        self._special[row] = (
            not sampling.greedy or sampling.penalized or bool(sampling.logit_bias) or held or opened.logprob.wanted
        )
        if sampling.penalized:
            self.counts.open(row, opened.tokens, opened.prompt_len)
        if opened.logprob.prompt_start >= 0:
            self._prompt[row] = opened.tokens[: opened.prompt_len]

    def prompt(self, row: int) -> tuple[LogprobSpec, np.ndarray] | None:
        """The specification and the prompt of a row that wants prompt log-probabilities."""
        tokens = self._prompt.get(row)
        return None if tokens is None else (self._logprob[row], tokens)

    def sampled(self, batch: SamplingBatch, tokens: Tensor) -> None:
        """Record a step's tokens, int64 [S], where rows lie in host memory. Through numpy, whose calls cost less."""
        self.last_token.numpy()[batch.rows] = tokens.numpy()
        self.out_pos.numpy()[batch.rows] += 1
        if batch.penalties is not None:
            self.counts.add(batch.penalties.counts, tokens.index_select(0, batch.penalties.segments))

    def jump(self, plan: StepPlan) -> None:
        """Count the tokens of a plan's jumps that no row sampled as output."""
        first = plan.num_prefill - plan.num_jumps
        rows, lengths = plan.rows[first : plan.num_prefill], plan.lengths[first : plan.num_prefill]
        known = lengths - plan.drafts if len(plan.drafts) else lengths
        self.out_pos.index_add_(0, self._tensor(rows), self._tensor(known - 1))
        at = int(plan.lengths[:first].sum())
        for row, length, end in zip(rows.tolist(), lengths.tolist(), known.tolist(), strict=True):
            line = self.counts.line.get(row)
            if line is not None:
                tokens = self._tensor(plan.tokens[at + 1 : at + end])
                self.counts.add(torch.full_like(tokens, line), tokens)
            at += length

    def batch(self, rows: np.ndarray) -> SamplingBatch:
        """How these rows sample; the same object while the same rows come again and none has opened."""
        last = self._batch
        if last is not None and len(last.rows) == len(rows) and not np.count_nonzero(last.rows != rows):
            return last
        special = bool(self._special[rows].any())
        on_host = self._staging is None
        batch = SamplingBatch(rows.copy(), self._tensor(rows if special else rows[:0]))
        if special:
            params = [self._sampling[row] for row in rows.tolist()]
            if on_host:
                batch.draws = self._draws(batch, params)
            else:
                batch.dense = self._dense(rows, params)
            batch.penalties = self._penalties(rows, params)
            batch.bias = self._biases(params)
            batch.hold = self._held(rows, params)
            self._logprobs(batch)
        self._batch = batch
        return batch

    def _dense(self, rows: np.ndarray, params: list[SamplingParams]) -> DenseDraws | None:
        if all(p.greedy for p in params):
            return None
        vocab = self.vocab_size
        limited = [
            index
            for index, p in enumerate(params)
            if not p.greedy and (0 < p.top_k < vocab or p.top_p < 1 or p.min_p > 0)
        ]
        chosen = [params[index] for index in limited]
        return DenseDraws(
            temperature=self._floats([0.0 if p.greedy else p.temperature for p in params]),
            seeds=self._tensor(self._seed[rows]),
            limited=self._tensor(limited) if limited else None,
            limits=(
                self._floats([p.temperature for p in chosen]),
                self._tensor([p.top_k for p in chosen]).int(),
                self._floats([p.top_p for p in chosen]),
                self._floats([p.min_p for p in chosen]),
            ),
        )

    def _tensor(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return self.move(torch.as_tensor(np.asarray(values, dtype=np.int64)))

    def _floats(self, values: list[float]) -> Tensor:
        return self.move(torch.tensor(values, dtype=torch.float32))

    def _column(self, values: list[float]) -> Tensor:
        return self._floats(values).unsqueeze(1)

    def move(self, values: Tensor) -> Tensor:
        """To the device without waiting for it."""
        if self.device.type != "cuda":
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)

    def _draws(self, batch: SamplingBatch, params: list[SamplingParams]) -> Draws | None:
        noisy = [index for index, p in enumerate(params) if not p.greedy]
        if not noisy:
            return None
        chosen = [params[index] for index in noisy]
        vocab = self.vocab_size
        rows = batch.rows[noisy]
        whole = len(noisy) == len(params)
        limit_k = any(0 < p.top_k < vocab for p in chosen)
        return Draws(
            segments=None if whole else self._tensor(noisy),
            rows=batch.rows_device if whole else self._tensor(rows),
            seeds=self._tensor(self._seed[rows]),
            temperature=self._column([p.temperature for p in chosen]),
            top_p=self._column([p.top_p for p in chosen]) if any(p.top_p < 1 for p in chosen) else None,
            min_p=self._column([p.min_p for p in chosen]) if any(p.min_p > 0 for p in chosen) else None,
            top_k=self._tensor([p.top_k if p.top_k > 0 else vocab for p in chosen]).unsqueeze(1) if limit_k else None,
        )

    def _penalties(self, rows: np.ndarray, params: list[SamplingParams]) -> Penalties | None:
        wanted = [index for index, p in enumerate(params) if p.penalized]
        if not wanted:
            return None
        chosen = [params[index] for index in wanted]
        return Penalties(
            segments=self._tensor(wanted),
            counts=self._tensor([self.counts.line[int(rows[index])] for index in wanted]),
            frequency=self._column([p.frequency_penalty for p in chosen]),
            presence=self._column([p.presence_penalty for p in chosen]),
            repetition=self._column([p.repetition_penalty for p in chosen]),
        )

    def _biases(self, params: list[SamplingParams]) -> tuple[Tensor, Tensor, Tensor] | None:
        found = [
            (index, token, value)
            for index, p in enumerate(params)
            for token, value in p.logit_bias.items()
            if 0 <= token < self.vocab_size
        ]
        if not found:
            return None
        segments, tokens, values = zip(*found, strict=True)
        return self._tensor(segments), self._tensor(tokens), self._column(list(values)).squeeze(1)

    def _held(self, rows: np.ndarray, params: list[SamplingParams]) -> tuple[Tensor, Tensor, Tensor] | None:
        found = [
            (index, token, p.min_new_tokens)
            for index, p in enumerate(params)
            if p.min_new_tokens > 0
            for token in sorted(set(self._eos[int(rows[index])]))
            if 0 <= token < self.vocab_size
        ]
        if not found:
            return None
        segments, tokens, until = zip(*found, strict=True)
        return self._tensor(segments), self._tensor(tokens), self._tensor(until)

    def _logprobs(self, batch: SamplingBatch) -> None:
        specs = [self._logprob[row] for row in batch.rows.tolist()]
        wanted = [index for index, spec in enumerate(specs) if spec.output]
        if not wanted:
            return
        batch.logprob_segments = np.asarray(wanted, np.int64)
        batch.top = max(specs[index].top for index in wanted)
        batch.fixed = [
            (at, int(batch.rows[index]), self._tensor(specs[index].token_ids))
            for at, index in enumerate(wanted)
            if specs[index].token_ids
        ]
