"""From the bytes of a request body to a typed, documented struct, with errors that name the field.

Owns JSON depth, decoding (msgspec) and the reading of msgspec's messages. Must never know what a field means.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Hashable
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from ceiba.core import limits
from ceiba.core.errors import BadRequest

T = TypeVar("T")

INLINE_BYTES = 256 << 10
"""Bodies up to this size are decoded on the event loop."""
_BLOCK = 1 << 20
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*?)`(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_AT = re.compile(r"^(?P<what>.*?) - at `(?:key in )?(?P<path>.*)`$", re.DOTALL)


def check_depth(data: bytes, limit: int = limits.MAX_JSON_DEPTH) -> None:
    """Refuse JSON nested deeper than ``limit``, in time linear in its size and without recursion."""
    if data.count(b"[") + data.count(b"{") <= limit:
        return
    if b"\\" in data:  # escape pairs are taken from the left, so what is left of them is never an escaped quote
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    depth = quotes = 0
    for start in range(0, len(data), _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - start), start)
        parity = np.cumsum(block == 0x22, dtype=np.int32) + quotes
        step = np.isin(block, (0x5B, 0x7B)).astype(np.int32) - np.isin(block, (0x5D, 0x7D))
        step[(parity & 1) == 1] = 0
        depths = np.cumsum(step, dtype=np.int32) + depth
        if depths.max() > limit:
            raise BadRequest(f"the JSON body is nested deeper than {limit} levels.", param="body", code="json_too_deep")
        depth, quotes = int(depths[-1]), int(parity[-1])


@functools.cache
def _decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(data: bytes, kind: type[T]) -> T:
    """``data`` as a ``kind``. Raises BadRequest that names the field at fault."""
    check_depth(data)
    if not data.strip():
        raise BadRequest("the request has no body: send a JSON object.", param="body")
    reader: msgspec.json.Decoder[T] = _decoder(cast(Hashable, kind))
    try:
        return reader.decode(data)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", param="body", code="invalid_json") from None


def _refusal(text: str) -> BadRequest:
    if match := _UNKNOWN.match(text):
        name = _field(match["path"], match["name"])
        return BadRequest(f"unknown field {name}: it is refused, because ignoring it would mislead you.", param=name)
    if match := _MISSING.match(text):
        name = _field(match["path"], match["name"])
        return BadRequest(f"missing required field {name}.", param=name, code="missing_field")
    if match := _AT.match(text):
        name = _field(match["path"])
        return BadRequest(f"{name}: {match['what']}.", param=name)
    return BadRequest(f"body: {text}.", param="body")


def _field(path: str | None, name: str = "") -> str:
    base = (path or "").removeprefix("$").removeprefix(".")[:200]
    return ".".join(part for part in (base, name[:200]) if part) or "body"


async def read(request: Request, kind: type[T]) -> T:
    """The body of ``request``, decoded; large ones off the event loop."""
    try:
        data = await request.body()
    except ClientDisconnect:
        raise BadRequest("the client left before its body was complete.", param="body") from None
    return await decoded(data, kind)


async def decoded(data: bytes, kind: type[T]) -> T:
    """``decode``, large bodies off the event loop."""
    if len(data) <= INLINE_BYTES:
        return decode(data, kind)
    return await asyncio.to_thread(decode, data, kind)
