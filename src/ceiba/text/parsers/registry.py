"""Parsers by the names that users type.

Owns the two tables and their spellings (``-`` and ``_`` are one). `detect` lives beside it. Must never know a request.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from ceiba.core.errors import ConfigError
from ceiba.text.parsers import harmony
from ceiba.text.parsers.arguments import Tools
from ceiba.text.parsers.detect import Detection, detect, explain
from ceiba.text.parsers.reasoning import tags
from ceiba.text.parsers.reasoning.tags import ReasoningFormat
from ceiba.text.parsers.tools import elements, json_calls, minimax_m3, pythonic, sections
from ceiba.text.parsers.tools.base import ToolFormat

__all__ = [
    "Detection",
    "detect",
    "explain",
    "reasoning_names",
    "reasoning_parser",
    "tool_names",
    "tool_parser",
]

_TOOLS: dict[str, type[ToolFormat]] = {
    "cohere_command4": json_calls.Cohere,
    "deepseekv3": sections.DeepSeekV3,
    "deepseekv31": sections.DeepSeekV31,
    "deepseekv32": elements.DeepSeekV32,
    "deepseekv4": elements.DeepSeekV4,
    "deepseekv41": elements.DeepSeekV41,
    "gemma4": pythonic.Gemma4,
    "gigachat3": json_calls.GigaChat,
    "glm": elements.Glm45,
    "glm45": elements.Glm45,
    "glm47": elements.Glm,
    "gpt-oss": harmony.HarmonyCalls,
    "granite": json_calls.Granite,
    "hermes": json_calls.Hermes,
    "hunyuan": elements.HunyuanAny,
    "hunyuan_a13b": json_calls.MiniMaxM1,
    "interns1": json_calls.InternLM,
    "kimi_k2": sections.KimiK2,
    "kimi_k3": elements.KimiK3,
    "lfm2": pythonic.Lfm2,
    "llama3": json_calls.Llama3,
    "mimo": elements.Qwen3Coder,
    "minicpm5": elements.MiniCPM5,
    "minimax": json_calls.MiniMaxM1,
    "minimax-m2": elements.MiniMaxM2,
    "minimax-m3": minimax_m3.MiniMaxM3,
    "mistral": json_calls.Mistral,
    "nemotron_nano2": json_calls.NemotronList,
    "poolside_v1": elements.Glm45,
    "pythonic": pythonic.Pythonic,
    "qwen": json_calls.Qwen25,
    "qwen25": json_calls.Qwen25,
    "qwen3_coder": elements.Qwen3Coder,
    "step3": elements.Step3,
    "step3p5": elements.Qwen3Coder,
    "trinity": json_calls.Trinity,
}

_REASONING: dict[str, ReasoningFormat] = {
    "cohere_command4": tags.COHERE,
    "deepseek-r1": tags.FORCED,
    "deepseek-v3": tags.THINK,
    "deepseek-v4": tags.THINK,
    "gemma4": tags.GEMMA4,
    "glm45": tags.THINK,
    "gpt-oss": harmony.CHANNELS,
    "granite": tags.GRANITE,
    "hunyuan": tags.HUNYUAN,
    "interns1": tags.THINK,
    "kimi": tags.KIMI,
    "kimi_k2": tags.THINK,
    "kimi_k3": tags.KIMI_K3,
    "mimo": tags.THINK,
    "minimax": tags.FORCED,
    "minimax-append-think": tags.MINIMAX_APPEND,
    "minimax-m3": tags.MINIMAX_M3,
    "mistral": tags.MISTRAL,
    "nemotron_3": tags.THINK,
    "poolside_v1": tags.THINK,
    "qwen3": tags.THINK,
    "qwen3-thinking": tags.FORCED,
    "step3": tags.FORCED,
    "step3p5": tags.FORCED,
}


def _canonical(name: str) -> str:
    return name.strip().lower().replace("-", "_")


_TOOL_NAMES = {_canonical(n): n for n in _TOOLS}
_REASONING_NAMES = {_canonical(n): n for n in _REASONING}


def tool_names() -> tuple[str, ...]:
    """All names that `tool_parser` knows, as documented; ``auto`` is the caller's to resolve with `detect`."""
    return tuple(_TOOLS)


def reasoning_names() -> tuple[str, ...]:
    return tuple(_REASONING)


def tool_parser(name: str, tools: Iterable[Mapping[str, Any]] = ()) -> ToolFormat:
    """The format called ``name``, for the tools of one request (OpenAI tool objects). Raises ConfigError."""
    return _TOOLS[_known(name, _TOOL_NAMES, "--tool-call-parser")](Tools(tools))


def reasoning_parser(name: str) -> ReasoningFormat:
    """The format called ``name``. Raises ConfigError."""
    return _REASONING[_known(name, _REASONING_NAMES, "--reasoning-parser")]


def _known(name: str, names: Mapping[str, str], flag: str) -> str:
    found = names.get(_canonical(name))
    if found is None:
        near = difflib.get_close_matches(_canonical(name), names, 1)
        hint = f"; did you mean {names[near[0]]!r}?" if near else ""
        raise ConfigError(f"{flag} {name!r} is not known{hint} Known names: auto, {', '.join(names.values())}")
    return found
