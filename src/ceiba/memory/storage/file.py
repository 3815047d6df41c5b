"""Pages as files in a directory: the store that needs nothing else. Owns names, the size budget and what goes first.

A page is written to a temporary file and renamed, so a reader sees all of it or nothing, whatever dies when; what a
crash of the machine leaves half written fails its checksum. The directory may be shared by several servers: each keeps
its own books of what it has seen and bounds that.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ceiba.memory.storage.base import Buffer, StoreError, StoreFull

log = logging.getLogger("ceiba.hicache")

SUFFIX = ".kv"
_FULL = {errno.ENOSPC, errno.EDQUOT}
LOW_WATER = 0.95
"""Over budget, the oldest pages go until this share of it is left."""


class FileIO(Protocol):
    """How a file's bytes are moved."""

    def read(self, path: str) -> Buffer:
        """All of it; FileNotFoundError, OSError."""

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        """A new file; OSError."""

    def close(self) -> None: ...


class PlainIO:
    def read(self, path: str) -> Buffer:
        fd = os.open(path, os.O_RDONLY)
        try:
            # Not a bytearray: that writes zeros first, which takes longer than reading what is in the page cache.
            view, at = np.empty(os.fstat(fd).st_size, np.uint8).data, 0
            while at < len(view):
                count = os.preadv(fd, [view[at:]], at)
                if count == 0:
                    break
                at += count
            return view[:at]
        finally:
            os.close(fd)

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            left = [memoryview(part).cast("B") for part in parts]
            while left:
                count = os.writev(fd, left)
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if left:
                    left[0] = left[0][count:]
        finally:
            os.close(fd)

    def close(self) -> None:
        return None


class FileStore:
    """``folder``: this model's, made if missing. ``budget``: bytes its pages may take. ``threads``: how many may read,
    and as many write, at a time; more than one only where ``io`` bears it."""

    def __init__(self, folder: Path, budget: int, io: FileIO | None = None, threads: int = 1) -> None:
        self.folder = folder
        self.budget = budget
        self.threads = threads
        self._io: FileIO = PlainIO() if io is None else io
        self._pages: OrderedDict[str, int] = OrderedDict()
        """Key -> bytes, the least recently used first."""
        self._used = 0
        self._coming = 0
        """Bytes being written."""
        self._lock = threading.Lock()
        self._number = itertools.count()
        self.evicted = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            raise StoreError(f"{folder} cannot be used: {error.strerror or error}") from error

    def exists(self, keys: Sequence[str]) -> int:
        for i, key in enumerate(keys):
            if key not in self._pages and not os.path.exists(self._path(key)):
                return i
        return len(keys)

    def get(self, key: str) -> Buffer | None:
        path = self._path(key)
        try:
            data = self._io.read(path)
        except FileNotFoundError:
            self._forget(key)
            return None
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror or error}") from error
        self._note(key, len(data))
        with contextlib.suppress(OSError):
            os.utime(path)  # what is used stays longer, also after a restart
        return data

    def put(self, key: str, parts: Sequence[Buffer]) -> int:
        path = self._path(key)
        if os.path.exists(path):
            self._note(key, None)
            return 0
        size = sum(memoryview(part).nbytes for part in parts)
        if size > self.budget:
            raise StoreFull(f"a page of {size} bytes is larger than the budget of {self.budget}")
        with self._lock:
            self._coming += size
        try:
            self._make_room()
            self._put(key, path, parts, size)
        finally:
            with self._lock:
                self._coming -= size
        return size

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key))
        self._forget(key)

    def clear(self) -> int:
        count = 0
        for entry in self._files():
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
                count += entry.name.endswith(SUFFIX)
        with self._lock:
            self._pages.clear()
            self._used = 0
        return count

    def stats(self) -> dict[str, object]:
        return {
            "path": str(self.folder),
            "pages": len(self._pages),
            "bytes": self._used,
            "max_bytes": self.budget,
            "evicted_pages": self.evicted,
        }

    def close(self) -> None:
        self._io.close()

    # ── inside ───────────────────────────────────────────────────────────────

    def _path(self, key: str) -> str:
        return f"{self.folder}/{key[:2]}/{key}{SUFFIX}"

    def _write(self, key: str, path: str, parts: Sequence[Buffer]) -> None:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        temporary = f"{os.path.dirname(path)}/.{key}.{os.getpid()}.{next(self._number)}.tmp"
        try:
            self._io.write(temporary, parts)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _put(self, key: str, path: str, parts: Sequence[Buffer], size: int) -> None:
        try:
            self._write(key, path, parts)
        except OSError as error:
            if error.errno not in _FULL:
                raise StoreError(f"{path}: {error.strerror or error}") from error
            if not self._evict(4 * size):
                raise StoreFull(f"{self.folder}: {error.strerror}") from error
            try:
                self._write(key, path, parts)
            except OSError as again:
                kind = StoreFull if again.errno in _FULL else StoreError
                raise kind(f"{self.folder}: {again.strerror or again}") from again
        self._note(key, size)

    def _files(self) -> list[os.DirEntry[str]]:
        found: list[os.DirEntry[str]] = []
        for part in os.scandir(self.folder):
            if part.is_dir(follow_symlinks=False) and len(part.name) == 2:
                ours = (entry for entry in os.scandir(part.path) if entry.name.endswith((SUFFIX, ".tmp")))
                found += [entry for entry in ours if entry.is_file(follow_symlinks=False)]
        return found

    def _scan(self) -> None:
        """Take stock, oldest first, and remove what writers that are gone have left half done."""
        pages = []
        for entry in self._files():
            with contextlib.suppress(FileNotFoundError):
                if entry.name.endswith(SUFFIX):
                    stat = entry.stat()
                    pages.append((stat.st_mtime, entry.name[: -len(SUFFIX)], stat.st_size))
                elif not _alive(entry.name):
                    os.unlink(entry.path)
        for _, key, size in sorted(pages):
            self._pages[key] = size
            self._used += size
        if pages:
            log.info("%s holds %d pages of KV, %.1f MiB", self.folder, len(pages), self._used / 2**20)

    def _note(self, key: str, size: int | None) -> None:
        """``key`` was used; ``size`` None: as it was."""
        with self._lock:
            old = self._pages.pop(key, None)
            if size is None and old is None:
                with contextlib.suppress(OSError):
                    size = os.stat(self._path(key)).st_size
            new = size if size is not None else old
            if new is not None:
                self._pages[key] = new
            self._used += (new or 0) - (old or 0)

    def _forget(self, key: str) -> None:
        with self._lock:
            self._used -= self._pages.pop(key, 0)

    def _make_room(self) -> None:
        with self._lock:
            wanted = self._used + self._coming
        if wanted > self.budget:
            self._evict(wanted - int(self.budget * LOW_WATER))

    def _evict(self, wanted: int) -> int:
        """Delete the least recently used pages until ``wanted`` bytes are gone; returns how many went."""
        gone = 0
        while gone < wanted:
            with self._lock:
                if not self._pages:
                    break
                key, size = self._pages.popitem(last=False)
                self._used -= size
            with contextlib.suppress(OSError):
                os.unlink(self._path(key))
                with self._lock:
                    self.evicted += 1
            gone += size
        return gone


def _alive(name: str) -> bool:
    """Whether the process that made a temporary file still runs on this machine."""
    try:
        pid = int(name.split(".")[-3])
        os.kill(pid, 0)
    except (ValueError, IndexError, ProcessLookupError):
        return False
    except OSError:
        return True
    return True
