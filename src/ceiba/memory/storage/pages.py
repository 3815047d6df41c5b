"""Keys and frames of stored pages: what a page is called, and how a damaged or a wrong one is noticed.

A key is a hash chain (as in a Merkle list): it covers model, data types, namespace and every token from the beginning
of the sequence to the end of the page, so equal keys mean equal KV. A frame puts the key and a checksum before the
bytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ceiba.memory.storage.base import Buffer

FORMAT = 1
"""Changes when the meaning of a page's bytes does; part of every identity."""
KEY_BYTES = 20
_MAGIC = b"CEIBAKV1"
_HEADER = struct.Struct("<8s20sQI")


class CorruptPage(ValueError):
    """The bytes are not what was stored under that key."""


def identity_digest(identity: Mapping[str, Any]) -> bytes:
    """Of everything that makes KV unusable for another server; the order of its entries does not matter."""
    text = json.dumps({**identity, "format": FORMAT}, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def page_keys(identity: bytes, namespace: str, tokens: np.ndarray, page: int) -> list[str]:
    """Keys of the whole pages of ``tokens`` int32 [N], from the first token of the sequence on."""
    name = namespace.encode()
    chain = hashlib.blake2b(identity + len(name).to_bytes(4, "little") + name, digest_size=KEY_BYTES).digest()
    data, step = np.ascontiguousarray(tokens, "<i4").tobytes(), 4 * page
    keys = []
    for at in range(0, len(data) - step + 1, step):
        chain = hashlib.blake2b(chain + data[at : at + step], digest_size=KEY_BYTES).digest()
        keys.append(chain.hex())
    return keys


def frame(key: str, payload: Buffer) -> list[Buffer]:
    """Header and payload, to be stored one after the other."""
    view = memoryview(payload).cast("B")
    return [_HEADER.pack(_MAGIC, bytes.fromhex(key), len(view), _checksum(key, view)), view]


def unframe(key: str, data: Buffer) -> memoryview:
    """The payload. Raises CorruptPage where anything differs from what ``frame`` made for ``key``."""
    view = memoryview(data).cast("B")
    if len(view) < _HEADER.size:
        raise CorruptPage(f"{len(view)} bytes are no page")
    magic, owner, length, checksum = _HEADER.unpack_from(view)
    payload = view[_HEADER.size :]
    if magic != _MAGIC or owner != bytes.fromhex(key) or length != len(payload):
        raise CorruptPage("the header is that of another page, or damaged")
    if checksum != _checksum(key, payload):
        raise CorruptPage("the checksum differs")
    return payload


def _checksum(key: str, payload: memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(key.encode()))
