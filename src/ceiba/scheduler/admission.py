"""Lets waiting requests into the batch: row, KV budget, chunk budget, twins. Owns the decision and the opening of a
row; the order comes from ``policy``, the plan is built by ``planner``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ceiba.cache.base import Match
from ceiba.cache.keys import CacheKey, Int32, ceil_page
from ceiba.cache.lease import LeaseTable
from ceiba.config.records import SchedulerConfig
from ceiba.core.step import RowOpen
from ceiba.scheduler.budget import CLIP_NEW_TOKENS, NewTokenRatio, PrefillBudget
from ceiba.scheduler.costs import StepCosts
from ceiba.scheduler.fair import FairShare
from ceiba.scheduler.hicache import HiCache
from ceiba.scheduler.output import report_interval
from ceiba.scheduler.pacing import SHARE, Pacer
from ceiba.scheduler.policy import SHORT_SHARE, CurrentOrder, Matches, Policy, TwinPrefills, View
from ceiba.scheduler.request import Request
from ceiba.scheduler.rows import RowTable
from ceiba.scheduler.stats import Counters
from ceiba.scheduler.waiting import WaitingQueue

MOST_COUNTED = 32
"""Waiting requests that are looked up in the cache to know how much there is to compute."""
FEW = 16
"""One decoding row for so many tokens of a chunk, or fewer, may come on top of it."""


@dataclass(slots=True)
class PrefillSegment:
    row: int
    start: int
    length: int
    last: bool
    """Whether the row's known tokens end here, so that the next one can be sampled."""
    slots: Int32
    drafts: Int32 | None = None
    """Guesses that stand behind the known tokens; they count in ``length``."""


class Admission:
    """Chooses the prefill segments of one step."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        queue: WaitingQueue,
        rows: RowTable,
        leases: LeaseTable,
        counters: Counters,
        fair: FairShare | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.queue = queue
        self.rows = rows
        self.leases = leases
        self.counters = counters
        self.fair = fair
        self.hicache: HiCache | None = None
        """Set where cached KV may lie in lower tiers."""
        self.matches = Matches(leases.cache)
        self._ordered = CurrentOrder(policy, View(queue, self.matches, rows, counters))
        self.ratio = NewTokenRatio(config.conservativeness)
        self.twins = TwinPrefills(
            config.in_batch_check_threshold,
            config.in_batch_deprioritize_threshold,
            leases.cache.enabled,
            leases.page_size,
        )
        self.costs = StepCosts()
        self.pacer: Pacer | None = None
        if config.enable_mixed_chunk and config.mixed_chunk_target > 0:
            self.pacer = Pacer(self.costs, config.mixed_chunk_target)
        self.partial: Request | None = None
        """The one request that is partly prefilled."""
        self.holding = False
        """Whether someone stands back for a prefill whose last result is not applied yet."""

    def select(self, now: float, decode_tokens: int) -> tuple[list[PrefillSegment], list[RowOpen]]:
        """Prefill segments of the next step: the partly prefilled request first, then whom the policy names.

        Opens rows and leases, launches positions. ``decode_tokens`` share the step with a mixed chunk.
        """
        budget = self._budget(decode_tokens)
        segments: list[PrefillSegment] = []
        opened: list[RowOpen] = []
        self.holding = False
        if self.partial is not None:
            kept = self._kept_for_short(budget.tokens)
            budget.tokens, budget.uncut = budget.tokens - kept, budget.uncut - kept
            segment = self._continue(self.partial, budget)
            budget.tokens, budget.uncut = max(budget.tokens + kept, kept), budget.uncut + kept
            if segment is None:
                return segments, opened
            segments.append(segment)
        if len(self.queue) and self.rows.num_free and budget.tokens > 0:
            self._admit(now, budget, segments, opened)
        return segments, opened

    def order(self) -> Iterable[Request]:
        """The queue as the policy orders it, under the tenants' shares where those count."""
        requests = self._ordered()
        return requests if self.fair is None else self.fair.order(requests, self._ordered.stamp)

    def first(self) -> Request | None:
        """Who is admitted next."""
        return next((request for request in self.order() if not request.compiling), None) if len(self.queue) else None

    def add(self, request: Request) -> None:
        """A new request joins the queue."""
        request.prefill_mark = self.counters.prefill_tokens
        self.queue.add(request)
        if self.fair is not None:
            self.fair.arrived(request)

    def pin(self, request: Request, key: CacheKey, length: int) -> None:
        """Keep the first ``length`` tokens cached as the request asked, as far as the budget and the cache go."""
        leases = self.leases
        match = leases.cache.match(key, min(length, leases.pins.budget))
        expires = leases.pins.clock() + request.pin_seconds if request.pin_seconds else math.inf
        if leases.pins.pin(request.pin, match, expires=expires, displaceable=True):
            request.pinned_tokens = match.length

    def reserved(self) -> int:
        """KV slots that requests with a row are expected to take from now on."""
        running = self.rows.running()
        remaining = np.maximum(self.rows.max_len[running] - 1 - self.leases.launched[running], 0)
        total = self.ratio.reserve(remaining)
        if self.partial is not None:
            row = self.partial.row
            total += self.leases.shortfall(row, int(self.rows.known[row] - self.leases.launched[row]))
            total += self.future(self.partial)
        return total if self.hicache is None else total + self.hicache.reserved()

    def expected(self, request: Request) -> int:
        """What ``reserved`` counts for one request that has a row."""
        row = request.row
        if request is self.partial:
            rest = int(self.rows.known[row] - self.leases.launched[row])
            return self.leases.shortfall(row, rest) + self.future(request)
        remaining = max(0, int(self.rows.max_len[row]) - 1 - int(self.leases.launched[row]))
        return int(min(remaining, CLIP_NEW_TOKENS) * self.ratio.value)

    def _budget(self, decode_tokens: int) -> PrefillBudget:
        config = self.config
        chunked = config.chunked_prefill_size > 0
        most = min(config.chunked_prefill_size, config.max_prefill_tokens) if chunked else config.max_prefill_tokens
        # A share stays with the prefill, however many rows decode.
        tokens = max(most - decode_tokens, most // 4, 1) if decode_tokens else most
        budget = PrefillBudget(tokens, config.prefill_max_requests or len(self.rows.requests), chunked)
        if chunked and self.pacer is not None:
            if decode_tokens * FEW <= most <= config.max_prefill_tokens - decode_tokens:
                tokens = most  # whole chunks of long prompts are fastest, and a few rows beside take no room
            chunk = self.pacer.beside(tokens, decode_tokens) if decode_tokens else self.pacer.alone(most)
            budget.tokens, budget.uncut = chunk.tokens, chunk.uncut
        return budget

    def look(self) -> bool:
        """See what waits, before each step; returns whether prompts should be computed before the running requests go
        on (``pacing``)."""
        if self.pacer is None:
            return False
        self.pacer.see(self._waiting_tokens(SHARE * max(self.config.chunked_prefill_size, self.pacer.pile + 1)))
        return self.pacer.piled_up

    def _waiting_tokens(self, enough: int) -> int:
        """Prompt tokens that could be computed now, about: not cached, with a row and room in the pool, nobody else
        computing them; counted no further than ``enough``. Of one prompt no more than make a pile, and half of that if
        it goes on: a long one is none, not even beside a few tokens."""
        assert self.pacer is not None
        cap, begun = self.pacer.pile or enough, 0
        if self.partial is not None:
            row = self.partial.row
            begun = min(int(self.rows.known[row] - self.leases.launched[row]), cap // 2)
        counted = min(len(self.queue), self.rows.num_free, MOST_COUNTED)
        if not counted or begun >= enough:
            return begun
        tiers, total = self.hicache, 0
        room = self.leases.available - self.reserved()
        for request in itertools.islice(self.order(), counted):
            match = self.matches.of(request)
            if request.compiling or (tiers is not None and tiers.waits(request)):
                continue
            if self.twins.must_wait(request, match.length) is not None:
                continue
            tokens = self.matches.uncached(request)
            room -= tokens + match.unlocked + self.future(request)
            if room < 0 and self.rows.num_used:
                return begun + total
            total += min(tokens, cap)
            if begun + total >= enough:
                return begun + total
        return begun + total * min(len(self.queue), self.rows.num_free) // counted

    def future(self, request: Request) -> int:
        """KV slots its output is expected to take; one page more, because the output does not end with a page."""
        output = min(request.max_len - len(request.tokens), CLIP_NEW_TOKENS)
        return int(output * self.ratio.value) + (self.leases.page_size if self.leases.page_size > 1 else 0)

    def _kept_for_short(self, tokens: int) -> int:
        """Budget that the partly prefilled request leaves to a shorter one that waits and fits into it."""
        kept = int(tokens * SHORT_SHARE) if self.policy.keeps_share_for_short else 0
        if not kept or not self.rows.num_free:
            return 0
        first = self.first()
        return kept if first is not None and self.matches.uncached(first) <= kept else 0

    def _continue(self, request: Request, budget: PrefillBudget) -> PrefillSegment | None:
        row = request.row
        start = int(self.leases.launched[row])
        wanted = budget.take(int(self.rows.known[row]) - start, may_cut=True)
        fits = (
            int(self.leases.allocated[row])
            - start
            + self.leases.available // self.leases.page_size * (self.leases.page_size)
        )
        length = min(wanted, fits)
        if length <= 0:
            return None
        return self._launch(request, start, length, budget)

    def _launch(self, request: Request, start: int, length: int, budget: PrefillBudget) -> PrefillSegment:
        row = request.row
        self.leases.cause = request.rid
        slots = self.leases.extend(row, length)
        budget.spend(length)
        last = start + length == int(self.rows.known[row])
        if not last:
            self.partial = request
        elif self.partial is request:
            self.partial = None
        if last:
            self.rows.start_running(row)
        return PrefillSegment(row, start, length, last, slots)

    def _admit(self, now: float, budget: PrefillBudget, segments: list[PrefillSegment], opened: list[RowOpen]) -> None:
        page, tiers = self.leases.page_size, self.hicache
        promised = self.reserved()
        held = 0
        due = False
        admitted: list[Request] = []
        for request in self.order():
            if self.rows.num_free <= held or budget.tokens <= 0:
                break
            if request.compiling or (tiers is not None and tiers.fetching(request, now)):
                continue
            if tiers is not None and tiers.restoring(request):
                held += 1  # its slots are lent and the rest is promised: there is nothing to ask room for
                continue
            own = 0 if tiers is None else tiers.reserved_for(request)
            match = self.matches.of(request)
            total = len(request.tokens)
            prompt = ceil_page(total - match.length, page)
            future = self.future(request)
            room = self.leases.available - match.unlocked - promised + own
            first = self.twins.must_wait(request, match.length)
            if first is not None:
                request.held_for = first.rid
                held += 1
                due = due or first is not self.partial
                promised += prompt + future - own  # those behind it must not take what it needs next round
                continue
            alone = self.rows.num_used == 0 and not held  # nobody runs, nor is anybody ahead about to
            if prompt + future > room and not alone:
                break
            if alone and not self._makes_room(request, prompt, match):
                break
            coming = None if tiers is None else tiers.loading(request, match, now)
            if coming is not None:
                held += 1
                promised += coming
                continue
            # Nobody who overtakes a held request may become the partly prefilled one: it would come first next round.
            length = budget.take(total - match.length, may_cut=self.partial is None and not held)
            if length <= 0:
                break
            admitted.append(request)
            request.match_memo = None
            self.twins.started(request)
            opened.append(self._open(request, match, now))
            segments.append(self._launch(request, match.length, length, budget))
            promised += future - own
            if self.partial is request:
                promised += self.leases.shortfall(request.row, total - match.length - length)
                break
        self._take_from_queue(admitted)
        self.holding = due

    def _take_from_queue(self, admitted: list[Request]) -> None:
        for request in admitted:
            self.queue.remove(request)
            if self.fair is not None and not request.retractions:
                self.fair.left_queue(request)

    def _makes_room(self, request: Request, prompt: int, match: Match) -> bool:
        """Whether ``request``, beside which nobody runs, may take ``prompt`` slots behind ``match``. What waits and
        what is pinned gives way for it; it waits for copies to lower tiers, which read what could be evicted."""
        tiers, pins = self.hicache, self.leases.pins
        # Who gives way may have locked a part of the match, which then takes room as well.
        while (short := prompt + match.unlocked - self.leases.available) > 0:
            if not ((tiers is not None and tiers.give_way(short, request)) or pins.give_way(short)):
                return not self.copying
        return True

    def _open(self, request: Request, match: Match, now: float) -> RowOpen:
        row = self.rows.open(request, report_interval(request, self.config.stream_interval))
        prefix = self.leases.open(row, match, hit=not request.retractions)
        if self.fair is not None:
            self.fair.admitted(request, len(request.tokens) - match.length)
        tiers = {} if self.hicache is None else self.hicache.admitted(request, min(match.length, request.prompt_len))
        if request.admitted_at is None:
            request.admitted_at = now
            request.cached_tokens = min(match.length, request.prompt_len)
            request.cached_by_tier = tiers
            self.counters.admitted(request)
        return RowOpen(
            row=row,
            tokens=request.tokens,
            prompt_len=request.prompt_len,
            prefix_slots=prefix,
            sampling=request.sampling,
            seed=request.seed,
            logprob=request.remaining_logprobs(),
            eos_ids=request.end_ids,
        )

    @property
    def copying(self) -> bool:
        """Whether copies to lower tiers may hold cached KV that could be evicted otherwise."""
        return self.hicache is not None and self.hicache.busy

    def forget(self, request: Request) -> None:
        """``request`` left the batch, by whatever way."""
        request.match_memo = None
        self.twins.settled(request)
        if self.hicache is not None:
            self.hicache.forget(request)
        if self.partial is request:
            self.partial = None

    def describe(self) -> str:
        """The numbers that decide an admission, for the log."""
        return (
            f"{len(self.queue)} wait, {self.rows.num_used} have rows, {self.leases.available} KV slots available, "
            f"{self.reserved()} reserved"
        )
