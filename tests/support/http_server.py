"""A real uvicorn on a free loopback port, in a thread of its own, serving the application over the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from ceiba.server.app import create_app
from ceiba.server.front import Front


@contextlib.contextmanager
def serving(make_front: Callable[[], tuple[Front, Any]]) -> Iterator[tuple[str, Any]]:
    """``make_front`` runs on the server's loop and returns (front, engine); yields (base url, engine)."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    state: dict[str, Any] = {}
    ready = threading.Event()

    async def main() -> None:
        front, engine = make_front()
        engine.start()
        app = create_app(front)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", http="httptools", ws="none", access_log=False))
        state.update(server=server, engine=engine)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        while not (server.started and front.health().ok):
            await asyncio.sleep(0.01)
            if task.done():
                break
        ready.set()
        await task
        await engine.stop()

    def run() -> None:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert ready.wait(60), "the server did not start"
        yield f"http://127.0.0.1:{port}", state["engine"]
    finally:
        state["server"].should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        sock.close()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)
