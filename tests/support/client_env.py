"""Environments of their own for other people's clients: a virtual environment for one of this project's extras.

They are large and none of our tests but the slow ones needs them. A machine without the registries skips, with the
installer's last words.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 600


def requirements(extra: str) -> list[str]:
    """Of one extra in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"][extra]


def run(*command: str | Path, seconds: float = SECONDS, **options) -> subprocess.CompletedProcess[str]:
    """The finished command, its outputs as text."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False, **options)


def environment(extra: str, folder: Path) -> Path:
    """The Python of a new environment in ``folder`` that has ``extra``; skips the test where it cannot be made.

    uv resolves these trees in seconds where pip needs minutes; pip is tried where there is no uv to be had.
    """
    try:
        return _environment(extra, folder)
    except subprocess.TimeoutExpired as error:
        pytest.skip(f"{extra} cannot be installed here in {error.timeout:g} s")


def _environment(extra: str, folder: Path) -> Path:
    python = folder / "bin" / "python"
    made = run(sys.executable, "-m", "venv", folder)
    if made.returncode:
        pytest.skip(f"no virtual environment: {made.stderr[-300:]}")
    wanted = requirements(extra)
    clean = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    if run(python, "-m", "pip", "install", "-q", "uv", env=clean).returncode == 0:
        clean.setdefault("SSL_CERT_FILE", os.environ.get("PIP_CERT", ""))
        if not clean["SSL_CERT_FILE"]:
            del clean["SSL_CERT_FILE"]
        done = run(folder / "bin" / "uv", "pip", "install", "-q", "--python", python, *wanted, env=clean)
        if done.returncode == 0:
            return python
    done = run(python, "-m", "pip", "install", "-q", *wanted, env=clean)
    if done.returncode:
        pytest.skip(f"{extra} cannot be installed here: {done.stderr[-300:]}")
    return python


def script(python: Path, path: Path, *arguments: str, seconds: float = SECONDS) -> None:
    """Run a client's script, which ends with ``ok`` when all of it held."""
    clean = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    quiet = {"DO_NOT_TRACK": "1", "OPENAI_AGENTS_DISABLE_TRACING": "1", "HF_HUB_OFFLINE": "1"}
    done = run(python, path, *arguments, seconds=seconds, env={**clean, **quiet}, cwd=path.parent)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.strip().endswith("ok"), done.stdout[-1000:]
