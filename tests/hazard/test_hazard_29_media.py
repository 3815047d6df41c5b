"""What a request may make us fetch and decode: public addresses only, however they are spelled, redirected or resolved,
and bounded bytes, pixels, frames and seconds (HAZARDS 29)."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import struct
import zlib
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
from PIL import Image

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.server.media import sources
from ceiba.server.media.fetch import Fetcher, is_public
from ceiba.server.media.images import decode
from ceiba.server.media.sources import Remote, Rules
from support.front_world import make_world

PLAIN = Rules(schemes=("https", "http"))


def png(width=3, height=2, color=(10, 20, 30)):
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, "PNG")
    return out.getvalue()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@asynccontextmanager
async def site(answer):
    """(port, requests seen) of a server whose ``answer`` is bytes, or a function from the request's head to them."""
    seen = []

    async def serve(reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            seen.append(head)
            made = answer(head) if callable(answer) else answer
            if asyncio.iscoroutine(made):
                await made
            else:
                writer.write(made)
                await writer.drain()
            writer.close()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], seen


def http(body=b"", status="200 OK", **headers):
    headers.setdefault("content_length", len(body))
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items() if value is not None)
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def fetcher(allowed=lambda address: True, **more):
    more.setdefault("rules", PLAIN)
    return Fetcher(allowed=allowed, **more)


# ── addresses ────────────────────────────────────────────────────────────────

PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.2.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2002:0a00:1::1",
    "2001:0:0:0:0:0:80ff:fffe",
    "fe80::1",
    "fe80::1%lo",
    "fc00::1",
    "ff02::1",
    "::127.0.0.1",
    "x",
    "",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_no_address_inside_is_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_are(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]"]
)
async def test_however_loopback_is_spelled_nothing_reaches_it(host):
    async with site(http(png())) as (port, seen):
        with pytest.raises(BadRequest) as refused:
            await Fetcher(PLAIN).load(f"http://{host}:{port}/x.png", "image_url")
        assert refused.value.param == "image_url"
        assert seen == []


async def test_the_socket_goes_to_the_address_that_was_checked(monkeypatch):
    """A name that stands for a public address when it is asked for the first time and for loopback the second."""
    loop = asyncio.get_running_loop()
    asked = []

    async def resolve(host, port, **options):
        asked.append(host)
        address = "93.184.216.34" if len(asked) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    connected = []

    class Inner:
        async def connect_tcp(self, host, port, *options):
            connected.append(host)
            raise OSError

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    monkeypatch.setattr("ceiba.server.media.fetch.httpcore.AnyIOBackend", Inner)
    with pytest.raises(BadRequest, match="connection failed"):
        await Fetcher(PLAIN).load("http://rebind.example/x.png", "image_url")
    assert connected == ["93.184.216.34"]
    with pytest.raises(BadRequest, match="public internet"):
        await Fetcher(PLAIN).load("http://rebind.example/x.png", "image_url")
    assert len(connected) == 1


async def test_one_private_address_among_public_ones_is_enough(monkeypatch):
    async def resolve(host, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in ("93.184.216.34", "10.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with pytest.raises(BadRequest, match="public internet"):
        await Fetcher(PLAIN).load("http://both.example/", "image_url")


# ── URLs ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "http://example.com/x.png",  # https only, unless the rules say more
        "ftp://example.com/x",
        "gopher://example.com/x",
        "//example.com/x",
        "/etc/passwd",
        "example.com/x.png",
        "https://",
        "https:///x",
        "https://user:pass@example.com/",
        "https://example.com@127.0.0.1/",
        "https://example.com\\@127.0.0.1/",
        "https://127.0.0.1\\.example.com/",
        "https://exa mple.com/",
        "https://example.com/\r\nX: y",
        "https://example.com\x00.evil/",
        "https://[fe80::1%25eth0]/",
        "https://example.com:99999/",
        "https://" + "a" * 10_000,
        "javascript:alert(1)",
        "data:text/html;base64,AAAA",
        "data:image/svg+xml;base64,AAAA",
        "data:image/png,AAAA",
        "data:image/png;base64",
        "",
        None,
        7,
        {"url": "x"},
    ],
)
def test_urls_that_are_refused_unread(url):
    with pytest.raises(BadRequest) as refused:
        sources.read_url(url, "image_url.url", Rules())
    assert refused.value.param == "image_url.url"


def test_what_is_checked_is_what_is_connected_to():
    made = sources.read_url("HTTPS://EXAMPLE.com:8443/a%2fb?q=1#frag", "u", Rules())
    assert made == Remote("https", "example.com", 8443, "/a%2fb?q=1")
    assert sources.read_url("https://bücher.example/ä", "u", Rules()).host == "xn--bcher-kva.example"
    assert sources.read_url("https://[2606:4700::1]/", "u", Rules()) == Remote("https", "2606:4700::1", 443, "/")


@pytest.mark.parametrize(
    ("domains", "host", "fits"),
    [
        (["example.com"], "example.com", True),
        (["EXAMPLE.com"], "example.com.", True),
        (["example.com"], "a.example.com", False),
        (["example.com"], "notexample.com", False),
        (["*.example.com"], "a.example.com", True),
        (["*.example.com"], "example.com", False),
        (["*.example.com"], "a.notexample.com", False),
        ([], "example.com", False),
    ],
)
def test_allowed_domains(domains, host, fits):
    rules = Rules(domains=domains)
    if fits:
        assert sources.read_url(f"https://{host}/", "u", rules)
        return
    with pytest.raises(BadRequest, match="allowed-media-domains"):
        sources.read_url(f"https://{host}/", "u", rules)


# ── fetching ─────────────────────────────────────────────────────────────────


async def test_an_image_is_fetched_and_decoded():
    async with site(http(png())) as (port, seen):
        data = await fetcher().load(f"http://localhost:{port}/a/b.png?x=1", "image_url")
        assert decode(data, "image_url").tolist() == [[[10, 20, 30]] * 3] * 2
        head = seen[0].lower()
        assert head.startswith("get /a/b.png?x=1 http/1.1\r\n")
        assert f"host: localhost:{port}\r\n" in head
        assert "cookie" not in head
        assert "authorization" not in head
    assert await fetcher().load(data_url(png()), "u") == png()
    with pytest.raises(BadRequest, match="not base64"):
        await fetcher().load("data:image/png;base64,@@@", "u")


async def test_redirects_are_checked_each_time():
    inside, target = [], [""]

    def allowed(address):
        inside.append(address)
        return len(inside) == 1  # the first host is public, where it sends us is not

    async with (
        site(http(png())) as (secret, seen),
        site(lambda head: http(status="302 Found", location=target[0])) as (port, _),
    ):
        target[0] = f"http://127.0.0.1:{secret}/latest/meta-data"
        with pytest.raises(BadRequest, match="public internet"):
            await fetcher(allowed).load(f"http://localhost:{port}/", "u")
        assert seen == []
        for target[0] in ("file:///etc/passwd", "gopher://x/", "http://u:p@x/", "http://", "https://\x7f/", "x" * 9000):
            with pytest.raises(BadRequest):
                await fetcher().load(f"http://localhost:{port}/", "u")
        target[0] = f"http://other.example:{secret}/"
        rules = Rules(domains=["localhost"], schemes=("http",))
        with pytest.raises(BadRequest, match="allowed-media-domains"):
            await fetcher(rules=rules).load(f"http://localhost:{port}/", "u")
        target[0] = f"http://127.0.0.1:{secret}/moved"
        assert await fetcher().load(f"http://localhost:{port}/", "u") == png()
        target[0] = "/again"
        with pytest.raises(BadRequest, match=f"more than {limits.MAX_MEDIA_REDIRECTS} times"):
            await fetcher().load(f"http://localhost:{port}/", "u")


def test_a_redirect_never_leaves_https():
    with pytest.raises(BadRequest, match="https to http"):
        sources.join(Remote("https", "example.com", 443, "/"), "http://example.com/x", "u", PLAIN)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (http(b"x" * 2000), "more than 1000 bytes"),
        (http(b"x" * 10, content_length=10**30), "more than 1000 bytes|connection failed"),
        (http(b"x" * 2000, content_length=None, connection="close"), "more than 1000 bytes"),
        (http(b"secret", status="403 Forbidden"), "answered 403"),
        (http(b"x", content_encoding="gzip"), "compressed"),
        (b"\xff\x00 nonsense\r\n\r\n", "connection failed"),
        (http(b"abc", content_length=100), "connection failed"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000 + b"\r\n", "connection failed"),
    ],
)
async def test_answers_are_bounded_and_not_shown(answer, why):
    async with site(answer) as (port, _):
        with pytest.raises(BadRequest, match=why) as refused:
            await fetcher(rules=Rules(schemes=("http",), most_bytes=1000)).load(f"http://localhost:{port}/", "u")
        assert "secret" not in refused.value.message


async def test_slow_answers_end_and_so_does_a_crowd():
    gone = asyncio.Event()

    def never(head):
        return gone.wait()

    async with site(never) as (port, _):
        slow = fetcher(seconds=0.2, at_once=2)
        answers = await asyncio.gather(
            *[slow.load(f"http://localhost:{port}/", "u") for _ in range(6)], return_exceptions=True
        )
        assert all(isinstance(a, BadRequest) and "0.2 s" in a.message for a in answers)
        gone.set()


# ── pixels ───────────────────────────────────────────────────────────────────


def huge_png(width, height):
    """A header that promises more than any memory has, and no rows."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    made = b"\x89PNG\r\n\x1a\n"
    for name, data in parts:
        made += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return made


@pytest.mark.parametrize(("width", "height"), [(100_000, 1), (16_000, 16_000), (2**31 - 1, 2**31 - 1), (1, 16_385)])
def test_pixels_are_counted_before_they_are_made(width, height):
    with pytest.raises(BadRequest):
        decode(huge_png(width, height), "u")


def test_only_the_first_frame_of_an_animation_is_looked_at():
    frames = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(1, 60)]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    assert decode(out.getvalue(), "u").shape == (4, 4, 3)
    whole = out.getvalue()
    cut = whole[: len(whole) // 2]  # the later frames may be anything
    assert np.array_equal(decode(cut, "u"), decode(whole, "u"))


def test_transparent_parts_are_white():
    out = io.BytesIO()
    Image.new("RGBA", (1, 2), (0, 0, 0, 0)).save(out, "PNG")
    assert decode(out.getvalue(), "u").tolist() == [[[255, 255, 255]], [[255, 255, 255]]]


def test_broken_bytes_are_an_error_of_the_request():
    whole = {}
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        out = io.BytesIO()
        Image.effect_noise((24, 24), 50).convert("RGB").save(out, kind)
        whole[kind] = out.getvalue()
        assert decode(whole[kind], "u").shape == (24, 24, 3)
    random = np.random.default_rng(5)
    for data in whole.values():
        for _ in range(60):
            broken = bytearray(data)
            for at in random.integers(0, len(broken), 4):
                broken[at] = random.integers(256)
            cut = bytes(broken[: random.integers(1, len(broken) + 1)])
            with suppress(BadRequest):
                assert decode(cut, "u").ndim == 3
    for other in (b"", b"GIF89a", b"<svg xmlns='x'/>", b"%PDF-1.4", b"%!PS-Adobe-3.0 EPSF", b"II*\x00" + bytes(100)):
        with pytest.raises(BadRequest, match="image"):
            decode(other, "u")


# ── routes ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "param", "code"),
    [
        ("file:///etc/passwd", "messages[0].content[0].image_url.url", "media_refused"),
        ("https://user@example.com/", "messages[0].content[0].image_url.url", "media_refused"),
        ("https://example.com/x.png", "messages[0].content[0]", "no_vision"),
        (data_url(png()), "messages[0].content[0]", "no_vision"),
        (None, "messages[0].content[0].image_url.url", None),
    ],
)
async def test_a_model_without_vision_fetches_nothing(url, param, code, monkeypatch):
    async def reached(*args, **options):
        raise AssertionError("something was resolved")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", reached)
    async with make_world() as world:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
        reply = await world.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == (param, code)
