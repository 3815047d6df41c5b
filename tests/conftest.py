"""Which tests run: GPU tests where there is one, and of the slow ones the share that was asked for.

``--slow-share K/N`` runs the Kth of N parts of the tests marked slow, chosen by a hash of their names, so that N runs
with K = 1..N run each once. ``auto`` takes the part by the day and the commit: CI goes round all of them in time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import time
from pathlib import Path

import pytest

SHARES = 4
ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-share", default="1/1", metavar="K/N", help="run the Kth of N parts of the slow tests; 0/1: none; auto"
    )


def pytest_configure(config: pytest.Config) -> None:
    """No example of a property has a deadline: on a busy machine, or when garbage is collected, any may take long."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile("ceiba", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("ceiba")


def _commit() -> str:
    try:
        return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""


def _share(text: str) -> tuple[int, int]:
    """(part, parts), part counted from 0; part -1 for no slow tests at all."""
    if text == "auto":
        day = int(time.time() // 86400)
        return (day + int(hashlib.sha256(_commit().encode()).hexdigest(), 16)) % SHARES, SHARES
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and int(parts) >= 1 and int(part) <= int(parts)):
        raise pytest.UsageError(f"--slow-share {text}: give K/N with 1 <= K <= N, 0/1 for none, or auto")
    return int(part) - 1, int(parts)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = _share(config.getoption("--slow-share"))
    kept, left = [], []
    for item in items:
        name = item.nodeid.encode()
        mine = int(hashlib.sha256(name).hexdigest(), 16) % parts == part
        (kept if item.get_closest_marker("slow") is None or mine else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
    gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if gpu and not _has_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_report_header(config: pytest.Config) -> str:
    part, parts = _share(config.getoption("--slow-share"))
    return f"slow tests: part {part + 1} of {parts}" if part >= 0 else "slow tests: none"
