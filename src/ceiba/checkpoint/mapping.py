"""One file, mapped read-only: owns the descriptor and the checks that come before any byte is believed (it exists, is a
regular file, is not empty). Must never know what is inside.
"""

from __future__ import annotations

import mmap
import os
import stat

import numpy as np

from ceiba.core.errors import CheckpointError


class MappedFile:
    """A read-only mapping of a regular file.

    ``bytes`` is the whole file as a read-only uint8 array; slices of it keep the mapping alive after ``close``. A file
    that another process cuts short while it is mapped cannot be guarded against: replace model files by renaming.
    """

    def __init__(self, path: str) -> None:
        """Raises CheckpointError when the path is missing, unreadable, empty or not a regular file."""
        self.path = path
        try:
            # O_NONBLOCK: opening a named pipe would otherwise wait for its writer.
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot open the model file: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            if status.st_size == 0:
                raise CheckpointError(f"{path}: the file is empty; fetch it again")
            self.map = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path}: cannot map the model file: {error}") from error
        finally:
            os.close(descriptor)
        self.size = status.st_size
        self.bytes = np.frombuffer(self.map, np.uint8)

    def slice(self, begin: int, end: int) -> np.ndarray:
        """uint8 [end - begin], not copied. The caller has checked the bounds."""
        return self.bytes[begin:end]

    def close(self) -> None:
        """Drop our hold; the mapping goes when the last array over it does."""
        self.bytes = np.zeros(0, np.uint8)


def read_small(path: str, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes; else CheckpointError names the file and the limit."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            if status.st_size > limit:
                raise CheckpointError(f"{path}: {status.st_size} bytes, over the limit of {limit}")
            return file.read(limit)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read: {error.strerror}") from error
