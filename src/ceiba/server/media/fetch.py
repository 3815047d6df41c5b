"""Fetches one image over the network, as a stranger asked for it: nothing of this machine or its network is reachable.

Owns the connection: a name is resolved once, every address it stands for must be public, and the socket goes to an
address that was checked, not to the name again (CVE-2026-33626, DNS rebinding). Redirects go through the same door.
Must never send a header, cookie or proxy of ours, and never show a client what an address answered.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any

import httpcore

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.server.media import sources
from ceiba.server.media.sources import Inline, Remote, Rules

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REDIRECTS = {301, 302, 303, 307, 308}


def is_public(text: str) -> bool:
    """Whether an address belongs to the internet at large, whatever IPv4 address an IPv6 one carries inside."""
    try:
        address: Address = ipaddress.ip_address(text)
    except ValueError:
        return False  # with a scope id, or none at all
    return all(a.is_global and not (a.is_multicast or a.is_reserved or a.is_unspecified) for a in _carried(address))


def _carried(address: Address) -> Iterable[Address]:
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    found: list[Address] = [address]
    if address.sixtofour is not None:
        found.append(address.sixtofour)
    if address.teredo is not None:
        found += address.teredo
    if address in _NAT64:
        found = [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return found


class _Refused(Exception):
    """The name stands for an address that is not public."""


class _Door(httpcore.AsyncNetworkBackend):
    """Connects to checked addresses only."""

    def __init__(self, allowed: Callable[[str], bool]) -> None:
        self._allowed = allowed
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(entry[4][0] for entry in found))
        if not addresses or not all(self._allowed(str(address)) for address in addresses):
            raise _Refused
        return await self._inner.connect_tcp(str(addresses[0]), port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Fetcher:
    """``seconds``: for one image, redirects and all. ``allowed``: which addresses may be connected to."""

    def __init__(
        self,
        rules: Rules | None = None,
        seconds: float = limits.MEDIA_SECONDS,
        at_once: int = limits.MAX_MEDIA_FETCHES,
        allowed: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._rules = rules or Rules()
        self._seconds = seconds
        self._slots = asyncio.Semaphore(at_once)
        self._allowed = allowed
        self._tls = tls

    async def load(self, url: object, where: str) -> bytes:
        """The bytes that ``url`` names. Raises BadRequest naming ``where``, the field that holds it."""
        source = sources.read_url(url, where, self._rules)
        if isinstance(source, Inline):
            return source.data(where)
        try:
            async with asyncio.timeout(self._seconds), self._slots:
                return await self._follow(source, where)
        except TimeoutError:
            raise self._failed(where, f"it took more than {self._seconds:g} s") from None
        except _Refused:
            raise self._failed(where, "its host is not on the public internet", "media_refused") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError):
            raise self._failed(where, "the connection failed") from None

    async def _follow(self, source: Remote, where: str) -> bytes:
        for _ in range(limits.MAX_MEDIA_REDIRECTS + 1):
            answer = await self._get(source, where)
            if isinstance(answer, bytes):
                return answer
            source = sources.join(source, answer, where, self._rules)
        raise self._failed(where, f"it redirects more than {limits.MAX_MEDIA_REDIRECTS} times")

    async def _get(self, source: Remote, where: str) -> bytes | str:
        """The body, or where it redirects to."""
        host = f"[{source.host}]" if ":" in source.host else source.host
        shown = host if source.port == sources.DEFAULT_PORTS[source.scheme] else f"{host}:{source.port}"
        url = httpcore.URL(scheme=source.scheme, host=source.host, port=source.port, target=source.target)
        headers = [("Host", shown), ("Accept", "image/*"), ("Accept-Encoding", "identity"), ("User-Agent", "ceiba")]
        most = self._rules.most_bytes
        async with (
            httpcore.AsyncConnectionPool(ssl_context=self._tls, network_backend=_Door(self._allowed)) as pool,
            pool.stream("GET", url, headers=headers) as response,
        ):
            found = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in found:
                return found[b"location"].decode("latin-1")
            if response.status != 200:
                raise self._failed(where, f"its server answered {response.status}")
            if found.get(b"content-encoding", b"identity") != b"identity":
                raise self._failed(where, "it is compressed, which was not asked for")
            length = found.get(b"content-length", b"0")
            if length.isdigit() and int(length[:20]) > most:
                raise self._failed(where, f"it has more than {most} bytes, the limit")
            data = bytearray()
            async for piece in response.aiter_stream():
                data += piece
                if len(data) > most:
                    raise self._failed(where, f"it has more than {most} bytes, the limit")
            return bytes(data)

    @staticmethod
    def _failed(where: str, why: str, code: str = "media_failed") -> BadRequest:
        return BadRequest(f"{where} could not be fetched: {why}.", param=where, code=code)
