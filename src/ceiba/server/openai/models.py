"""GET /v1/models and /v1/models/{id}: the one loaded model."""

from __future__ import annotations

from typing import Any

from ceiba.core.errors import NotFound
from ceiba.server.front import Front


def card(front: Front) -> dict[str, Any]:
    return {
        "id": front.config.model.name,
        "object": "model",
        "created": int(front.started),
        "owned_by": "ceiba",
        "root": front.config.model.name,
        "parent": None,
        "max_model_len": front.capacity,
    }


def listing(front: Front) -> dict[str, Any]:
    return {"object": "list", "data": [card(front)]}


def one(front: Front, model_id: str) -> dict[str, Any]:
    if model_id != front.config.model.name:
        raise NotFound(
            f"model {model_id!r} is not loaded; this server has {front.config.model.name!r}.",
            param="model",
            code="model_not_found",
        )
    return card(front)
