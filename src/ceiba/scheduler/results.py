"""Applies the values of a step: appends tokens, commits KV, shares prefills through the cache, finds who has ended.

Owns the meaning of a result; a step that was planned before a row changed hands is recognised by the row's epoch and
its values are dropped (overlap's extra token, an abort in flight).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ceiba.cache.keys import Int32
from ceiba.core.messages import Finish
from ceiba.core.step import PromptLogprobs, StepOutput, StepPlan, StepResult
from ceiba.scheduler.admission import Admission
from ceiba.scheduler.drafts import Drafts
from ceiba.scheduler.grammar import broken
from ceiba.scheduler.output import Outbox
from ceiba.scheduler.request import Request


@dataclass(slots=True)
class Flight:
    """A launched step."""

    plan: StepPlan
    epochs: np.ndarray
    """int64 [B]: each segment's row epoch when the step was planned."""
    result: StepResult | None = None
    launched_at: float = 0.0

    @property
    def tokens(self) -> tuple[int, int]:
        """(prompt tokens, decoding rows) as a device computes them: where each segment is one token, all decode."""
        plan = self.plan
        if plan.num_tokens == plan.num_segments:
            return 0, plan.num_segments
        decode = plan.num_segments - plan.num_prefill
        return plan.num_tokens - decode, decode


MAX_JUMP = 64
"""Forced tokens that a row takes over at once: what a step computes stays small, and the rest follows at once."""

Ended = list[tuple[Request, Finish]]


def _where(kept: np.ndarray, *arrays: Int32) -> tuple[Int32, ...]:
    """The ``kept`` entries of each array: the arrays themselves where that is all of them."""
    if np.count_nonzero(kept) == len(kept):
        return arrays
    return tuple(array[kept] for array in arrays)


class Results:
    def __init__(
        self, admission: Admission, outbox: Outbox, eos_ids: tuple[int, ...], drafts: Drafts | None = None
    ) -> None:
        self.admission = admission
        self.rows = admission.rows
        self.leases = admission.leases
        self.counters = admission.counters
        self.outbox = outbox
        self.drafts = drafts
        self._eos = np.array(eos_ids, np.int32)

    def apply(self, flight: Flight, output: StepOutput) -> Ended:
        """Take over the values of ``flight``; returns the requests that end with it, still in their rows."""
        plan, rows = flight.plan, self.rows
        live = rows.epoch[plan.rows] == flight.epochs
        ended: Ended = []
        for row, why in output.faults.items():
            at = np.flatnonzero((plan.rows == row) & live)
            if len(at):  # not committed: what this step wrote for the row is as doubtful as its token
                live[at] = False
                ended.append((rows.request(row), Finish(kind="error", message=why, status=500)))
        every = np.count_nonzero(live) == len(live)
        ends = self._judged(plan, live, output) if len(plan.drafts) else plan.starts + plan.lengths
        self.leases.commit(plan.rows if every else plan.rows[live], ends if every else ends[live])
        for i in range(plan.num_prefill - plan.num_jumps):
            if live[i]:
                ended += self._prefilled(plan, i, output.prompt_logprobs.get(int(plan.rows[i])))
                if ended and ended[-1][0].row == plan.rows[i]:
                    live[i] = False
        ended += self._sampled(plan, live, output)
        return ended

    def _judged(self, plan: StepPlan, live: np.ndarray, output: StepOutput) -> Int32:
        """How far each segment's positions hold what its row really has, int32 [B]; the others are taken back."""
        ends = plan.starts + plan.lengths
        right = np.zeros(plan.num_segments, np.int32)
        right[plan.samples] = output.counts - 1
        for i, drafted in zip(plan.jumps, plan.drafts.tolist(), strict=True):
            if drafted and live[i]:
                ends[i] += right[i] - drafted
                self.leases.take_back(plan.rows[i : i + 1], ends[i : i + 1])
                if self.drafts is not None:
                    self.drafts.judge(int(plan.rows[i]), drafted, int(right[i]))
        return ends

    def _prefilled(self, plan: StepPlan, i: int, logprobs: PromptLogprobs | None) -> Ended:
        row = int(plan.rows[i])
        request = self.rows.request(row)
        if logprobs is not None and request.wants_prompt_logprobs:
            fault = self._add_prompt_logprobs(request, logprobs)
            if fault:
                return [(request, Finish(kind="error", message=fault, status=500))]
        self.leases.share(row, self.rows.key(row), request.priority)
        if request.pin and plan.starts[i] + plan.lengths[i] >= request.prompt_len > request.pinned_tokens:
            self.admission.pin(request, self.rows.key(row), request.prompt_len)
        complete = int(plan.starts[i] + plan.lengths[i]) == int(self.rows.known[row])
        if complete:
            self.admission.twins.settled(request)
        else:
            self.admission.twins.advanced(request)
        if complete and not plan.samples[i]:  # max_new_tokens 0: the prompt was all that was wanted
            return [(request, Finish(kind="length"))]
        return []

    def _add_prompt_logprobs(self, request: Request, got: PromptLogprobs) -> str:
        skip = request.next_prompt_logprob - got.start
        if skip < 0:
            return (
                f"prompt log-probabilities {request.next_prompt_logprob} to {got.start - 1} are missing "
                "(an engine fault; please report it)"
            )
        end = min(len(got.values), request.prompt_len - got.start)
        if end > skip:
            part = slice(skip, end)
            request.prompt_logprobs.add(
                got.values[part],
                request.logprob.top,
                None if got.top_ids is None else got.top_ids[part],
                None if got.top_values is None else got.top_values[part],
                None if got.fixed_values is None else got.fixed_values[part],
            )
            request.next_prompt_logprob = got.start + end
        return ""

    def _sampled(self, plan: StepPlan, live: np.ndarray, output: StepOutput) -> Ended:
        """Take over one token a row, and then those behind its right drafts, one of each row at a time."""
        expected, kept, at = plan.rows, live, plan.starts + plan.lengths
        if np.count_nonzero(plan.samples) < len(expected):
            expected, kept, at = expected[plan.samples], kept[plan.samples], at[plan.samples]
        self._check(plan, output, expected)
        ended: Ended = []
        if len(plan.drafts):
            counts = output.counts
            self.counters.dropped_tokens += int(counts[~kept].sum())
            at = at - (plan.lanes - 1)
            first = np.cumsum(counts) - counts
            for lane in range(int(counts.max(initial=0))):
                ended += self._taken(expected, at + lane, first + lane, lane, kept & (counts > lane), output)
                if ended:
                    kept = kept & ~np.isin(expected, [request.row for request, _ in ended])
        else:
            self.counters.dropped_tokens += len(kept) - int(np.count_nonzero(kept))
            ended = self._taken(expected, at, np.arange(len(expected)), 0, kept, output)
            if ended:
                kept = kept & ~np.isin(expected, [request.row for request, _ in ended])
        row, table = _where(kept, expected)[0], self.rows
        due = table.known[row] - table.reported[row] >= table.interval[row]
        self.outbox.report(_where(due, row)[0])
        return ended

    @staticmethod
    def _check(plan: StepPlan, output: StepOutput, expected: Int32) -> None:
        """The runner answered for the sampled rows, in order, with a token each and those behind right drafts."""
        counts = output.counts
        fits = len(output.rows) == len(counts) == len(expected) and not np.count_nonzero(output.rows != expected)
        if len(plan.drafts):
            fits = fits and np.count_nonzero(counts) == len(counts) and len(output.tokens) == counts.sum()
        else:
            fits = fits and np.count_nonzero(counts == 1) == len(counts) == len(output.tokens)
        if not fits:
            raise RuntimeError(
                f"step {plan.step}: {len(output.tokens)} tokens came back for {len(expected)} sampled segments"
            )

    def _taken(
        self, expected: Int32, at: Int32, index: np.ndarray, lane: int, kept: np.ndarray, output: StepOutput
    ) -> Ended:
        """Token ``lane`` of each of the ``kept`` of the rows ``expected``: number ``index`` of ``output``, at positions
        ``at``."""
        rows = self.rows
        kept = kept & (rows.known[expected] == at)  # else a grammar forced this token before it came back
        row, at, index = _where(kept, expected, at, index)
        token = output.tokens[index]
        if not len(row):
            return []
        after = at + 1
        rows.tokens[row, at] = token
        rows.known[row] = after
        self.counters.generation_tokens += len(row)
        if self.admission.fair is not None:
            self.admission.fair.produced(row)
        full = after >= rows.max_len[row]
        ends = token[:, None] == self._eos
        # Most steps end nobody and have no row that needs a look of its own.
        if not (np.count_nonzero(full) or np.count_nonzero(ends) or np.count_nonzero(rows.special[row])):
            return []
        free_to_end = at - rows.prompt_len[row] >= rows.min_new[row]
        stopped = rows.ends_on_eos[row] & free_to_end & ends.any(axis=1)
        ended: Ended = []
        done = full | stopped
        for i in np.flatnonzero(rows.special[row]).tolist():
            finish = self._special(row[i], token[i], int(index[i]), lane, bool(free_to_end[i]), output)
            if finish is not None:
                ended.append((rows.request(int(row[i])), finish))
                done[i] = True
                stopped[i] = full[i] = False
            elif not done[i]:
                finish = self._jump(int(row[i]))
                if finish is not None:
                    ended.append((rows.request(int(row[i])), finish))
                    done[i] = True
        for i in np.flatnonzero(stopped).tolist():
            ended.append((rows.request(int(row[i])), Finish(kind="stop", matched=int(token[i]))))
        for i in np.flatnonzero(full & ~stopped).tolist():
            ended.append((rows.request(int(row[i])), Finish(kind="length")))
        return ended

    def _special(
        self, row: int, token: int, index: int, lane: int, free_to_end: bool, output: StepOutput
    ) -> Finish | None:
        """Own stop ids, log-probabilities and the grammar of one row; the end that they bring, if any."""
        request = self.rows.request(int(row))
        if request.logprob.output:
            self._add_output_logprob(request, int(row), index, lane, output)
        if free_to_end and int(token) in request.end_ids:
            return Finish(kind="stop", matched=int(token))
        grammar = request.grammar
        if grammar is not None:
            if not grammar.accept(int(token)):
                return broken(grammar, f"token {int(token)} does not fit the grammar")
            if grammar.terminated:
                return Finish(kind="stop")
        return None

    def _jump(self, row: int) -> Finish | None:
        """Take over the tokens that the row's grammar forces next; the end that they bring, if any."""
        rows, request = self.rows, self.rows.request(row)
        grammar = request.grammar
        if not request.jumps or grammar is None:
            return None
        for token in grammar.forced_tokens()[:MAX_JUMP]:
            at = int(rows.known[row])
            free_to_end = at - int(rows.prompt_len[row]) >= int(rows.min_new[row])
            if token in request.end_ids and not free_to_end:
                return None  # held back: what becomes of that is the sampler's to say
            if not grammar.accept(token):
                return None  # the library thinks otherwise after all: the mask will say
            rows.tokens[row, at] = token
            rows.known[row] = at + 1
            self.counters.generation_tokens += 1
            self.counters.jumped_tokens += 1
            if self.admission.fair is not None:
                self.admission.fair.produced(np.array([row], np.int32))
            if token in request.end_ids:
                return Finish(kind="stop", matched=token)
            if grammar.terminated:
                return Finish(kind="stop")
            if at + 1 >= int(rows.max_len[row]):
                return Finish(kind="length")
        return None

    def _add_output_logprob(self, request: Request, row: int, index: int, lane: int, output: StepOutput) -> None:
        if output.logprobs is None:
            raise RuntimeError(f"request {request.rid} wants log-probabilities and the runner sent none")
        part: slice = slice(index, index + 1)
        fixed: Int32 | None = output.fixed_values[row][lane : lane + 1] if request.logprob.token_ids else None
        request.output_logprobs.add(
            output.logprobs[part],
            request.logprob.top,
            None if output.top_ids is None else output.top_ids[part],
            None if output.top_values is None else output.top_values[part],
            fixed,
        )
