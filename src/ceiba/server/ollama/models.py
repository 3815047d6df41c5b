"""GET /api/tags, /api/ps, /api/version and POST /api/show: the one loaded model in Ollama's words."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ceiba
from ceiba.server.front import Front
from ceiba.server.output import template_text
from ceiba.text.infill import find_infill


def _family(front: Front) -> str:
    """``llama``, ``qwen2``, …: the architecture in the form that GGUF and Ollama's clients use."""
    facts = front.facts
    return "" if facts is None else re.sub(r"(For[A-Z]\w*|Model)$", "", facts.architecture).lower()


def _parameter_size(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _details(front: Front) -> dict[str, Any]:
    model, facts, family = front.config.model, front.facts, _family(front)
    packed = "gguf" if model.path.endswith(".gguf") else "safetensors"
    stored = facts.quantized if facts is not None else None
    return {
        "parent_model": "",
        "format": packed,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if facts is None else _parameter_size(facts.num_params),
        "quantization_level": model.quantization or stored or model.dtype,
    }


def _info(front: Front) -> dict[str, Any]:
    """The header in GGUF's names; the context is what this server takes."""
    facts, name = front.facts, _family(front)
    info: dict[str, Any] = {
        "general.basename": front.config.model.name,
        "context_length": front.capacity,
        "vocab_size": front.vocab_size,
    }
    if facts is None:
        return info
    return info | {
        "general.architecture": name,
        "general.parameter_count": facts.num_params,
        f"{name}.context_length": front.capacity,
        f"{name}.embedding_length": facts.hidden_size,
        f"{name}.block_count": facts.num_layers,
        f"{name}.attention.head_count": facts.num_heads,
        f"{name}.attention.head_count_kv": facts.num_kv_heads,
        f"{name}.vocab_size": facts.vocab_size,
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
    if front.tokenizer is not None and find_infill(front.tokenizer.token_to_id) is not None:
        able.append("insert")
    return {
        "modelfile": f"FROM {model.path}",
        "parameters": "\n".join(f"{name} {value}" for name, value in front.sampling_defaults.items()),
        "template": template_text(front.template) or "",
        "details": _details(front),
        "model_info": _info(front),
        "capabilities": able,
        "modified_at": _modified(front),
        "license": "",
    }


def version() -> dict[str, str]:
    return {"version": ceiba.__version__}
