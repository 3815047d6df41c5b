"""The front over the real scheduler on a fake runner, in one event loop: what HTTP says about scheduling and cache."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from ceiba.config.records import Config
from ceiba.core.messages import Heartbeat, Reply, TextBatch, TokenBatch, bytes_to_ids
from ceiba.core.step import RunnerInfo
from ceiba.scheduler.fake import FakeRunner
from ceiba.scheduler.loop import Scheduler
from ceiba.server.app import create_app
from ceiba.server.front import Front
from support.fake_engine import EOS, VOCAB, ByteTokenizer, PlainTemplate, make_config


class SchedulerPorts:
    """Both ends of the wire: the scheduler's port and the front's, with a detokenizer that knows bytes."""

    def __init__(self) -> None:
        self.inbox: list[Any] = []
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()
        self.seen: list[Any] = []
        self._tokenizer = ByteTokenizer()

    def to_scheduler(self, message: Any) -> None:
        self.seen.append(message)
        self.inbox.append(message)

    def receive(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return self.outbox.get()
        messages, self.inbox = self.inbox, []
        return messages

    def to_front(self, message: Reply | Heartbeat) -> None:
        self.outbox.put_nowait(message)

    def to_detokenizer(self, batch: TokenBatch) -> None:
        counts, tokens = bytes_to_ids(batch.counts).tolist(), deque(bytes_to_ids(batch.tokens).tolist())
        texts = [self._tokenizer.decode([tokens.popleft() for _ in range(count)]) for count in counts]
        self.outbox.put_nowait(
            TextBatch(
                rids=batch.rids,
                texts=texts,
                counts=batch.counts,
                tokens=batch.tokens,
                finishes=batch.finishes,
                usages=batch.usages,
            )
        )


@dataclass
class ScheduledWorld:
    scheduler: Scheduler
    ports: SchedulerPorts
    front: Front
    client: httpx.AsyncClient

    async def post(self, path: str, body: dict[str, Any], status: int = 200, **more: Any) -> Any:
        response = await self.client.post(path, json=body, **more)
        assert response.status_code == status, response.text
        return response.json()


@asynccontextmanager
async def scheduled_world(
    pool: int = 2000, context: int = 500, rows: int = 8, running: bool = True, **scheduler: Any
) -> AsyncIterator[ScheduledWorld]:
    """``scheduler``: fields of its record. With ``running`` off the test steps the scheduler itself."""
    config: Config = make_config(context=context, pool=pool)
    settings = msgspec.structs.replace(config.scheduler, max_running_requests=rows, **scheduler)
    config = msgspec.structs.replace(config, scheduler=settings)
    info = RunnerInfo(num_slots=pool, max_rows=rows, vocab_size=VOCAB, context_len=context, eos_ids=(EOS,))
    ports = SchedulerPorts()
    engine = Scheduler(settings, FakeRunner(info), ports, clock=time.monotonic)
    front = Front(config, ByteTokenizer(), PlainTemplate(), ports)

    async def drive() -> None:
        while True:
            engine.step(wait=0.0)
            await asyncio.sleep(0 if not engine.idle else 0.001)

    task = asyncio.create_task(drive()) if running else None
    await front.start()
    ports.to_front(engine.heartbeat())
    transport = httpx.ASGITransport(app=create_app(front, config), raise_app_exceptions=False, client=("127.0.0.1", 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20) as client:
        try:
            yield ScheduledWorld(engine, ports, front, client)
        finally:
            await front.close()
            if task is not None:
                task.cancel()
