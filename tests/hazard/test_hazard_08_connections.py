"""Connections used to harm: pipelines, headers and trailers without end, many large bodies at a time. None of it costs
memory without bound, and leaving is noticed in every state (HAZARDS, opening rule, 7 and 19)."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from ceiba.core import limits
from ceiba.core.errors import Overloaded, TooSlow
from ceiba.server.limits import BodyBudget, LimitMiddleware
from support.front_world import make_world, until


@pytest.fixture
async def site():
    """(port, world) of the application behind the launcher's own HTTP server."""
    from ceiba.launch.wiring import make_http_server

    async with make_world() as world:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            server = make_http_server(world.front.config, world.front)
            task = asyncio.create_task(server.serve(sockets=[sock.dup()]))
            yield sock.getsockname()[1], world
            server.should_exit = True
            await task


def post(**body):
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LONG = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def healthy(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEALTH)
    assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"}"), 30)
    writer.close()


async def test_pipelined_requests_are_answered_in_order(site):
    port, _ = site
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(12):  # in pieces, so that some arrive while others run
        writer.write(post(prompt="x", max_tokens=2) + HEALTH)
        await asyncio.sleep(0)
    data = b""
    while data.count(b"HTTP/1.1 200") < 24 or not data.endswith(b"}"):
        data += await asyncio.wait_for(reader.read(1 << 16), 30)
    kinds = [b"text_completion" in part for part in data.split(b"HTTP/1.1 200")[1:]]
    assert kinds == [True, False] * 12
    writer.close()


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("behind", [b"", HEALTH, HEALTH * 40, post(prompt="y", max_tokens=2) + b"GET /hea"])
async def test_leaving_is_noticed_with_requests_waiting_behind(site, behind, abort):
    port, world = site
    world.engine.step_seconds = 0.05
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(**LONG) + behind)
    await until(lambda: world.front.num_live == 1)
    if behind:
        writer.write(HEALTH * 3)
        await writer.drain()
        await asyncio.sleep(0.05)
    if abort:
        writer.transport.abort()
    else:
        writer.close()
    await until(lambda: world.front.num_live == 0)
    await until(lambda: world.engine.aborted)  # it did not just end
    world.engine.step_seconds = 0.0
    await healthy(port)


async def test_what_waits_behind_a_request_is_bounded(site):
    port, world = site
    world.engine.step_seconds = 0.05
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(**LONG))
    await until(lambda: world.front.num_live == 1)
    writer.write(HEALTH)

    async def flood():
        for _ in range(64 * limits.MAX_PIPELINED_BYTES >> 16):
            writer.write(b"x" * (1 << 16))
            await asyncio.wait_for(writer.drain(), 30)
        await reader.readexactly(1)

    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await flood()
    await until(lambda: world.front.num_live == 0)
    await until(lambda: world.engine.aborted)  # it did not just end
    world.engine.step_seconds = 0.0
    await healthy(port)


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\n", b"X-%06d: y\r\n"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: ", b"%08d" * 8),
        (b"GET /", b"%08d" * 8),
        (HEAD + b"1\r\na\r\n0\r\n", b"X-%06d: y\r\n"),
    ],
)
async def test_headers_and_trailers_without_end_close_the_connection(site, head, more):
    port, _ = site
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    sent = 0
    try:
        while sent < 16 << 20:
            piece = b"".join(more % ((i,) * more.count(b"%")) for i in range(500))
            writer.write(piece)
            sent += len(piece)
            await asyncio.wait_for(writer.drain(), 30)
            if reader.at_eof():
                break
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    assert sent < 8 << 20
    await healthy(port)


async def test_bodies_of_all_connections_have_one_budget():
    budget = BodyBudget(most=1 << 20)
    go = asyncio.Event()
    refused = []

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await go.wait()

    async def send(message):
        refused.append(message)

    async def request(size):
        pieces: asyncio.Queue = asyncio.Queue()
        pieces.put_nowait({"type": "http.request", "body": bytes(size), "more_body": False})
        await LimitMiddleware(app, budget=budget)({"type": "http", "path": "/", "headers": []}, pieces.get, send)

    small = limits.SMALL_BODY_BYTES
    first = asyncio.create_task(request(small + (1 << 20)))
    await until(lambda: budget.held == 1 << 20)
    with pytest.raises(Overloaded, match="bodies of requests in flight fill 1 MiB"):
        await request(small + 1)
    others = [asyncio.create_task(request(small)) for _ in range(20)]  # ordinary ones pass all the same
    await asyncio.sleep(0.01)
    assert budget.held == 1 << 20
    go.set()
    await asyncio.gather(first, *others)
    assert budget.held == 0
    await request(small + 1)
    assert budget.held == 0


async def test_a_body_that_trickles_is_given_up():
    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass

    async def trickle():
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"a", "more_body": True}

    with pytest.raises(TooSlow, match="under 1000 bytes a second"):
        await LimitMiddleware(app, stall=1.0, rate=1000)({"type": "http", "path": "/", "headers": []}, trickle, None)
