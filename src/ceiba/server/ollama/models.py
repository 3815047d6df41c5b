"""GET /api/tags, /api/ps, /api/version and POST /api/show: the one loaded model in Ollama's words."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ceiba
from ceiba.server.front import Front
from ceiba.server.output import template_text


def _details(front: Front) -> dict[str, Any]:
    model = front.config.model
    form = "gguf" if model.path.endswith(".gguf") else "safetensors"
    return {
        "parent_model": "",
        "format": form,
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": model.quantization or model.dtype,
    }


def _card(front: Front) -> dict[str, Any]:
    """What both lists show. Size 0 where the model is no single file."""
    model = front.config.model
    path = Path(model.path)
    size = path.stat().st_size if path.is_file() else 0
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _modified(front),
        "size": size,
        "digest": hashlib.sha256(f"{model.path}:{size}".encode()).hexdigest(),
        "details": _details(front),
    }


def _modified(front: Front) -> str:
    path = Path(front.config.model.path)
    at = path.stat().st_mtime if path.exists() else front.started
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def tags(front: Front) -> dict[str, Any]:
    return {"models": [_card(front)]}


def running(front: Front) -> dict[str, Any]:
    card = _card(front)
    del card["modified_at"]
    far = datetime(9999, 12, 31, tzinfo=UTC).isoformat().replace("+00:00", "Z")
    return {"models": [{**card, "expires_at": far, "size_vram": 0, "context_length": front.capacity}]}


def show(front: Front) -> dict[str, Any]:
    model = front.config.model
    able = ["completion"] if model.task == "generate" else ["embedding"]
    if front.parsers.tool is not None:
        able.append("tools")
    if front.parsers.reasoning is not None:
        able.append("thinking")
    return {
        "modelfile": f"FROM {model.path}",
        "parameters": "\n".join(f"{name} {value}" for name, value in front.sampling_defaults.items()),
        "template": template_text(front.template) or "",
        "details": _details(front),
        "model_info": {
            "general.basename": model.name,
            "context_length": front.capacity,
            "vocab_size": front.vocab_size,
        },
        "capabilities": able,
        "modified_at": _modified(front),
        "license": "",
    }


def version() -> dict[str, str]:
    return {"version": ceiba.__version__}
