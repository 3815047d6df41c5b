"""Stores through other people's packages: the real ones where they are installed, and fakes with their answers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from ceiba.core.errors import ConfigError
from ceiba.memory.storage.base import StoreError, StoreFull
from ceiba.memory.storage.file import FileStore
from ceiba.memory.storage.mooncake import MooncakeStore
from ceiba.memory.storage.nixl import NixlIO
from ceiba.memory.storage.pages import frame, identity_digest, page_keys, unframe
from ceiba.memory.storage.registry import check, open_store

KEYS = page_keys(identity_digest({"m": 1}), "", np.arange(400, dtype=np.int32), 4)


def exercise(store, other) -> None:
    """What every store must do; ``other``: the same store as another model sees it."""
    payload = os.urandom(300_000)
    assert store.exists(KEYS[:2]) == 0
    assert store.get(KEYS[0]) is None
    assert store.put(KEYS[0], frame(KEYS[0], payload)) == len(payload) + 40
    assert store.put(KEYS[0], frame(KEYS[0], b"another")) == 0
    store.put(KEYS[1], frame(KEYS[1], payload[::-1]))
    assert store.exists(KEYS[:3]) == 2
    assert bytes(unframe(KEYS[0], store.get(KEYS[0]))) == payload
    assert bytes(unframe(KEYS[1], store.get(KEYS[1]))) == payload[::-1]
    assert other.exists(KEYS[:1]) == 0
    store.put(KEYS[2], frame(KEYS[2], b"x"))
    store.delete(KEYS[2])
    store.delete(KEYS[3])
    assert store.exists(KEYS[2:3]) == 0
    assert store.stats()


class FakeMooncake:
    """The answers of MooncakeDistributedStore 0.3.13, noted from the real one."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.dead = self.full = False

    def is_exist(self, name):
        return -900 if self.dead else int(name in self.pages)

    def batch_is_exist(self, names):
        return [self.is_exist(name) for name in names]

    def get(self, name):
        return b"" if self.dead else self.pages.get(name, b"")

    def put_parts(self, name, *parts):
        if self.dead or self.full:
            return -900 if self.dead else -200
        self.pages.setdefault(name, b"".join(bytes(part) for part in parts))
        return 0

    def remove(self, name, force):
        return -900 if self.dead else 0 if self.pages.pop(name, None) is not None else -704

    def remove_by_regex(self, pattern, force):
        gone = [name for name in self.pages if re.search(pattern, name)]
        for name in gone:
            del self.pages[name]
        return -900 if self.dead else len(gone)

    def close(self):
        return 0


def test_mooncake_by_its_answers():
    client = FakeMooncake()
    store, other = MooncakeStore({}, "a", client), MooncakeStore({}, "b", client)
    exercise(store, other)
    other.put(KEYS[9], [b"kept"])
    assert store.clear() == 2
    assert other.exists([KEYS[9]]) == 1
    client.full = True
    with pytest.raises(StoreFull):
        store.put(KEYS[0], [b"x"])
    client.dead = True
    for call in (
        lambda: store.exists(KEYS[:1]),
        lambda: store.get(KEYS[0]),
        lambda: store.put(KEYS[0], [b"x"]),
        lambda: store.delete(KEYS[0]),
        store.clear,
    ):
        with pytest.raises(StoreError, match="-900"):
            call()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def mooncake_master(tmp_path):
    """A real master with its metadata server; skips where the package or the libraries under it are missing."""
    package = pytest.importorskip("mooncake", reason="mooncake is not installed")
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"mooncake cannot be loaded: {error}")
    rpc, http = free_port(), free_port()
    log = (tmp_path / "master.log").open("w")
    master = subprocess.Popen(
        [
            Path(package.__file__).with_name("mooncake_master"),
            f"--rpc_port={rpc}",
            "--rpc_address=127.0.0.1",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={http}",
            f"--metrics_port={free_port()}",
            "--default_kv_lease_ttl=300",
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        for port in (rpc, http):
            deadline = time.monotonic() + 30
            while True:
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert time.monotonic() < deadline, (tmp_path / "master.log").read_text()
                time.sleep(0.05)
        yield (
            master,
            {
                "metadata_server": f"http://127.0.0.1:{http}/metadata",
                "master_server_address": f"127.0.0.1:{rpc}",
                "global_segment_size": 32 << 20,
                "local_buffer_size": 16 << 20,
            },
        )
    finally:
        master.kill()
        master.wait()
        log.close()


@pytest.mark.slow
def test_the_real_mooncake(mooncake_master):
    master, options = mooncake_master
    check("mooncake", options)
    store = open_store("mooncake", options, {"model": "a"})
    other = MooncakeStore(options, "b", store._client)
    exercise(store, other)

    def fill() -> None:
        for key in KEYS[10:60]:
            store.put(key, [os.urandom(2 << 20)])

    with pytest.raises(StoreFull):
        fill()
    assert store.clear() >= 2
    master.kill()
    master.wait()
    with pytest.raises(StoreError):
        store.exists(KEYS[:1])
    store.close()


def test_nixl_moves_files(tmp_path):
    """The real NIXL, with its POSIX plugin."""
    try:
        io = NixlIO("POSIX")
    except (ImportError, StoreError) as error:
        pytest.skip(f"nixl cannot be loaded: {error}")
    exercise(FileStore(tmp_path / "a", 10**7, io), FileStore(tmp_path / "b", 10**7, io))
    plain = FileStore(tmp_path / "a", 10**7)
    assert len(unframe(KEYS[0], plain.get(KEYS[0]))) == 300_000  # the same files
    io.close()


class FakeNixl:
    """An agent that moves bytes as NIXL's POSIX plugin does, or fails."""

    name = "fake"

    def __init__(self, state: str = "DONE") -> None:
        self.state = state
        self.registered = 0

    def register_memory(self, descriptors, kind, backends):
        self.registered += 1

        class Registered(list):
            def trim(self):
                return list(self)

        return Registered(descriptors)

    def deregister_memory(self, descriptors, backends):
        self.registered -= 1

    def initialize_xfer(self, operation, memory, file, name):
        return operation, memory[0], file[0]

    def transfer(self, handle):
        import ctypes

        operation, (address, size, _, _), (offset, _, fd, _) = handle
        buffer = (ctypes.c_char * size).from_address(address)
        if self.state == "DONE":
            if operation == "WRITE":
                os.pwrite(fd, bytes(buffer), offset)
            else:
                buffer[:] = os.pread(fd, size, offset)
        return "PROC"

    def check_xfer_state(self, handle):
        return self.state

    def release_xfer_handle(self, handle):
        return None


def test_nixl_by_its_answers(tmp_path):
    agent = FakeNixl()
    exercise(
        FileStore(tmp_path / "a", 10**7, NixlIO(agent=agent)), FileStore(tmp_path / "b", 10**7, NixlIO(agent=agent))
    )
    assert agent.registered == 0
    broken = FakeNixl("ERR")
    store = FileStore(tmp_path / "c", 10**7, NixlIO(agent=broken))
    with pytest.raises(StoreError, match="NIXL WRITE failed"):
        store.put(KEYS[0], [b"x" * 100])
    assert (broken.registered, list((tmp_path / "c").rglob("*.kv")), list((tmp_path / "c").rglob("*.tmp"))) == (
        0,
        [],
        [],
    )


class Own:
    """What ``dynamic`` may name."""

    def __init__(self, options, model):
        self.options, self.model = options, model

    def exists(self, keys): ...
    def get(self, key): ...
    def put(self, key, parts): ...
    def delete(self, key): ...
    def clear(self): ...


def test_a_class_by_name():
    options = {"module_path": "test_storage_remote", "class_name": "Own", "size": 3}
    store = open_store("dynamic", options, {"m": 1})
    assert (store.options, len(store.model)) == ({"size": 3}, 16)
    for options, text in (
        ({}, "needs a class"),
        ({"module_path": "no.such.module", "class_name": "X"}, "cannot be loaded"),
        ({"module_path": "test_storage_remote", "class_name": "Missing"}, "cannot be loaded"),
        ({"module_path": "test_storage_remote", "class_name": "FakeNixl"}, "lacks exists, get"),
    ):
        with pytest.raises(ConfigError, match=text):
            open_store("dynamic", options, {})


@pytest.mark.parametrize(
    ("backend", "options", "text"),
    [
        ("file", {}, "needs a folder"),
        ("file", {"path": "/x", "max_gb": 0}, "more than 0"),
        ("file", {"path": "/x", "max_gb": "5"}, "is a number"),
        ("file", {"path": "/x", "size": 5}, "no option 'size'; it has: path, max_gb"),
        ("mooncake", {"protocol": 1}, "is a text"),
        ("hf3fs", {}, "not available"),
        ("nixl", {"path": "/x", "plugin": "GDS", "more": 1}, "no option 'more'"),
    ],
)
def test_options_that_cannot_work_are_named(backend, options, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        check(backend, options)
