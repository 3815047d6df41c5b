"""From the Responses API's items to a conversation.

Owns the request's meaning. Must never know how an answer is sent or stored.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.server import structured
from ceiba.server.conversation import TEXT_PARTS, Chat, check_effort, unheard
from ceiba.server.front import Front
from ceiba.server.hints import hint_header, hints_of
from ceiba.server.openai.translate import check_callers, only, refuse
from ceiba.server.responses.schemas import INCLUDES, REFUSED, Item, ResponsesRequest

NAMES = {
    "max_new_tokens": "max_output_tokens",
    "messages": "input",
    "top_logprobs_num": "top_logprobs",
    "json_schema": "text.format",
}
LOGPROBS = "message.output_text.logprobs"


def hints(body: ResponsesRequest, front: Front) -> dict[str, str]:
    given = hints_of(body)
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is not None and unheard(front, "reasoning_effort", "enable_thinking"):
        given.append("reasoning.effort")
    return hint_header(given)


def items_of(body: ResponsesRequest) -> list[Item]:
    """The input as a list of items."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    if len(body.input) > limits.MAX_MESSAGES:
        raise BadRequest(f"{len(body.input)} items in input; the limit is {limits.MAX_MESSAGES}.", param="input")
    return body.input


def chat_of(body: ResponsesRequest, front: Front, history: list[Item]) -> Chat:
    """The conversation of ``history`` (earlier input and output) and this input. Raises BadRequest."""
    refuse(body, REFUSED)
    if body.stream_options is not None:
        if not body.stream:
            raise BadRequest("stream_options is only for stream: true.", param="stream_options")
        if body.stream_options.include_obfuscation:
            raise BadRequest("stream_options.include_obfuscation: not available.", param="stream_options")
    if body.metadata and len(body.metadata) > limits.MAX_METADATA:
        raise BadRequest(
            f"{len(body.metadata)} entries in metadata; the limit is {limits.MAX_METADATA}.", param="metadata"
        )
    for name in body.include or ():
        if name not in INCLUDES:
            raise BadRequest(f"include: {name[:100]!r} is not available.", param="include")
    messages = messages_of([*history, *items_of(body)])
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    effort = body.reasoning.effort if body.reasoning is not None else None
    check_effort(effort, "reasoning.effort")
    sampling, filled = _sampling(body, front)
    wanted = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wanted:
        raise BadRequest(f"top_logprobs needs include: [{LOGPROBS!r}].", param="top_logprobs")
    return Chat(
        messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])],
        tool_choice=_choice(body.tool_choice),
        parallel=body.parallel_tool_calls is not False,
        effort=effort,
        sampling=sampling,
        logprob=LogprobSpec(output=wanted, top=body.top_logprobs or 0),
        length="fill" if filled else "exact",
        names={**NAMES, "json_schema": "text.format.schema"},
    )


def _sampling(body: ResponsesRequest, front: Front) -> tuple[SamplingParams, bool]:
    """And whether the answer may fill what the context leaves."""
    longest = body.max_output_tokens
    if longest is not None and longest < 1:
        raise BadRequest(f"max_output_tokens is {longest}; it must be at least 1.", param="max_output_tokens")
    values: dict[str, Any] = {**front.sampling_defaults}
    for name in ("temperature", "top_p"):
        if getattr(body, name) is not None:
            values[name] = getattr(body, name)
    values["max_new_tokens"] = front.capacity if longest is None else longest
    shape = body.text
    if shape is not None:
        if shape.verbosity not in {None, "medium"}:
            raise BadRequest("text.verbosity: no model here obeys it: say it in a message.", param="text.verbosity")
        if shape.format is not None:
            values.update(structured.sampling_fields(SimpleNamespace(**{"text.format": shape.format}), front))
    return SamplingParams(**values), longest is None


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadRequest(
            f"{where}: tools of type {str(tool.get('type'))[:50]!r} run on OpenAI's servers and are not available; "
            "only functions are.",
            param=f"{where}.type",
        )
    names = ("name", "description", "parameters", "strict")
    only(tool, frozenset({"type", "allowed_callers", *names}), where)
    check_callers(tool, where)
    return {"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    if choice is None:
        return "auto"
    if isinstance(choice, dict) and choice.get("type") != "function":
        raise BadRequest("tool_choice must be none, auto, required or {type: function, name}.", param="tool_choice")
    return choice


# ── items ────────────────────────────────────────────────────────────────────


def messages_of(items: list[Item]) -> list[dict[str, Any]]:
    """Items as OpenAI chat messages: what the assistant thought, said and called in one go is one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for i, item in enumerate(items):
        at, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            turn = None
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), f"{at}.content")})
        elif kind == "function_call_output":
            turn = None
            if not isinstance(item.get("call_id"), str):
                raise BadRequest(f"{at}.call_id is missing.", param=f"{at}.call_id")
            text = _content(item.get("output"), f"{at}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        elif kind in ("message", "function_call", "reasoning"):
            if turn is None or (kind != "function_call" and turn.get("tool_calls")):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _add_to_turn(turn, item, kind, at)
        else:
            raise BadRequest(f"{at}: items of type {str(kind)[:50]!r} are not available.", param=f"{at}.type")
    for message in messages:
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""
    return messages


def _add_to_turn(turn: dict[str, Any], item: Item, kind: str, where: str) -> None:
    if kind == "message":
        text = _content(item.get("content"), f"{where}.content")
        turn["content"] = text if turn["content"] is None else f"{turn['content']}\n{text}"
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list):
            raise BadRequest(f"{where}.content must be a list of parts.", param=where)
        text = "\n".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))
        if text:
            before = turn.get("reasoning_content")
            turn["reasoning_content"] = text if before is None else f"{before}\n{text}"
    else:
        name, arguments, call = item.get("name"), item.get("arguments"), item.get("call_id")
        if not (isinstance(name, str) and isinstance(arguments, str) and isinstance(call, str)):
            raise BadRequest(f"{where}: a function_call needs call_id, name and arguments (a text).", param=where)
        made = {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
        turn.setdefault("tool_calls", []).append(made)


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of parts.", param=where)
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise BadRequest(f"{where} has {len(content)} parts; the limit is {limits.MAX_CONTENT_PARTS}.", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise BadRequest(
                f"{where}[{i}]: part type {str(kind)[:50]!r} is not available; this model takes text only.",
                param=f"{where}[{i}]",
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise BadRequest(f"{where}[{i}]: the part has no text.", param=f"{where}[{i}]")
        texts.append(text)
    return "\n".join(texts)
