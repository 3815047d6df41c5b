"""Clients that connect and never finish: they are let go, and nobody else notices (HAZARDS, opening rule)."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from ceiba.core.errors import TooSlow
from ceiba.core.limits import HEADER_SECONDS
from ceiba.launch.http_protocol import PunctualProtocol
from ceiba.server.limits import LimitMiddleware
from support.front_world import make_world

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
async def port(monkeypatch):
    """The application behind the launcher's own HTTP server, with little patience."""
    from ceiba.launch.wiring import make_http_server

    monkeypatch.setattr(PunctualProtocol, "header_seconds", 0.4)
    async with make_world() as world:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            server = make_http_server(world.front.config, world.front)
            task = asyncio.create_task(server.serve(sockets=[sock.dup()]))
            yield sock.getsockname()[1]
            server.should_exit = True
            await task


async def until_closed(reader: asyncio.StreamReader, began: float) -> tuple[bytes, float]:
    """What came, and the seconds since ``began``, which must lie before the server's clock was started."""
    data = await asyncio.wait_for(reader.read(), 20)
    return data, time.monotonic() - began


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, HEAD + b"A: b\r\n"])
async def test_headers_that_never_end_close_the_connection(port, sent):
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    data, seconds = await until_closed(reader, began)
    assert data == b""
    assert 0.3 < seconds < HEADER_SECONDS / 2
    writer.close()


async def test_a_second_request_of_a_connection_has_the_same_limit(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"\r\n")
    assert b"200 OK" in await reader.readuntil(b"}")
    began = time.monotonic()
    writer.write(HEAD)
    data, seconds = await until_closed(reader, began)
    assert data == b""
    assert 0.3 < seconds < HEADER_SECONDS / 2
    writer.close()


async def test_a_request_that_takes_long_to_answer_is_not_cut(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"prompt": "x", "max_tokens": 4}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(head + body[:5])
    await asyncio.sleep(0.8)
    writer.write(body[5:])
    assert b"200 OK" in await asyncio.wait_for(reader.read(100), 30)
    writer.close()


async def test_a_body_that_stalls_is_given_up():
    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass

    pieces = asyncio.Queue()
    for _ in range(3):
        pieces.put_nowait({"type": "http.request", "body": b"ab", "more_body": True})
    scope = {"type": "http", "path": "/", "headers": []}
    with pytest.raises(TooSlow, match="after the first 6"):
        await LimitMiddleware(app, stall=0.05)(scope, pieces.get, None)


async def test_waiting_for_the_client_to_leave_has_no_limit():
    """After the body ``receive`` waits for the disconnect, as long as the answer takes."""

    async def app(scope, receive, send):
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"

    pieces = asyncio.Queue()
    pieces.put_nowait({"type": "http.request", "body": b"ab", "more_body": False})
    asyncio.get_running_loop().call_later(0.3, pieces.put_nowait, {"type": "http.disconnect"})
    await LimitMiddleware(app, stall=0.05)({"type": "http", "path": "/", "headers": []}, pieces.get, None)
