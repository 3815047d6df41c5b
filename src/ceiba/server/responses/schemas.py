"""The fields of the Responses API: the source of both decoding and the OpenAPI document.

Owns names, types and descriptions. Every field works, is a hint, or is refused with its reason.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ceiba.core import limits

Item = dict[str, Any]


class ReasoningParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Annotated[
        str | None, Meta(description="`none`, `minimal`, `low`, `medium`, `high`, `xhigh`: a limit on thinking.")
    ] = None
    summary: Annotated[str | None, Meta(description="Hint: thinking is shown whole, not summarized.")] = None
    generate_summary: Annotated[str | None, Meta(description="Hint: thinking is shown whole.")] = None
    context: Annotated[Any, Meta(description="Hint: earlier thinking is given to the template.")] = None
    mode: Annotated[Any, Meta(description="Hint: there is one way to think.")] = None


class TextParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: Annotated[
        dict[str, Any] | None, Meta(description="`text`, `json_object`, or `json_schema` with name and schema.")
    ] = None
    verbosity: Annotated[str | None, Meta(description="`medium` or absent; others are refused.")] = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: Annotated[bool | None, Meta(description="false is what you get; true is refused.")] = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses."""

    input: Annotated[
        str | list[Item],
        Meta(description="A text, or items: message, function_call, function_call_output, reasoning."),
    ]
    model: Annotated[str, Meta(description="Any name: the one loaded model answers, and the name is repeated.")] = ""
    instructions: Annotated[str | None, Meta(description="The system prompt of this turn only.")] = None
    max_output_tokens: Annotated[int | None, Meta(description="Most tokens of the answer, thinking included.")] = None
    temperature: Annotated[float | None, Meta(description="0 is greedy. Default 1, or the model's.")] = None
    top_p: Annotated[float | None, Meta(description="Nucleus sampling: smallest set with this probability.")] = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Functions that the model may call.")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, Meta(description="`none`, `auto`, `required` or `{type: function, name}`.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: at most one call per answer.")] = None
    reasoning: Annotated[ReasoningParam | None, Meta(description="How much to think.")] = None
    text: Annotated[TextParam | None, Meta(description="A shape for the answer.")] = None
    stream: Annotated[bool | None, Meta(description="Send server-sent events.")] = None
    stream_options: Annotated[ResponsesStreamOptions | None, Meta(description="Only with `stream`.")] = None
    store: Annotated[bool | None, Meta(description="Keep the answer; true needs --enable-response-store.")] = None
    previous_response_id: Annotated[
        str | None, Meta(description="Go on from a stored answer; needs --enable-response-store.")
    ] = None
    background: Annotated[bool | None, Meta(description="Answer at once and go on; needs --enable-response-store.")] = (
        None
    )
    include: Annotated[
        list[str] | None,
        Meta(description="`message.output_text.logprobs`, `reasoning.encrypted_content` (never there)."),
    ] = None
    top_logprobs: Annotated[
        int | None, Meta(description=f"Alternatives per token, 0..{limits.MAX_TOP_LOGPROBS}; with `include`.")
    ] = None
    truncation: Annotated[str | None, Meta(description="`disabled` or absent; `auto` is refused.")] = None
    metadata: Annotated[
        dict[str, str] | None, Meta(description=f"Up to {limits.MAX_METADATA} texts, given back as they are.")
    ] = None
    user: Annotated[str | None, Meta(description="Hint: has no effect here.")] = None
    safety_identifier: Annotated[str | None, Meta(description="Hint: has no effect here.")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="Hint: prefixes are cached without it.")] = None
    prompt_cache_options: Annotated[Any, Meta(description="Hint: prefixes are cached without it.")] = None
    prompt_cache_retention: Annotated[str | None, Meta(description="Hint: prefixes stay while there is room.")] = None
    service_tier: Annotated[str | None, Meta(description="`auto` or `default`; others are refused.")] = None
    max_tool_calls: Annotated[Any, Meta(description="Hint: no built-in tools are run here.")] = None
    conversation: Annotated[Any, Meta(description="Refused: send previous_response_id.")] = None
    prompt: Annotated[Any, Meta(description="Refused: there are no stored prompts.")] = None
    context_management: Annotated[Any, Meta(description="Refused: the input is used as it is sent.")] = None
    moderation: Annotated[Any, Meta(description="Refused: this server moderates nothing.")] = None
    image: Annotated[Any, Meta(description="Refused: no images are made here.")] = None
    access_programs: Annotated[Any, Meta(description="Refused: not available.")] = None
    background_options: Annotated[Any, Meta(description="Refused: not available.")] = None


REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "truncation": ("an input that is too long is refused, never cut", ("disabled",)),
    "service_tier": ("there is one tier: leave it out, or send auto or default", ("auto", "default")),
    "conversation": ("send previous_response_id", ()),
    "prompt": ("there are no stored prompts", ()),
    "context_management": ("the input is used as it is sent", ()),
    "moderation": ("this server moderates nothing", ()),
    "image": ("no images are made here", ()),
    "access_programs": ("not available", ()),
    "background_options": ("not available", ()),
}
INCLUDES = {"message.output_text.logprobs", "reasoning.encrypted_content"}


class InputDetails(msgspec.Struct, kw_only=True):
    cached_tokens: Annotated[int, Meta(description="Prompt tokens that the prefix cache held.")]
    cache_write_tokens: Annotated[int, Meta(description="0: every prefix is kept without being asked.")]


class OutputDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: Annotated[int, Meta(description="Tokens of thinking.")]


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: Annotated[int, Meta(description="Tokens of the prompt.")]
    input_tokens_details: Annotated[InputDetails, Meta(description="Kinds of prompt tokens.")]
    output_tokens: Annotated[int, Meta(description="Generated tokens.")]
    output_tokens_details: Annotated[OutputDetails, Meta(description="Kinds of generated tokens.")]
    total_tokens: Annotated[int, Meta(description="The sum of both.")]


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """A response; fields of the request come back as they were understood."""

    id: Annotated[str, Meta(description="The response's id.")]
    object: Annotated[str, Meta(description="`response`.")]
    created_at: Annotated[float, Meta(description="Unix time of the request.")]
    status: Annotated[
        str, Meta(description="`queued`, `in_progress`, `completed`, `incomplete`, `cancelled` or `failed`.")
    ]
    model: Annotated[str, Meta(description="The model name that the request gave.")]
    output: Annotated[list[Item], Meta(description="Items: reasoning, message, function_call.")]
    error: Annotated[dict[str, Any] | None, Meta(description="Why it failed.")]
    incomplete_details: Annotated[dict[str, str] | None, Meta(description="Why it is incomplete.")]
    usage: Annotated[ResponsesUsage | None, Meta(description="Token counts, at the end.")]


class EventAnswer(msgspec.Struct, kw_only=True):
    type: Annotated[str, Meta(description="Such as response.created or response.output_text.delta.")]
    sequence_number: Annotated[int, Meta(description="Number of the event, from 0.")]


class ResponseDeleted(msgspec.Struct, kw_only=True):
    id: Annotated[str, Meta(description="The response's id.")]
    object: Annotated[str, Meta(description="`response`.")]
    deleted: Annotated[bool, Meta(description="true.")]


class ItemsAnswer(msgspec.Struct, kw_only=True):
    object: Annotated[str, Meta(description="`list`.")]
    data: Annotated[list[Item], Meta(description="The items that were the input.")]
    first_id: Annotated[str | None, Meta(description="Id of the first.")]
    last_id: Annotated[str | None, Meta(description="Id of the last.")]
    has_more: Annotated[bool, Meta(description="false: all come at once.")]
