"""Which of Anthropic's routes there are. Owns wiring only."""

from __future__ import annotations

from fastapi import Request, Response

from ceiba.server.anthropic import messages, schemas
from ceiba.server.auth import Access
from ceiba.server.decode import read
from ceiba.server.front import Front
from ceiba.server.openapi import Operation
from ceiba.server.routes import Routes, json_answer
from ceiba.server.sse import Answer


def wire(routes: Routes, front: Front) -> None:
    async def create(request: Request) -> Response:
        body = await read(request, schemas.MessagesRequest)
        wanted = messages.request_of(body, front, request.headers)
        more = {**messages.hints(body, front), "request-id": wanted.rid}
        written = await messages.written(body, front)
        return Answer(front, wanted, messages.MessageShape(body, wanted, front, written), more)

    async def count_tokens(request: Request) -> Response:
        return json_answer(await messages.count(await read(request, schemas.CountRequest), front))

    post, user = ("POST",), Access.USER
    routes.add(
        "/v1/messages",
        post,
        user,
        Operation(
            "Answer a conversation (Anthropic)", schemas.MessagesRequest, schemas.MessageAnswer, schemas.MessageEvent
        ),
        create,
    )
    routes.add(
        "/v1/messages/count_tokens",
        post,
        user,
        Operation("Tokens of a conversation (Anthropic)", schemas.CountRequest, schemas.MessageCount),
        count_tokens,
    )
