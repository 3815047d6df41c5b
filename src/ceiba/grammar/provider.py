"""Grammars for the scheduler: compiled aside, kept, shared by the requests that ask for the same one.

Owns the compile threads (each with one compiler process), the cache and the batch of masks. The scheduler's thread only
looks whether a ticket is ready. Nothing is loaded before the first constrained request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from ceiba.config.records import GrammarConfig
from ceiba.core import limits
from ceiba.core.errors import BadRequest, CeibaError, EngineFault, Overloaded
from ceiba.core.sampling import SamplingParams
from ceiba.core.step import Int32
from ceiba.grammar import fields
from ceiba.grammar.base import Compiled, Constraint, Engine, Prepared, Spacing, State, Vocabulary, WireVocabulary
from ceiba.grammar.compiler import Start
from ceiba.grammar.masks import packed
from ceiba.grammar.process import Cancelled, CompilerProcess
from ceiba.grammar.thinking import AfterThinking

log = logging.getLogger("ceiba.grammar")

FAILURE_SECONDS = 60.0
"""How long a constraint that failed is refused without another try."""


class Job:
    """One constraint on its way, and everyone who waits for it."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.done = threading.Event()
        self.prepared: Prepared | None = None
        self.error: CeibaError | None = None
        self.failed_at = float("-inf")
        self.waiting = 0
        """Tickets not taken back; written under the provider's lock."""


class _Bytes:
    """What the compiled grammars take that are kept or in use. Has a lock of its own: a grammar may be let go of by any
    thread, at any moment."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.held = 0

    def add(self, size: int) -> bool:
        with self._lock:
            fits = self.held + size <= limits.GRAMMAR_CACHE_BYTES
            self.held += size if fits else 0
            return fits

    def take(self, size: int) -> None:
        with self._lock:
            self.held -= size


class Ticket:
    """What the scheduler holds for a request whose grammar may still be compiling."""

    def __init__(self, provider: Provider, job: Job, sampling: SamplingParams) -> None:
        self._provider = provider
        self._job = job
        self._sampling = sampling
        self._left = False

    def ready(self) -> bool:
        return self._job.done.is_set()

    def state(self) -> State:
        """The grammar's beginning. Raises CeibaError for a constraint that cannot be served. Call once ready."""
        self.cancel()
        job = self._job
        if job.error is not None:
            raise job.error.with_traceback(None)
        assert job.prepared is not None, "not ready"
        state = job.prepared.state()
        ends = self._sampling.think_end_ids
        return AfterThinking(state, ends, self._provider.anything()) if ends else state

    def cancel(self) -> None:
        """The request needs it no longer; a compile that nobody waits for is killed. Safe to call again."""
        if not self._left:
            self._left = True
            self._provider.leave(self._job)


class Provider:
    """``vocabulary``: called once, on a compile thread, when the first constraint comes."""

    def __init__(
        self,
        config: GrammarConfig,
        vocabulary: Callable[[], Vocabulary],
        *,
        workers: int | None = None,
        seconds: float = limits.GRAMMAR_SECONDS,
    ) -> None:
        self._config = config
        self._load = vocabulary
        self._seconds = seconds
        self._workers = workers or max(2, min(4, (os.cpu_count() or 2) // 4))
        self._lock = threading.Lock()
        self._setup = threading.Lock()
        self._making = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._engines: dict[str, Engine] = {}
        self._jobs: OrderedDict[Constraint, Job] = OrderedDict()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: list[CompilerProcess] = []
        self._free = 0
        self._bytes = _Bytes()
        self._anything: Int32 | None = None
        self._closed = False

    # ── the scheduler's side ─────────────────────────────────────────────────

    def create(self, sampling: SamplingParams) -> Ticket:
        """A ticket for the constraint of ``sampling``, ready at once if it is known. Raises BadRequest."""
        constraint = fields.constraint_of(sampling)
        if constraint is None:
            raise BadRequest("the request has no constraint")
        with self._lock:
            job = self._jobs.get(constraint)
            if job is not None and job.error is not None and time.monotonic() - job.failed_at > FAILURE_SECONDS:
                job = None
            if job is None:
                job = self._jobs[constraint] = Job(constraint)
                self._begin(job)
            self._jobs.move_to_end(constraint)
            job.waiting += 1
            self._trim()
        return Ticket(self, job, sampling)

    def fill(self, states: Sequence[State], bits: Int32) -> np.ndarray:
        """Masks of ``states``, row i of ``bits`` (int32 [N, words]) for state i; bool [N]: whether any is allowed."""
        allowed = np.zeros(len(states), bool)
        groups: dict[type, list[int]] = {}
        inner: list[State] = list(states)
        for i, state in enumerate(states):
            if isinstance(state, AfterThinking):
                if state.thinking:
                    allowed[i] = state.fill(bits[i])
                    continue
                inner[i] = state.inner
            groups.setdefault(type(inner[i]), []).append(i)
        for kind, rows in groups.items():
            engine = self._engines.get(_ENGINE_OF.get(kind.__name__, ""))
            members = [inner[i] for i in rows]
            if engine is None or len(rows) == 1:
                for i, state in zip(rows, members, strict=True):
                    allowed[i] = state.fill(bits[i])
                continue
            part = np.zeros((len(rows), bits.shape[1]), np.int32)
            allowed[rows] = engine.fill(members, part)
            bits[rows] = part
        return allowed

    def leave(self, job: Job) -> None:
        with self._lock:
            job.waiting -= 1

    def anything(self) -> Int32:
        """The mask of every token but padding and ends."""
        assert self._anything is not None, "a grammar was compiled before"
        return self._anything

    def close(self) -> None:
        """End the threads and the compiler processes."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(5.0)

    @property
    def pids(self) -> list[int]:
        """The compiler processes that live now."""
        return [process.pid for process in self._processes if process.pid is not None]

    # ── compiling ────────────────────────────────────────────────────────────

    def _begin(self, job: Job) -> None:
        """Called under the lock. A further thread only when all are busy: on a quiet server one is enough."""
        if self._closed:
            raise EngineFault("the engine is stopping")
        if self._free == 0 and len(self._threads) < self._workers:
            process = CompilerProcess(self._start_frame, self._seconds)
            thread = threading.Thread(
                target=self._work, args=(process,), name=f"grammar-{len(self._threads)}", daemon=True
            )
            self._processes.append(process)
            self._threads.append(thread)
            self._free += 1
            thread.start()
        self._free -= 1
        self._queue.put(job)

    def _trim(self, room: int = 0) -> None:
        """Forget the oldest until there is ``room`` (bytes) for another. Called under the lock."""
        while len(self._jobs) > limits.GRAMMAR_CACHE or self._bytes.held + room > limits.GRAMMAR_CACHE_BYTES:
            oldest = next((c for c, job in self._jobs.items() if job.done.is_set()), None)
            if oldest is None:
                return
            del self._jobs[oldest]

    def _prepare(self, compiled: Compiled) -> Prepared:
        """Raises Overloaded when the grammars in use leave no room for it."""
        size = len(compiled.data)
        with self._lock:
            self._trim(size)
            if not self._bytes.add(size):
                raise Overloaded(
                    f"this grammar takes {size >> 20} MiB compiled, and those in use leave less of "
                    f"{limits.GRAMMAR_CACHE_BYTES >> 20} MiB: try again when they are done, or bound its lengths",
                    code="grammars_full",
                )
        try:
            prepared = self._engine(compiled.engine).prepare(compiled)
        except BaseException:
            self._bytes.take(size)
            raise
        weakref.finalize(prepared, self._bytes.take, size).atexit = False
        return prepared

    def _work(self, process: CompilerProcess) -> None:
        try:
            while (job := self._queue.get()) is not None and not self._closed:
                self._run(job, process)
                with self._lock:
                    self._free += 1
        finally:
            process.kill()

    def _run(self, job: Job, process: CompilerProcess) -> None:
        started = time.monotonic()
        try:
            if job.waiting <= 0:
                raise Cancelled
            compiled = process.compile(job.constraint, lambda: job.waiting <= 0 or self._closed, self._chosen)
            job.prepared = self._prepare(compiled)
        except Cancelled:
            job.error = EngineFault("the grammar was given up because nobody waited for it")
            with self._lock:
                if self._jobs.get(job.constraint) is job and job.waiting <= 0:
                    del self._jobs[job.constraint]
                elif job.waiting > 0:  # somebody came in the moment the last one left
                    job.error = None
                    self._free -= 1
                    self._queue.put(job)
                    return
        except Overloaded as error:
            job.error = error  # and another may try at once
        except CeibaError as error:
            job.error, job.failed_at = error, time.monotonic()
        except Exception as error:
            log.exception("compiling a %s failed", job.constraint.kind)
            job.error = EngineFault(f"compiling the {job.constraint.kind} failed: {type(error).__name__}: {error}")
            job.failed_at = time.monotonic()
        job.done.set()
        log.debug("compiled a %s in %.3f s", job.constraint.kind, time.monotonic() - started)

    def _start_frame(self) -> Start:
        vocabulary = self._words()
        config = self._config
        wire = WireVocabulary(vocabulary.tokens, list(vocabulary.eos_ids), vocabulary.special)
        spacing = Spacing(config.whitespace_pattern, config.any_whitespace, config.max_whitespace)
        return Start(config.backend, wire, spacing)

    def _chosen(self, name: str) -> None:
        """A library is about to be loaded in the child: load it here at the same time, since it may take seconds."""
        if name not in self._engines:
            threading.Thread(target=self._warm, args=(name,), name="grammar-warm", daemon=True).start()

    def _warm(self, name: str) -> None:
        with contextlib.suppress(Exception):  # it shows again when a grammar is prepared
            self._engine(name)

    def _words(self) -> Vocabulary:
        with self._setup:
            if self._vocabulary is None:
                words = self._vocabulary = self._load()
                special, ends = set(words.special.values()), set(words.eos_ids)
                usable = (i for i, data in enumerate(words.tokens) if (data or i in special) and i not in ends)
                self._anything = packed(usable, words.words)
            return self._vocabulary

    def _engine(self, name: str) -> Engine:
        vocabulary = self._words()
        with self._making:
            engine = self._engines.get(name)
            if engine is None:
                engine = self._engines[name] = _make_engine(name, vocabulary)
            return engine


_ENGINE_OF = {"GuidanceState": "llguidance", "XGrammarState": "xgrammar", "OutlinesState": "outlines"}


def _make_engine(name: str, vocabulary: Vocabulary) -> Engine:
    if name == "llguidance":
        from ceiba.grammar.backends import guidance

        return guidance.Engine(vocabulary)
    if name == "xgrammar":
        from ceiba.grammar.backends import xgrammar

        return xgrammar.Engine(vocabulary)
    from ceiba.grammar.backends import outlines

    return outlines.Engine(vocabulary)
