"""Files in one folder: their bytes under names of our own making, and what is known of them beside.

Owns the folder. A name that a client gives is shown and never used as a path, so nothing can leave the folder. Methods
block: keep them off the event loop where bytes are moved. Must never know HTTP or batches.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from ceiba.core import limits
from ceiba.core.errors import BadRequest, ConfigError, NotFound, TooLarge

_ID = re.compile(r"file-[0-9a-f]{32}\Z")
_BLOCK = 1 << 20
T = TypeVar("T")


class FileObject(msgspec.Struct, kw_only=True):
    """What is known of one file, as OpenAI shows it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    expires_at: int | None = None
    status_details: str | None = None


def write_json(path: Path, value: object) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(value))
    os.replace(part, path)


def read_json(path: Path, kind: type[T]) -> T | None:
    """None for a file that is not there or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def new_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def shown_name(name: str | None) -> str:
    """The last part of a client's file name, printable and not too long."""
    last = re.split(r"[/\\]", name or "")[-1]
    kept = "".join(c for c in last if c.isprintable())[-limits.MAX_ID_CHARS :]
    return kept if kept.strip(". ") else "file"


class FileStore:
    """``folder`` is made if it is not there, and belongs to this server until ``close``. Raises ConfigError when it
    cannot be written or another server has it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self._files = self.folder / "files"
        try:
            self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = self._files / f".probe-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
            self._lock = (self.folder / ".lock").open("ab")
        except OSError as error:
            raise ConfigError(f"--file-storage-path {folder}: {error.strerror}.", param="--file-storage-path") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                f"--file-storage-path {folder}: another server uses this folder and would answer its batches a second "
                "time; give each server a folder of its own.",
                param="--file-storage-path",
            ) from None

    def close(self) -> None:
        """Let another server have the folder; the end of the process does so too."""
        self._lock.close()

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file lie. Raises NotFound for what is no id of ours."""
        if not _ID.match(file_id):
            raise NotFound(
                f"file {file_id[: limits.MAX_ID_CHARS]!r} is not here.", param="file_id", code="no_such_file"
            )
        return self._files / file_id

    def create(self, source: BinaryIO, filename: str | None, purpose: str) -> FileObject:
        """Keep the bytes of ``source``. Raises TooLarge, and BadRequest when there are too many files."""
        if sum(1 for _ in self._files.glob("file-*.json")) >= limits.MAX_FILES:
            raise BadRequest(f"there are {limits.MAX_FILES} files, which is the limit: delete some.", param="file")
        file_id, size = new_id(), 0
        part = self.path(file_id).with_suffix(".part")
        try:
            with part.open("xb") as out:
                while block := source.read(_BLOCK):
                    size += len(block)
                    if size > limits.MAX_FILE_BYTES:
                        raise TooLarge(
                            f"the file has more than {limits.MAX_FILE_BYTES} bytes, which is the limit: split it.",
                            param="file",
                            code="file_too_large",
                        )
                    out.write(block)
            os.replace(part, self.path(file_id))
        finally:
            part.unlink(missing_ok=True)
        return self.publish(file_id, filename, purpose)

    def publish(self, file_id: str, filename: str | None, purpose: str) -> FileObject:
        """Make a file whose bytes are written known."""
        path = self.path(file_id)
        made = FileObject(
            id=file_id,
            bytes=path.stat().st_size,
            created_at=int(time.time()),
            filename=shown_name(filename),
            purpose=purpose,
        )
        write_json(path.with_suffix(".json"), made)
        return made

    def get(self, file_id: str) -> FileObject:
        """Raises NotFound."""
        found = read_json(self.path(file_id).with_suffix(".json"), FileObject)
        if found is None:
            raise NotFound(f"file {file_id!r} is not here.", param="file_id", code="no_such_file")
        return found

    def all(self) -> list[FileObject]:
        """Newest first."""
        found = [read_json(path, FileObject) for path in self._files.glob("file-*.json")]
        return sorted((f for f in found if f is not None), key=lambda f: (-f.created_at, f.id))

    def delete(self, file_id: str) -> None:
        """Raises NotFound."""
        self.get(file_id)
        self.path(file_id).with_suffix(".json").unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    def lines(self, file_id: str) -> Iterator[bytes]:
        """Lines that are not empty, without their ends."""
        with self.path(file_id).open("rb") as source:
            for line in source:
                if line := line.strip():
                    yield line
