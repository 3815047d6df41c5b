"""The one loop: receive, plan, forward, apply the previous result, fill masks, sample.

Owns the order of these stages and every request's end; each stage's decisions live in its own module. ``depth`` is how
many launched steps may lie unapplied: 1 overlaps planning and results with the device, 0 does not. It sees the runner
and the port as protocols: no sockets, no tensors.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ceiba.cache.allocator import SlotAllocator
from ceiba.cache.base import PrefixCache
from ceiba.cache.eviction import make_policy as make_eviction
from ceiba.cache.history import EvictionHistory
from ceiba.cache.lease import LeaseTable
from ceiba.cache.none import NoCache
from ceiba.cache.pins import PinBoard
from ceiba.cache.radix import RadixCache
from ceiba.cache.tiers import TieredCache
from ceiba.config.records import SchedulerConfig
from ceiba.core.errors import CeibaError
from ceiba.core.messages import Abort, Control, DetokOpen, Finish, Generate, Heartbeat, ToScheduler, bytes_to_ids
from ceiba.core.ports import SchedulerPort
from ceiba.core.step import Int32, Runner, StepPlan, TokenMasks
from ceiba.core.tiers import TierIO
from ceiba.scheduler.admission import Admission
from ceiba.scheduler.control import Controls
from ceiba.scheduler.drafts import Drafts
from ceiba.scheduler.fair import FairShare
from ceiba.scheduler.grammar import Compiling, GrammarProvider, broken, undo
from ceiba.scheduler.heartbeat import INTERVAL, Beat, HeartbeatThread
from ceiba.scheduler.hicache import HiCache
from ceiba.scheduler.intake import Intake
from ceiba.scheduler.output import Outbox
from ceiba.scheduler.planner import NeedResult, Planner
from ceiba.scheduler.policy import make_policy
from ceiba.scheduler.report import StepLog
from ceiba.scheduler.request import Request, State
from ceiba.scheduler.results import Flight, Results
from ceiba.scheduler.rows import RowTable
from ceiba.scheduler.stats import Counters, Gauges
from ceiba.scheduler.timing import PlanTiming
from ceiba.scheduler.waiting import WaitingQueue
from ceiba.spec.base import Drafter

log = logging.getLogger("ceiba.scheduler")

IDLE_WAIT = 0.25
"""Seconds to sleep on the mailbox at a time when there is nothing to do."""

STALL_ROUNDS = 100
"""Rounds without work although requests wait, after which the loop says so and stops spinning."""
STALL_WAIT = 0.05
TRANSFER_WAIT = 0.001
"""Seconds to sleep on the mailbox while all that is to do is done by transfers."""
COMPILE_WAIT = 0.002
"""Seconds to sleep on the mailbox when all that is left waits for a grammar."""
LINGER_WAIT = 0.001
"""Seconds to sleep on the mailbox at a time while a step runs and the next need not be planned yet."""


class Scheduler:
    """Drives ``runner`` with the requests that come through ``port``. Used from one thread."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        port: SchedulerPort,
        clock: Callable[[], float] = time.monotonic,
        grammar: GrammarProvider | None = None,
        tiers: TierIO | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        info = runner.info
        self.config = config
        self.runner = runner
        self.port = port
        self.clock = clock
        self.depth = 1 if config.overlap else 0
        page = info.page_size
        self.history = EvictionHistory(clock)
        cache = self._make_cache(page, tiers)
        allocator = SlotAllocator(info.num_slots, page)
        self.intake = Intake(config, info, allocator.total, grammar)
        self.grammar = grammar
        self.compiling = Compiling()
        max_rows = min(config.max_running_requests, info.max_rows)
        self.rows = RowTable(max_rows, self.intake.max_len)
        pins = PinBoard(cache, min(config.cache_pin_budget, allocator.total), clock)
        self.leases = LeaseTable(cache, allocator, max_rows, self.intake.max_len, pins)
        self.queue = WaitingQueue()
        self.counters = Counters()
        self.fair = None if config.fair_share == "off" else FairShare(max_rows, config.fair_share_weights)
        self.admission = Admission(
            config, make_policy(config), self.queue, self.rows, self.leases, self.counters, self.fair
        )
        self.hicache: HiCache | None = None
        if isinstance(cache, TieredCache) and config.hicache is not None:
            admission = self.admission
            self.hicache = HiCache(config.hicache, cache, self.leases, admission.future, admission.costs, clock)
            self.admission.hicache = self.hicache
        self.drafts: Drafts | None = None
        if drafter is not None and config.num_draft_tokens > 1:
            self.drafts = Drafts(drafter, config.num_draft_tokens - 1, self.rows, self.leases, self.counters)
        self.planner = Planner(config, self.admission, self.drafts)
        self.outbox = Outbox(self.rows, config.stream_interval)
        self.results = Results(self.admission, self.outbox, info.eos_ids, self.drafts)
        self.gauges = Gauges(
            self.counters, self.rows, self.queue, self.leases, self.admission.ratio, runner, self._throughput
        )
        self.steps = StepLog(
            config.decode_log_interval,
            self.rows,
            self.queue,
            self.counters,
            lambda: (self.gauges.tokens_used, self.gauges.usage),
            runner,
            clock,
            drafts=self.drafts is not None,
        )
        self.timing = PlanTiming(self.admission.costs)
        self.controls = Controls(self)
        self.stopped = False
        self._requests: dict[str, Request] = {}
        self._flights: deque[Flight] = deque()
        self._last_round = self._round_began = clock()
        self._last_beat = -INTERVAL
        self._own_beats = True
        self._stalled = 0
        self._blocked = False
        """Whether requests wait and the last round could do nothing for them."""
        self._left_waiting = False
        """Whether the last plan could not admit everyone who waited."""
        self._device_free_at = 0.0

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not self._requests and not self._flights

    def run(self, beat: Beat | None = None) -> None:
        """Step until a ``shutdown``. ``beat`` sends heartbeats from a thread of their own (see ``heartbeat``)."""
        if beat is None:
            while not self.stopped:
                self.step()
            return
        self._own_beats = False
        with HeartbeatThread(beat, self.heartbeat):
            while not self.stopped:
                self.step()

    def step(self, wait: float = IDLE_WAIT) -> bool:
        """One round. Waits up to ``wait`` seconds for a message if idle; returns whether a step was launched."""
        self._linger()
        self._round_began = self.clock()
        for message in self._receive(wait):
            self._handle(message)
        now = self.clock()
        self._expire(now)
        self.leases.pins.expire(now)
        if self.hicache is not None:
            self.hicache.poll(now)
        for request, error in self.compiling.settle():
            self._end(request, Finish.of(error))
        plan = self._plan(now)
        self._left_waiting = len(self.queue) > 0
        busy = plan is not None or bool(self._flights)
        if plan is None:
            self._apply(0)
        else:
            self._launch(plan)
        self.outbox.flush(self.port)
        self._finish_round(busy)
        return plan is not None

    def heartbeat(self) -> Heartbeat:
        """A snapshot of the gauges; safe to call from another thread, since it only reads."""
        return Heartbeat(at=self._last_round, stats=self.stats())

    def stats(self) -> dict[str, float]:
        """Gauges and totals for metrics and /server_info."""
        tiers = {} if self.hicache is None else self.hicache.stats()
        drafts = {} if self.drafts is None else self.drafts.stats()
        return {**self.gauges.read(), **tiers, **drafts, "num_grammar_queue_reqs": float(len(self.compiling))}

    def abort(self, rids: list[str], *, reason: str, message: str) -> None:
        """End these requests in whatever state they are. With reason ``stop`` the detokenizer has reported the end."""
        for rid in rids:
            request = self._requests.get(rid)
            if request is None:
                continue
            if reason == "stop":
                self._end(request, Finish(kind="stop"), report=False)
            else:
                self.counters.requests_aborted += 1
                self._end(request, Finish(kind="abort", message=message))

    def abort_all(self, message: str) -> None:
        self.abort(list(self._requests), reason="abort", message=message)

    # ── the stages ───────────────────────────────────────────────────────────

    def _receive(self, wait: float) -> list[ToScheduler]:
        if len(self.compiling) == len(self._requests) > 0 and not self._flights:
            return self.port.receive(COMPILE_WAIT)
        tiers = self.hicache
        if tiers is not None:
            if not self._flights and (tiers.waiting == len(self._requests) > 0 or (self._blocked and tiers.busy)):
                return self.port.receive(TRANSFER_WAIT)
            if self.idle and tiers.busy:
                return self.port.receive(min(wait, TRANSFER_WAIT))
        if not self.idle:
            return self.port.receive(STALL_WAIT if self._stalled > STALL_ROUNDS else 0.0)
        before = self.clock()
        messages = self.port.receive(wait)
        self.counters.idle_seconds += self.clock() - before
        return messages

    def _linger(self) -> None:
        """Leave the next plan until the device is about to need it: who arrives meanwhile is in it."""
        flight = self._flights[-1] if self._flights else None
        if flight is None or not self.config.late_planning:
            return
        prefill, decode = flight.tokens
        if not decode and not self.config.enable_mixed_chunk:
            return  # running requests are owed a step between two prefills
        due = self.timing.due(max(flight.launched_at, self._device_free_at), prefill, decode)
        while (now := self.clock()) < due and not self.stopped and not self._result_ready(flight):
            messages = self.port.receive(min(due - now, LINGER_WAIT))
            for message in messages:
                self._handle(message)
            if not messages and self.clock() <= now:
                return  # time that does not pass by itself, as in simulations

    def _handle(self, message: Generate | Abort | Control) -> None:
        if isinstance(message, Generate):
            self._accept(message)
        elif isinstance(message, Abort):
            text = "the request was aborted" if message.reason in {"abort", "stop"} else message.reason
            rids = list(self._requests) if message.everything else message.rids
            self.abort(rids, reason="stop" if message.reason == "stop" else "abort", message=text)
        else:
            reply = self.controls.answer(message)
            if reply is not None:
                self.port.to_front(reply)

    def _accept(self, message: Generate) -> None:
        self.counters.requests_received += 1
        if message.rid in self._requests:
            # Reporting an end would end the first request of that name: the front owns unique names.
            self.counters.requests_rejected += 1
            log.error("request %s refused: a request of that name is still alive", message.rid)
            return
        # Whoever finds a free row at the next plan does not wait: a burst into an idle engine is no full queue.
        served_next = 0 if self._left_waiting else self.rows.num_free
        try:
            request = self.intake.accept(message, len(self.queue) - served_next, self.clock())
            ticket = self.intake.grammar(request)
            if ticket is not None and ticket.ready():
                request.grammar, ticket = ticket.state(), None
        except CeibaError as error:
            self.counters.requests_rejected += 1
            opening = DetokOpen(rid=message.rid, stream=message.stream, sampling=message.sampling)
            finish = Finish.of(error)
            self.outbox.refuse(opening, finish, len(bytes_to_ids(message.input_ids)))
            return
        self._requests[request.rid] = request
        self.admission.add(request)
        if self.hicache is not None:
            self.hicache.arrived(request, self.clock())
        if ticket is not None:
            self.compiling.add(request, ticket)

    def _expire(self, now: float) -> None:
        for request in self.queue.expired(now):
            waited = now - request.arrival
            text = f"the request waited {waited:.1f} s in the queue, longer than its limit: try again later"
            self.counters.requests_failed += 1
            self._end(request, Finish(kind="error", message=text, status=504))

    def _plan(self, now: float) -> StepPlan | None:
        """The next plan, applying results first where that costs nothing or the plan depends on them."""
        flights = self._flights
        if flights and (
            self.admission.holding
            or self._result_ready(flights[-1])
            or self._prefills_apart(flights[-1])
            or self._drafts_wait(flights[-1])
        ):
            self._apply(0)
        if not self._requests:
            return None
        try:
            return self.planner.build(now, in_flight=bool(flights))
        except NeedResult:
            self._apply(0)
            return self.planner.build(now, in_flight=False)

    def _launch(self, plan: StepPlan) -> None:
        flight = Flight(plan, self.rows.epoch[plan.rows])
        self.steps.planned(plan)
        self.outbox.flush(self.port)  # a device without a queue of its own computes inside forward
        flight.launched_at = self.clock()
        handle = self.runner.forward(plan)
        if self._flights:  # otherwise results were waited for in between
            launched = None if plan.num_prefill else self.clock() - flight.launched_at
            self.timing.planned(flight.launched_at - self._round_began, launched)
        self._apply(0)
        flight.result = self.runner.sample(handle, self._masks(flight))
        self._flights.append(flight)
        # Without a device that works meanwhile the values are there: what they say leaves before the next plan is made.
        self._apply(0 if self._result_ready(flight) else self.depth)

    def _apply(self, depth: int) -> None:
        """Apply results, oldest first, until at most ``depth`` steps are in flight."""
        while len(self._flights) > depth:
            flight = self._flights.popleft()
            assert flight.result is not None
            output = flight.result.wait()
            now = self.clock()
            seconds = now - max(flight.launched_at, self._device_free_at)
            self.counters.forward_seconds += seconds
            self._device_free_at = now
            if not flight.plan.num_jumps:
                self.admission.costs.observe(*flight.tokens, seconds)
            for request, finish in self.results.apply(flight, output):
                self._end(request, finish)

    def _masks(self, flight: Flight) -> TokenMasks | None:
        """Grammar masks of the rows that are sampled and still alive, now that their previous token is applied."""
        plan, rows = flight.plan, self.rows
        wanted = rows.constrained[plan.rows]
        if not np.count_nonzero(wanted):
            return None
        wanted &= plan.samples & (rows.epoch[plan.rows] == flight.epochs)
        if not wanted.any():
            return None
        if len(plan.drafts):
            return self._masks_of_drafts(plan, np.flatnonzero(wanted))
        masked, at = plan.rows[wanted], (plan.starts + plan.lengths)[wanted]
        bits = np.zeros((len(masked), -(-self.runner.info.vocab_size // 32)), np.int32)
        ahead = rows.known[masked] > at
        if ahead.any():  # forced meanwhile: nothing else may be sampled
            token = rows.tokens[masked[ahead], at[ahead]].astype(np.int64)
            bits[ahead, token >> 5] = np.left_shift(1, token & 31).astype(np.uint32).view(np.int32)
            return self._filled(masked, bits, np.flatnonzero(~ahead))
        return self._filled(masked, bits, np.arange(len(masked)))

    def _masks_of_drafts(self, plan: StepPlan, segments: np.ndarray) -> TokenMasks:
        """Of constrained ``segments`` whose tokens are all known: a mask behind each draft, which the grammars accept
        on trial. That nothing is allowed behind a draft is found out in the row's next step, if it goes there."""
        drafts = np.zeros(plan.num_segments, np.int32)
        drafts[plan.jumps.start : plan.jumps.stop] = plan.drafts
        masked = plan.rows[segments]
        words = -(-self.runner.info.vocab_size // 32)
        first = self._filled(masked, np.zeros((len(segments), words), np.int32), np.arange(len(segments)))
        rows, bits, lanes = [masked], [first.bits], [np.zeros(len(segments), np.int32)]
        ends = np.cumsum(plan.lengths)
        for i, row in zip(segments.tolist(), masked.tolist(), strict=True):
            request, count = self.rows.requests[row], int(drafts[i])
            if request is None or request.grammar is None or not count:  # None: ended just now, by its empty mask
                continue
            state, part = request.grammar, np.zeros((count, words), np.int32)
            assert self.grammar is not None
            taken = 0
            for lane, token in enumerate(plan.tokens[ends[i] - count : ends[i]].tolist()):
                if not state.accept(token):
                    break
                taken += 1
                self.grammar.fill([state], part[lane : lane + 1])
            undo(state, taken)
            rows.append(np.full(count, row, np.int32))
            bits.append(part)
            lanes.append(np.arange(1, count + 1, dtype=np.int32))
        return TokenMasks(np.concatenate(rows), np.concatenate(bits), np.concatenate(lanes))

    def _filled(self, masked: Int32, bits: Int32, which: np.ndarray) -> TokenMasks:
        """The masks of the rows ``masked``, those at ``which`` from their grammars."""
        if not len(which):
            return TokenMasks(masked, bits)
        requests = [self.rows.request(row) for row in masked[which].tolist()]
        states = [request.grammar for request in requests if request.grammar is not None]
        assert self.grammar is not None
        assert len(states) == len(requests)
        part = bits if len(which) == len(bits) else np.zeros((len(which), bits.shape[1]), np.int32)
        allowed = self.grammar.fill(states, part)
        if part is not bits:
            bits[which] = part
        for i in np.flatnonzero(~allowed).tolist():
            bits[which[i]] = -1  # its token is dropped, but the sampler must find one
            self._end(requests[i], broken(states[i], "the grammar allows no next token"))
        return TokenMasks(masked, bits)

    def _end(self, request: Request, finish: Finish, *, report: bool = True) -> None:
        """The one way a request ends: last report, KV to the cache or the allocator, row back."""
        del self._requests[request.rid]
        if report:
            self.outbox.finish(request, finish)
        if request.row >= 0:
            row, key = request.row, self.rows.key(request.row)
            self.leases.close(row, key, request.priority)
            if request.pin_output and finish.kind in {"stop", "length"}:
                self.admission.pin(request, key, len(key))
            self.rows.close(row, State.FINISHED)
        else:
            self.queue.remove(request)
            if self.fair is not None and not request.retractions:
                self.fair.left_queue(request)
            request.to(State.FINISHED)
        if self.fair is not None:
            self.fair.ended(request)
        self.admission.forget(request)
        self.compiling.drop(request)
        if finish.kind in {"stop", "length"}:
            self.counters.requests_finished += 1
        elif finish.kind == "error":
            self.counters.requests_failed += 1

    def _finish_round(self, busy: bool) -> None:
        self._last_round = self.clock()
        tiers = self.hicache
        excused = len(self.compiling) == len(self._requests) or (
            tiers is not None and (tiers.waiting > 0 or tiers.busy)
        )
        self._blocked = not busy and not self.idle
        self._stalled = 0 if busy or excused else self._stalled + 1
        if self._stalled == STALL_ROUNDS:
            log.error("requests wait and none is admitted (an engine fault): %s", self.admission.describe())
        if self.idle:
            self.steps.idle()
            self.admission.ratio.reset()
        if self._own_beats and self._last_round - self._last_beat >= INTERVAL:
            self._last_beat = self._last_round
            self.port.to_front(self.heartbeat())

    def _make_cache(self, page: int, tiers: TierIO | None) -> PrefixCache:
        config = self.config
        if config.disable_radix_cache:
            return NoCache(page)
        eviction = make_eviction(config.radix_eviction_policy, config.eviction_options)
        if config.hicache is None or tiers is None:
            return RadixCache(page, eviction, history=self.history)
        write_back = config.hicache.write_policy == "write_back"
        return TieredCache(tiers, page, eviction, self.history, write_back=write_back)

    def _prefills_apart(self, flight: Flight) -> bool:
        if self.config.consecutive_prefill_overlap or flight.plan.num_prefill == flight.plan.num_jumps:
            return False
        return len(self.queue) > 0 or self.admission.partial is not None

    def _drafts_wait(self, flight: Flight) -> bool:
        """Where the rows of a step with drafts go on is not known before its result, nor what to guess for a row before
        its last token: while guessing pays, steps do not overlap."""
        return self.drafts is not None and (len(flight.plan.drafts) > 0 or self.drafts.wanted())

    def _throughput(self) -> float:
        return self.steps.throughput

    @staticmethod
    def _result_ready(flight: Flight) -> bool:
        # The device has finished and idles whatever we do next, so let the plan know the result.
        return flight.result is not None and flight.result.ready()
