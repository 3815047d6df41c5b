"""Who may call what. Pure ASGI, decided on ``scope["path"]``, the same string that routing uses.

Owns the access level of every path. A path that nobody has declared is an admin path, so a forgotten route is a closed
route. Must never log or echo a key.
"""

from __future__ import annotations

import hmac
import ipaddress
from enum import IntEnum
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from ceiba.core.errors import CeibaError, Forbidden, NotFound, Unauthorized
from ceiba.server.errors import path_of, send_error


class Access(IntEnum):
    OPEN = 0
    """Anybody: probes and metrics."""
    USER = 1
    """--api-key, when one is set."""
    ADMIN = 2
    """Changes state: --admin-api-key, or --api-key where that is the only key, or loopback where there is none."""


_FORWARDED = {b"x-forwarded-for", b"forwarded", b"x-real-ip"}


class AccessTable:
    """Path -> level. Prefixes end in a slash and cover what lies below them."""

    def __init__(self) -> None:
        self._paths: dict[str, Access] = {}
        self._prefixes: dict[str, Access] = {}

    def declare(self, path: str, level: Access) -> None:
        """``path`` as given to the router; a path with parameters covers everything below its fixed part."""
        fixed, brace, _ = path.partition("{")
        (self._prefixes if brace else self._paths)[fixed] = level

    def level(self, path: str) -> Access:
        found = self._paths.get(path)
        if found is not None:
            return found
        return max((level for prefix, level in self._prefixes.items() if path.startswith(prefix)), default=Access.ADMIN)

    def label(self, path: str) -> str:
        """A name for ``path`` out of a bounded set, for metrics."""
        if path in self._paths:
            return path
        return next((prefix for prefix in self._prefixes if path.startswith(prefix)), "other")

    def known(self, path: str) -> bool:
        return path in self._paths or any(path.startswith(prefix) for prefix in self._prefixes)


class AuthMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        table: AccessTable,
        api_key: str | None,
        admin_api_key: str | None,
        *,
        own_machine: bool = False,
        origins: tuple[str, ...] = (),
    ) -> None:
        """``own_machine``: the server listens on loopback only, so that without a key a web page is the one stranger
        who could reach it. ``origins``: pages that may."""
        self._app = app
        self._own_machine = own_machine
        self._origins = origins
        self._table = table
        self._api_key = api_key.encode() if api_key else None
        self._admin_key = admin_api_key.encode() if admin_api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        error = self._refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await send_error(send, error, path_of(scope))

    def _refusal(self, scope: Scope) -> CeibaError | None:
        path = path_of(scope)
        level = self._table.level(path)
        if level == Access.OPEN:
            return None
        if self._api_key is None and self._admin_key is None:
            if level == Access.USER and self._own_machine and _from_foreign_page(scope, self._origins):
                return Forbidden(
                    "a web page of another site, or a name that is not this machine's, may not be used with this "
                    "server: start it with --allowed-origins ORIGIN (https:// and the name), or with --api-key.",
                    code="foreign_page",
                )
            if level == Access.USER or _from_here(scope):
                return None
            if not self._table.known(path):
                return NotFound(f"no such route: {path}", code="unknown_route")
            return Forbidden(
                f"{path} changes the server's state: without a key it answers on loopback only. "
                "Start the server with --admin-api-key (or --api-key) and send it as a bearer token.",
                code="admin_from_remote",
            )
        given = bearer(scope)
        admin = _same(given, self._admin_key)
        user = _same(given, self._api_key)
        if level == Access.ADMIN and self._admin_key is not None:
            allowed, flag = admin, "--admin-api-key"
        else:
            allowed, flag = user or admin or (level == Access.USER and self._api_key is None), "--api-key"
        if allowed:
            return None
        if user and not self._table.known(path):
            return NotFound(f"no such route: {path}", code="unknown_route")
        problem = "needs a key" if given is None else "was called with a wrong key"
        return Unauthorized(
            f"{path} {problem}: send 'Authorization: Bearer KEY' with the server's {flag}.", code="invalid_api_key"
        )


def bearer(scope: Scope) -> bytes | None:
    """The caller's key: a bearer token, or ``x-api-key`` as some clients send it."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            return token.strip() if scheme.lower() == b"bearer" else b""
    return next((value for name, value in scope["headers"] if name == b"x-api-key"), None)


def _same(given: bytes | None, key: bytes | None) -> bool:
    return given is not None and key is not None and hmac.compare_digest(given, key)


def _from_here(scope: Scope) -> bool:
    """Whether a program on this machine speaks, for itself: no forwarding proxy, no foreign web page."""
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0]) if client else None
    except ValueError:
        return False
    if address is None:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not address.is_loopback:
        return False
    for name, value in scope["headers"]:
        if name in _FORWARDED:
            return False
        if name == b"origin" and not _is_loopback_origin(value):
            return False
        if name == b"sec-fetch-site" and value not in (b"same-origin", b"none"):
            return False
        if name == b"host" and not _is_local_name(value):
            return False
    return True


def _from_foreign_page(scope: Scope, origins: tuple[str, ...]) -> bool:
    """Whether a browser sends this for a page of another site: under a name that was made to resolve to loopback, or
    as a request that no page needs leave for. What only reads needs leave (CORS) for its answer to be seen. Programs
    whose windows have origins of other kinds (app:, vscode-webview:, extensions) were installed: they are no pages."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    if "*" in origins or _FORWARDED & headers.keys():
        return False  # any page may, or a proxy of ours stands before the server
    host, origin = headers.get(b"host", b""), headers.get(b"origin")
    if host and not (_is_local_name(host) or _is_no_public_name(host) or _hosts(origins, host)):
        return True
    if scope["method"] in {"GET", "HEAD", "OPTIONS"}:
        return False
    if origin is None:
        return headers.get(b"sec-fetch-site") == b"cross-site"
    scheme, _, place = origin.partition(b"://")
    if origin.decode("latin-1") in origins or (place and scheme not in (b"http", b"https")):
        return False
    return not _is_loopback_origin(origin) and place != host


def _is_no_public_name(host: bytes) -> bool:
    """Whether nobody outside could make this Host resolve to loopback: an address, or a name under a domain that is
    reserved for private use (host.docker.internal, a.b.localhost)."""
    try:
        name = (urlsplit(f"//{host.decode('latin-1')}").hostname or "").removesuffix(".")
        if name.endswith((".internal", ".localhost")) or name == "localhost":
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _hosts(origins: tuple[str, ...], host: bytes) -> bool:
    """Whether ``host`` serves one of the allowed ``origins``, as behind a proxy that keeps the name."""
    return any(origin.partition("://")[2].encode("latin-1", "replace") == host for origin in origins)


def is_loopback(host: str) -> bool:
    """Whether a server that listens on ``host`` can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local_name(host: bytes) -> bool:
    """Whether a Host header can only mean this machine: a page of a foreign site whose name was made to resolve to
    loopback (DNS rebinding) sends that site's name, which has a dot."""
    try:
        name = urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return False
    if "." not in name.removesuffix(".localhost") and ":" not in name:
        return True
    return _is_loopback_origin(b"//" + host)


def _is_loopback_origin(origin: bytes) -> bool:
    try:
        host = urlsplit(origin.decode("latin-1")).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
