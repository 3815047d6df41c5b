"""How many events a second the way from TextBatch to ASGI makes: printed, with a floor far below what it reaches."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from ceiba.core.messages import Finish, Generate, Heartbeat, TextBatch, Usage, ids_to_bytes
from ceiba.server.app import create_app
from ceiba.server.front import Front
from support.fake_engine import ByteTokenizer, PlainTemplate, make_config

STREAMS, TOKENS = 64, 200


class Pump:
    """A port that plays prepared steps for as many streams as came, as fast as they are taken."""

    def __init__(self) -> None:
        self.rids: list[str] = []
        self.go = asyncio.Event()
        self._steps = self._play()

    def to_scheduler(self, message) -> None:
        if isinstance(message, Generate):
            self.rids.append(message.rid)
            if len(self.rids) == STREAMS:
                self.go.set()

    async def receive(self):
        return await anext(self._steps)

    async def _play(self):
        yield Heartbeat(at=time.monotonic())
        await self.go.wait()
        counts, tokens = ids_to_bytes([1] * STREAMS), ids_to_bytes([65] * STREAMS)
        usage = Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=TOKENS)
        for step in range(TOKENS):
            last = step == TOKENS - 1
            yield TextBatch(
                rids=self.rids,
                texts=[" word"] * STREAMS,
                counts=counts,
                tokens=tokens,
                finishes=dict.fromkeys(range(STREAMS), Finish(kind="length")) if last else {},
                usages=dict.fromkeys(range(STREAMS), usage) if last or not step else {},
            )
            await asyncio.sleep(0)
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
async def test_events_per_second(path, body):
    port = Pump()
    front = Front(make_config(), ByteTokenizer(), PlainTemplate(), port)
    await front.start()
    app = create_app(front)
    data = json.dumps({**body, "stream": True, "max_tokens": TOKENS}).encode()
    events = 0

    async def call() -> None:
        asked = False

        async def receive():
            nonlocal asked
            if asked:
                await asyncio.Event().wait()
            asked = True
            return {"type": "http.request", "body": data}

        async def send(message) -> None:
            nonlocal events
            if message["type"] == "http.response.body":
                events += message["body"].count(b'"finish_reason"')

        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": [], "client": ("127.0.0.1", 1), "server": ("s", 80), "scheme": "http", "root_path": ""}
        await app(scope, receive, send)

    calls = [asyncio.create_task(call()) for _ in range(STREAMS)]
    await port.go.wait()
    started = time.perf_counter()
    await asyncio.gather(*calls)
    seconds = time.perf_counter() - started
    await front.close()
    extra = STREAMS * (2 if "chat" in path else 0)  # role and finish events
    assert events == STREAMS * TOKENS + extra
    print(f"\n{path}: {events / seconds:,.0f} events/s on one core")
    assert events / seconds > 4000
