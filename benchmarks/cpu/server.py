"""Servers for the CPU benchmarks: start a command, wait until it is healthy, stop it with all its children. Knows no
engine; whoever calls it says what to run and where health is asked for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
"""Ignored by git: what the benchmarks fetch and compile."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    seconds: float
    """From exec to the first healthy answer."""
    log: Path
    group: int
    """The processes that it consists of."""

    def pause(self) -> None:
        """Take the processor from it, for as long as others are measured."""
        os.killpg(self.group, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.group, signal.SIGCONT)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    port: int,
    log: Path,
    health: str = "/health",
    limit: float = 600.0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run ``command`` until the block ends, ``environment`` beside ours. Raises RuntimeError with the log's end when it
    dies or takes too long."""
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with open(log, "wb") as out:
        begun = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**inherited, **(environment or {})},
        )
    try:
        while not healthy(url + health):
            if process.poll() is not None or time.monotonic() - begun > limit:
                raise RuntimeError(f"{command[0]} is not healthy:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.01)
        yield Server(url, time.monotonic() - begun, log, process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            os.killpg(process.pid, signal.SIGCONT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ceiba(model: str | None, port: int, flags: Sequence[str] = ()) -> list[str]:
    """The command of our server."""
    return [sys.executable, "-m", "ceiba", "serve", *([model] if model else []), "--port", str(port), *flags]
