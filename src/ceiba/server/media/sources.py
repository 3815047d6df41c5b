"""What an image's URL says, read once: inline bytes, or the parts of an https address.

Owns the only reading of a URL there is: what was checked here is, part by part, what ``fetch`` connects to, so no
second parser can see another host in it (CVE-2026-24779). Must never open a connection.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection
from dataclasses import dataclass

import httpx

from ceiba.core import limits
from ceiba.core.errors import BadRequest

DEFAULT_PORTS = {"https": 443, "http": 80}
_INLINE = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")


@dataclass(frozen=True, slots=True)
class Inline:
    encoded: str
    """Base64, not yet read."""

    def data(self, where: str) -> bytes:
        """Raises BadRequest naming ``where``."""
        try:
            return base64.b64decode(self.encoded, validate=True)
        except (binascii.Error, ValueError):
            raise BadRequest(f"{where} is not base64.", param=where) from None


@dataclass(frozen=True, slots=True)
class Remote:
    """``host`` as it is resolved and sent: lower case, IDNA, an IPv6 address without brackets. ``target``: path and
    query, escaped."""

    scheme: str
    host: str
    port: int
    target: str


@dataclass(frozen=True, slots=True)
class Rules:
    """``domains``: hosts that may be asked, ``*.example.com`` for all below one; None: any public host."""

    domains: Collection[str] | None = None
    schemes: Collection[str] = ("https",)
    most_bytes: int = limits.MAX_MEDIA_BYTES


def read_url(url: object, where: str, rules: Rules) -> Inline | Remote:
    """Raises BadRequest naming ``where``, the field that holds ``url``."""
    if not isinstance(url, str) or not url:
        raise BadRequest(f"{where} must be a text: an https: or data: URL.", param=where)
    if url[:5].lower() == "data:":
        return _inline(url, where, rules.most_bytes)
    return _remote(url, where, rules)


def join(base: Remote, location: str, where: str, rules: Rules) -> Remote:
    """Where a redirect from ``base`` leads, under the same rules."""
    host = f"[{base.host}]" if ":" in base.host else base.host
    here = httpx.URL(f"{base.scheme}://{host}:{base.port}{base.target}")
    if len(location) > limits.MAX_URL_CHARS:
        raise _refused(where, "it redirects to a URL that is too long")
    try:
        there = here.join(location)
    except (httpx.InvalidURL, ValueError):
        raise _refused(where, "it redirects to something that is no URL") from None
    if there.scheme == "http" and base.scheme == "https":
        raise _refused(where, "it redirects from https to http")
    return _remote(str(there), where, rules)


def _inline(url: str, where: str, most: int) -> Inline:
    head, comma, body = url[5:].partition(",")
    kind, _, encoding = head.partition(";")
    if not comma or encoding.strip().lower() != "base64":
        raise BadRequest(f"{where}: a data: URL must be data:image/…;base64,….", param=where)
    if kind.strip().lower() not in _INLINE:
        raise BadRequest(f"{where}: {kind[:50]!r} is not one of {', '.join(_INLINE)}.", param=where)
    if len(body) // 4 * 3 > most + 3:
        raise BadRequest(f"{where} has more than {most} bytes, the limit.", param=where)
    return Inline(body)


def _remote(url: str, where: str, rules: Rules) -> Remote:
    if len(url) > limits.MAX_URL_CHARS:
        raise BadRequest(f"{where} has {len(url)} characters; the limit is {limits.MAX_URL_CHARS}.", param=where)
    if not url.isprintable() or "\\" in url or " " in url:
        raise _refused(where, "it holds a character that no URL has")
    try:
        read = httpx.URL(url)
        scheme, host, port = read.scheme, read.raw_host.decode("ascii").lower(), read.port
        target = read.raw_path.decode("ascii")
    except (httpx.InvalidURL, ValueError):
        raise _refused(where, "it is no URL") from None
    if scheme not in rules.schemes:
        known = ", ".join([*rules.schemes, "data"])
        raise _refused(where, f"its scheme is {scheme[:20]!r}, and only {known} are taken")
    if port is not None and not 1 <= port <= 65535:
        raise _refused(where, "it has no such port")
    if read.userinfo:
        raise _refused(where, "it holds a name or password")
    host = host.removeprefix("[").removesuffix("]").rstrip(".")
    if not host or "%" in host:
        raise _refused(where, "it names no host")
    if rules.domains is not None and not any(_matches(host, domain.lower()) for domain in rules.domains):
        raise _refused(where, f"{host[:100]} is not among the hosts of --allowed-media-domains")
    return Remote(scheme, host, port or DEFAULT_PORTS[scheme], target)


def _matches(host: str, domain: str) -> bool:
    return host.endswith(domain[1:]) and host != domain[2:] if domain.startswith("*.") else host == domain


def _refused(where: str, why: str) -> BadRequest:
    return BadRequest(f"{where} is not fetched: {why}.", param=where, code="media_refused")
