"""Packed weights on disk: what the CPU kernels made of a checkpoint, mapped at the next start instead of made again.

Owns the file, its identity, its checks and the folder's size. It may be deleted at any time, and anything odd about a
file (another version, a cut, a changed byte) means that it is not used and written anew. Knows names and bytes; never
what they mean, nor a device. No torch: reading begins while torch is still being imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

MAGIC = b"CEIBAPK1"
SUFFIX = ".packed"
ALIGNMENT = 4096
MAX_HEADER = 64 << 20
LEAST_BYTES = 16 << 20
"""Smaller models are packed in less time than a file is worth."""
FOLDER_BYTES = 16 << 30
"""What the folder may hold; the files that were not used for longest go first. A model of more than half stays out."""
SPARE_DISK = 2 << 30
"""Free bytes that must stay on the disk."""
STALE_SECONDS = 3600.0
"""A temporary file of this age belongs to a process that died."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Of each weight file, to tell two apart that have one size and one time (archives often have one time for all)."""


@dataclass(slots=True)
class _Entry:
    offset: int
    size: int
    crc: int


class PackedCache:
    """The packed weights of one checkpoint, packed for one build of the kernels.

    ``take`` returns what the file has, ``keep`` collects what it lacks, ``finish`` writes the file where something was
    lacking. ``ready`` says whether the file was found whole.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        """Look for the file and begin to check it, on a thread. Never raises: without a file all is packed anew."""
        self.folder, self.identity = folder, identity
        name = hashlib.sha256(identity.encode()).hexdigest()[:32]
        self.path = folder / (name + SUFFIX)
        self.bytes_taken = 0
        self._entries: dict[str, _Entry] = {}
        self._data = np.zeros(0, np.uint8)
        self._kept: dict[str, np.ndarray] = {}
        self._checked = threading.Thread(target=self._check, name="packed-cache", daemon=True)
        self._checked.start()

    @property
    def ready(self) -> bool:
        """Whether a usable file was found; waits for its check."""
        self._checked.join()
        return bool(self._entries)

    def take(self, name: str, size: int) -> np.ndarray | None:
        """The ``size`` bytes stored as ``name``, mapped and read only by agreement; None where there are none."""
        self._checked.join()
        entry = self._entries.get(name)
        if entry is None or entry.size != size:
            return None
        self.bytes_taken += size
        return self._data[entry.offset : entry.offset + size]

    def keep(self, name: str, data: np.ndarray) -> None:
        """Remember ``data`` (uint8, contiguous, not to be changed) for the file."""
        self._kept[name] = data

    def finish(self) -> threading.Thread | None:
        """All is taken or kept: write the file, on the returned thread, if anything had to be packed."""
        kept, self._kept = self._kept, {}
        if not kept:
            with contextlib.suppress(OSError):
                os.utime(self.path)  # used now: the last to be deleted
            return None
        if self._entries:
            return None  # the file serves another part of the same checkpoint: leave it
        size = sum(len(data) for data in kept.values())
        if size < LEAST_BYTES or size > FOLDER_BYTES // 2:
            return None
        thread = threading.Thread(target=self._write, args=(kept, size), name="packed-cache", daemon=True)
        thread.start()
        return thread

    # ── reading ──────────────────────────────────────────────────────────────

    def _check(self) -> None:
        try:
            entries, data = _read(self.path, self.identity)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("packed weights %s are not used (%s); they are packed and written again", self.path, error)
            with contextlib.suppress(OSError):
                self.path.unlink()
            return
        self._entries, self._data = entries, data

    # ── writing ──────────────────────────────────────────────────────────────

    def _write(self, kept: dict[str, np.ndarray], size: int) -> None:
        temporary = self.folder / f"{self.path.name}.{os.getpid()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for stale in _stale(self.folder):
                stale.unlink(missing_ok=True)
            if shutil.disk_usage(self.folder).free < size + SPARE_DISK:
                log.info("packed weights are not kept: the disk of %s is nearly full", self.folder)
                return
            with open(temporary, "wb") as file:
                for piece in _file_of(self.identity, kept):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
            _shrink(self.folder, self.path)
            log.info("packed weights kept in %s (%.0f MB)", self.path, size / 1e6)
        except OSError as error:
            log.info("packed weights are not kept: %s", error)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def identity_of(files: tuple[str, ...], build: bytes, options: dict[str, str | None]) -> str:
    """What a packed file depends on: every weight file (size, time, samples of its bytes), the kernels' ``build``
    (bytes that change with their layout) and how the weights are held. Raises OSError for a file that cannot be read.
    """
    weights = []
    for name in files:
        with open(name, "rb") as file:
            status = os.fstat(file.fileno())
            digest = hashlib.sha256()
            for index in range(SAMPLES):
                file.seek(max(0, status.st_size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
        weights.append([os.path.basename(name), status.st_size, status.st_mtime_ns, digest.hexdigest()])
    return json.dumps({"files": weights, "build": hashlib.sha256(build).hexdigest(), **options}, sort_keys=True)


def _file_of(identity: str, kept: dict[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    """The file piece by piece: magic, length and checksum of the header, header (JSON), then the data."""
    entries, offset = [], 0
    for name, data in kept.items():
        entries.append([name, offset, len(data), zlib.crc32(data.data)])
        offset += _aligned(len(data))
    header = json.dumps({"identity": identity, "entries": entries, "bytes": offset}).encode()
    head = MAGIC + struct.pack("<QI", len(header), zlib.crc32(header)) + header
    yield head
    yield bytes(_aligned(len(head)) - len(head))
    for data in kept.values():
        yield data.data
        yield bytes(_aligned(len(data)) - len(data))


def _read(path: Path, identity: str) -> tuple[dict[str, _Entry], np.ndarray]:
    """(entries, mapped bytes) of a file. Raises ValueError saying what is wrong with it, OSError."""
    fixed = len(MAGIC) + 12
    with open(path, "rb") as file:
        start = file.read(fixed)
        if len(start) < fixed or not start.startswith(MAGIC):
            raise ValueError("it is no such file")
        length, crc = struct.unpack("<QI", start[len(MAGIC) :])
        if length > MAX_HEADER:
            raise ValueError("its header is too long")
        header = file.read(length)
        if len(header) != length or zlib.crc32(header) != crc:
            raise ValueError("its header is damaged")
        fields = json.loads(header)
        if fields["identity"] != identity:
            raise ValueError("it belongs to another checkpoint")
        begin = _aligned(fixed + length)
        if os.fstat(file.fileno()).st_size != begin + fields["bytes"]:
            raise ValueError("it is cut short")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with contextlib.suppress(AttributeError, OSError):
        mapped.madvise(mmap.MADV_WILLNEED)
    data = np.frombuffer(mapped, np.uint8)
    entries = {}
    for name, offset, size, crc in fields["entries"]:
        at = begin + offset
        if zlib.crc32(data[at : at + size].data) != crc:
            raise ValueError(f"{name} is damaged")
        entries[name] = _Entry(at, size, crc)
    return entries, data


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _stale(folder: Path) -> list[Path]:
    before = time.time() - STALE_SECONDS
    found = []
    for path in folder.glob(f"*{SUFFIX}.*.tmp"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < before:
                found.append(path)
    return found


def _shrink(folder: Path, newest: Path) -> None:
    """Delete the files that were not used for longest until the folder is within its bound."""
    files = []
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            status = path.stat()
            files.append((path == newest, status.st_mtime, status.st_size, path))
    total = sum(size for _, _, size, _ in files)
    for is_newest, _, size, path in sorted(files, key=lambda item: item[:2]):
        if total <= FOLDER_BYTES or is_newest:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
