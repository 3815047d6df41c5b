"""Public golden data: the vocabularies and chat templates in the source archive of llama-cpp-python on PyPI.

Fetched once with pip and kept in the user's cache. ``folder`` skips the test, with the reason, where it cannot be had.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

REQUIREMENT = "llama-cpp-python==0.3.36"
INSIDE = "/vendor/llama.cpp/models/"


def folder() -> Path:
    """The archive's models folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ceiba-tests"
    target = cache / REQUIREMENT.replace("==", "-")
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        # pip reads the archive's metadata, for which it fetches a build backend; nothing is compiled.
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        command += ["-d", temporary, REQUIREMENT]
        try:
            got = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{REQUIREMENT} does not come from the package registry in time")
        archives = list(Path(temporary).glob("*.tar.gz"))
        if got.returncode or not archives:
            pytest.skip(f"{REQUIREMENT} cannot be had from the package registry: {got.stderr.strip()[-200:]}")
        made = Path(temporary) / "models"
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                at = member.name.find(INSIDE)
                if at < 0 or not member.isfile():
                    continue
                out = made / member.name[at + len(INSIDE) :]
                if not out.resolve().is_relative_to(made.resolve()):
                    continue
                out.parent.mkdir(parents=True, exist_ok=True)
                data = archive.extractfile(member)
                assert data is not None
                out.write_bytes(data.read())
        try:
            made.rename(target)
        except OSError:
            assert target.is_dir()  # another run was faster
    return target
