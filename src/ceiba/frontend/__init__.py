"""The front-end language: programs of several calls with branches, choices and constraints, over a server or an engine.

Owns names that SGLang's users type. Stands apart from the engine: it imports ``core`` and the client, and speaks HTTP
or the public methods of ``ceiba.Engine``. ``import ceiba as sgl`` has all of these names, too.
"""

from ceiba.frontend.backends.default import as_backend, flush_cache, get_server_info, set_default_backend
from ceiba.frontend.backends.engine import EngineBackend, Runtime
from ceiba.frontend.backends.http import RuntimeEndpoint
from ceiba.frontend.backends.openai import OpenAI
from ceiba.frontend.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from ceiba.frontend.primitives import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from ceiba.frontend.program import Program, function
from ceiba.frontend.state import ForkGroup, ProgramState

__all__ = [
    "EngineBackend",
    "ForkGroup",
    "OpenAI",
    "Program",
    "ProgramState",
    "Runtime",
    "RuntimeEndpoint",
    "as_backend",
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
]
