"""POST /v1/chat/completions: from messages to a prompt, and from chunks to chat events or one answer.

Owns the chat request's meaning and the form of its answer. Must never know how tokens are made.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.datastructures import Headers

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.core.messages import Finish
from ceiba.core.sampling import LogprobSpec
from ceiba.server.choices import Choice, Delta
from ceiba.server.front import Front
from ceiba.server.logprobs import TokenTexts, chat_entries
from ceiba.server.openai import translate
from ceiba.server.openai.schemas import REFUSED_CHAT, ChatRequest
from ceiba.server.openai.usage import Usage
from ceiba.server.request import ChatPrompt, EngineRequest, Input, LengthRule
from ceiba.server.sse import DONE

_encode = msgspec.json.Encoder().encode
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}
_OURS = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


def engine_request(body: ChatRequest, front: Front, headers: Headers) -> EngineRequest:
    """Raises BadRequest naming the field that cannot be served."""
    translate.refuse(body, REFUSED_CHAT)
    translate.check_stream(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    longest = body.max_completion_tokens
    names = {**translate.NAMES, "max_new_tokens": "max_completion_tokens"}
    if longest is None:
        longest, names = body.max_tokens, dict(translate.NAMES)
    elif body.max_tokens is not None and body.max_tokens != longest:
        raise BadRequest("max_tokens and max_completion_tokens differ: send one of them.", param="max_tokens")
    if longest is not None and longest < 1:
        name = names["max_new_tokens"]
        raise BadRequest(f"{name} is {longest}; it must be at least 1.", param=name)
    rule: LengthRule = "exact"
    if longest is None:
        longest = front.sampling_defaults.get("max_new_tokens")
        rule = "fill" if longest is None else "clamp"
    entry = Input(
        prompt=_prompt(body),
        sampling=translate.sampling(body, front, front.capacity if longest is None else longest),
        logprob=LogprobSpec(output=bool(body.logprobs), top=body.top_logprobs or 0),
        n=1 if body.n is None else body.n,
        length=rule,
    )
    return EngineRequest(
        [entry],
        rid=translate.rid(body, "chatcmpl"),
        stream=bool(body.stream),
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        priority=body.priority,
        routing_key=translate.routing_key(body.routing_key, headers),
        names=names,
    )


def conversation(messages: list[dict[str, Any]], **options: Any) -> ChatPrompt:
    """Checked messages as a prompt; ``options`` are ``ChatPrompt``'s other fields."""
    if not messages:
        raise BadRequest("messages is empty: give at least one message.", param="messages")
    if len(messages) > limits.MAX_MESSAGES:
        raise BadRequest(f"{len(messages)} messages; the limit is {limits.MAX_MESSAGES}.", param="messages")
    return ChatPrompt([_message(message, f"messages[{i}]") for i, message in enumerate(messages)], **options)


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """``chat_template_kwargs`` as they go to the template. Raises BadRequest for those that are ours to set."""
    for name in _OURS & (given or {}).keys():
        raise BadRequest(f"chat_template_kwargs may not set {name}.", param=f"chat_template_kwargs.{name}")
    return dict(given or {})


def _prompt(body: ChatRequest) -> ChatPrompt:
    generate = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    kwargs = template_variables(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    prompt = conversation(
        body.messages,
        add_generation_prompt=generate,
        continue_final_message=body.continue_final_message,
        kwargs=kwargs,
    )
    if body.continue_final_message:
        if generate:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
            )
        if prompt.messages[-1]["role"] != "assistant":
            raise BadRequest(
                "continue_final_message needs a last message from the assistant.", param="continue_final_message"
            )
    return prompt


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message that may go to the template, which knows what form its model wants. Media are refused here."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(sorted(ROLES))}.", param=f"{where}.role")
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise BadRequest(f"{where}.content is missing.", param=f"{where}.content")
    elif isinstance(content, list):
        _check_parts(content, f"{where}.content")
    elif not isinstance(content, str):
        raise BadRequest(f"{where}.content must be a text or a list of parts.", param=f"{where}.content")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise BadRequest(f"{where}.tool_calls must be a list.", param=f"{where}.tool_calls")
    return message


def _check_parts(parts: list[Any], where: str) -> None:
    if len(parts) > limits.MAX_CONTENT_PARTS:
        raise BadRequest(f"{where} has {len(parts)} parts; the limit is {limits.MAX_CONTENT_PARTS}.", param=where)
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise BadRequest(
                f"{where}[{i}]: part type {kind!r} is not available; this model takes parts of type text.",
                param=f"{where}[{i}]",
            )
        if not isinstance(part.get("refusal" if kind == "refusal" else "text"), str):
            raise BadRequest(f"{where}[{i}]: the part has no text.", param=f"{where}[{i}]")


def unread_variables(body: ChatRequest, front: Front) -> list[str]:
    """Template variables that the request sets and the model's template never mentions: they were hints."""
    source = getattr(front.template, "source", None)
    given = [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or {}]
    if body.reasoning_effort is not None:
        given.append("reasoning_effort")
    if source is None or not given:
        return []
    text = source()
    return [name for name in given if name.rpartition(".")[2] not in text]


class ChatShape:
    """Chat completion chunks, or one chat completion. Streamed events are joined from parts encoded once."""

    def __init__(self, body: ChatRequest, request: EngineRequest, front: Front, texts: TokenTexts) -> None:
        self._request = request
        self._texts = texts
        self._logprobs = bool(body.logprobs)
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
        if delta.text or (delta.count and (finish is None or delta.logprobs is not None)):
            logprobs = b"null"
            if self._logprobs and delta.logprobs is not None:
                logprobs = _encode({"content": chat_entries(delta.logprobs, self._texts), "refusal": None})
            out.append(
                b'%b{"content":%b},"logprobs":%b,"finish_reason":null}]%b}\n\n'
                % (head, _encode(delta.text), logprobs, tail)
            )
        if finish is not None:
            reason, matched = finish_reason(finish)
            end = b'{},"logprobs":null,"finish_reason":%b,"matched_stop":%b}]' % (_encode(reason), _encode(matched))
            out.append(head + end + tail + b"}\n\n")

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
        assert choice.finish is not None
        reason, matched = finish_reason(choice.finish)
        part = choice.logprobs if self._logprobs else None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if part is None else {"content": chat_entries(part, self._texts), "refusal": None},
            "finish_reason": reason,
            "matched_stop": matched,
        }


def finish_reason(finish: Finish) -> tuple[str, int | str | None]:
    """OpenAI's name of why a choice ended, and the stop that matched."""
    return finish.kind, finish.matched
