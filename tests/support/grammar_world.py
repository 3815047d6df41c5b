"""A byte vocabulary for grammars, walks through their masks, and real schemas where they lie beside the project."""

from __future__ import annotations

import json
import time
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ceiba.config.records import GrammarConfig
from ceiba.core.sampling import SamplingParams
from ceiba.grammar.base import Constraint, Spacing, State, Vocabulary
from ceiba.grammar.masks import members
from ceiba.grammar.provider import Provider

EOS, EOS2, TOOL, THINK = 256, 257, 258, 259
MERGED = [b'{"', b'": ', b'", "', b"true", b"  ", "é".encode(), b"\xc3", b"abc"]
SIZE = 300
"""Of the model: larger than the vocabulary, and no multiple of 32."""
SCHEMAS = Path(__file__).parents[3] / "shared" / "data" / "json_schemas.jsonl"


def vocabulary() -> Vocabulary:
    tokens = [*(bytes([b]) for b in range(256)), b"", b"", b"", b"", *MERGED]
    tokens += [b""] * (SIZE - len(tokens))
    special = {"<end>": EOS, "<stop>": EOS2, "<tool>": TOOL, "</think>": THINK}
    return Vocabulary(tokens, (EOS, EOS2), special, lambda text: list(text.encode()))


def compilers(backend: str, spacing: Spacing | None = None) -> Any:
    """The compiling half of a backend, in this process; skips where its package is missing."""
    if backend == "llguidance":
        from ceiba.grammar.backends import guidance as module
    elif backend == "xgrammar":
        pytest.importorskip("xgrammar")
        from ceiba.grammar.backends import xgrammar as module  # type: ignore[no-redef]
    else:
        pytest.importorskip("outlines_core")
        from ceiba.grammar.backends import outlines as module  # type: ignore[no-redef]
    words = vocabulary()
    return module.Compiler(words, spacing or Spacing()), module.Engine(words)


@cache
def pair(backend: str) -> Any:
    return compilers(backend)


def begin(backend: str, kind: str, text: str | dict | bool) -> State:
    """The state at the start of a constraint. Raises Refusal."""
    text = text if isinstance(text, str) else json.dumps(text)
    return _prepared(backend, Constraint(kind, text)).state()


@lru_cache(maxsize=16)
def _prepared(backend: str, constraint: Constraint) -> Any:
    compiler, engine = pair(backend)
    return engine.prepare(compiler.compile(constraint))


def allowed(state: State) -> list[int]:
    bits = np.zeros(-(-SIZE // 32), np.int32)
    state.fill(bits)
    return members(bits).tolist()


def walk(state: State, data: bytes) -> bool:
    """Whether every byte is in its mask and is taken."""
    bits = np.zeros(-(-SIZE // 32), np.int32)
    for byte in data:
        if state.terminated:
            return False
        state.fill(bits)
        inside = bool(bits[byte >> 5] >> (byte & 31) & 1)
        took = state.accept(byte)
        assert inside == took, f"mask and accept disagree about {bytes([byte])!r} in {data!r}"
        if not took:
            return False
    return True


def complete(state: State) -> bool:
    """Whether the answer may end here."""
    return state.terminated or EOS in allowed(state)


def matches(state: State, text: str) -> bool:
    return walk(state, text.encode()) and complete(state)


def ready(ticket: Any, seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while not ticket.ready():
        assert time.monotonic() < deadline, "the grammar did not compile"
        time.sleep(0.005)
    return ticket


def make_provider(backend: str = "llguidance", **options: Any) -> Provider:
    return Provider(GrammarConfig(backend=backend), vocabulary, **options)  # type: ignore[arg-type]


def ask(provider: Provider, **fields: Any) -> Any:
    return provider.create(SamplingParams(**fields))


@cache
def real_schemas() -> list[dict[str, Any]]:
    """Real-world schemas with marked instances; skips where the file is not there."""
    if not SCHEMAS.exists():
        pytest.skip(f"the real-world schemas are not at {SCHEMAS}")
    return [json.loads(line) for line in SCHEMAS.read_text().splitlines()]


def spellings(schema: Any, value: Any, *, whole: bool) -> list[str]:
    """JSON texts of one value: as it came, and with its keys in the order of the schema's properties. ``whole``: also
    with 1.0 written as 1, which is the same number where it is valid."""
    places = {name: i for i, name in enumerate(dict.fromkeys(_properties(schema)))}

    def ordered(v: Any) -> Any:
        if isinstance(v, dict):
            return {k: ordered(v[k]) for k in sorted(v, key=lambda name: places.get(name, len(places)))}
        if isinstance(v, list):
            return [ordered(item) for item in v]
        return int(v) if whole and isinstance(v, float) and v == int(v) else v

    values = [value, ordered(value)]
    if isinstance(value, dict):
        values.append(dict(reversed(value.items())))
    return list(dict.fromkeys(json.dumps(v, ensure_ascii=False) for v in values))


def _properties(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for part in schema for name in _properties(part)]
    if not isinstance(schema, dict):
        return []
    own = schema.get("properties")
    names = list(own) if isinstance(own, dict) else []
    return names + [name for part in schema.values() for name in _properties(part)]
