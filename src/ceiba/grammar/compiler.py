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
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from ceiba.core import limits
from ceiba.grammar.base import Compiled, Constraint, Refusal, Spacing, Vocabulary, WireVocabulary

if TYPE_CHECKING:
    from ceiba.grammar.backends import guidance, outlines, xgrammar

_PR_SET_PDEATHSIG = 1


class Start(msgspec.Struct, array_like=True):
    """The first frame to the child."""

    backend: str
    vocabulary: WireVocabulary
    spacing: Spacing


class Answer(msgspec.Struct, array_like=True):
    """A frame from the child: ready (neither field), a compiled grammar, or why not."""

    compiled: Compiled | None = None
    refusal: str = ""


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
    """The chosen backend, and llguidance for what xgrammar does not keep exactly."""

    def __init__(self, start: Start) -> None:
        wire = start.vocabulary
        self._vocabulary = Vocabulary(wire.tokens, tuple(wire.eos_ids), wire.special)
        self._spacing = start.spacing
        self._first: xgrammar.Compiler | None = None
        self._exact: guidance.Compiler | outlines.Compiler
        if start.backend == "outlines":
            from ceiba.grammar.backends import outlines

            self._exact = outlines.Compiler(self._vocabulary, self._spacing)
            return
        from ceiba.grammar.backends import guidance

        self._exact = guidance.Compiler(self._vocabulary, self._spacing)
        if start.backend == "xgrammar":
            from ceiba.grammar.backends import xgrammar

            self._first = xgrammar.Compiler(self._vocabulary, self._spacing)

    def compile(self, constraint: Constraint) -> Compiled:
        """Raises Refusal."""
        if self._first is not None and self._first.takes(constraint):
            return self._first.compile(constraint)
        return self._exact.compile(constraint)


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
    _limit_memory()
    encode = msgspec.msgpack.Encoder().encode
    decoder = msgspec.msgpack.Decoder(Constraint)
    write_frame(sink, encode(Answer()))
    while True:
        try:
            constraint = decoder.decode(read_frame(source))
        except EOFError:
            os._exit(0)
        write_frame(sink, encode(_answer(compilers, constraint)))


def _answer(compilers: Compilers, constraint: Constraint) -> Answer:
    try:
        return Answer(compiled=compilers.compile(constraint))
    except Refusal as refusal:
        return Answer(refusal=str(refusal))
    except RecursionError:
        return Answer(refusal="it is nested too deeply")
    except MemoryError:
        return Answer(refusal=f"it needs more than {limits.GRAMMAR_MEMORY_BYTES >> 20} MiB to compile")
    except Exception as error:  # a library's own kind of failure says that this constraint cannot be used
        return Answer(refusal=f"it cannot be compiled ({type(error).__name__}: {str(error)[:200]})")


def _limit_memory() -> None:
    """Let this process grow by the budget and no further."""
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        most = now + limits.GRAMMAR_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (OSError, ValueError):
        return  # no such file or no right to: the time limit stays


if __name__ == "__main__":
    main()
