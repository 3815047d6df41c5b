"""GET /v1/models and /v1/models/{id}: the one loaded model."""

from __future__ import annotations

from datetime import UTC, datetime
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


def _anthropic_card(front: Front) -> dict[str, Any]:
    name = front.config.model.name
    created = datetime.fromtimestamp(int(front.started), UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def listing(front: Front, anthropic: bool = False) -> dict[str, Any]:
    """``anthropic``: in the form that Anthropic's clients read; the route is the same."""
    if anthropic:
        found = _anthropic_card(front)
        return {"data": [found], "has_more": False, "first_id": found["id"], "last_id": found["id"]}
    return {"object": "list", "data": [card(front)]}


def one(front: Front, model_id: str, anthropic: bool = False) -> dict[str, Any]:
    if model_id != front.config.model.name:
        raise NotFound(
            f"model {model_id!r} is not loaded; this server has {front.config.model.name!r}.",
            param="model",
            code="model_not_found",
        )
    return _anthropic_card(front) if anthropic else card(front)
