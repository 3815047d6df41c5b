"""Operations that change the server's state. Every route here is an admin route.

Owns what each operation means and answers. Must never be reachable without the key that ``auth`` asks for.
"""

from __future__ import annotations

from typing import Any

from ceiba.core.errors import BadRequest, EngineFault
from ceiba.server.front import Front
from ceiba.server.native_schemas import AbortRequest


async def flush_cache(front: Front) -> dict[str, Any]:
    """Forget all cached prefixes. Raises BadRequest while requests run."""
    try:
        value = await front.control("flush_cache")
    except EngineFault as error:
        raise BadRequest(f"the cache was not flushed: {error.message}", code="flush_refused") from None
    return {"success": True, "message": "the prefix cache is empty.", "detail": value}


def abort_request(front: Front, body: AbortRequest) -> dict[str, Any]:
    """End one request or all; an unknown id aborts nothing and is no error, because it may just have ended."""
    if body.abort_all == bool(body.rid):
        raise BadRequest("give either rid or abort_all: true.", param="rid")
    return {"aborted": front.abort_all() if body.abort_all else front.abort(body.rid)}
