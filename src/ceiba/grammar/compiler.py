"""The compiler process: one constraint in, one compiled grammar or refusal out.

Owns the child's side of the pipe and the limits it puts on itself; killing it is the parent's (``process``). Frames are
a 4-byte length and msgpack. Whatever the libraries print goes nowhere: it would break the frames or fill the log.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO, Protocol

import msgspec

from ceiba.core import limits
from ceiba.grammar.base import Compiled, Constraint, Refusal, Spacing, Vocabulary, WireVocabulary

_PR_SET_PDEATHSIG = 1


class Start(msgspec.Struct, array_like=True):
    """The first frame to the child."""

    backend: str
    vocabulary: WireVocabulary
    spacing: Spacing


class Ask(msgspec.Struct, array_like=True):
    """Every further frame to the child."""

    constraint: Constraint
    lazily: bool = False
    """Whether nothing shall be built ahead: that has taken too long already."""


class Answer(msgspec.Struct, array_like=True):
    """A frame from the child. For each constraint: the library that was chosen (``stage``), then ``BEGUN`` once it is
    loaded, then a compiled grammar or why not; a refusal may come at once, and a second library after the first."""

    compiled: Compiled | None = None
    refusal: str = ""
    stage: str = ""


BEGUN = "begun"


class Compiler(Protocol):
    def compile(self, constraint: Constraint) -> Compiled:
        """Raises Refusal."""


def write_frame(stream: BinaryIO, data: bytes) -> None:
    stream.write(struct.pack("<I", len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes:
    """Raises EOFError when the other side is gone."""
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    size = struct.unpack("<I", head)[0]
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


class Compilers:
    """The chosen backend, and llguidance for what xgrammar does not keep exactly; each imported when first needed."""

    def __init__(self, start: Start) -> None:
        wire = start.vocabulary
        self._vocabulary = Vocabulary(wire.tokens, tuple(wire.eos_ids), wire.special)
        self._spacing = start.spacing
        self._backend = start.backend
        self._made: dict[str, Compiler] = {}

    def choose(self, ask: Ask) -> str:
        """Which library compiles it. Raises Refusal for a constraint that cannot be read."""
        if self._backend != "xgrammar":
            return self._backend
        if ask.lazily:
            return "llguidance"
        from ceiba.grammar.backends import xgrammar

        taken = xgrammar.takes(ask.constraint, self._spacing, self._vocabulary)
        return "xgrammar" if taken else "llguidance"

    def get(self, name: str) -> Compiler:
        """The compiler of one library; imports it, which takes xgrammar seconds."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._make(name)
        return made

    def _make(self, name: str) -> Compiler:
        if name == "xgrammar":
            from ceiba.grammar.backends import xgrammar

            return xgrammar.Compiler(self._vocabulary, self._spacing)
        if name == "outlines":
            from ceiba.grammar.backends import outlines

            return outlines.Compiler(self._vocabulary, self._spacing)
        from ceiba.grammar.backends import guidance

        return guidance.Compiler(self._vocabulary, self._spacing)


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)  # the engine's own threads come first
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    void = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(void, fd)
    try:
        compilers = Compilers(msgspec.msgpack.decode(read_frame(source), type=Start))
    except EOFError:
        os._exit(1)
    except Exception as error:
        write_frame(sink, msgspec.msgpack.encode(Answer(refusal=f"{type(error).__name__}: {error}")))
        os._exit(1)
    encode = msgspec.msgpack.Encoder().encode
    decoder = msgspec.msgpack.Decoder(Ask)

    def send(answer: Answer) -> None:
        write_frame(sink, encode(answer))

    while True:
        try:
            ask = decoder.decode(read_frame(source))
        except EOFError:
            os._exit(0)
        send(_answer(compilers, ask, send))


def _answer(compilers: Compilers, ask: Ask, send: Callable[[Answer], None]) -> Answer:
    """What the chosen library refuses or cannot build goes to llguidance, which knows more: character classes in
    expressions, Lark, automata that need not be built ahead."""
    try:
        name = compilers.choose(ask)
    except Refusal as refusal:
        return Answer(refusal=str(refusal))
    answer = _attempt(compilers, name, ask.constraint, send)
    if answer.compiled is None and name == "xgrammar":
        answer = _attempt(compilers, "llguidance", ask.constraint, send)
    return answer


def _attempt(compilers: Compilers, name: str, constraint: Constraint, send: Callable[[Answer], None]) -> Answer:
    try:
        send(Answer(stage=name))
        _limit_memory(None)
        compiler = compilers.get(name)
        _limit_memory(limits.GRAMMAR_MEMORY_BYTES)
        send(Answer(stage=BEGUN))
        return Answer(compiled=compiler.compile(constraint))
    except Refusal as refusal:
        return Answer(refusal=str(refusal))
    except RecursionError:
        return Answer(refusal="it is nested too deeply")
    except MemoryError:
        return Answer(refusal=f"it needs more than {limits.GRAMMAR_MEMORY_BYTES >> 20} MiB to compile")
    except Exception as error:  # a library's own kind of failure says that this constraint cannot be used
        return Answer(refusal=f"it cannot be compiled ({type(error).__name__}: {str(error)[:200]})")


def _limit_memory(budget: int | None) -> None:
    """Let this process grow by ``budget`` bytes from here and no further; None: as it likes, while a library loads."""
    most = resource.RLIM_INFINITY
    try:
        if budget is not None:
            with open("/proc/self/statm") as file:
                most = int(file.read().split()[0]) * resource.getpagesize() + budget
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (OSError, ValueError):
        return  # no such file or no right to: the time limit stays


if __name__ == "__main__":
    main()
