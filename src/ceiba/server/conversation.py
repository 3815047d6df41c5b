"""A conversation as every chat protocol means it: messages, tools, thinking and limits, made into one engine request.

Owns what tools, tool choice, thinking and template variables mean. Protocols translate their fields into a ``Chat``;
must never know their field names (they come with ``names``) or the form of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.server.front import Front
from ceiba.server.media.sources import Rules, read_url
from ceiba.server.output import OutputFormat, template_text
from ceiba.server.request import ChatPrompt, EngineRequest, Input, LengthRule
from ceiba.text.parsers.tools.base import ToolFormat

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
# Not sets: a request may name anything as a type, and not all of it can be looked up in a set.
IMAGE_PARTS = ("image_url", "input_image")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_OURS = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
EFFORTS: dict[str, int | None] = {
    "none": 0,
    "minimal": 256,
    "low": 1024,
    "medium": 4096,
    "high": 16384,
    "xhigh": None,
    "max": None,
}
"""Reasoning effort -> most tokens of thinking; None: only the answer's own limit."""


@dataclass(slots=True)
class Chat:
    """One request of any chat protocol. ``tools`` are OpenAI tool objects."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    """``none``, ``auto``, ``required``, or OpenAI's object that names a function."""
    parallel: bool = True
    """Whether one answer may hold several calls."""
    strict: bool = False
    """Whether arguments must fit their schema even where a tool does not say so itself."""
    effort: str | None = None
    think_tokens: int | None = None
    """Most tokens of thinking; wins over ``effort``."""
    think: bool | None = None
    """Whether to think at all; None: as the template does by itself."""
    separate: bool = True
    """Whether thinking is taken out of the answer."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprob: LogprobSpec = field(default_factory=LogprobSpec)
    n: int = 1
    length: LengthRule = "exact"
    names: dict[str, str] = field(default_factory=dict)


def engine_request(chat: Chat, front: Front, rid: str, **options: Any) -> EngineRequest:
    """The request for the engine; ``options`` are ``EngineRequest``'s other fields. Raises BadRequest."""
    choice = _choice(chat)
    tools = check_tools(chat.tools, chat.names) if choice != "none" else []
    output = front.parsers.output(tools, separate=chat.separate, one_call=not chat.parallel)
    sampling, names = chat.sampling, dict(chat.names)
    if tools:
        sampling = _constrained(chat, choice, output, names, front.config.grammar.backend)
        if output is not None and sampling.structural_tag is not None:
            output = replace(output, spelled=True, forced=_forced(chat, choice))
    elif choice not in {"none", "auto"}:
        name = names.get("tool_choice", "tool_choice")
        raise BadRequest(f"{name} asks for a call, but the request has no tools.", param=name)
    if output is not None and output.needs_special_tokens:
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    variables, budget = _thinking(chat, front)
    prompt = conversation(
        chat.messages,
        names.get("messages", "messages"),
        tools=tools or None,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final,
        kwargs=variables,
    )
    if output is None or not output.think_end:
        budget = None
    entry = Input(prompt, sampling, chat.logprob, chat.n, length=chat.length, think_tokens=budget)
    return EngineRequest([entry], rid=rid, output=output, names=names, **options)


# ── messages ─────────────────────────────────────────────────────────────────


def conversation(messages: list[dict[str, Any]], name: str = "messages", **options: Any) -> ChatPrompt:
    """Checked messages as a prompt; ``name`` is what the protocol calls them, ``options`` are ``ChatPrompt``'s other
    fields."""
    if not messages:
        raise BadRequest(f"{name} is empty: give at least one message.", param=name)
    if len(messages) > limits.MAX_MESSAGES:
        raise BadRequest(f"{len(messages)} messages; the limit is {limits.MAX_MESSAGES}.", param=name)
    return ChatPrompt([_message(message, f"{name}[{i}]") for i, message in enumerate(messages)], **options)


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """``chat_template_kwargs`` as they go to the template. Raises BadRequest for those that are ours to set."""
    for name in _OURS & (given or {}).keys():
        raise BadRequest(f"chat_template_kwargs may not set {name}.", param=f"chat_template_kwargs.{name}")
    return dict(given or {})


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
    if calls and len(calls) > limits.MAX_TOOLS:
        raise BadRequest(
            f"{where}.tool_calls has {len(calls)} calls; the limit is {limits.MAX_TOOLS}.", param=f"{where}.tool_calls"
        )
    return message


def _check_parts(parts: list[Any], where: str) -> None:
    if len(parts) > limits.MAX_CONTENT_PARTS:
        raise BadRequest(f"{where} has {len(parts)} parts; the limit is {limits.MAX_CONTENT_PARTS}.", param=where)
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in IMAGE_PARTS:
            _refuse_image(part, f"{where}[{i}]")
        if kind not in TEXT_PARTS:
            raise BadRequest(
                f"{where}[{i}]: part type {str(kind)[:50]!r} is not available; this model takes parts of type text.",
                param=f"{where}[{i}]",
            )
        if not isinstance(part.get("refusal" if kind == "refusal" else "text"), str):
            raise BadRequest(f"{where}[{i}]: the part has no text.", param=f"{where}[{i}]")


def _refuse_image(part: dict[str, Any], where: str) -> None:
    """Its form is checked first, then whether the model sees: nothing is fetched for one that does not."""
    given = part.get("image_url")
    place = f"{where}.image_url"
    if isinstance(given, dict):
        given, place = given.get("url"), f"{place}.url"
    read_url(given, place, Rules())
    raise BadRequest(
        f"{where}: the loaded model has no vision: send text, or serve a model that reads images.",
        param=where,
        code="no_vision",
    )


# ── tools ────────────────────────────────────────────────────────────────────


def check_tools(tools: list[dict[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every tool is a function with a name, a description that is text and parameters that are an object."""
    where = names.get("tools", "tools")
    if len(tools) > limits.MAX_TOOLS:
        raise BadRequest(f"{len(tools)} entries in {where}; the limit is {limits.MAX_TOOLS}.", param=where)
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        at = f"{where}[{i}]"
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise BadRequest(f"{at}: only tools of type function are available.", param=f"{at}.type")
        name = function.get("name")
        if not isinstance(name, str) or not name or len(name) > limits.MAX_TOOL_NAME_CHARS or not name.isprintable():
            raise BadRequest(
                f"{at}: a name of 1..{limits.MAX_TOOL_NAME_CHARS} printable characters is needed.", param=f"{at}.name"
            )
        if name in seen:
            raise BadRequest(f"{at}: a tool called {name!r} is given twice.", param=f"{at}.name")
        seen.add(name)
        if not isinstance(function.get("description", ""), str | None):
            raise BadRequest(f"{at}: the description must be a text.", param=f"{at}.description")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise BadRequest(f"{at}: parameters must be a JSON schema (an object).", param=f"{at}.parameters")
    return tools


def _choice(chat: Chat) -> str:
    """``none``, ``auto``, ``required`` or the name of the one function to call."""
    name = chat.names.get("tool_choice", "tool_choice")
    choice = chat.tool_choice
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        named = function.get("name") if isinstance(function, dict) else None
        if not isinstance(named, str) or choice.get("type", "function") != "function":
            raise BadRequest(f'{name} must be none, auto, required or {{"type": "function", …}}.', param=name)
        functions = [tool.get("function") for tool in chat.tools if isinstance(tool, dict)]
        if named not in [function.get("name") for function in functions if isinstance(function, dict)]:
            raise BadRequest(f"{name} names {named!r}, which is not among the tools of the request.", param=name)
        return named
    if choice not in {"none", "auto", "required"}:
        raise BadRequest(f"{name} is {choice[:50]!r}; it must be none, auto, required or name a function.", param=name)
    return choice


def _constrained(
    chat: Chat, choice: str, output: OutputFormat | None, names: dict[str, str], backend: str
) -> SamplingParams:
    """With the grammar that holds calls to their form, where one is asked for."""
    sampling = chat.sampling
    assert output is not None
    assert output.tool is not None
    wanted: str | dict[str, Any] = choice if choice in {"auto", "required"} else {"name": choice}
    if sampling.constrained and choice == "auto":
        return _shape_or_calls(chat, output.tool, names)
    found = output.tool.constraint(wanted, parallel=chat.parallel, strict=chat.strict)
    if found is None:
        return sampling
    if sampling.constrained:
        name = names.get("tool_choice", "tool_choice")
        raise BadRequest(f"{name}: a forced call leaves no room for a response format; send one of them.", param=name)
    _mark_notation(chat, found)
    reason = "tools" if choice == "auto" else "tool_choice"
    name = names["structural_tag"] = names.get(reason, reason)
    if backend in {"none", "outlines"}:
        raise BadRequest(
            f"{name}: forced and strict calls are not available with --grammar-backend {backend}; start the server "
            "with llguidance or xgrammar.",
            param=name,
            code="not_available",
        )
    return msgspec.structs.replace(sampling, structural_tag=msgspec.json.encode(found).decode())


def _forced(chat: Chat, choice: str) -> tuple[str, ...]:
    """The tools that may be called where nothing but calls may come."""
    if choice == "auto":
        return ()
    return tuple(tool["function"]["name"] for tool in chat.tools) if choice == "required" else (choice,)


def _shape_or_calls(chat: Chat, tool: ToolFormat, names: dict[str, str]) -> SamplingParams:
    """A grammar for either an answer of the response format or calls."""
    sampling = chat.sampling
    if sampling.json_schema is None:
        name = names.get("tools", "tools")
        raise BadRequest(f"{name} go together with a JSON schema for the answer, with no other grammar.", param=name)
    found = tool.constraint("required", parallel=chat.parallel, strict=chat.strict)
    assert found is not None
    _mark_notation(chat, found)
    shape = {"type": "json_schema", "json_schema": msgspec.json.decode(sampling.json_schema)}
    text = msgspec.json.encode(
        {"type": "structural_tag", "format": {"type": "or", "elements": [shape, found]}}
    ).decode()
    names["structural_tag"] = names.get("json_schema", "response_format")
    return msgspec.structs.replace(sampling, json_schema=None, structural_tag=text)


def _mark_notation(chat: Chat, found: dict[str, Any]) -> None:
    """Say of arguments that are not written as JSON whether a schema that cannot be held there is let go: the tool is
    named in a refusal otherwise."""
    for tag in [*found["tags"], *found.get("bare", {}).get("tags", ())]:
        if tag["content"]["type"] != "json":
            function = next(t["function"] for t in chat.tools if t["function"]["name"] == tag["name"])
            tag["content"]["tool"] = tag["name"]
            tag["content"]["loose"] = not (chat.strict or function.get("strict"))


# ── thinking ─────────────────────────────────────────────────────────────────


def unheard(front: Front, *variables: str) -> bool:
    """Whether a wish about thinking changes nothing here: no parser knows the thinking, and the template mentions none
    of ``variables``."""
    source = template_text(front.template)
    return front.parsers.reasoning is None and source is not None and not any(name in source for name in variables)


def check_effort(effort: str | None, name: str) -> None:
    if effort is not None and effort not in EFFORTS:
        raise BadRequest(f"{name} is {effort[:50]!r}; it must be one of {', '.join(EFFORTS)}.", param=name)


def _thinking(chat: Chat, front: Front) -> tuple[dict[str, Any], int | None]:
    """Template variables, and the most tokens of thinking (None: no limit of its own)."""
    variables = dict(chat.variables)
    source = template_text(front.template)
    think = chat.think
    budget = chat.think_tokens
    if chat.effort is not None:
        variables.setdefault("reasoning_effort", chat.effort)
        if budget is None:
            budget = EFFORTS[chat.effort]
        if chat.effort == "none" and think is None:
            think = False
    if budget is not None and budget < 0:
        name = chat.names.get("think_tokens", "thinking_budget")
        raise BadRequest(f"{name} is {budget}; it must be at least 0.", param=name)
    if think is not None:
        for name in ("enable_thinking", "thinking"):
            if source is None or name in source:
                variables.setdefault(name, think)
    if think is False and budget is None:
        budget = 0
    return variables, budget
