"""A runner without a model: it computes a deterministic token from the tokens so far, and checks every plan.

Owns a shadow KV pool that keeps, per slot, a hash of all tokens up to that position. A wrong slot, a wrong prefix or a
slot reused too early changes the hash, so it shows as a wrong token, and with ``strict`` as an error at once. With a
``SimClock`` it also tells how long the device would have taken. Tests and ``ceiba simulate`` drive the real scheduler
with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ceiba.core.sampling import LogprobSpec
from ceiba.core.step import (
    FUTURE,
    Int32,
    PromptLogprobs,
    RowOpen,
    RunnerInfo,
    StepHandle,
    StepOutput,
    StepPlan,
    TokenMasks,
)
from ceiba.spec.verify import verify

MULTIPLIER = 6364136223846793005
"""Knuth's multiplier (MMIX): position p weighs its token with the p-th power, modulo 2**64."""


class PlanError(AssertionError):
    """A plan that no runner may be given."""


def mix(h: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer over uint64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return h ^ (h >> np.uint64(31))


def logprob(h: np.ndarray, token: np.ndarray | int) -> np.ndarray:
    """The made-up log-probability of ``token`` after the context ``h``: in (-10, 0], float32."""
    with np.errstate(over="ignore"):
        context = h + np.asarray(token).astype(np.uint64)
    return -((mix(context) % np.uint64(10000)).astype(np.float32)) / 1000


@dataclass(slots=True)
class CostModel:
    """Seconds a device takes, linear in what a step does. The defaults resemble an 8B model on one large GPU."""

    step: float = 4e-3
    """Reading the weights."""
    prefill_token: float = 3.3e-5
    decode_row: float = 1e-5
    context_token: float = 3.5e-8
    """Reading the KV of one token."""
    host: float = 4e-4
    """The host's own work per step."""
    hidden: bool = False
    """Whether the weights are read while the products of prompt tokens are computed, as far as those take."""
    tile: int = 1
    """Products of a step with prompt tokens cost what a multiple of so many tokens does, decoding ones among them."""

    def seconds(self, plan: StepPlan) -> float:
        decode = plan.num_segments - plan.num_prefill
        context = int((plan.starts + plan.lengths).sum())
        prefill = plan.num_tokens - decode
        if prefill and self.tile > 1:
            prefill = -(-plan.num_tokens // self.tile) * self.tile
        products = self.prefill_token * prefill
        return (
            (max(self.step, products) if self.hidden else self.step + products)
            + self.decode_row * decode
            + self.context_token * context
        )


class SimClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, when: float) -> None:
        self.now = max(self.now, when)


@dataclass(slots=True)
class FakeHandle:
    plan: StepPlan
    prompt_logprobs: dict[int, PromptLogprobs]
    done_at: float


@dataclass(slots=True)
class FakeResult:
    output: StepOutput
    done_at: float
    clock: SimClock | None
    eager: bool

    def ready(self) -> bool:
        return self.eager if self.clock is None else self.clock.now >= self.done_at

    def wait(self) -> StepOutput:
        if self.clock is not None:
            self.clock.advance_to(self.done_at)
        return self.output


@dataclass(slots=True)
class _Row:
    opened: RowOpen
    chain: np.ndarray
    """uint64: expected hash at each launched position (strict only)."""
    produced: int


@dataclass
class FakeRunner:
    """``eager``: results are ready at once, as on a device that computes inside ``forward``."""

    info: RunnerInfo
    clock: SimClock | None = None
    cost: CostModel = field(default_factory=CostModel)
    strict: bool = True
    eager: bool = False
    fault_rows: dict[int, str] = field(default_factory=dict)
    """row -> message: the next step that samples this row reports a fault for it."""

    def __post_init__(self) -> None:
        info = self.info
        width = info.context_len + info.page_size
        self._powers = np.concatenate(
            [np.ones(1, np.uint64), np.cumprod(np.full(width, MULTIPLIER, np.uint64), dtype=np.uint64)]
        )
        self._kv = np.zeros(info.num_slots, np.uint64)
        self._table = np.zeros((info.max_rows, width), np.int32)
        self._length = np.zeros(info.max_rows, np.int32)
        self._last = np.full(info.max_rows, FUTURE, np.int32)
        self._rows: dict[int, _Row] = {}
        self._special: set[int] = set()
        self._users = np.zeros(info.num_slots, np.int32)
        """Live rows that read each slot."""
        self._free_at = 0.0
        self.busy_seconds = 0.0
        self._counters = {"forwards": 0.0, "tokens": 0.0, "padded": 0.0}
        self.closed = False

    def forward(self, plan: StepPlan) -> FakeHandle:
        self._check_shape(plan)
        for row in plan.closed.tolist():
            self._close(row)
        for opened in plan.opened:
            self._open(opened)
        logprobs: dict[int, PromptLogprobs] = {}
        at = 0
        for i in range(plan.num_prefill):
            length = int(plan.lengths[i])
            self._prefill(plan, i, at, logprobs)
            at += length
        self._decode(plan, at)
        self._counters["forwards"] += 1
        self._counters["tokens"] += plan.num_tokens
        return FakeHandle(plan, logprobs, self._occupy(plan))

    def sample(self, handle: StepHandle, masks: TokenMasks | None) -> FakeResult:
        assert isinstance(handle, FakeHandle)
        plan = handle.plan
        rows = plan.rows[plan.samples]
        output = self._verify(plan, masks) if len(plan.drafts) else self._choose(plan, rows, masks, True)
        output.prompt_logprobs = handle.prompt_logprobs
        return FakeResult(output, handle.done_at, self.clock, self.eager)

    def _choose(self, plan: StepPlan, rows: Int32, masks: TokenMasks | None, first: bool) -> StepOutput:
        if not first:
            self._length[rows] += 1
        state = self._kv[self._table[rows, self._length[rows] - 1]]
        tokens = (mix(state) % np.uint64(self.info.vocab_size)).astype(np.int32)
        output = StepOutput(step=plan.step, rows=rows, counts=np.ones(len(rows), np.int32), tokens=tokens)
        if self._special or masks is not None:
            self._sample_special(output, state, masks, first)
        for row in [row for row in self.fault_rows if row in rows]:
            output.faults[row] = self.fault_rows.pop(row)
        if output.faults and not first:  # they stop before this draft
            sound = ~np.isin(rows, list(output.faults))
            self._length[rows[~sound]] -= 1
            rows, tokens = rows[sound], tokens[sound]
        self._last[rows] = tokens
        return output

    def _verify(self, plan: StepPlan, masks: TokenMasks | None) -> StepOutput:
        jumping = plan.rows[plan.jumps.start : plan.jumps.stop]
        ends = self._length[jumping]
        self._length[jumping] -= plan.drafts
        output = verify(plan, masks, lambda rows, lines, masks, first: self._choose(plan, rows, masks, first))
        if self.strict:
            for row, end in zip(jumping.tolist(), ends.tolist(), strict=True):
                kept = int(self._length[row])
                self._users[self._table[row, kept:end]] -= 1
                self._rows[row].chain = self._rows[row].chain[:kept]
        return output

    def stats(self) -> dict[str, float]:
        return dict(self._counters)

    def close(self) -> None:
        self.closed = True

    # ── rows ─────────────────────────────────────────────────────────────────

    def _close(self, row: int) -> None:
        if row not in self._rows:
            raise PlanError(f"row {row} is closed but was not open")
        if self.strict:
            self._users[self._table[row, : self._length[row]]] -= 1
        del self._rows[row]
        self._special.discard(row)

    def _open(self, opened: RowOpen) -> None:
        row, prefix = opened.row, opened.prefix_slots
        if row in self._rows:
            raise PlanError(f"row {row} is opened twice")
        n = len(prefix)
        if n >= len(opened.tokens):
            raise PlanError(f"row {row}: the cache serves {n} of {len(opened.tokens)} tokens, none is left to compute")
        chain = np.empty(0, np.uint64)
        if self.strict:
            chain = np.cumsum((opened.tokens.astype(np.uint64) + np.uint64(1)) * self._powers[: len(opened.tokens)])
            if not np.array_equal(self._kv[prefix], chain[:n]):
                raise PlanError(f"row {row}: the cached prefix of {n} tokens holds other tokens' KV")
            chain = chain[:n]
            self._users[prefix] += 1
        self._rows[row] = _Row(opened, chain, len(opened.tokens) - opened.prompt_len)
        if opened.sampling.min_new_tokens or opened.logprob.wanted:
            self._special.add(row)
        self._table[row, :n] = prefix
        self._length[row] = n
        self._last[row] = FUTURE

    def _prefill(self, plan: StepPlan, i: int, at: int, logprobs: dict[int, PromptLogprobs]) -> None:
        row, start, length = int(plan.rows[i]), int(plan.starts[i]), int(plan.lengths[i])
        tokens, slots = plan.tokens[at : at + length], plan.slots[at : at + length]
        known = self._rows[row].opened
        if i in plan.jumps:
            if tokens[0] != self._last[row] or self._last[row] == FUTURE:
                raise PlanError(f"row {row} jumps from token {tokens[0]}, and sampled {self._last[row]} last")
            self._rows[row].produced += length - 1 - self._drafts(plan, i)
        elif not np.array_equal(tokens, known.tokens[start : start + length]):
            raise PlanError(
                f"row {row}: prefill tokens [{start}, {start + length}) are not the ones it was opened with"
            )
        before = self._kv[self._table[row, start - 1]] if start else np.uint64(0)
        weighed = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[start : start + length]
        states = np.cumsum(weighed, dtype=np.uint64) + before
        self._write(np.array([row], np.int32), start, length, slots, states)
        if known.logprob.prompt_start >= 0:
            self._prompt_logprobs(row, start, length, before, states, logprobs)

    @staticmethod
    def _drafts(plan: StepPlan, i: int) -> int:
        return int(plan.drafts[i - plan.jumps.start]) if len(plan.drafts) else 0

    def _decode(self, plan: StepPlan, at: int) -> None:
        rows, starts = plan.rows[plan.num_prefill :], plan.starts[plan.num_prefill :]
        if not len(rows):
            return
        tokens, slots = plan.tokens[at:], plan.slots[at:]
        future = tokens == FUTURE
        last = self._last[rows]
        if (last[future] == FUTURE).any() or (last[~future] != tokens[~future]).any():
            raise PlanError("a decode segment's token is not the one its row sampled last")
        before = self._kv[self._table[rows, starts - 1]]
        states = before + (last.astype(np.uint64) + np.uint64(1)) * self._powers[starts]
        if not self.strict:
            self._kv[slots] = states
            self._table[rows, starts] = slots
            self._length[rows] = starts + 1
            return
        for i, row in enumerate(rows.tolist()):
            self._write(rows[i : i + 1], int(starts[i]), 1, slots[i : i + 1], states[i : i + 1])
            assert row in self._rows

    def _write(self, rows: Int32, start: int, length: int, slots: Int32, states: np.ndarray) -> None:
        row = int(rows[0])
        if self.strict:
            if self._users[slots].any():
                taken = slots[self._users[slots] > 0]
                raise PlanError(f"row {row} writes to slots {taken[:8].tolist()} that live rows read")
            self._users[slots] += 1
        self._kv[slots] = states
        self._table[row, start : start + length] = slots
        self._length[row] = start + length
        if self.strict:
            entry = self._rows[row]
            entry.chain = np.concatenate([entry.chain, states])
            held = self._kv[self._table[row, : start + length]]
            if not np.array_equal(held, entry.chain):
                bad = int(np.flatnonzero(held != entry.chain)[0])
                raise PlanError(f"row {row}: position {bad} of {start + length} no longer holds its own KV")

    def _check_shape(self, plan: StepPlan) -> None:
        lengths = plan.lengths
        if int(lengths.sum()) != len(plan.tokens) or len(plan.tokens) != len(plan.slots) or not len(lengths):
            raise PlanError(f"{len(lengths)} segments of {int(lengths.sum())} tokens, {len(plan.slots)} slots")
        jumps = slice(plan.num_prefill - plan.num_jumps, plan.num_prefill)
        if plan.num_jumps > plan.num_prefill or (lengths[jumps] < 2).any() or not plan.samples[jumps].all():
            raise PlanError("a jump is shorter than two tokens or samples none")
        if len(plan.drafts) and (
            len(plan.drafts) != plan.num_jumps or (plan.drafts < 0).any() or (plan.drafts >= lengths[jumps]).any()
        ):
            raise PlanError("drafts do not fit their segments")
        if (lengths <= 0).any() or (lengths[plan.num_prefill :] != 1).any():
            raise PlanError("a segment is empty or a decode segment is longer than one token")
        if not self.strict:
            return
        for name in ("rows", "starts", "lengths", "tokens", "slots", "closed"):
            if getattr(plan, name).dtype != np.int32:
                raise PlanError(f"{name} is {getattr(plan, name).dtype}, not int32")
        if len(np.unique(plan.rows)) != len(plan.rows) or len(np.unique(plan.slots)) != len(plan.slots):
            raise PlanError("a row or a slot appears twice in one plan")
        if plan.slots.min() < 0 or plan.slots.max() >= self.info.num_slots:
            raise PlanError("a slot lies outside the pool")
        opened = {entry.row: len(entry.prefix_slots) for entry in plan.opened}
        closed = set(plan.closed.tolist())
        for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True):
            if row not in opened and (row in closed or row not in self._rows):
                raise PlanError(f"row {row} computes but is not open")
            expected = opened.get(row, int(self._length[row]))
            if start != expected:
                raise PlanError(f"row {row} continues at {start}, but {expected} positions are computed")

    # ── values ───────────────────────────────────────────────────────────────

    def _sample_special(self, output: StepOutput, state: np.ndarray, masks: TokenMasks | None, first: bool) -> None:
        allowed = {} if masks is None else dict(zip(masks.rows.tolist(), masks.bits, strict=True))
        specs: dict[int, LogprobSpec] = {}
        for i, row in enumerate(output.rows.tolist()):
            if row not in self._special and row not in allowed:
                continue
            entry = self._rows[row]
            held = set(entry.opened.eos_ids) if entry.produced < entry.opened.sampling.min_new_tokens else set()
            entry.produced += 1
            token = int(output.tokens[i])
            for _ in range(self.info.vocab_size):
                bits = allowed.get(row)
                if token not in held and (bits is None or (int(bits[token // 32]) >> (token % 32)) & 1):
                    break
                token = (token + 1) % self.info.vocab_size
            else:
                output.faults[row] = "no token is allowed"
                entry.produced -= not first
            output.tokens[i] = token
            if entry.opened.logprob.output:
                specs[i] = entry.opened.logprob
        if specs:
            self._output_logprobs(output, state, specs)

    def _output_logprobs(self, output: StepOutput, state: np.ndarray, specs: dict[int, LogprobSpec]) -> None:
        n, top = len(output.rows), max(spec.top for spec in specs.values())
        output.logprobs = np.full(n, np.nan, np.float32)
        output.top_ids = np.zeros((n, top), np.int32)
        output.top_values = np.zeros((n, top), np.float32)
        for i, spec in specs.items():
            output.logprobs[i] = logprob(state[i], int(output.tokens[i]))
            ids = (int(output.tokens[i]) + np.arange(top)) % self.info.vocab_size
            output.top_ids[i] = ids
            output.top_values[i] = logprob(state[i], ids)
            if spec.token_ids:
                output.fixed_values[int(output.rows[i])] = logprob(state[i], np.array(spec.token_ids))[None, :]

    def _prompt_logprobs(
        self,
        row: int,
        start: int,
        length: int,
        before: np.uint64,
        states: np.ndarray,
        found: dict[int, PromptLogprobs],
    ) -> None:
        opened = self._rows[row].opened
        wanted, end = opened.logprob.prompt_start, min(start + length + 1, opened.prompt_len)
        first = max(wanted, 0 if start == 0 else start + 1)
        if first >= end:
            return
        contexts = np.concatenate([[before], states])[first - start : end - start]  # hash up to position p - 1
        tokens = opened.tokens[first:end]
        values = logprob(contexts, tokens)
        if first == 0:
            values[0] = np.nan
        found[row] = PromptLogprobs(start=first, values=values)
        spec = opened.logprob
        if spec.top:
            ids = ((tokens[:, None] + np.arange(spec.top)) % self.info.vocab_size).astype(np.int32)
            found[row].top_ids = ids
            found[row].top_values = logprob(contexts[:, None], ids)
        if spec.token_ids:
            found[row].fixed_values = logprob(contexts[:, None], np.array(spec.token_ids)[None, :])

    def _occupy(self, plan: StepPlan) -> float:
        if self.clock is None:
            return 0.0
        self.clock.now += self.cost.host
        seconds = self.cost.seconds(plan)
        self._free_at = max(self._free_at, self.clock.now) + seconds
        self.busy_seconds += seconds
        return self._free_at
