"""Files moved by NIXL instead of the kernel's read and write: its POSIX plugin, or GDS where the driver is there.

Owns one agent and the registration of each transfer's memory and file. What a file is called and when it goes is
``file``'s. The package is imported when it is opened and nowhere else; it needs torch, which is loaded by then.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from ceiba.memory.storage.base import Buffer, StoreError

PLUGINS = ("POSIX", "GDS", "GDS_MT")
SECONDS = 30.0
"""A transfer that takes longer has failed."""


class NixlIO:
    """``agent``: one to use instead of our own, for tests. Raises StoreError where the plugin cannot be had."""

    def __init__(self, plugin: str = "POSIX", agent: Any = None) -> None:
        self._plugin = plugin
        self._agent = _make_agent(plugin) if agent is None else agent

    def read(self, path: str) -> Buffer:
        fd = os.open(path, os.O_RDONLY)
        try:
            data = np.empty(os.fstat(fd).st_size, np.uint8)
            if len(data):
                self._move("READ", data, fd)
            return data.data
        finally:
            os.close(fd)

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            data = np.concatenate([np.frombuffer(memoryview(part).cast("B"), np.uint8) for part in parts])
            os.posix_fallocate(fd, 0, len(data))  # a full disk is told here, as ENOSPC
            self._move("WRITE", data, fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        self._agent = None

    def _move(self, operation: str, data: np.ndarray, fd: int) -> None:
        agent = self._agent
        memory = agent.register_memory([(data.ctypes.data, len(data), 0, "")], "DRAM", backends=[self._plugin])
        try:
            file = agent.register_memory([(0, len(data), fd, "")], "FILE", backends=[self._plugin])
            try:
                handle = agent.initialize_xfer(operation, memory.trim(), file.trim(), agent.name)
                try:
                    self._wait(agent, handle, operation)
                finally:
                    agent.release_xfer_handle(handle)
            finally:
                agent.deregister_memory(file, backends=[self._plugin])
        finally:
            agent.deregister_memory(memory, backends=[self._plugin])

    def _wait(self, agent: Any, handle: Any, operation: str) -> None:
        state = agent.transfer(handle)
        deadline = time.monotonic() + SECONDS
        pause = 0.00005
        while state not in {"DONE", "ERR"}:
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, f"NIXL {operation} takes longer than {SECONDS:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.002)
            state = agent.check_xfer_state(handle)
        if state == "ERR":
            raise OSError(errno.EIO, f"NIXL {operation} failed")


def _make_agent(plugin: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(f"ceiba-{uuid.uuid4().hex[:12]}", nixl_agent_config(backends=[]))
    try:
        agent.create_backend(plugin)
    except Exception as error:
        raise StoreError(f"NIXL has no working plugin {plugin} here ({type(error).__name__}: {error})") from error
    return agent
