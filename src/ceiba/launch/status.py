"""What a child tells the process that started it: phases of start-up, ready, failed. Frames on an inherited pipe.

A pipe and not a mailbox, because its end-of-file is also how the death of a child is noticed, however it died. Owns the
framing in both directions (the configuration comes down another pipe); must never know what the children do.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator

import msgspec

_HEADER = struct.Struct("<I")


class Phase(msgspec.Struct, tag=True, array_like=True):
    """One stage of start-up is over."""

    name: str
    seconds: float


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The child serves from now on. ``info``: what the parent prints and shows of it, plain values."""

    info: dict[str, object] = {}


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The child cannot start. ``expected``: an error that is ours to explain, so no traceback was printed."""

    message: str
    expected: bool = True


Status = Phase | Ready | Failed

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Status).decode


def frame(data: bytes) -> bytes:
    return _HEADER.pack(len(data)) + data


def read_frame(fd: int) -> bytes:
    """Block until one whole frame has come from ``fd``; EOFError when the writer went away first."""
    (size,) = _HEADER.unpack(_read_exactly(fd, _HEADER.size))
    return _read_exactly(fd, size)


def _read_exactly(fd: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError("the other end of the pipe is closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class StatusWriter:
    """The child's end. Writes are small and the parent always reads, so they do not block."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # a grandchild holding it would hide our death
        self._fd = fd

    def send(self, status: Status) -> None:
        # The parent may be gone; whoever watches for that ends this process.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, frame(_encode(status)))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a stage of start-up and report it when it has gone well."""
        start = time.perf_counter()
        yield
        self.send(Phase(name, time.perf_counter() - start))


class StatusReader:
    """The parent's end: never blocks, gives whole statuses."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.closed = False
        self._buffer = bytearray()

    def read(self) -> list[Status]:
        """All statuses that have arrived; sets ``closed`` when the child is gone."""
        while not self.closed:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
            self._buffer += data
        statuses: list[Status] = []
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer)
            if len(self._buffer) < _HEADER.size + size:
                break
            statuses.append(_decode(bytes(self._buffer[_HEADER.size : _HEADER.size + size])))
            del self._buffer[: _HEADER.size + size]
        return statuses
