"""POST /parse_function_call and /separate_reasoning: the parsers alone, for text that was made elsewhere.

Owns the form of these two requests and answers. Must never know the engine.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import Request, Response
from msgspec import Meta

from ceiba.core import limits
from ceiba.core.errors import BadRequest, ConfigError
from ceiba.server.auth import Access
from ceiba.server.conversation import check_tools
from ceiba.server.decode import INLINE_BYTES, read
from ceiba.server.front import Front
from ceiba.server.openapi import Operation
from ceiba.server.routes import Routes, json_answer
from ceiba.text.parsers import registry
from ceiba.text.parsers.events import Answer, join
from ceiba.text.parsers.output import OutputParser


class ParseCallRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: Annotated[str, Meta(description="What a model wrote.")]
    tools: Annotated[list[dict[str, Any]], Meta(description="The tools it was offered.")] = []
    tool_call_parser: Annotated[
        str | None, Meta(description="Name of the format. Default: that of the loaded model.")
    ] = None


class ParsedCall(msgspec.Struct, kw_only=True):
    tool_index: Annotated[int, Meta(description="Which call, from 0.")]
    name: Annotated[str, Meta(description="The function.")]
    parameters: Annotated[str, Meta(description="JSON text of an object.")]


class ParseCallAnswer(msgspec.Struct, kw_only=True):
    normal_text: Annotated[str, Meta(description="What is no call.")]
    calls: Annotated[list[ParsedCall], Meta(description="The calls in their order.")]


class SeparateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    text: Annotated[str, Meta(description="What a model wrote.")]
    reasoning_parser: Annotated[
        str | None, Meta(description="Name of the format. Default: that of the loaded model.")
    ] = None


class SeparateAnswer(msgspec.Struct, kw_only=True):
    reasoning_text: Annotated[str, Meta(description="The thinking.")]
    text: Annotated[str, Meta(description="The answer.")]


def _named(given: str | None, own: str | None, field: str) -> str:
    name = own if given in {None, "auto"} else given
    if name is None:
        raise BadRequest(f"{field} is missing, and the loaded model shows none; name one.", param=field)
    return name


def _parse(parser: OutputParser, text: str) -> Answer:
    return join([*parser.feed(text), *parser.finish()])


async def _run(parser: OutputParser, text: str) -> Answer:
    if len(text) > limits.MAX_TOOL_TEXT_CHARS:
        raise BadRequest(f"text has {len(text)} characters; the limit is {limits.MAX_TOOL_TEXT_CHARS}.", param="text")
    if len(text) <= INLINE_BYTES:
        return _parse(parser, text)
    return await asyncio.to_thread(_parse, parser, text)


async def parse_call(body: ParseCallRequest, front: Front) -> ParseCallAnswer:
    """Raises BadRequest for a name that is not known."""
    own = front.parsers.tool
    try:
        tool = registry.tool_parser(_named(body.tool_call_parser, own, "tool_call_parser"), _checked(body.tools))
    except ConfigError as error:
        raise BadRequest(error.message, param="tool_call_parser") from None
    answer = await _run(OutputParser(None, tool), body.text)
    calls = [ParsedCall(tool_index=i, name=c.name, parameters=c.arguments) for i, c in enumerate(answer.calls)]
    return ParseCallAnswer(normal_text=answer.content, calls=calls)


def _checked(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return check_tools([tool if "function" in tool else {"function": tool} for tool in tools], {})


async def separate(body: SeparateRequest, front: Front) -> SeparateAnswer:
    """Raises BadRequest for a name that is not known."""
    own = front.parsers.reasoning
    try:
        reasoning = registry.reasoning_parser(_named(body.reasoning_parser, own, "reasoning_parser"))
    except ConfigError as error:
        raise BadRequest(error.message, param="reasoning_parser") from None
    answer = await _run(OutputParser(reasoning, None), body.text)
    return SeparateAnswer(reasoning_text=answer.reasoning, text=answer.content)


def wire(routes: Routes, front: Front) -> None:
    async def parse_function_call(request: Request) -> Response:
        return json_answer(await parse_call(await read(request, ParseCallRequest), front))

    async def separate_reasoning(request: Request) -> Response:
        return json_answer(await separate(await read(request, SeparateRequest), front))

    post, user = ("POST",), Access.USER
    operation = Operation("Calls in a text", ParseCallRequest, ParseCallAnswer)
    routes.add("/parse_function_call", post, user, operation, parse_function_call)
    operation = Operation("Thinking and answer of a text", SeparateRequest, SeparateAnswer)
    routes.add("/separate_reasoning", post, user, operation, separate_reasoning)
