"""POST /v1/chat/completions: from messages to a prompt, and from chunks to chat events or one answer.

Owns the chat request's meaning and the form of its answer. Must never know how tokens are made.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.datastructures import Headers

from ceiba.core.errors import BadRequest
from ceiba.core.sampling import LogprobSpec
from ceiba.server import structured
from ceiba.server.choices import Choice, Delta
from ceiba.server.conversation import Chat, check_effort, conversation, engine_request, template_variables, unheard
from ceiba.server.front import Front
from ceiba.server.logprobs import TokenTexts, chat_entries
from ceiba.server.openai import translate
from ceiba.server.openai.schemas import REFUSED_CHAT, ChatRequest
from ceiba.server.openai.usage import Usage
from ceiba.server.output import template_text
from ceiba.server.request import EngineRequest, LengthRule
from ceiba.server.sse import DONE, Shape
from ceiba.text.parsers.events import Arguments, CallStart, Content, Event, Reasoning

__all__ = ["ChatShape", "conversation", "finish_reason", "request_of", "template_variables", "unread_variables"]

_encode = msgspec.json.Encoder().encode


def request_of(body: ChatRequest, front: Front, headers: Headers) -> EngineRequest:
    """Raises BadRequest naming the field that cannot be served."""
    translate.refuse(body, REFUSED_CHAT)
    translate.check_stream(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    longest, rule, names = _length(body, front)
    check_effort(body.reasoning_effort, "reasoning_effort")
    generate = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    _check_continuing(body, generate)
    chat = Chat(
        body.messages,
        tools=body.tools or [],
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        parallel=body.parallel_tool_calls is not False,
        effort=body.reasoning_effort,
        think_tokens=body.thinking_budget,
        separate=body.separate_reasoning,
        variables=template_variables(body.chat_template_kwargs),
        add_generation_prompt=generate,
        continue_final=body.continue_final_message,
        sampling=translate.sampling(body, front, front.capacity if longest is None else longest),
        logprob=LogprobSpec(output=bool(body.logprobs), top=body.top_logprobs or 0),
        n=1 if body.n is None else body.n,
        length=rule,
        names=names | structured.names(body),
    )
    return engine_request(
        chat,
        front,
        translate.rid(body, "chatcmpl"),
        stream=bool(body.stream),
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        priority=body.priority,
        routing_key=translate.routing_key(body.routing_key, headers),
    )


def _length(body: ChatRequest, front: Front) -> tuple[int | None, LengthRule, dict[str, str]]:
    """The most tokens of the answer, how that meets the room, and what errors call the field."""
    longest = body.max_completion_tokens
    names = {**translate.NAMES, "max_new_tokens": "max_completion_tokens"}
    if longest is None:
        longest, names = body.max_tokens, dict(translate.NAMES)
    elif body.max_tokens is not None and body.max_tokens != longest:
        raise BadRequest("max_tokens and max_completion_tokens differ: send one of them.", param="max_tokens")
    if longest is not None and longest < 1:
        name = names["max_new_tokens"]
        raise BadRequest(f"{name} is {longest}; it must be at least 1.", param=name)
    if longest is not None:
        return longest, "exact", names
    longest = front.sampling_defaults.get("max_new_tokens")
    return longest, "fill" if longest is None else "clamp", names


def _check_continuing(body: ChatRequest, generate: bool) -> None:
    if not body.continue_final_message:
        return
    if generate:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
        )
    if body.messages and body.messages[-1].get("role") != "assistant":
        raise BadRequest(
            "continue_final_message needs a last message from the assistant.", param="continue_final_message"
        )


def unread_variables(body: ChatRequest, front: Front) -> list[str]:
    """What the request sets for the model's template and the template never mentions: these were hints."""
    text = template_text(front.template)
    unbound = ["thinking_budget"] if body.thinking_budget is not None and unheard(front) else []
    given = [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or {}]
    if body.reasoning_effort is not None and front.parsers.reasoning is None:
        given.append("reasoning_effort")
    if body.tools and body.tool_choice != "none":
        given.append("tools")
    if text is None or not given:
        return unbound
    return [*unbound, *(name for name in given if name.rpartition(".")[2] not in text)]


class ChatShape(Shape):
    """Chat completion chunks, or one chat completion. Streamed events are joined from parts encoded once."""

    def __init__(self, body: ChatRequest, request: EngineRequest, front: Front, texts: TokenTexts) -> None:
        self._request = request
        self._texts = texts
        self._logprobs = bool(body.logprobs)
        self._hold_reasoning = not body.stream_reasoning
        self._held: dict[int, list[str]] = {}
        self._created = int(time.time())
        self._model = body.model or front.config.model.name
        self._usage = Usage(request, body.stream_options, front.config.server.enable_cache_report)
        self._choices: list[Choice] = []
        self._heads: list[bytes] = []
        common = {"id": request.rid, "object": "chat.completion.chunk", "created": self._created, "model": self._model}
        self._common = b"data: " + _encode(common)[:-1]

    def opened(self, choices: list[Choice]) -> None:
        self._choices = choices
        self._heads = [self._common + b',"choices":[{"index":%d,"delta":' % c.index for c in choices]

    def event(self, choice: Choice, delta: Delta, out: list[bytes]) -> None:
        head = self._heads[choice.index]
        finish = delta.finish
        tail = self._usage.in_chunk(self._choices)
        if delta.first:
            role = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            out.append(head + role + tail + b"}\n\n")
        logprobs = b"null"
        if self._logprobs and delta.logprobs is not None:
            logprobs = _encode({"content": chat_entries(delta.logprobs, self._texts), "refusal": None})
        if delta.events is None:
            if delta.text or (delta.count and (finish is None or delta.logprobs is not None)):
                parts = [b'{"content":%b}' % _encode(delta.text)]
            else:
                parts = []
        else:
            parts = self._parts(choice, delta)
            if not parts and logprobs != b"null":
                parts = [b"{}"]
        for part in parts:
            out.append(b'%b%b,"logprobs":%b,"finish_reason":null}]%b}\n\n' % (head, part, logprobs, tail))
            logprobs = b"null"
        if finish is not None:
            reason, matched = finish_reason(choice)
            end = b'{},"logprobs":null,"finish_reason":%b,"matched_stop":%b}]' % (_encode(reason), _encode(matched))
            out.append(head + end + tail + b"}\n\n")

    def _parts(self, choice: Choice, delta: Delta) -> list[bytes]:
        """The delta objects for what was told apart."""
        parts: list[bytes] = []
        for event in delta.events or ():
            if self._hold_reasoning:
                held = self._held.setdefault(choice.index, [])
                if isinstance(event, Reasoning):
                    held.append(event.text)
                    continue
                parts += self._release(choice.index)
            part = _delta(event)
            if part is not None:
                parts.append(_encode(part))
        if delta.finish is not None:
            parts += self._release(choice.index)
        return parts

    def _release(self, index: int) -> list[bytes]:
        held = "".join(self._held.pop(index, ()))
        return [_encode({"reasoning_content": held})] if held else []

    def closing(self, out: list[bytes]) -> None:
        if self._usage.at_end:
            out.append(self._common + b',"choices":[],"usage":' + _encode(self._usage.total(self._choices)) + b"}\n\n")
        out.append(DONE)

    def whole(self) -> bytes:
        return _encode(
            {
                "id": self._request.rid,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": [self._choice(c) for c in self._choices],
                "usage": self._usage.total(self._choices),
            }
        )

    def _choice(self, choice: Choice) -> dict[str, Any]:
        reason, matched = finish_reason(choice)
        part = choice.logprobs if self._logprobs else None
        return {
            "index": choice.index,
            "message": message_of(choice),
            "logprobs": None if part is None else {"content": chat_entries(part, self._texts), "refusal": None},
            "finish_reason": reason,
            "matched_stop": matched,
        }


def message_of(choice: Choice) -> dict[str, Any]:
    """The assistant message: content is null where there are only calls."""
    answer = choice.answer
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


def _delta(event: Event) -> dict[str, Any] | None:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


def finish_reason(choice: Choice) -> tuple[str, int | str | None]:
    """OpenAI's name of why a choice ended, and the stop that matched."""
    finish = choice.finish
    assert finish is not None
    if finish.kind == "stop" and choice.called:
        return "tool_calls", finish.matched
    return finish.kind, finish.matched
