"""The files around the weights in a Hugging Face directory: owns the reading of config.json, generation_config.json,
tokenizer files and chat templates. Must never read weights.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from ceiba.checkpoint.base import TokenizerSource
from ceiba.checkpoint.facts import normalise
from ceiba.checkpoint.mapping import read_small
from ceiba.core.errors import CheckpointError

MAX_JSON_BYTES: Final = 32 << 20
MAX_TEMPLATE_BYTES: Final = 4 << 20


def read_json(path: str, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """An object from a JSON file of at most ``limit`` bytes. Raises CheckpointError."""
    return parse_object(read_small(path, limit), path)


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """An object from JSON bytes in which no object has a key twice. Raises CheckpointError naming ``where``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("an object has the same key twice")
        return out

    try:
        value = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: a JSON object is needed")
    return value


def read_config(directory: str) -> dict[str, Any]:
    """config.json, with the newer spellings also in the older form."""
    return normalise(read_json(os.path.join(directory, "config.json")))


def read_optional(directory: str, name: str) -> dict[str, Any]:
    """The object in a file that may be missing; then empty."""
    path = os.path.join(directory, name)
    return read_json(path) if os.path.exists(path) else {}


def tokenizer_source(directory: str, config: dict[str, Any], generation: dict[str, Any]) -> TokenizerSource:
    """Paths and special ids; tokenizer.json itself is parsed by the tokenizer library, not here."""
    tokenizer_json = os.path.join(directory, "tokenizer.json")
    settings = read_optional(directory, "tokenizer_config.json")
    ids = _added_tokens(settings)
    bos = _first_id(config.get("bos_token_id"))
    eos = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))]
    named_bos, named_eos = (ids.get(_token_text(settings.get(key))) for key in ("bos_token", "eos_token"))
    if named_eos is not None:
        eos.append(named_eos)
    return TokenizerSource(
        tokenizer_json=tokenizer_json if os.path.exists(tokenizer_json) else None,
        tokenizer_config=settings,
        chat_templates=_templates(directory, settings),
        bos_id=bos if named_bos is None else named_bos,
        eos_ids=tuple(dict.fromkeys(eos)),
        add_bos=settings.get("add_bos_token") is True,
        add_eos=settings.get("add_eos_token") is True,
    )


def _templates(directory: str, settings: dict[str, Any]) -> dict[str, str]:
    """Of all the places a chat template may be in; a file of its own wins over tokenizer_config.json."""
    templates: dict[str, str] = {}
    inline = settings.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        for item in inline:
            if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str):
                templates[item["name"]] = item["template"]
    whole = read_optional(directory, "chat_template.json").get("chat_template")
    if isinstance(whole, str):
        templates["default"] = whole
    path = os.path.join(directory, "chat_template.jinja")
    if os.path.exists(path):
        templates["default"] = read_small(path, MAX_TEMPLATE_BYTES).decode("utf-8", "replace")
    more = os.path.join(directory, "additional_chat_templates")
    if os.path.isdir(more):
        for name in sorted(os.listdir(more)):
            if name.endswith(".jinja"):
                raw = read_small(os.path.join(more, name), MAX_TEMPLATE_BYTES)
                templates[name.removesuffix(".jinja")] = raw.decode("utf-8", "replace")
    return templates


def _added_tokens(settings: dict[str, Any]) -> dict[str, int]:
    decoder = settings.get("added_tokens_decoder")
    ids = {}
    for key, entry in decoder.items() if isinstance(decoder, dict) else ():
        if key.isascii() and key.isdigit() and len(key) < 10 and isinstance(entry, dict):
            content = entry.get("content")
            if isinstance(content, str):
                ids[content] = int(key)
    return ids


def _token_text(value: Any) -> str:
    """A special token is a string or an object with its ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if type(v) is int and 0 <= v < 1 << 31]


def _first_id(value: Any) -> int | None:
    return next(iter(_ids(value)), None)


def weight_quantization(config: dict[str, Any]) -> str | None:
    """``quant_method`` of a directory that was quantized by another tool: fp8, gptq, awq, compressed-tensors, …"""
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return method if isinstance(method, str) else None
