"""Starts the real server for tests: on a free port of loopback, always stopped, its processes known by pid."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from ceiba.kernels import cpu

SAME_BITS = ("--enable-deterministic-inference",) if cpu.available else ()
"""For servers whose answers are compared although more rows were computed beside them, or fewer: without the flag,
tiles of bfloat16 (AMX, AVX-512 BF16) round. Without the compiled kernels it is refused, and sums have one order."""

READY = re.compile(r"The server is up and ready: (http://\S+)")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class LiveServer:
    """``ceiba serve`` as a user starts it. Use as a context manager, or ``start`` and ``stop``."""

    def __init__(self, *flags: str, port: int | None = None, module: str = "ceiba", log_level: str = "info") -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        serve = ["serve"] if module == "ceiba" else []
        self.command = [
            sys.executable,
            "-m",
            module,
            *serve,
            "--port",
            str(self.port),
            "--log-level",
            log_level,
            *flags,
        ]
        self.process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.NamedTemporaryFile(prefix="ceiba-test-", suffix=".log", delete=False)  # noqa: SIM115

    def start(self, timeout: float = 120.0, wait: bool = True) -> LiveServer:
        self.process = subprocess.Popen(
            self.command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        if wait:
            self.wait_ready(timeout)
        return self

    def wait_ready(self, timeout: float = 120.0) -> None:
        deadline = time.monotonic() + timeout
        while not READY.search(self.output):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.output}")
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the server was not ready after {timeout} s:\n{self.output}")
            time.sleep(0.02)

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self.process.pid

    def children(self) -> dict[str, psutil.Process]:
        """Child processes by role."""
        found = {}
        for child in psutil.Process(self.pid).children():
            words = child.cmdline()
            for role in ("scheduler", "detokenizer"):
                if role in words:
                    found[role] = child
        return found

    def family(self) -> list[psutil.Process]:
        main = psutil.Process(self.pid)
        return [main, *main.children(recursive=True)]

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **kwargs)

    def post(self, path: str, json: Any = None, timeout: float = 120, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=json, timeout=timeout, **kwargs)

    def request(self, method: str, path: str, json: Any = None, timeout: float = 120) -> httpx.Response:
        return httpx.request(method, self.url + path, json=json, timeout=timeout)

    def info(self) -> dict[str, Any]:
        return self.get("/server_info").json()

    def wait_exit(self, timeout: float = 30.0) -> int:
        return self.process.wait(timeout)

    def stop(self) -> int | None:
        """SIGTERM, then SIGKILL to the whole family."""
        if self.process is None:
            return None
        family = self.family() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for process in family:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
        self._log.close()
        if os.path.exists(self._log.name):
            os.unlink(self._log.name)
        return self.process.returncode

    def __enter__(self) -> LiveServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
