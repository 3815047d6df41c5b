"""POST /api/chat and /api/generate: Ollama's fields into a conversation or a plain prompt, chunks into JSON lines.

Owns these requests' meaning and the form of their answers. Must never know how tokens are made.
"""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
from starlette.datastructures import Headers

from ceiba.core import limits
from ceiba.core.errors import BadRequest, CeibaError
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.server import errors, structured
from ceiba.server.choices import Choice, Delta, Positions
from ceiba.server.conversation import Chat, check_effort, engine_request, unheard
from ceiba.server.front import Front
from ceiba.server.hints import hint_header, hints_of
from ceiba.server.logprobs import TokenTexts, chat_entries
from ceiba.server.ollama.schemas import (
    REFUSED_GENERATE,
    REFUSED_OPTIONS,
    Common,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from ceiba.server.openai.translate import fold_seed, infilled, refuse, routing_key, strings
from ceiba.server.request import EngineRequest, Input, LengthRule, TextPrompt
from ceiba.server.sse import Shape
from ceiba.text.parsers.events import Arguments, CallEnd, CallStart, Content, Reasoning

_encode = msgspec.json.Encoder().encode
NAMES = {
    "max_new_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "top_logprobs_num": "top_logprobs",
    **{
        name: f"options.{name}"
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
    },
}


def chat_request(body: OllamaChatRequest, front: Front, headers: Headers) -> EngineRequest:
    """Raises BadRequest naming the field that cannot be served."""
    if len(body.messages) > limits.MAX_MESSAGES:
        raise BadRequest(f"{len(body.messages)} messages; the limit is {limits.MAX_MESSAGES}.", param="messages")
    chat = Chat([_message(m, f"messages[{i}]") for i, m in enumerate(body.messages)], tools=body.tools or [])
    last = body.messages[-1].get("role") if body.messages else None
    if last == "assistant":
        chat.add_generation_prompt, chat.continue_final = False, True
    return _request(body, chat, front, headers)


def generate_request(body: OllamaGenerateRequest, front: Front, headers: Headers) -> EngineRequest:
    """Raises BadRequest naming the field that cannot be served."""
    refuse(body, REFUSED_GENERATE)
    if body.suffix:
        return _infill_request(body, front, headers)
    if not body.raw and front.template is not None:
        messages = [{"role": "system", "content": body.system}] if body.system else []
        return _request(body, Chat([*messages, {"role": "user", "content": body.prompt}]), front, headers)
    if body.system:
        raise BadRequest("system needs a chat template: leave out raw, or write it into the prompt.", param="system")
    if body.think:
        raise BadRequest("think needs a chat template: leave out raw.", param="think")
    sampling, length = _sampling(body, front)
    return EngineRequest(
        [Input(TextPrompt(body.prompt), sampling, _logprobs(body), length=length)],
        rid=f"ollama-{uuid.uuid4().hex}",
        stream=body.stream is not False,
        routing_key=routing_key(None, headers),
        names=NAMES,
    )


def _infill_request(body: OllamaGenerateRequest, front: Front, headers: Headers) -> EngineRequest:
    """The prompt and the suffix around a gap: no conversation, so no template."""
    for name in ("system", "think"):
        if getattr(body, name):
            raise BadRequest(f"{name} and suffix exclude each other: a gap is filled without a template.", param=name)
    sampling, length = _sampling(body, front)
    (prompt,), sampling = infilled([TextPrompt(body.prompt)], body.suffix or "", sampling, front)
    return EngineRequest(
        [Input(prompt, sampling, _logprobs(body), length=length)],
        rid=f"ollama-{uuid.uuid4().hex}",
        stream=body.stream is not False,
        routing_key=routing_key(None, headers),
        names=NAMES,
    )


def hints(body: Common, front: Front) -> dict[str, str]:
    given = hints_of(body)
    if body.think is not None and unheard(front, "reasoning_effort", "enable_thinking", "thinking"):
        given.append("think")
    return hint_header(given)


def loaded(body: OllamaChatRequest | OllamaGenerateRequest) -> dict[str, Any] | None:
    """The answer to a request without a question, which only wants the model to be there; None for others."""
    if isinstance(body, OllamaChatRequest):
        if body.messages:
            return None
        return {**_line(body.model, True), "message": {"role": "assistant", "content": ""}, "done_reason": "load"}
    if body.prompt:
        return None
    return {**_line(body.model, True), "response": "", "done_reason": "load"}


def _request(body: Common, chat: Chat, front: Front, headers: Headers) -> EngineRequest:
    chat.sampling, chat.length = _sampling(body, front)
    chat.logprob = _logprobs(body)
    chat.names = dict(NAMES)
    if isinstance(body.think, str):
        check_effort(body.think, "think")
        chat.effort, chat.think = body.think, body.think != "none"
    elif body.think is not None:
        chat.think = body.think
    return engine_request(
        chat,
        front,
        f"ollama-{uuid.uuid4().hex}",
        stream=body.stream is not False,
        routing_key=routing_key(None, headers),
    )


def _logprobs(body: Common) -> LogprobSpec:
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    return LogprobSpec(output=bool(body.logprobs), top=body.top_logprobs or 0)


def _sampling(body: Common, front: Front) -> tuple[SamplingParams, LengthRule]:
    options = body.options or OllamaOptions()
    refuse(options, REFUSED_OPTIONS)
    longest, length = options.num_predict, "clamp"
    if longest is None or longest in {-1, -2}:
        longest, length = front.capacity, "fill"
    elif longest < 1:
        raise BadRequest(
            f"options.num_predict is {longest}; it must be at least 1, or -1.", param="options.num_predict"
        )
    given = {
        "temperature": options.temperature,
        "top_k": -1 if options.top_k == 0 else options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": fold_seed(options.seed, "options.seed"),
        "stop": None if options.stop is None else strings(options.stop),
    }
    values: dict[str, Any] = {
        **front.sampling_defaults,
        **{name: value for name, value in given.items() if value is not None},
        "max_new_tokens": longest,
    }
    if body.format:
        if isinstance(body.format, str) and body.format != "json":
            raise BadRequest(f"format is {body.format[:50]!r}; it must be json or a JSON schema.", param="format")
        shape = {"type": "object"} if body.format == "json" else body.format
        values.update(structured.sampling_fields(SimpleNamespace(json_schema=shape), front))
    return SamplingParams(**values), length  # type: ignore[return-value]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """One of Ollama's messages as OpenAI's. Raises BadRequest for pictures."""
    if message.get("images"):
        raise BadRequest(f"{where}.images: this model takes text only.", param=f"{where}.images")
    made: dict[str, Any] = {"role": message.get("role"), "content": message.get("content") or ""}
    if message.get("thinking"):
        made["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        made["name"] = message["tool_name"]
    if message.get("tool_call_id"):
        made["tool_call_id"] = message["tool_call_id"]
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or len(calls) > limits.MAX_TOOLS:
            raise BadRequest(f"{where}.tool_calls must be a list of at most {limits.MAX_TOOLS} calls.", param=where)
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]", i) for i, call in enumerate(calls)]
    return made


def _call(call: Any, where: str, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}.function needs a name and arguments.", param=where)
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}.function.arguments must be an object.", param=where)
    text = _encode(arguments).decode()
    given = call.get("id")
    call_id = given if isinstance(given, str) and given else f"call_{number}"
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": text}}


def _line(model: str, done: bool) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now, "done": done}


class LineShape(Shape):
    """JSON lines, or one object; ``chat`` says which of the two routes answers."""

    media_type = "application/x-ndjson"

    def __init__(self, body: Common, front: Front, texts: TokenTexts, chat: bool) -> None:
        self._model = body.model or front.config.model.name
        self._chat = chat
        self._texts = texts
        self._logprobs = bool(body.logprobs)
        self._arrival = time.monotonic_ns()
        self._first_at = 0
        self._choice: Choice | None = None
        self._calls: dict[int, tuple[str, str, list[str]]] = {}

    def opened(self, choices: list[Choice]) -> None:
        self._choice = choices[0]

    def event(self, choice: Choice, delta: Delta, out: list[bytes]) -> None:
        if delta.first:
            self._first_at = time.monotonic_ns()
        lines: list[dict[str, Any]] = []
        for event in delta.parts:
            match event:
                case Content(text):
                    lines.append(self._said(text))
                case Reasoning(text):
                    lines.append(self._said("", thinking=text))
                case CallStart(index, call_id, name):
                    self._calls[index] = (call_id, name, [])
                case Arguments(index, text):
                    self._calls[index][2].append(text)
                case CallEnd(index):
                    call_id, name, parts = self._calls.pop(index)
                    lines.append(self._said("", calls=[_called(index, call_id, name, "".join(parts))]))
        if self._logprobs and delta.logprobs is not None:
            if not lines:
                lines.append(self._said(""))
            lines[0]["logprobs"] = self._entries(delta.logprobs)
        out += [_encode(line) + b"\n" for line in lines]
        if delta.finish is not None:
            out.append(_encode(self._said("") | self._end(choice)) + b"\n")

    def _said(self, text: str, thinking: str = "", calls: list[Any] | None = None) -> dict[str, Any]:
        line = _line(self._model, False)
        extra: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if self._chat:
            if calls:
                extra["tool_calls"] = calls
            line["message"] = {"role": "assistant", "content": text, **extra}
        else:
            line |= {"response": text, **extra}
        return line

    def _end(self, choice: Choice) -> dict[str, Any]:
        assert choice.finish is not None
        now = time.monotonic_ns()
        first = self._first_at or now
        return {
            "done": True,
            "done_reason": choice.finish.kind,
            "total_duration": now - self._arrival,
            "load_duration": 0,
            "prompt_eval_count": choice.prompt_tokens,
            "prompt_eval_duration": first - self._arrival,
            "eval_count": choice.completion_tokens,
            "eval_duration": now - first,
        }

    def _entries(self, part: Positions) -> list[dict[str, Any]]:
        return chat_entries(part, self._texts)

    def closing(self, out: list[bytes]) -> None:
        pass

    def whole(self) -> bytes:
        choice = self._choice
        assert choice is not None
        answer = choice.answer
        calls = [_called(i, call.id, call.name, call.arguments) for i, call in enumerate(answer.calls) if call.whole]
        line = self._said(answer.content, answer.reasoning, calls) | self._end(choice)
        if self._logprobs and choice.logprobs is not None:
            line["logprobs"] = self._entries(choice.logprobs)
        return _encode(line)

    def failure(self, error: CeibaError) -> bytes:
        return errors.body(error, errors.OLLAMA_PATH) + b"\n"


def _called(index: int, call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"index": index, "name": name, "arguments": msgspec.json.decode(arguments)}
    return {"id": call_id, "function": function}
