"""The page at ``/``: a chat playground and a live view of the engine, as static files of this package.

Owns the files, their types and headers, and who gets the page at ``/`` (browsers do; probes get Ollama's plain text).
Must never know requests or the engine: the page speaks HTTP like any client, with the key that its user types.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

PROBE = "Ollama is running"
"""What Ollama's clients look for at ``/``."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, in nobody's frame: a model's answer cannot become a script here.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file and the headers it goes with."""

    data: bytes
    media_type: str
    headers: dict[str, str]


@cache
def _assets() -> dict[str, Asset]:
    found = {}
    for entry in files(__package__).joinpath("static").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in _TYPES:
            data = entry.read_bytes()
            tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
            found[entry.name] = Asset(data, _TYPES[suffix], {**_HEADERS, "etag": tag})
    return found


def asset(name: str) -> Asset | None:
    """The file called ``name``; None for any other name, path tricks included: only listed names exist."""
    return _assets().get(name)


def page() -> Asset:
    return _assets()["index.html"]


def wants_page(accept: str) -> bool:
    """Whether a request for ``/`` comes from a browser: ``text/html`` is named and not refused (RFC 9110, 12.5.1)."""
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        if kind in {"text/html", "application/xhtml+xml"}:
            return not any(p.replace(" ", "") in {"q=0", "q=0.0", "q=0.00", "q=0.000"} for p in parameters)
    return False
