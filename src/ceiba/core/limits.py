"""One table of limits, checked before any fan-out or allocation. A limit that a flag may move says so."""

from __future__ import annotations

from typing import Final

MAX_BODY_BYTES: Final = 64 << 20
"""One HTTP request body."""
MAX_HEADER_BYTES: Final = 64 << 10
HEADER_SECONDS: Final = 30.0
"""From the first byte of a request, or from connecting, to the end of its headers."""
BODY_STALL_SECONDS: Final = 60.0
"""Between two pieces of one request body."""
BODY_BYTES_PER_SECOND: Final = 64 << 10
"""What a body must come at on average, once BODY_STALL_SECONDS are over."""
MAX_BODIES_BYTES: Final = 512 << 20
"""Request bodies in memory over all connections, beyond the first SMALL_BODY_BYTES of each."""
SMALL_BODY_BYTES: Final = 256 << 10
"""Of each body, not counted: ordinary requests pass however many large ones are about."""
MAX_PIPELINED_BYTES: Final = 1 << 20
"""Sent on one connection behind requests that have not been answered yet."""
MAX_JSON_DEPTH: Final = 64
MAX_N: Final = 128
"""Choices of one request (n, best_of)."""
MAX_BATCH: Final = 4096
"""Prompts in one request, and prompts × n."""
MAX_MESSAGES: Final = 8192
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_STOP_EXPRESSIONS: Final = 16
"""Entries of stop_regex: each reads every byte of an answer."""
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_LOGIT_BIAS: Final = 4096
MAX_LOGIT_BIAS_VALUE: Final = 100.0
MAX_TOP_LOGPROBS: Final = 128
MAX_LOGPROB_TOKEN_IDS: Final = 1024
MAX_TEMPERATURE: Final = 100.0
MAX_PENALTY: Final = 2.0
MIN_REPETITION_PENALTY: Final = 0.01
"""Logits are divided by it, and must stay finite."""
MAX_REPETITION_PENALTY: Final = 100.0
MAX_PROMPT_CHARS: Final = 32 << 20
MAX_TOOL_TEXT_CHARS: Final = 4 << 20
"""Texts that are only looked at (/tokenize, /parse_function_call, …), together: a token being made takes 100 bytes."""
MAX_HINTS_CHARS: Final = 2048
"""Of the header that names the fields taken as advice."""
MAX_ID_CHARS: Final = 256
"""rid, user, routing key, cache salt, model name."""
MAX_TOOLS: Final = 1024
MAX_TOOL_NAME_CHARS: Final = 256
MAX_CONTENT_PARTS: Final = 4096
MAX_URL_CHARS: Final = 8192
MAX_MEDIA_BYTES: Final = 32 << 20
"""One image, as it is sent or fetched."""
MAX_MEDIA_REDIRECTS: Final = 3
MAX_MEDIA_FETCHES: Final = 16
"""Images fetched at a time, over all requests."""
MEDIA_SECONDS: Final = 10.0
"""Fetching one image, redirects and waiting for its turn included."""
MAX_IMAGE_SIDE: Final = 16_384
MAX_IMAGE_PIXELS: Final = 40_000_000
MAX_METADATA: Final = 64
"""Entries of a request's metadata."""
MAX_STORED_RESPONSES: Final = 4096
"""Answers kept for /v1/responses; the oldest leave first."""
MAX_STORED_BYTES: Final = 256 << 20
MAX_BACKGROUND: Final = 256
"""Responses that run in the background at a time."""
MAX_FILES: Final = 10_000
MAX_FILE_BYTES: Final = 200 << 20
"""One uploaded file."""
MAX_BATCH_LINES: Final = 50_000
MAX_BATCHES: Final = 64
"""Batches that have not ended."""
MAX_BATCH_RUNNING: Final = 32
"""Requests of one batch that are in the engine at a time."""
MAX_SCORE_ITEMS: Final = 4096
MAX_JOINED: Final = 8 << 20
"""Characters or ids of all prompts of /v1/score or /v1/decisions, which repeat their query or input in each."""
MAX_QUESTIONS: Final = 400
"""Questions of one /v1/decisions request."""
MAX_OPTIONS: Final = 255
"""Choices or levels of one question."""
TEMPLATE_SECONDS: Final = 5.0
"""Rendering one chat template."""
MAX_GRAMMAR_CHARS: Final = 256 << 10
"""A JSON schema, EBNF grammar or structural tag, as text."""
MAX_REGEX_CHARS: Final = 16 << 10
MAX_REGEX_SIZE: Final = 100_000
"""Characters of an expression after its bounded repetitions are written out."""
MAX_SCHEMA_DEPTH: Final = 64
MAX_SCHEMA_NODES: Final = 20_000
"""Schemas inside one schema, also after ``not``, ``oneOf`` and the like are written out."""
MAX_SCHEMA_ITEMS: Final = 1_000_000
"""``minItems``, ``minProperties`` and ``minLength``: nothing longer can be generated."""
MAX_CHOICES: Final = 4096
"""Strings of ``choice``."""
MAX_NUMBERED_CALLS = 16
"""Calls in one forced answer of a format that numbers them."""
MAX_STRUCTURAL_TAGS: Final = 1024
GRAMMAR_SECONDS: Final = 10.0
"""Of CPU time to compile one grammar (three times as many by the clock), in a process that is killed when they are
over."""
GRAMMAR_AHEAD_SECONDS: Final = 3.0
"""Of these, what xgrammar has to build a grammar ahead; then llguidance gets it, which builds while it is used."""
GRAMMAR_MEMORY_BYTES: Final = 1 << 30
"""What compiling one grammar may take on top of the compiler itself."""
GRAMMAR_RETAINED_BYTES: Final = 256 << 20
"""What a compiler may have grown by when it is asked again; else another one is started."""
GRAMMAR_CACHE: Final = 256
"""Compiled grammars kept."""
GRAMMAR_CACHE_BYTES: Final = 1 << 30
"""Compiled grammars kept and in use: an automaton built ahead for a long text may take 150 MB."""
GRAMMAR_LEXER_STATES: Final = 50_000
"""States one grammar's automaton may grow to while it is used (1-2 kB each)."""
GRAMMAR_STEP_FUEL: Final = 200_000
"""llguidance's unit of work in its automata during one mask (about 14 k per ms)."""
GRAMMAR_STEP_ITEMS: Final = 50_000
"""Parser items of one mask (about 20 k per ms)."""
