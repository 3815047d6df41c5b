"""The fields of Anthropic's Messages API: the source of both decoding and the OpenAPI document.

Owns names, types and descriptions. Every field works, is a hint, or is refused with its reason.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ceiba.core import limits

Block = dict[str, Any]


class MessageParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Annotated[str, Meta(description="`user` or `assistant`; `system` counts as a system prompt.")]
    content: Annotated[
        str | list[Block], Meta(description="Text, or blocks: text, tool_use, tool_result, thinking, document (text).")
    ]


class ThinkingParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Annotated[str, Meta(description="`enabled`, `adaptive` or `disabled`.")]
    budget_tokens: Annotated[int | None, Meta(description="Most tokens of thinking; with `enabled`.")] = None
    display: Annotated[str | None, Meta(description="`summarized` (thinking is shown) or `omitted`.")] = None


class ToolChoiceParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Annotated[str, Meta(description="`auto`, `any`, `tool` or `none`.")]
    name: Annotated[str | None, Meta(description="With `tool`: which one.")] = None
    disable_parallel_tool_use: Annotated[bool, Meta(description="At most one call per answer.")] = False


class OutputFormatParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Annotated[str, Meta(description="`json_schema`.")]
    schema: Annotated[dict[str, Any], Meta(description="The schema that the answer's text keeps to.")]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Annotated[
        str | None, Meta(description="`low`, `medium`, `high`, `xhigh` or `max`: a limit on the tokens of thinking.")
    ] = None
    format: Annotated[OutputFormatParam | None, Meta(description="A shape for the answer.")] = None


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages/count_tokens."""

    model: Annotated[str, Meta(description="Any name: the one loaded model answers, and the name is repeated.")]
    messages: Annotated[list[MessageParam], Meta(description="The conversation so far.")]
    system: Annotated[str | list[Block] | None, Meta(description="The system prompt.")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, Meta(description=f"Up to {limits.MAX_TOOLS} tools of type `custom`.")
    ] = None
    tool_choice: Annotated[ToolChoiceParam | None, Meta(description="Whether and what to call.")] = None
    thinking: Annotated[ThinkingParam | None, Meta(description="Whether to think, and how long at most.")] = None
    output_config: Annotated[OutputConfig | None, Meta(description="Effort, and a shape for the answer.")] = None
    cache_control: Annotated[
        Any,
        Meta(
            description='{"type": "ephemeral", "ttl": "5m" or "1h"}, here or at a tool or block: up to it new tokens '
            "count as written to the cache. Every prefix is cached without it."
        ),
    ] = None
    speed: Annotated[
        Any,
        Meta(
            description="`standard` or absent; others are refused.", extra_json_schema={"enum": [None, "", "standard"]}
        ),
    ] = None
    user_profile_id: Annotated[Any, Meta(description="Refused: there are no profiles here.")] = None
    workspace_id: Annotated[Any, Meta(description="Refused: there are no workspaces here.")] = None
    mcp_servers: Annotated[Any, Meta(description="Refused: this server calls no other.")] = None
    context_management: Annotated[Any, Meta(description="Refused: the conversation is used as it is sent.")] = None


class MessagesRequest(CountRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(description="Most tokens of the answer; less where the context leaves less.")]
    stream: Annotated[bool, Meta(description="Send server-sent events.")] = False
    stop_sequences: Annotated[
        list[str] | None, Meta(description=f"Up to {limits.MAX_STOP_STRINGS} strings that end the answer.")
    ] = None
    temperature: Annotated[float | None, Meta(description="0 is greedy. Default 1, or the model's.")] = None
    top_p: Annotated[float | None, Meta(description="Nucleus sampling: smallest set with this probability.")] = None
    top_k: Annotated[int | None, Meta(description="Only the k most likely tokens.")] = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Hint: has no effect here.")] = None
    service_tier: Annotated[str | None, Meta(description="`auto` or `standard_only`; others are refused.")] = None
    container: Annotated[Any, Meta(description="Refused: nothing is executed here.")] = None
    inference_geo: Annotated[Any, Meta(description="Hint: the answer is made where this server runs.")] = None
    diagnostics: Annotated[Any, Meta(description="Refused: not available.")] = None


REFUSED_COUNT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "speed": ("there is one speed: leave it out, or send standard", ("standard",)),
    "user_profile_id": ("there are no profiles here", ()),
    "workspace_id": ("there are no workspaces here", ()),
    "mcp_servers": ("this server calls no other", ()),
    "context_management": ("the conversation is used as it is sent", ()),
}
REFUSED_MESSAGES = REFUSED_COUNT | {
    "service_tier": ("there is one tier: leave it out, or send auto", ("auto", "standard_only")),
    "container": ("nothing is executed here", ()),
    "diagnostics": ("not available", ()),
}


class Answer(msgspec.Struct, kw_only=True):
    pass


class MessageUsage(Answer, kw_only=True):
    input_tokens: Annotated[int, Meta(description="Prompt tokens of neither of the kinds below.")]
    output_tokens: Annotated[int, Meta(description="Generated tokens.")]
    cache_creation_input_tokens: Annotated[
        int, Meta(description="Prompt tokens up to the last cache_control that were not cached yet; 0 without one.")
    ]
    cache_read_input_tokens: Annotated[int, Meta(description="Prompt tokens that the prefix cache held.")]


class MessageAnswer(Answer, kw_only=True):
    id: Annotated[str, Meta(description="The request's id.")]
    type: Annotated[str, Meta(description="`message`.")]
    role: Annotated[str, Meta(description="`assistant`.")]
    model: Annotated[str, Meta(description="The model name that the request gave.")]
    content: Annotated[list[Block], Meta(description="Blocks of type thinking, text and tool_use.")]
    stop_reason: Annotated[
        str | None, Meta(description="`end_turn`, `max_tokens`, `stop_sequence` or `tool_use`; null in message_start.")
    ]
    stop_sequence: Annotated[str | None, Meta(description="The stop sequence that matched.")]
    usage: Annotated[MessageUsage, Meta(description="Token counts.")]


class MessageEvent(Answer, kw_only=True):
    type: Annotated[
        str,
        Meta(
            description="message_start, ping, content_block_start, content_block_delta, content_block_stop, "
            "message_delta, message_stop or error."
        ),
    ]
    message: Annotated[MessageAnswer | None, Meta(description="With message_start.")] = None
    index: Annotated[int | None, Meta(description="Which block.")] = None
    content_block: Annotated[Block | None, Meta(description="With content_block_start.")] = None
    delta: Annotated[dict[str, Any] | None, Meta(description="What is added.")] = None
    usage: Annotated[MessageUsage | None, Meta(description="With message_delta.")] = None
    error: Annotated[dict[str, Any] | None, Meta(description="With error.")] = None


class MessageCount(Answer, kw_only=True):
    input_tokens: Annotated[int, Meta(description="Tokens of the prompt.")]
