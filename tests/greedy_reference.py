"""The stored greedy answers of transformers to the default model, and the rule by which ours are compared with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def reference() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "reference" / "smollm2_greedy.json").read_text())


def prompts() -> list[dict[str, Any]]:
    """{name, text, ids, tokens, margins} each; 64 tokens."""
    return reference()["prompts"]


def comparable(prompt: dict[str, Any]) -> int:
    """How many leading tokens are decided by more than rounding: up to the first margin below the limit."""
    limit = reference()["margin_limit"]
    return next((i for i, margin in enumerate(prompt["margins"]) if margin < limit), len(prompt["margins"]))


def assert_greedy(prompt: dict[str, Any], tokens: Sequence[int]) -> None:
    n = comparable(prompt)
    assert list(tokens[:n]) == prompt["tokens"][:n], f"{prompt['name']}: differs within the first {n} tokens"
