"""The front over the fake engine, and the HTTP application over that front, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from ceiba.config.records import Config
from ceiba.obs.metrics import FrontMetrics
from ceiba.server.app import create_app
from ceiba.server.front import Front
from support.fake_engine import ByteTokenizer, FakeEngine, PlainTemplate, make_config


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Raises TimeoutError where it does not come to that."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)


@dataclass
class World:
    engine: FakeEngine
    front: Front
    client: httpx.AsyncClient
    app: Any

    async def idle(self) -> None:
        """Until nothing is live anywhere."""
        try:
            await until(lambda: self.engine.idle and not self.front.num_live)
        except TimeoutError:
            raise AssertionError(f"still live: {self.engine.live}, {self.front.num_live}") from None


@asynccontextmanager
async def make_world(
    config: Config | None = None, client_ip: str = "127.0.0.1", **options: Any
) -> AsyncIterator[World]:
    config = config or make_config()
    engine = FakeEngine(options.pop("step_seconds", 0.0))
    root_path = options.pop("root_path", "")
    metrics = FrontMetrics(config.obs.enable_metrics, config.model.name)
    template = options.pop("template", PlainTemplate())
    front = Front(config, ByteTokenizer(), template, engine, metrics=metrics, **options)
    engine.start()
    await front.start()
    while not front.health().ok:  # noqa: ASYNC110 - health is looked at, never waited for
        await asyncio.sleep(0.001)
    app = create_app(front, config)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False, client=(client_ip, 5000), root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20) as client:
        try:
            yield World(engine, front, client, app)
        finally:
            await front.close()
            await engine.stop()


def events(text: str) -> list[str]:
    """The data of each server-sent event."""
    blocks = text.split("\n\n")
    assert blocks[-1] == ""
    assert all(b.startswith("data: ") for b in blocks[:-1]), text[:200]
    return [b.removeprefix("data: ") for b in blocks[:-1]]


class RawCall:
    """One request straight into the ASGI application, so that a test can leave at any moment."""

    def __init__(self, app: Any, path: str, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self._first = asyncio.Event()
        self._gone = asyncio.Event()
        self._asked = False
        self._body = body
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), *(headers or [])],
            "client": ("127.0.0.1", 5000),
            "server": ("server", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._gone.is_set():
            return  # as a server does whose peer is gone
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self._first.set()

    async def first_event(self) -> None:
        await asyncio.wait_for(self._first.wait(), 20)

    async def leave(self) -> None:
        """The client closes its connection; returns when the application has noticed."""
        self._gone.set()
        await asyncio.wait_for(self.task, 20)
