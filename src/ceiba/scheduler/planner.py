"""Builds the next ``StepPlan``: prefill first, else decode, or both with mixed chunks. Owns the shape of a step.

It launches positions in the lease table and so decides what the device writes; it neither waits for results nor talks
to anyone. A decode step is a fixed number of array operations over the running rows. The arrays of a plan are fresh,
because the runner may still read the previous plan's while this one is built; constants nobody may write are shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ceiba.cache.keys import Int32
from ceiba.config.records import SchedulerConfig
from ceiba.core.step import FUTURE, RowOpen, StepPlan
from ceiba.scheduler.admission import Admission, PrefillSegment
from ceiba.scheduler.drafts import Drafts
from ceiba.scheduler.groups import PrefixGroups
from ceiba.scheduler.preempt import Preemptor
from ceiba.scheduler.retract import Retractor


@dataclass(slots=True)
class DecodePart:
    """Decode segments whose positions are launched: rows, starts, tokens, slots, int32 [B] each."""

    rows: Int32
    starts: Int32
    tokens: Int32
    slots: Int32
    jumps: list[PrefillSegment] = field(default_factory=list)
    """Running rows with more than one known or guessed token to compute."""

    @property
    def num_tokens(self) -> int:
        return len(self.rows) + sum(segment.length for segment in self.jumps)


_NONE = np.empty(0, np.int32)
_NO_DECODE = DecodePart(_NONE, _NONE, _NONE, _NONE)


MAX_JUMP_TOKENS = 8192
"""Forced tokens that all rows together compute in a step, where prefills are not chunked."""


MOST_ALONE = 4
"""Steps in a row that compute prompts alone although mixed steps are on."""


class NeedResult(Exception):
    """The next plan depends on tokens in flight: apply the pending result, then plan again."""


class Planner:
    def __init__(self, config: SchedulerConfig, admission: Admission, drafts: Drafts | None = None) -> None:
        self.config = config
        self.admission = admission
        self.drafts = drafts
        self.rows = admission.rows
        self.leases = admission.leases
        self.retractor = Retractor(config.retraction_policy, admission)
        self.preemptor: Preemptor | None = None
        if config.enable_priority_scheduling and config.preemption_threshold is not None:
            self.preemptor = Preemptor(config.preemption_threshold, admission)
        self._groups = PrefixGroups(self.leases) if config.shared_prefix and not config.disable_radix_cache else None
        self._step = 0
        size = len(self.rows.requests)
        self._one, self._true = np.ones(size, np.int32), np.ones(size, bool)
        """Lengths and samples of decode segments, the same in every plan."""
        for constant in (self._one, self._true):
            constant.setflags(write=False)
        self._decodes = config.prefill_decode_interval
        """Decode steps since the last prefill."""
        self._alone = 0
        """Steps since the last that decoded."""
        self._turn = 0

    def build(self, now: float, *, in_flight: bool) -> StepPlan | None:
        """The next step's plan, or None when there is nothing to compute.

        ``in_flight``: whether a result has not been applied yet. Raises ``NeedResult``, having changed nothing, when
        the KV pool is short then: whom to retract, and with which tokens, is only known after the result.
        """
        self._preempt(in_flight)
        piled_up = self.admission.look()
        mixed = self.config.enable_mixed_chunk and not (piled_up and self._alone < MOST_ALONE)
        decode = _NO_DECODE
        if mixed or self._decodes_first():
            decode = self._decode(in_flight, self._decode_share() if mixed else None)
        segments: list[PrefillSegment] = []
        opened: list[RowOpen] = []
        if mixed or not decode.num_tokens:
            segments, opened = self.admission.select(now, decode.num_tokens)
            if not segments and not mixed:
                decode = self._decode(in_flight)
        self._decodes = 0 if segments else self._decodes + 1
        self._alone = 0 if decode.num_tokens else self._alone + 1
        if segments or decode.num_tokens:
            return self._plan(segments, opened, decode)
        return self._unblock(now, in_flight) if self.admission.partial is not None else None

    def _preempt(self, in_flight: bool) -> None:
        """Retract whoever stands in the way of a much higher priority."""
        victims = self.preemptor.victims() if self.preemptor is not None else []
        if not victims:
            return
        if in_flight:
            raise NeedResult
        for request in victims:
            self.retractor.retract(request)
        self.admission.queue.add_front(victims)
        self.admission.counters.preemptions += len(victims)

    def _decodes_first(self) -> bool:
        """Whether running requests are owed decode steps before the next prefill (--prefill-decode-interval)."""
        if self._decodes >= self.config.prefill_decode_interval:
            return False
        return len(self.rows.running()) >= max(1, self.config.prefill_decode_interval_min_bs)

    def _decode_share(self) -> int | None:
        """How many rows may decode in a mixed step so that a quarter of the chunk is left for prefill; None: all."""
        chunk = self.config.chunked_prefill_size
        waits = self.admission.partial is not None or (len(self.admission.queue) and self.rows.num_free)
        return max(1, chunk - max(1, chunk // 4)) if waits and chunk > 0 else None

    def _unblock(self, now: float, in_flight: bool) -> StepPlan | None:
        """A partly prefilled request lacks room and no row decodes: only giving its own slots back can help."""
        if in_flight:
            raise NeedResult
        request = self.admission.partial
        assert request is not None
        page, tiers = self.leases.page_size, self.admission.hicache
        if not ((tiers is not None and tiers.give_way(page)) or self.leases.pins.give_way(page)):
            self.retractor.retract(request)
            self.admission.queue.add_front([request])
        segments, opened = self.admission.select(now, 0)
        return self._plan(segments, opened, _NO_DECODE) if segments else None

    def _decode(self, in_flight: bool, limit: int | None = None) -> DecodePart:
        """Launch one more position of every row that decodes in this step; retracts where there is no room.

        A row whose last allowed token is already being sampled stays out: its end needs no extra step. Beyond
        ``limit`` the rows take turns.
        """
        rows = self._turns(self._growing(), limit)
        distance = self._distance(rows)
        wanted = self._shortfall(rows, distance)
        if wanted > self.leases.available:
            if in_flight:
                raise NeedResult
            self.retractor.make_room()
            rows = self._turns(self._growing(), limit)
            distance = self._distance(rows)
            wanted = self._shortfall(rows, distance)
        elif len(rows):
            self.admission.ratio.decayed()
        if not len(rows):
            return _NO_DECODE
        self.leases.cause = "decode"
        jumps: list[PrefillSegment] = []
        drafts = {} if in_flight or self.drafts is None else self._drafts(self.drafts, rows, distance, wanted)
        ahead = distance > 1
        if drafts:
            ahead |= np.isin(rows, list(drafts))
        if np.count_nonzero(ahead):
            jumps = self._jump(rows[ahead], distance[ahead], drafts)
            rows, distance = rows[~ahead], distance[~ahead]
            if not len(rows):
                return DecodePart(_NONE, _NONE, _NONE, _NONE, jumps)
        starts = self.leases.launched[rows]
        every = np.count_nonzero(distance) == len(rows)
        tokens = self.rows.tokens[rows, starts] if every else self._known_or_future(rows, starts, distance > 0)
        return DecodePart(rows, starts, tokens, self.leases.extend_each(rows), jumps)

    def _shortfall(self, rows: Int32, distance: Int32) -> int:
        """Slots that the rows would take now, those that jump all of their tokens'."""
        ahead = distance > 1
        if not np.count_nonzero(ahead):
            return self.leases.shortfall_each(rows)
        jumps = zip(rows[ahead].tolist(), distance[ahead].tolist(), strict=True)
        far = sum(self.leases.shortfall(row, count) for row, count in jumps)
        return self.leases.shortfall_each(rows[~ahead]) + far

    def _distance(self, rows: Int32) -> Int32:
        """Known tokens of each row that no step has been given."""
        return self.rows.known[rows] - self.leases.launched[rows]

    def _drafts(self, drafts: Drafts, rows: Int32, distance: Int32, wanted: int) -> dict[int, Int32]:
        """Guesses for the rows, ``distance`` tokens of each known and ``wanted`` slots to take, where they cost nobody
        room: not in the step, and not in the pool."""
        room = self._step_room() - int(distance.sum())
        spare = self.leases.available - wanted
        if room <= 0 or spare < len(rows) * (drafts.most + self.leases.page_size):
            return {}
        return drafts.propose(rows, room)

    def _step_room(self) -> int:
        return self.config.chunked_prefill_size if self.config.chunked_prefill_size > 0 else MAX_JUMP_TOKENS

    def _jump(self, rows: Int32, distance: Int32, drafts: dict[int, Int32]) -> list[PrefillSegment]:
        """Launch the known tokens of rows whose grammar forced some, ``distance`` of each, and drafts; whoever does
        not fit into a step waits for the next."""
        room = self._step_room()
        segments: list[PrefillSegment] = []
        for row, known in zip(rows.tolist(), distance.tolist(), strict=True):
            guesses = drafts.get(row)
            length = known + (0 if guesses is None else len(guesses))
            room -= length
            if room < 0 and segments:
                break
            start = int(self.leases.launched[row])
            segments.append(PrefillSegment(row, start, length, True, self.leases.extend(row, length), guesses))
        return segments

    def _turns(self, rows: Int32, limit: int | None) -> Int32:
        if limit is None or len(rows) <= limit:
            return rows
        self._turn = (self._turn + limit) % len(rows)
        return np.sort(np.roll(rows, self._turn)[:limit])

    def _known_or_future(self, rows: Int32, starts: Int32, known: np.ndarray) -> Int32:
        tokens = np.full(len(rows), FUTURE, np.int32)
        tokens[known] = self.rows.tokens[rows[known], starts[known]]
        return tokens

    def _growing(self) -> Int32:
        running = self.rows.running()
        grows = self.leases.launched[running] + 1 < self.rows.max_len[running]
        return running if np.count_nonzero(grows) == len(grows) else running[grows]

    def _plan(self, segments: list[PrefillSegment], opened: list[RowOpen], decode: DecodePart) -> StepPlan:
        self._step += 1
        rows, starts, tokens, slots = decode.rows, decode.starts, decode.tokens, decode.slots
        lengths, samples = self._one[: len(rows)], self._true[: len(rows)]
        segments = [*segments, *decode.jumps]
        if segments:
            table = self.rows
            wants = [s.last and table.max_len[s.row] > table.known[s.row] for s in segments]
            rows = _join([s.row for s in segments], rows)
            starts = _join([s.start for s in segments], starts)
            lengths = _join([s.length for s in segments], lengths)
            samples = np.concatenate([np.array(wants, bool), samples])
            tokens = np.concatenate([*(part for s in segments for part in self._tokens(s)), tokens])
            slots = np.concatenate([*(s.slots for s in segments), slots])
        return StepPlan(
            step=self._step,
            rows=rows,
            starts=starts,
            lengths=lengths,
            samples=samples,
            tokens=tokens,
            slots=slots,
            num_prefill=len(segments),
            opened=opened,
            closed=self.rows.take_closed(),
            groups=self._groups.find(decode.rows, len(segments)) if self._groups and len(decode.rows) > 1 else [],
            num_jumps=len(decode.jumps),
            drafts=self._draft_counts(decode.jumps),
        )

    def _tokens(self, segment: PrefillSegment) -> list[Int32]:
        guesses = [] if segment.drafts is None else [segment.drafts]
        end = segment.start + segment.length - sum(map(len, guesses))
        return [self.rows.tokens[segment.row, segment.start : end], *guesses]

    @staticmethod
    def _draft_counts(jumps: list[PrefillSegment]) -> Int32:
        counts = [0 if segment.drafts is None else len(segment.drafts) for segment in jumps]
        return np.array(counts, np.int32) if any(counts) else _NONE


def _join(head: list[int], tail: Int32) -> Int32:
    return np.concatenate([np.array(head, np.int32), tail])
