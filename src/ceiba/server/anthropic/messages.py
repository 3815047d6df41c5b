"""POST /v1/messages: from Anthropic's blocks to a conversation, and from chunks to its events or one message.

Owns the request's meaning and the form of its answer. Must never know how tokens are made.
"""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from starlette.datastructures import Headers

from ceiba.core import limits
from ceiba.core.errors import BadRequest, CeibaError
from ceiba.core.sampling import SamplingParams
from ceiba.server import errors, structured
from ceiba.server.anthropic import caching
from ceiba.server.anthropic.schemas import (
    REFUSED_COUNT,
    REFUSED_MESSAGES,
    CountRequest,
    MessageParam,
    MessagesRequest,
)
from ceiba.server.choices import Choice, Delta
from ceiba.server.conversation import EFFORTS, Chat, engine_request, unheard
from ceiba.server.front import Front
from ceiba.server.hints import hint_header, hints_of
from ceiba.server.openai.translate import check_callers, only, refuse, routing_key
from ceiba.server.request import ChatPrompt, EngineRequest
from ceiba.server.sse import Shape
from ceiba.text.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning

_encode = msgspec.json.Encoder().encode
NAMES = {
    "max_new_tokens": "max_tokens",
    "stop": "stop_sequences",
    "think_tokens": "thinking.budget_tokens",
    "json_schema": "output_config.format",
}
_TOOL_FIELDS = frozenset(
    {
        *("type", "name", "description", "input_schema", "strict", "cache_control"),
        "eager_input_streaming",  # what is done in any case
        "allowed_callers",
    }
)
_BLOCK_FIELDS = {
    "text": frozenset({"type", "text", "cache_control", "citations"}),  # where an earlier answer had its words from
    "document": frozenset({"type", "source", "title", "context", "citations", "cache_control"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),  # who called, earlier
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
}
_MEDIA = ("image", "video", "audio")


def request_of(body: MessagesRequest, front: Front, headers: Headers) -> EngineRequest:
    """Raises BadRequest naming the field that cannot be served."""
    refuse(body, REFUSED_MESSAGES)
    if body.max_tokens < 1:
        raise BadRequest(f"max_tokens is {body.max_tokens}; it must be at least 1.", param="max_tokens")
    chat = _chat(body)
    if chat.think_tokens is not None and chat.think_tokens >= body.max_tokens:
        raise BadRequest(
            f"thinking.budget_tokens {chat.think_tokens} must be less than max_tokens {body.max_tokens}.",
            param="thinking.budget_tokens",
        )
    chat.sampling = _sampling(body, front)
    chat.length = "clamp"
    return engine_request(
        chat,
        front,
        f"msg_{uuid.uuid4().hex[:24]}",
        stream=body.stream,
        routing_key=routing_key(None, headers),
    )


async def count(body: CountRequest, front: Front) -> dict[str, Any]:
    """Tokens of the prompt that the same fields would make. Raises BadRequest."""
    refuse(body, REFUSED_COUNT)
    caching.marked(body)
    request = engine_request(_chat(body), front, "count")
    prompt = request.inputs[0].prompt
    assert not hasattr(prompt, "text")
    return {"input_tokens": len(await front.encode(prompt))}  # type: ignore[arg-type]


def hints(body: MessagesRequest, front: Front) -> dict[str, str]:
    given = hints_of(body)
    effort = body.output_config.effort if body.output_config is not None else None
    if body.thinking is not None and unheard(front, "enable_thinking", "thinking"):
        given.append("thinking")
    if effort is not None and unheard(front, "reasoning_effort", "enable_thinking"):
        given.append("output_config.effort")
    return hint_header(given)


async def written(body: MessagesRequest, front: Front) -> np.ndarray | None:
    """The beginning of the prompt, int32 [N], up to the last mark for the cache (``caching``), as far as whole messages
    go; None where that is all of it. Raises BadRequest for what is no mark."""
    count = caching.marked(body)
    if count == len(body.messages):
        return None
    if count is None or front.config.scheduler.disable_radix_cache:
        return np.empty(0, np.int32)
    chat = _chat(msgspec.structs.replace(body, messages=body.messages[:count]))
    chat.add_generation_prompt, chat.continue_final = False, False
    try:
        prompt = engine_request(chat, front, "prefix").inputs[0].prompt
        assert isinstance(prompt, ChatPrompt)
        return await front.encode(prompt)
    except BadRequest:  # the template makes nothing of a part: then none of it is told apart
        return np.empty(0, np.int32)


def _sampling(body: MessagesRequest, front: Front) -> SamplingParams:
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": None if body.stop_sequences is None else tuple(body.stop_sequences),
    }
    values: dict[str, Any] = {
        **front.sampling_defaults,
        **{name: value for name, value in given.items() if value is not None},
        "max_new_tokens": body.max_tokens,
    }
    shape = body.output_config.format if body.output_config is not None else None
    if shape is not None:
        if shape.type != "json_schema":
            raise BadRequest(
                f"output_config.format.type is {shape.type[:50]!r}; only json_schema is available.",
                param="output_config.format.type",
            )
        values.update(structured.sampling_fields(SimpleNamespace(json_schema=shape.schema), front))
    return SamplingParams(**values)


# ── conversation ─────────────────────────────────────────────────────────────


def _chat(body: CountRequest) -> Chat:
    if len(body.messages) > limits.MAX_MESSAGES:
        raise BadRequest(f"{len(body.messages)} messages; the limit is {limits.MAX_MESSAGES}.", param="messages")
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _plain(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += _translated(message, f"messages[{i}]")
    last = body.messages[-1] if body.messages else None
    prefilled = last is not None and last.role == "assistant"
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None and effort not in EFFORTS:
        raise BadRequest(
            f"output_config.effort is {effort[:50]!r}; it must be one of {', '.join(EFFORTS)}.",
            param="output_config.effort",
        )
    think, budget = _thinking(body)
    choice, parallel = _tool_choice(body)
    return Chat(
        messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])],
        tool_choice=choice,
        parallel=parallel,
        effort=effort,
        think=think,
        think_tokens=budget,
        add_generation_prompt=not prefilled,
        continue_final=prefilled,
        names=dict(NAMES),
    )


def _thinking(body: CountRequest) -> tuple[bool | None, int | None]:
    thinking = body.thinking
    if thinking is None:
        return None, None
    if thinking.type not in {"enabled", "adaptive", "disabled"}:
        raise BadRequest(
            f"thinking.type is {thinking.type[:50]!r}; it must be enabled, adaptive or disabled.", param="thinking.type"
        )
    if thinking.display not in {None, "summarized", "omitted"}:
        raise BadRequest("thinking.display must be summarized or omitted.", param="thinking.display")
    if thinking.type == "disabled":
        return False, None
    if thinking.budget_tokens is not None and thinking.budget_tokens < 1:
        raise BadRequest(
            f"thinking.budget_tokens is {thinking.budget_tokens}; it must be at least 1.",
            param="thinking.budget_tokens",
        )
    return True, thinking.budget_tokens


def _tool_choice(body: CountRequest) -> tuple[str | dict[str, Any], bool]:
    choice = body.tool_choice
    if choice is None:
        return "auto", True
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if not choice.name:
            raise BadRequest("tool_choice.name is missing.", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}, parallel
    named = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if named is None:
        raise BadRequest(
            f"tool_choice.type is {choice.type[:50]!r}; it must be auto, any, tool or none.", param="tool_choice.type"
        )
    return named, parallel


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise BadRequest(
            f"{where}: tool type {str(kind)[:50]!r} runs on Anthropic's servers and is not available; "
            "describe the tool yourself (type custom).",
            param=f"{where}.type",
        )
    only(tool, _TOOL_FIELDS, where)
    check_callers(tool, where)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest(f"{where}.input_schema must be a JSON schema (an object).", param=f"{where}.input_schema")
    function = {"name": tool.get("name"), "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _translated(message: MessageParam, where: str) -> list[dict[str, Any]]:
    """One message as OpenAI-style messages: results of tools stand before the user's own words."""
    content = message.content
    if message.role not in {"user", "assistant", "system"}:
        raise BadRequest(f"{where}.role must be user or assistant.", param=f"{where}.role")
    if isinstance(content, str):
        return [{"role": message.role, "content": content}]
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise BadRequest(
            f"{where}.content has {len(content)} blocks; the limit is {limits.MAX_CONTENT_PARTS}.",
            param=f"{where}.content",
        )
    if message.role == "assistant":
        return [_assistant(content, f"{where}.content")]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        if block.get("type") == "tool_result" and message.role == "user":
            results.append(_result(block, at))
        else:
            texts.append(_text(block, at))
    if texts or not results:
        results.append({"role": message.role, "content": "\n".join(texts)})
    return results


def _assistant(content: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at, kind = f"{where}[{i}]", block.get("type")
        if kind == "tool_use":
            only(block, _BLOCK_FIELDS["tool_use"], at)
            name, given = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(given, dict) or not isinstance(block.get("id"), str):
                raise BadRequest(f"{at}: a tool_use block needs id, name and input (an object).", param=at)
            function = {"name": name, "arguments": _encode(given).decode()}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "thinking":
            only(block, _BLOCK_FIELDS["thinking"], at)
            if not isinstance(block.get("thinking"), str):
                raise BadRequest(f"{at}.thinking must be a text.", param=at)
            thoughts.append(block["thinking"])
        elif kind == "redacted_thinking":
            raise BadRequest(f"{at}: only Anthropic's servers can read redacted thinking; leave it out.", param=at)
        else:
            texts.append(_text(block, at))
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    only(block, _BLOCK_FIELDS["tool_result"], where)
    call = block.get("tool_use_id")
    if not isinstance(call, str):
        raise BadRequest(f"{where}.tool_use_id is missing.", param=f"{where}.tool_use_id")
    text = _plain(block.get("content") or "", f"{where}.content")
    if block.get("is_error") and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call, "content": text}


def _plain(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of blocks.", param=where)
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise BadRequest(f"{where} has {len(content)} blocks; the limit is {limits.MAX_CONTENT_PARTS}.", param=where)
    return "\n".join(_text(block, f"{where}[{i}]") for i, block in enumerate(content))


def _text(block: Any, where: str) -> str:
    """The words of a block. Raises BadRequest for a kind that this model cannot read."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and isinstance(block.get("text"), str):
        only(block, _BLOCK_FIELDS["text"], where)
        return str(block["text"])
    if kind == "document":
        only(block, _BLOCK_FIELDS["document"], where)
        if isinstance(block.get("citations"), dict) and block["citations"].get("enabled"):
            raise BadRequest(f"{where}.citations are not available; leave them out.", param=f"{where}.citations")
        source = block.get("source")
        if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
            about = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
            return "\n".join([*about, source["data"]])
        raise BadRequest(f"{where}: only documents with a text source are available; send the text.", param=where)
    if kind in _MEDIA:
        raise BadRequest(f"{where}: this model takes text only, no {kind}.", param=where)
    raise BadRequest(f"{where}: a block of type {str(kind)[:50]!r} is not available here.", param=where)


# ── answer ───────────────────────────────────────────────────────────────────


class MessageShape(Shape):
    """Anthropic's events in their order, or one message."""

    def __init__(self, body: MessagesRequest, request: EngineRequest, front: Front, written: np.ndarray | None) -> None:
        """``written``: see the function of that name."""
        self._id = request.rid
        self._written = written
        self._marked = 0
        self._model = body.model or front.config.model.name
        self._hide = body.thinking is not None and body.thinking.display == "omitted"
        self._choice: Choice | None = None
        self._index = -1
        self._open = ""
        """Type of the block that is open in the stream."""

    def opened(self, choices: list[Choice]) -> None:
        self._choice = choices[0]
        self._marked = _shared(choices[0].prompt, self._written)

    def _usage(self, choice: Choice) -> dict[str, int]:
        new = max(0, self._marked - choice.cached_tokens)
        return {
            "input_tokens": choice.prompt_tokens - choice.cached_tokens - new,
            "cache_creation_input_tokens": new,
            "cache_read_input_tokens": choice.cached_tokens,
            "output_tokens": choice.completion_tokens,
        }

    def _message(self, choice: Choice, content: list[dict[str, Any]], stop: tuple[str | None, str | None]) -> Any:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop[0],
            "stop_sequence": stop[1],
            "usage": self._usage(choice),
        }

    def event(self, choice: Choice, delta: Delta, out: list[bytes]) -> None:
        if delta.first:
            out.append(_event("message_start", message=self._message(choice, [], (None, None))))
            out.append(_event("ping"))
        for event in delta.parts:
            self._part(event, out)
        if delta.finish is not None:
            self._close(out)
            reason, sequence = stop_reason(choice)
            changed = {"stop_reason": reason, "stop_sequence": sequence}
            out.append(_event("message_delta", delta=changed, usage=self._usage(choice)))

    def _part(self, event: Event, out: list[bytes]) -> None:
        match event:
            case Content(text):
                self._begin("text", {"type": "text", "text": ""}, out)
                self._delta({"type": "text_delta", "text": text}, out)
            case Reasoning(text):
                self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""}, out)
                if not self._hide:
                    self._delta({"type": "thinking_delta", "thinking": text}, out)
            case CallStart(_, call_id, name):
                self._close(out)
                self._begin("tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}}, out)
            case Arguments(_, text):
                self._delta({"type": "input_json_delta", "partial_json": text}, out)
            case CallEnd():
                self._close(out)

    def _begin(self, kind: str, block: dict[str, Any], out: list[bytes]) -> None:
        if self._open != kind:
            self._close(out)
            self._open = kind
            self._index += 1
            out.append(_event("content_block_start", index=self._index, content_block=block))

    def _delta(self, delta: dict[str, Any], out: list[bytes]) -> None:
        out.append(_event("content_block_delta", index=self._index, delta=delta))

    def _close(self, out: list[bytes]) -> None:
        if self._open:
            if self._open == "thinking":
                self._delta({"type": "signature_delta", "signature": ""}, out)
            self._open = ""
            out.append(_event("content_block_stop", index=self._index))

    def closing(self, out: list[bytes]) -> None:
        out.append(_event("message_stop"))

    def whole(self) -> bytes:
        choice = self._choice
        assert choice is not None
        answer = choice.answer
        blocks: list[dict[str, Any]] = []
        if answer.reasoning:
            shown = "" if self._hide else answer.reasoning
            blocks.append({"type": "thinking", "thinking": shown, "signature": ""})
        if answer.content:
            blocks.append({"type": "text", "text": answer.content})
        for call in answer.calls:
            # Half an object is none: what is missing could be what makes the rest harmless.
            given = msgspec.json.decode(call.arguments) if call.whole else {}
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        return _encode(self._message(choice, blocks, stop_reason(choice)))

    def failure(self, error: CeibaError) -> bytes:
        return b"event: error\ndata: " + errors.body(error, errors.ANTHROPIC_PATH) + b"\n\n"


def _shared(prompt: np.ndarray, part: np.ndarray | None) -> int:
    """How many ids ``prompt`` begins with that ``part`` does too; all of them where ``part`` is None."""
    if part is None:
        return len(prompt)
    length = min(len(prompt), len(part))
    differ = np.flatnonzero(prompt[:length] != part[:length])
    return int(differ[0]) if len(differ) else length


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def stop_reason(choice: Choice) -> tuple[str, str | None]:
    """Anthropic's name of why the answer ended, and the stop sequence that matched."""
    finish = choice.finish
    assert finish is not None
    if finish.kind in {"length", "abort"}:
        return "max_tokens", None  # it knows no word for an answer that an operator ended: cut off, in any case
    if choice.called:
        return "tool_use", None
    if finish.kind == "stop" and isinstance(finish.matched, str):
        return "stop_sequence", finish.matched
    return "end_turn", None
