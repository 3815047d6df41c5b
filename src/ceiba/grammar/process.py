"""The parent's side of a compiler process: start it, ask it, and kill it when its time is over or nobody waits.

Owns the child's life. Used from one thread, which must live as long as the child (the kernel ties them together).
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from ceiba.core import limits
from ceiba.core.errors import BadRequest, EngineFault
from ceiba.grammar.base import Compiled, Constraint
from ceiba.grammar.compiler import BEGUN, Answer, Ask, Start, write_frame

START_SECONDS = 120.0
"""Imports and the vocabulary: xgrammar's imports alone take several seconds on a busy machine."""
WALL = 3.0
"""Compiling may last so many times its seconds of CPU time: on a busy machine it gets less than a core."""
_TICK = 0.05
_BOOTSTRAP = (
    "import sys, importlib.util as u\n"
    "if u.find_spec('ceiba') is None: sys.path.append(sys.argv[1])\n"
    "from ceiba.grammar.compiler import main\n"
    "main()\n"
)


class Cancelled(Exception):
    """Nobody waits for the grammar any more."""


class _AheadFailed(Exception):
    """xgrammar needed too much time or memory."""


class CompilerProcess:
    """``start``: the first frame, made when a child is first needed."""

    def __init__(self, start: Callable[[], Start], seconds: float = limits.GRAMMAR_SECONDS) -> None:
        self._start = start
        self._seconds = seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._received = bytearray()
        self._light = 1 << 62
        """Bytes of the child before it compiled anything large."""
        self._decoder = msgspec.msgpack.Decoder(Answer)

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def compile(
        self, constraint: Constraint, unwanted: Callable[[], bool], chosen: Callable[[str], None] = lambda name: None
    ) -> Compiled:
        """``chosen`` hears which library compiles it, before that is loaded.

        Raises BadRequest for a constraint that is refused or over its budget, Cancelled once ``unwanted()``.
        """
        try:
            answer = self._ask(Ask(constraint), unwanted, chosen)
        except _AheadFailed:
            answer = self._ask(Ask(constraint, lazily=True), unwanted, chosen)
        child = self._child
        if child is not None and _resident(child.pid) > self._light + limits.GRAMMAR_RETAINED_BYTES:
            self.kill()  # what a library keeps of a large constraint goes back to the machine
        if answer.compiled is None:
            raise BadRequest(f"{constraint.kind}: {answer.refusal}", param=constraint.kind, code="invalid_grammar")
        return answer.compiled

    def _ask(self, ask: Ask, unwanted: Callable[[], bool], chosen: Callable[[str], None]) -> Answer:
        child, kind, library = self._child or self._spawn(), ask.constraint.kind, ""
        try:
            write_frame(_pipe(child.stdin), msgspec.msgpack.encode(ask))
            answer = self._receive(child, START_SECONDS, unwanted)
            while answer.stage:
                if answer.stage != BEGUN:
                    library = answer.stage
                    chosen(library)
                    answer = self._receive(child, START_SECONDS, unwanted)
                    continue
                self._light = min(self._light, _resident(child.pid) or self._light)
                ahead = library == "xgrammar"
                seconds = min(self._seconds, limits.GRAMMAR_AHEAD_SECONDS) if ahead else self._seconds
                answer = self._receive(child, seconds, unwanted, of_cpu=True)
            return answer
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self.kill()
            if library == "xgrammar":
                raise _AheadFailed from None
            if isinstance(error, TimeoutError):
                why = f"the {kind} took more than {self._seconds:g} s to compile and was given up: simplify it"
            else:
                why = (
                    f"compiling the {kind} ended the compiler, most likely for want of memory (the limit is "
                    f"{limits.GRAMMAR_MEMORY_BYTES >> 20} MiB): use a simpler one"
                )
            raise BadRequest(why, param=kind, code="grammar_too_complex") from None
        except Cancelled:
            self.kill()
            raise

    def kill(self) -> None:
        """End the child at once, whatever it does; a next constraint starts another."""
        child, self._child = self._child, None
        self._received.clear()
        self._light = 1 << 62
        if child is None:
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                _pipe(stream).close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        start = self._start()
        child = self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            write_frame(_pipe(child.stdin), msgspec.msgpack.encode(start))
        except BrokenPipeError:
            self.kill()
            raise EngineFault("the grammar compiler did not start; the server's log may say why") from None
        return child

    def _receive(
        self, child: subprocess.Popen[bytes], seconds: float, unwanted: Callable[[], bool], *, of_cpu: bool = False
    ) -> Answer:
        """The next frame. Frames may arrive together, so what was read too far is kept. ``of_cpu``: the seconds are
        those that the child computes, so that a busy machine refuses nothing that an idle one takes."""
        fd = _pipe(child.stdout).fileno()
        before = _computed(child.pid) if of_cpu else None
        deadline = time.monotonic() + (seconds if before is None else seconds * WALL)
        while (frame := self._take_frame()) is None:
            if select.select([fd], [], [], _TICK)[0]:
                data = os.read(fd, 1 << 20)
                if not data:
                    raise EOFError
                self._received += data
            elif unwanted():
                raise Cancelled
            elif time.monotonic() > deadline or (
                before is not None and (_computed(child.pid) or before) - before > seconds
            ):
                raise TimeoutError
        return self._decoder.decode(frame)

    def _take_frame(self) -> bytes | None:
        if len(self._received) < 4:
            return None
        end = 4 + int.from_bytes(self._received[:4], "little")
        if len(self._received) < end:
            return None
        frame = bytes(self._received[4:end])
        del self._received[:end]
        return frame


def _pipe(stream: object) -> BinaryIO:
    return cast(BinaryIO, stream)


def _computed(pid: int) -> float | None:
    """Seconds of CPU time that a process has used; None where that cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 where that cannot be told."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
