"""Ceiba: an LLM serving engine grown around a radix-tree KV cache.

Light on purpose: importing the package imports no torch. ``ceiba.Engine``, ``ceiba.Client`` and the names of the
front-end language (``ceiba.function``, ``ceiba.gen``, …) load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
_FRONTEND = (
    "OpenAI",
    "Runtime",
    "RuntimeEndpoint",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "image",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
)
_LAZY = {"Client": "ceiba.client", "SyncClient": "ceiba.client"} | dict.fromkeys(_FRONTEND, "ceiba.frontend")
__all__ = ["Client", "Engine", "SyncClient", "__version__", *_FRONTEND]  # noqa: PLE0604

if TYPE_CHECKING:
    from ceiba.client import Client, SyncClient
    from ceiba.frontend import *  # noqa: F403
    from ceiba.launch.engine import Engine


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from ceiba.launch.engine import Engine

        return Engine
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ceiba' has no attribute {name!r}")
