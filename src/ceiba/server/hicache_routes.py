"""Routes that attach, detach, clear and show the storage behind the prefix cache. Owns their fields; all are admin
routes, and nothing here knows a store."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ceiba.core.errors import BadRequest, EngineFault
from ceiba.server.auth import Access
from ceiba.server.decode import read
from ceiba.server.front import Front
from ceiba.server.openapi import Operation
from ceiba.server.routes import Routes, json_answer

SECONDS = 60.0
"""Connecting a storage over a network may take a while."""


class AttachRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of PUT /hicache/storage-backend; the names of the flags."""

    hicache_storage_backend: Annotated[str, Meta(description="file, mooncake, nixl or dynamic.")]
    hicache_storage_backend_extra_config_json: Annotated[
        str | dict[str, Any] | None, Meta(description="Options of the storage, as JSON text or an object.")
    ] = None
    hicache_storage_prefetch_policy: Annotated[
        str | None, Meta(description="best_effort, wait_complete or timeout; as it was if missing.")
    ] = None
    hicache_write_policy: Annotated[
        str | None, Meta(description="write_through, write_through_selective or write_back; as it was if missing.")
    ] = None


def wire(routes: Routes, front: Front) -> None:
    """Add the routes."""

    async def show() -> Response:
        return json_answer(await _ask(front, "hicache_status", {}))

    async def attach(request: Request) -> Response:
        body = await read(request, AttachRequest)
        args = {
            "backend": body.hicache_storage_backend,
            "options": body.hicache_storage_backend_extra_config_json,
            "prefetch_policy": body.hicache_storage_prefetch_policy,
            "write_policy": body.hicache_write_policy,
        }
        return json_answer(await _ask(front, "hicache_attach", args))

    async def detach() -> Response:
        return json_answer(await _ask(front, "hicache_detach", {}))

    async def clear() -> Response:
        return json_answer(await _ask(front, "hicache_clear", {}))

    path = "/hicache/storage-backend"
    for name, method, summary, body, handler in (
        (path, "GET", "The storage behind the prefix cache", None, show),
        (path, "PUT", "Attach a storage to the prefix cache", AttachRequest, attach),
        (path, "DELETE", "Detach the storage", None, detach),
        (f"{path}/clear", "POST", "Delete what is stored of this model", None, clear),
    ):
        routes.add(name, (method,), Access.ADMIN, Operation(summary, body, dict[str, Any]), handler)


async def _ask(front: Front, op: str, args: dict[str, Any]) -> dict[str, Any]:
    try:
        value: dict[str, Any] = await front.control(op, args, SECONDS)
    except EngineFault as error:
        raise BadRequest(error.message, code="hicache_refused") from None
    return value
