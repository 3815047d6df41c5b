"""Template workers as seen from the front: start, ask with a deadline, end and replace.

Owns the child processes and their pipes. Must never know what a template says or what a message is.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec

from ceiba.core.errors import BadRequest, Overloaded
from ceiba.core.limits import TEMPLATE_SECONDS


class TemplateTimeout(BadRequest):
    """The template did not come to an end in time, or ran out of memory, and its process is gone."""


class _Worker:
    def __init__(self) -> None:
        # The child gets our import path and nothing else of the environment, where keys may stand.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ceiba.text.template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONUTF8": "1"},
            start_new_session=True,
        )
        self.loaded: dict[int, int] = {}
        """Index of a source in the pool -> its number in this worker."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Raises TemplateTimeout when no answer came; the worker must then be closed."""
        deadline = time.monotonic() + seconds + 1.0  # the child's own alarm rings first
        data = msgspec.msgpack.encode({**request, "seconds": seconds, "zone": time.localtime().tm_gmtoff})
        self._write(struct.pack("<I", len(data)) + data, deadline)
        (length,) = struct.unpack("<I", self._read(4, deadline))
        return dict(msgspec.msgpack.decode(self._read(length, deadline)))

    def _write(self, data: bytes, deadline: float) -> None:
        assert self.process.stdin is not None
        fd = self.process.stdin.fileno()
        view = memoryview(data)
        while view:
            _wait([], [fd], deadline)
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise _ended() from error

    def _read(self, n: int, deadline: float) -> bytes:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        parts = []
        while n:
            _wait([fd], [], deadline)
            try:
                part = os.read(fd, min(n, 1 << 20))
            except BlockingIOError:
                continue
            if not part:
                raise _ended()
            parts.append(part)
            n -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _wait(read: list[int], write: list[int], deadline: float) -> None:
    left = deadline - time.monotonic()
    poll = select.poll()
    for fd in read:
        poll.register(fd, select.POLLIN)
    for fd in write:
        poll.register(fd, select.POLLOUT)
    if left <= 0 or not poll.poll(left * 1000):
        raise _ended()


def _ended() -> TemplateTimeout:
    return TemplateTimeout(
        f"the chat template did not finish within its limits ({TEMPLATE_SECONDS:g} s, 2 GiB); "
        "choose another with --chat-template, or send fewer or shorter messages",
        code="template_timeout",
    )


class TemplatePool:
    """Up to ``size`` workers, started when needed and replaced when lost. Safe to call from many threads."""

    def __init__(self, size: int = 2) -> None:
        self._sources: list[str] = []
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._free = threading.Semaphore(size)
        self._closed = False

    def load(self, source: str) -> int:
        """Compile a template; its number for ``render``. Raises BadRequest naming the line of a mistake."""
        with self._lock:
            number = len(self._sources)
            self._sources.append(source)
        self._with_worker(number, None, 0, TEMPLATE_SECONDS)
        return number

    def render(self, number: int, variables: dict[str, Any], limit: int, seconds: float = TEMPLATE_SECONDS) -> str:
        """The text. Raises BadRequest with the template's own words where it refuses the conversation."""
        return self._with_worker(number, variables, limit, seconds)

    def close(self) -> None:
        """End all workers. Idempotent."""
        with self._lock:
            self._closed = True
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.close()

    def _with_worker(self, number: int, variables: dict[str, Any] | None, limit: int, seconds: float) -> str:
        # Behind others for longer than two renderings may take means strangers' templates are eating the time.
        if not self._free.acquire(timeout=2 * (TEMPLATE_SECONDS + 1)):
            raise Overloaded("chat templates are taking too long; try again", code="template_busy")
        try:
            worker = self._living() or _Worker()
            try:
                text = self._ask(worker, number, variables, limit, seconds)
            except BadRequest as error:
                if isinstance(error, TemplateTimeout):
                    worker.close()
                else:
                    self._keep(worker)
                raise
            except BaseException:
                worker.close()
                raise
            self._keep(worker)
            return text
        finally:
            self._free.release()

    def _living(self) -> _Worker | None:
        """An idle worker that nobody has killed meanwhile (a system short of memory does)."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None or worker.process.poll() is None:
                return worker
            worker.close()

    def _keep(self, worker: _Worker) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.close()

    def _ask(self, worker: _Worker, number: int, variables: dict[str, Any] | None, limit: int, seconds: float) -> str:
        if number not in worker.loaded:
            answer = worker.ask({"op": "load", "source": self._sources[number]}, TEMPLATE_SECONDS)
            if "error" in answer:
                raise BadRequest(f"the chat template has a mistake: {answer['error']}", param="chat_template")
            worker.loaded[number] = answer["id"]
        if variables is None:
            return ""
        request = {"op": "render", "id": worker.loaded[number], "variables": variables, "limit": limit}
        answer = worker.ask(request, seconds)
        if "error" in answer:
            said = "refuses this conversation" if answer["refused"] else "failed on this conversation"
            raise BadRequest(f"the chat template {said}: {answer['error']}", param="messages")
        return str(answer["text"])
