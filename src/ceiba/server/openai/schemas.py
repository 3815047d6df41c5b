"""The fields of OpenAI's requests, with ours beside them: the source of both decoding and the OpenAPI document.

Owns names, types, defaults and descriptions. Every field either works, is a hint, or is refused with its reason
(``REFUSED_*``); none is ignored in silence.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ceiba.core import limits


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: Annotated[
        bool | None, Meta(description="Send one last chunk with `choices: []` and the usage of the whole request.")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="Put the usage so far into every chunk (extension).")
    ] = None
    include_obfuscation: Annotated[
        bool | None, Meta(description="Chunks are never padded: false is what you get; true is refused.")
    ] = None


class CommonFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and text completions share."""

    model: Annotated[str, Meta(description="Any name: the one loaded model answers, and the name is repeated.")] = ""
    n: Annotated[int | None, Meta(description=f"Choices per prompt, 1..{limits.MAX_N}. Default 1.")] = None
    temperature: Annotated[
        float | None, Meta(description=f"0 is greedy; up to {limits.MAX_TEMPERATURE:g}. Default 1, or the model's.")
    ] = None
    top_p: Annotated[float | None, Meta(description="Nucleus sampling: smallest set with this probability.")] = None
    top_k: Annotated[int | None, Meta(description="Only the k most likely tokens; -1: all (extension).")] = None
    min_p: Annotated[
        float | None, Meta(description="Only tokens at least this fraction as likely as the likeliest (extension).")
    ] = None
    frequency_penalty: Annotated[
        float | None, Meta(description="-2..2: subtracted per earlier occurrence in the answer. Default 0.")
    ] = None
    presence_penalty: Annotated[
        float | None, Meta(description="-2..2: subtracted once a token has occurred in the answer. Default 0.")
    ] = None
    repetition_penalty: Annotated[
        float | None, Meta(description="0.01..100: divides the logits of tokens already seen; 1: off (extension).")
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None, Meta(description="Token id (as text) to a number in -100..100 added to its logit.")
    ] = None
    seed: Annotated[
        int | None,
        Meta(description="Same seed and prompt, same answer, whatever else runs. Choice k of n uses seed + k."),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        Meta(description=f"Up to {limits.MAX_STOP_STRINGS} strings that end the answer; they are not part of it."),
    ] = None
    stream: Annotated[bool | None, Meta(description="Send server-sent events, one per token. Default false.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Only with `stream`.")] = None
    user: Annotated[str | None, Meta(description="Hint: has no effect here.")] = None
    min_tokens: Annotated[
        int | None, Meta(description="End tokens and stop tokens are held back until then (extension).")
    ] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="Token ids that end the answer (extension).")] = None
    stop_regex: Annotated[
        str | list[str] | None,
        Meta(description=f"Up to {limits.MAX_STOP_EXPRESSIONS} expressions whose match ends the answer (extension)."),
    ] = None
    ignore_eos: Annotated[bool, Meta(description="Go on past the model's own end tokens (extension).")] = False
    no_stop_trim: Annotated[bool, Meta(description="Keep the stop string in the answer (extension).")] = False
    skip_special_tokens: Annotated[
        bool, Meta(description="Leave special tokens out of the text. Default true (extension).")
    ] = True
    spaces_between_special_tokens: Annotated[
        bool, Meta(description="Spaces between special tokens that are shown. Default true (extension).")
    ] = True
    rid: Annotated[
        str | None, Meta(description="Your own id for the request; /abort_request takes it (extension).")
    ] = None
    extra_key: Annotated[
        str | None, Meta(description="Requests with different keys share no cached prefix (extension).")
    ] = None
    cache_salt: Annotated[
        str | None,
        Meta(description="A secret per tenant: without it nobody else can probe or use your cached prefixes."),
    ] = None
    priority: Annotated[
        int | None, Meta(description="Larger goes first; refused unless priority scheduling is on (extension).")
    ] = None
    routing_key: Annotated[
        str | None, Meta(description="Groups requests for routing; also header x-smg-routing-key (extension).")
    ] = None
    queue_timeout: Annotated[
        float | None,
        Meta(description="Seconds it may wait in the queue; then 504. Default: the server's limit (extension)."),
    ] = None
    cache_control: Annotated[
        dict[str, Any] | None,
        Meta(
            description='{"type": "ephemeral", "ttl": "5m" or "1h"}: keep this prompt cached, within the pin budget '
            "(extension)."
        ),
    ] = None
    response_format: Annotated[
        dict[str, Any] | None,
        Meta(description="`text`, `json_object`, `json_schema` or `structural_tag`: the shape of the answer."),
    ] = None
    json_schema: Annotated[
        str | dict[str, Any] | bool | None, Meta(description="The answer is JSON that satisfies this (extension).")
    ] = None
    regex: Annotated[str | None, Meta(description="The answer matches this expression (extension).")] = None
    ebnf: Annotated[str | None, Meta(description="The answer follows this grammar (extension).")] = None
    structural_tag: Annotated[
        str | dict[str, Any] | None, Meta(description="Free text whose marked parts have a shape (extension).")
    ] = None
    choice: Annotated[list[str] | None, Meta(description="The answer is one of these (extension).")] = None
    lora_path: Annotated[Any, Meta(description="Refused: LoRA adapters are not available yet.")] = None
    session_params: Annotated[Any, Meta(description="Refused: sessions belong to /generate.")] = None
    custom_logit_processor: Annotated[Any, Meta(description="Refused: code from a request is never executed here.")] = (
        None
    )
    custom_params: Annotated[Any, Meta(description="Refused: nothing here reads it.")] = None
    return_hidden_states: Annotated[Any, Meta(description="Refused: hidden states are not available yet.")] = None
    return_routed_experts: Annotated[Any, Meta(description="Refused: expert routing is not available yet.")] = None
    bootstrap_host: Annotated[Any, Meta(description="Refused: prefill/decode separation is not available yet.")] = None
    bootstrap_port: Annotated[Any, Meta(description="Refused: prefill/decode separation is not available yet.")] = None
    bootstrap_room: Annotated[Any, Meta(description="Refused: prefill/decode separation is not available yet.")] = None
    data_parallel_rank: Annotated[Any, Meta(description="Refused: there is one replica.")] = None


Message = dict[str, Any]

MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role"],
    "additionalProperties": True,
    "properties": {
        "role": {
            "type": "string",
            "enum": ["system", "developer", "user", "assistant", "tool", "function"],
            "description": "Who speaks. `developer` is shown to the template as `system`.",
        },
        "content": {
            "description": "Text, or a list of parts of type `text`.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}],
        },
        "name": {"type": "string", "description": "Given to the template as it is."},
        "tool_calls": {
            "type": "array",
            "items": {"type": "object"},
            "description": "Earlier calls.",
        },
        "tool_call_id": {"type": "string", "description": "The call that a tool message answers."},
        "reasoning_content": {"type": "string", "description": "Earlier reasoning, given to the template."},
    },
    "description": "One message. Other keys are given to the chat template as they are.",
}


class ChatRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[
        list[Message],
        Meta(description="The conversation so far.", extra_json_schema={"items": MESSAGE_SCHEMA}),
    ]
    max_tokens: Annotated[
        int | None, Meta(description="Older name of `max_completion_tokens`. Default: what the context leaves.")
    ] = None
    max_completion_tokens: Annotated[
        int | None, Meta(description="Most tokens of the answer. Default: what the context leaves.")
    ] = None
    logprobs: Annotated[bool | None, Meta(description="Return the log-probability of each token.")] = None
    top_logprobs: Annotated[
        int | None, Meta(description=f"Alternatives per token, 0..{limits.MAX_TOP_LOGPROBS}; needs `logprobs`.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="End the prompt where the assistant begins. Default true (extension).")
    ] = None
    continue_final_message: Annotated[
        bool, Meta(description="Continue the last message instead of answering it (extension).")
    ] = False
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Variables for the chat template, and nothing else (extension).")
    ] = None
    reasoning_effort: Annotated[
        str | None,
        Meta(
            description="`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`: given to the template, and with "
            "--reasoning-parser a limit on the tokens of thinking (0, 256, 1024, 4096, 16384, none, none)."
        ),
    ] = None
    thinking_budget: Annotated[
        int | None,
        Meta(description="Most tokens of thinking, with --reasoning-parser; wins over the effort (extension)."),
    ] = None
    separate_reasoning: Annotated[
        bool,
        Meta(description="With --reasoning-parser: thinking goes to `reasoning_content`. Default true (extension)."),
    ] = True
    stream_reasoning: Annotated[
        bool, Meta(description="Stream thinking as it comes, else in one piece. Default true (extension).")
    ] = True
    metadata: Annotated[dict[str, Any] | None, Meta(description="Hint: has no effect here.")] = None
    store: Annotated[bool | None, Meta(description="false or absent: nothing is stored here; true is refused.")] = None
    service_tier: Annotated[
        str | None, Meta(description="`auto` or `default`: there is one tier; others are refused.")
    ] = None
    prediction: Annotated[Any, Meta(description="Hint: has no effect here.")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="Hint: prefixes are cached without it.")] = None
    prompt_cache_retention: Annotated[str | None, Meta(description="Hint: prefixes stay while there is room.")] = None
    safety_identifier: Annotated[str | None, Meta(description="Hint: has no effect here.")] = None
    verbosity: Annotated[
        Any,
        Meta(description="`medium` or absent; others are refused.", extra_json_schema={"enum": [None, "", "medium"]}),
    ] = None
    modalities: Annotated[
        Any,
        Meta(description='`["text"]` or absent; others are refused.', extra_json_schema={"enum": [None, [], ["text"]]}),
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        Meta(description="Functions that the model may call: `{type: function, function: {name, parameters, …}}`."),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(description="`none`, `auto` (default), `required`, or `{type: function, function: {name}}`."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="false: at most one call per answer. Default true.")
    ] = None
    functions: Annotated[Any, Meta(description="Refused: the older form; send `tools`.")] = None
    function_call: Annotated[
        Any,
        Meta(
            description="`none` or absent; send `tool_choice`.", extra_json_schema={"enum": [None, "", "none", "auto"]}
        ),
    ] = None
    moderation: Annotated[Any, Meta(description="Refused: this server moderates nothing.")] = None
    prompt_cache_options: Annotated[Any, Meta(description="Hint: prefixes are cached without it.")] = None
    audio: Annotated[Any, Meta(description="Refused: audio is not available.")] = None
    web_search_options: Annotated[Any, Meta(description="Refused: this server searches nothing.")] = None


Prompt = str | list[int | str | list[int]]


class CompletionRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Prompt, Meta(description="A text, a list of texts, a list of token ids, or a list of such lists.")
    ]
    max_tokens: Annotated[int | None, Meta(description="Most tokens of each answer. Default 16; 0 only scores.")] = None
    best_of: Annotated[
        int | None,
        Meta(description="Generate so many choices and return the `n` with the best mean log-probability; no stream."),
    ] = None
    echo: Annotated[bool | None, Meta(description="Put the prompt in front of the answer.")] = None
    logprobs: Annotated[
        int | None, Meta(description=f"Log-probabilities with so many alternatives, 0..{limits.MAX_TOP_LOGPROBS}.")
    ] = None
    suffix: Annotated[
        str | None,
        Meta(description="Text behind the gap that the answer fills; needs a model with fill-in-the-middle tokens."),
    ] = None
    prompt_embeds: Annotated[Any, Meta(description="Refused: embeddings as input are not available.")] = None


_PD = "prefill/decode separation is not available yet"
REFUSED_COMMON: dict[str, tuple[str, tuple[Any, ...]]] = {
    # field: why it is refused, and the values that change nothing (besides null, false and empty)
    "lora_path": ("LoRA adapters are not available yet", ()),
    "session_params": ("sessions belong to /generate: send the turn there", ()),
    "custom_logit_processor": ("code from a request is never executed here; use logit_bias", ()),
    "custom_params": ("nothing here reads it", ()),
    "return_hidden_states": ("hidden states are not available yet", ()),
    "return_routed_experts": ("expert routing is not available yet", ()),
    "bootstrap_host": (_PD, ()),
    "bootstrap_port": (_PD, ()),
    "bootstrap_room": (_PD, ()),
    "data_parallel_rank": ("there is one replica", (0,)),
}
REFUSED_CHAT = REFUSED_COMMON | {
    "functions": ("the older form is not available: send tools", ()),
    "function_call": ("the older form is not available: send tool_choice", ("none", "auto")),
    "moderation": ("this server moderates nothing", ()),
    "audio": ("audio is not available", ()),
    "modalities": ('only ["text"] is available', (["text"],)),
    "web_search_options": ("this server searches nothing", ()),
    "store": ("this server stores no completions", ()),
    "service_tier": ("there is one tier: leave it out, or send auto or default", ("auto", "default")),
    "verbosity": ("no model here obeys it: say it in a message", ("medium",)),
}
REFUSED_COMPLETION = REFUSED_COMMON | {
    "prompt_embeds": ("embeddings as input are not available: send text or token ids", ()),
}
