"""One table of limits, checked before any fan-out or allocation. A limit that a flag may move says so."""

from __future__ import annotations

from typing import Final

MAX_BODY_BYTES: Final = 64 << 20
"""One HTTP request body."""
MAX_HEADER_BYTES: Final = 64 << 10
MAX_JSON_DEPTH: Final = 64
MAX_N: Final = 128
"""Choices of one request (n, best_of)."""
MAX_BATCH: Final = 4096
"""Prompts in one request, and prompts × n."""
MAX_MESSAGES: Final = 8192
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_LOGIT_BIAS: Final = 4096
MAX_LOGIT_BIAS_VALUE: Final = 100.0
MAX_TOP_LOGPROBS: Final = 128
MAX_LOGPROB_TOKEN_IDS: Final = 1024
MAX_TEMPERATURE: Final = 100.0
MAX_PENALTY: Final = 2.0
MAX_REPETITION_PENALTY: Final = 100.0
MAX_PROMPT_CHARS: Final = 32 << 20
MAX_ID_CHARS: Final = 256
"""rid, user, routing key, cache salt, model name."""
MAX_TOOLS: Final = 1024
MAX_CONTENT_PARTS: Final = 4096
TEMPLATE_SECONDS: Final = 5.0
"""Rendering one chat template."""
