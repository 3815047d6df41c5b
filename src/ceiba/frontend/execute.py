"""Runs the steps of one state in order: at once, or (branches of a fork) in a thread while the program goes on.

Owns the transcript, the variables and the order. Must never know what a program is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ceiba.core.errors import BadRequest, CeibaError
from ceiba.frontend.backends.base import Backend, Result
from ceiba.frontend.expr import Constant, Expr, Gen, Image, RoleBegin, RoleEnd, Select
from ceiba.frontend.transcript import Transcript

UNSET: Any = object()


class Slot:
    """A variable, perhaps not there yet."""

    def __init__(self, value: Any = UNSET, value_type: Any = None) -> None:
        self.value = value
        self.value_type = value_type
        self.meta: dict[str, Any] = {}
        self.error: BaseException | None = None
        self._ready = threading.Event()
        if value is not UNSET:
            self._ready.set()

    def set(self, value: Any, meta: dict[str, Any]) -> None:
        self.value, self.meta = value, meta
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        if not self._ready.is_set():
            self.error = error
            self._ready.set()

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    def wait(self) -> Slot:
        """Until it is there. Raises what kept it from coming."""
        self._ready.wait()
        if self.error is not None:
            raise self.error
        return self


class Executor:
    """``threaded``: steps wait in a queue that one thread works off; the thread is there only while there is work.

    ``streaming``: generations are read piece by piece, for ``pieces``.
    """

    def __init__(
        self,
        backend: Backend,
        sampling: Mapping[str, Any],
        *,
        transcript: Transcript | None = None,
        slots: Mapping[str, Slot] | None = None,
        threaded: bool = False,
        streaming: bool = False,
    ) -> None:
        self.backend = backend
        self.sampling = dict(sampling)
        self.transcript = transcript or Transcript()
        self.slots = dict(slots or {})
        self.error: BaseException | None = None
        self.streaming = streaming
        self._threaded = threaded
        self._queue: deque[Expr] = deque()
        self._working = False
        self._changed = threading.Condition()
        self._pieces: list[tuple[str | None, str]] = []
        self._ended = False
        self._warm = ""

    # ── giving it work ───────────────────────────────────────────────────────

    def submit(self, expr: Expr) -> None:
        """Raises the step's error where it runs at once, and the branch's first error once it has one."""
        steps = list(expr.flat())
        with self._changed:
            for step in steps:
                for name in step.names():
                    kind = step.value_type if isinstance(step, Gen) else None
                    self.slots[name] = Slot(value_type=kind)
            if self._threaded:
                if self.error is not None:
                    self._drop(steps)
                    return
                self._queue.extend(steps)
                if not self._working:
                    self._working = True
                    threading.Thread(target=self._work, name="ceiba-branch", daemon=True).start()
                return
        for step in steps:
            try:
                self._execute(step)
            except BaseException as error:
                self._fail(error, steps)
                raise

    def sync(self) -> None:
        """Wait until all steps are done. Raises the first error."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None = None) -> None:
        """The program is over: nothing more comes, for those who read pieces."""
        with self._changed:
            self.error = self.error or error
            self._ended = True
            if error is not None:
                for slot in self.slots.values():
                    slot.fail(error)
            self._changed.notify_all()

    def pieces(self, name: str | None = None) -> Iterator[str]:
        """Text as it is added; of one variable only, or of everything. Raises the program's error."""
        position = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._pieces) > position or self._ended)  # noqa: B023
                fresh, position = self._pieces[position:], len(self._pieces)
                over = self._ended
            for owner, text in fresh:
                if name is None or owner == name:
                    yield text
            if name is not None and (slot := self.slots.get(name)) is not None and slot.ready and not fresh:
                slot.wait()
                return
            if over and not fresh:
                break
        if self.error is not None:
            raise self.error
        if name is not None and name not in self.slots:
            raise KeyError(f"the program never set {name!r}")

    def fork(self, count: int) -> list[Executor]:
        """Branches that go on from here, each in a thread of its own. What they share is brought into the cache."""
        self.sync()
        if count > 1:
            self.warm()
        return [
            Executor(self.backend, self.sampling, transcript=self.transcript.copy(), slots=self.slots, threaded=True)
            for _ in range(count)
        ]

    def absorb(self, branch: Executor, base: Transcript) -> None:
        """Add what ``branch`` wrote since it left ``base``."""
        self.sync()
        self._say(None, self.transcript.absorb(branch.transcript, base, self.backend))

    def warm(self) -> None:
        """Have the text so far in the server's tree, if it has grown since the last time."""
        if self.backend.messages_only or self.transcript.has_images:
            return
        prompt = self.transcript.prompt(self.backend, as_messages=False)
        if prompt.text and prompt.text != self._warm:
            self.backend.warm(prompt)
            self._warm = prompt.text

    # ── doing it ─────────────────────────────────────────────────────────────

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._working = False
                    self._changed.notify_all()
                    return
                step = self._queue.popleft()
            try:
                self._execute(step)
            except BaseException as error:
                with self._changed:
                    rest = [step, *self._queue]
                    self._queue.clear()
                    self._fail(error, rest)

    def _fail(self, error: BaseException, steps: list[Expr]) -> None:
        self.error = self.error or error
        self._drop(steps)

    def _drop(self, steps: list[Expr]) -> None:
        error = self.error or CeibaError("the program was stopped")
        for step in steps:
            for name in step.names():
                self.slots[name].fail(error)

    def _execute(self, step: Expr) -> None:
        if isinstance(step, Constant):
            self._add(None, step.text)
        elif isinstance(step, Gen):
            self._generate(step)
        elif isinstance(step, Select):
            self._select(step)
        elif isinstance(step, RoleBegin):
            self.transcript.begin(step.role)
        elif isinstance(step, RoleEnd):
            self.transcript.end(step.role)
        elif isinstance(step, Image):
            self.transcript.add_image(step.url)
        else:
            raise BadRequest(f"{type(step).__name__} is no step of a program")

    def _add(self, name: str | None, text: str) -> None:
        self.transcript.add(text)
        self._say(name, text)

    def _say(self, name: str | None, text: str) -> None:
        if self.streaming and text:
            with self._changed:
                self._pieces.append((name, text))
                self._changed.notify_all()

    def _generate(self, step: Gen) -> None:
        prompt = self.transcript.prompt(self.backend, self.backend.messages_only)
        sampling = {**self.sampling, **step.sampling}
        if self.streaming:
            result = Result("")
            for grown in self.backend.stream(prompt, sampling, step.fields):
                self._say(step.name, grown.text[len(result.text) :])
                result = grown
        else:
            result = self.backend.generate(prompt, sampling, step.fields)
        self.transcript.add(result.text)
        self._set(step.name, result.text, result.meta)

    def _select(self, step: Select) -> None:
        prompt = self.transcript.prompt(self.backend, self.backend.messages_only)
        scores = self.backend.score(prompt, step.choices, step.method.unconditional)
        index, values = step.method.pick(scores.entries)
        means = [sum(entry.conditional) / max(1, len(entry.conditional)) for entry in scores.entries]
        meta = {**scores.meta, "choice_scores": values, "normalized_prompt_logprobs": means}
        self._add(step.name, step.choices[index])
        self._set(step.name, step.choices[index], meta)

    def _set(self, name: str | None, value: str, meta: dict[str, Any]) -> None:
        if name is None:
            return
        self.slots[name].set(value, meta)
        with self._changed:
            self._changed.notify_all()


def parsed(slot: Slot) -> Any:
    """The variable's text as the value that its ``gen`` asked for. Raises BadRequest where the text is none."""
    text, kind = slot.value, slot.value_type
    try:
        if kind is None:
            return text
        if kind == "json" or kind is str:
            return msgspec.json.decode(text)
        return text.lower() == "true" if kind is bool else kind(text)
    except (ValueError, msgspec.DecodeError) as error:
        raise BadRequest(f"{text!r} is not what the generation asked for: {error}.") from None
