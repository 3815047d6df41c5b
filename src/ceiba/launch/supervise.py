"""Starts child processes, learns at once when one dies, and leaves none behind.

Owns pids, pipes and signals. Must never know what a child computes: a child is a name, a command and a first message.
A child gets two pipes: standard input carries the first message and then stays open (its end-of-file tells the child
that we are gone), the status pipe carries ``launch.status`` frames (its end-of-file tells us that the child is gone,
whether it returned, was killed or aborted inside C++).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ceiba.core.errors import CeibaError, ConfigError
from ceiba.launch.starting import Starting, start
from ceiba.launch.status import Failed, Phase, Ready, StatusReader, frame


class ChildDied(CeibaError):
    """A child ended although nobody asked it to."""


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    status: StatusReader
    started: float
    phases: list[Phase] = field(default_factory=list)
    ready: Ready | None = None
    failed: Failed | None = None
    exited: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid


class Supervisor:
    """All children of one launch. All methods but ``spawn`` and ``adopt`` run on the event loop given to ``attach``."""

    def __init__(self, on_death: Callable[[Child, str], None]) -> None:
        """``on_death(child, reason)`` is called once, for the first child that ends on its own after being ready."""
        self.children: list[Child] = []
        self._on_death = on_death
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._changed: asyncio.Event | None = None

    def spawn(self, name: str, command: list[str], first: bytes) -> Child:
        """Start ``command`` (see ``start``) and send it ``first``."""
        return self.adopt(name, start(name, command), first)

    def adopt(self, name: str, starting: Starting, first: bytes) -> Child:
        """A process that runs already becomes a child of this launch and gets its first message."""
        child = Child(name, starting.process, StatusReader(starting.status_fd), starting.started)
        self.children.append(child)
        _send_first(starting.process, first)
        if self._loop is not None:
            self._loop.add_reader(starting.status_fd, self._on_status, child)
        return child

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch all children, those to come too, on ``loop`` (the running one)."""
        self._loop = loop
        self._changed = asyncio.Event()
        for child in self.children:
            loop.add_reader(child.status.fd, self._on_status, child)

    async def wait_ready(self) -> None:
        """Return when every child is ready; raise what the first one that cannot start says. No time limit: loading
        a large model may take minutes, and a child that hangs then can be interrupted."""
        assert self._changed is not None, "attach first"
        while True:
            self._changed.clear()
            for child in self.children:
                if child.failed is not None:
                    kind = ConfigError if child.failed.expected else ChildDied
                    raise kind(child.failed.message)
                if child.exited:
                    raise ChildDied(f"the {child.name} process ended while starting ({_describe(child)})")
            if all(child.ready is not None for child in self.children):
                return
            await self._changed.wait()

    def kill(self, child: Child, number: int = signal.SIGKILL) -> None:
        if child.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    async def stop(self, grace: float = 3.0) -> None:
        """End all children: SIGTERM, after ``grace`` seconds SIGKILL. Then none is left, and more may be spawned."""
        self._stopping = True
        for child in self.children:
            self.kill(child, signal.SIGTERM)
        deadline = time.monotonic() + grace
        for child in self.children:
            while child.process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110 - polled on purpose
                await asyncio.sleep(0.02)
        self._reap()
        self._stopping = False

    def stop_now(self) -> None:
        """SIGKILL and reap, without an event loop: for ``finally`` and ``atexit``."""
        self._stopping = True
        self._reap()

    def _reap(self) -> None:
        for child in self.children:
            self.kill(child)
        for child in self.children:
            child.process.wait()
            self._release(child)
        self.children.clear()

    def _release(self, child: Child) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(child.status.fd)
        if child.status.fd >= 0:
            os.close(child.status.fd)
            child.status.fd = -1
        if child.process.stdin is not None:
            with contextlib.suppress(OSError):
                child.process.stdin.close()

    def _on_status(self, child: Child) -> None:
        assert self._loop is not None
        assert self._changed is not None
        for status in child.status.read():
            match status:
                case Phase():
                    child.phases.append(status)
                case Ready():
                    child.ready = status
                case Failed():
                    child.failed = status
        if child.status.closed:
            self._loop.remove_reader(child.status.fd)
            self._loop.call_soon(self._on_closed, child, time.monotonic() + 1.0)
        self._changed.set()

    def _on_closed(self, child: Child, deadline: float) -> None:
        """The pipe ended: the process is at its end too, or is in a state that only SIGKILL cures."""
        assert self._loop is not None
        assert self._changed is not None
        if child.process.poll() is None:
            if time.monotonic() > deadline:
                self.kill(child)
            self._loop.call_later(0.02, self._on_closed, child, deadline)
            return
        child.exited = True
        self._changed.set()
        if not self._stopping and child.ready is not None:
            self._stopping = True  # one death is enough: whatever follows is its consequence
            self._on_death(child, _describe(child))


def _send_first(process: subprocess.Popen[bytes], first: bytes) -> None:
    """Write the first message without waiting for the child's interpreter: a pipe takes 64 KiB, a thread the rest."""
    assert process.stdin is not None
    fd = process.stdin.fileno()
    data = memoryview(frame(first))

    def write() -> None:
        with contextlib.suppress(OSError):  # a child that died first is noticed through its status pipe
            sent = 0
            while sent < len(data):
                sent += os.write(fd, data[sent:])

    if len(data) <= 4096:
        write()
    else:
        threading.Thread(target=write, name="first-message", daemon=True).start()


def _describe(child: Child) -> str:
    code = child.process.returncode
    if code is None or code >= 0:
        return f"pid {child.pid}, exit status {code}"
    try:
        return f"pid {child.pid}, killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"pid {child.pid}, killed by signal {-code}"
