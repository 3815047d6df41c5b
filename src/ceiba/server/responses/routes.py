"""The routes of the Responses API, and what happens to responses that are stored or run in the background."""

from __future__ import annotations

import asyncio
import uuid

from fastapi import Path, Query, Request, Response
from starlette.datastructures import Headers

from ceiba.core.errors import BadRequest
from ceiba.server import errors
from ceiba.server.auth import Access
from ceiba.server.conversation import engine_request
from ceiba.server.decode import decoded, read
from ceiba.server.front import Front
from ceiba.server.logprobs import TokenTexts
from ceiba.server.openai.translate import routing_key
from ceiba.server.openapi import Operation
from ceiba.server.request import EngineRequest
from ceiba.server.responses import schemas, translate
from ceiba.server.responses.shape import ResponseShape
from ceiba.server.responses.store import ResponseStore, Stored
from ceiba.server.routes import Routes, json_answer, page
from ceiba.server.sse import Answer, collect


class Responses:
    """The handlers. ``enabled``: whether anything may be stored (--enable-response-store)."""

    def __init__(self, front: Front, enabled: bool) -> None:
        self._front = front
        self._enabled = enabled
        self._texts = TokenTexts(front.tokenizer)
        self.store = ResponseStore()

    async def create(self, request: Request) -> Response:
        body = await read(request, schemas.ResponsesRequest)
        self._check_storing(body)
        history = []
        if body.previous_response_id is not None:
            before = self.store.get(body.previous_response_id)
            status = before.response["status"]
            if status not in {"completed", "incomplete"}:
                name = "previous_response_id"
                raise BadRequest(f"{name}: the response is {status}; only one that has ended goes on.", param=name)
            history = [*before.history, *before.response["output"]]
        wanted, shape = self._prepare(body, request.headers, history)
        if body.background:
            return json_answer(self._run_in_background(wanted, shape))
        return Answer(self._front, wanted, shape, translate.hints(body, self._front))

    async def answer(self, data: bytes) -> bytes:
        """One request of a batch: whole, and never stored. Raises BadRequest."""
        body = await decoded(data, schemas.ResponsesRequest)
        if body.stream or body.background or body.store or body.previous_response_id:
            raise BadRequest("stream, background, store and previous_response_id are not for batches.", param="body")
        body.store = False
        wanted, shape = self._prepare(body, Headers(), [])
        return await collect(self._front, wanted, shape)

    def _check_storing(self, body: schemas.ResponsesRequest) -> None:
        if not self._enabled:
            for name in ("store", "previous_response_id", "background"):
                if getattr(body, name):
                    raise BadRequest(
                        f"{name}: nothing is stored here; start the server with --enable-response-store.",
                        param=name,
                        code="not_available",
                    )
        if body.background and body.stream:
            raise BadRequest("background and stream exclude each other: poll GET /v1/responses/{id}.", param="stream")
        if body.background and body.store is False:
            raise BadRequest("background needs store.", param="store")

    def _prepare(
        self, body: schemas.ResponsesRequest, headers: Headers, history: list[schemas.Item]
    ) -> tuple[EngineRequest, ResponseShape]:
        chat = translate.chat_of(body, self._front, history)
        body.store = self._enabled and body.store is not False
        wanted = engine_request(
            chat,
            self._front,
            f"resp_{uuid.uuid4().hex}",
            stream=bool(body.stream),
            routing_key=routing_key(None, headers),
        )
        given = translate.items_of(body)
        kept: list[Stored] = []

        def finished() -> None:
            for stored in kept:
                self.store.resize(stored)

        shape = ResponseShape(body, wanted, self._front, self._texts, finished)
        if body.store:
            stored = Stored(shape.response, [*history, *given], given)
            self.store.add(stored)
            kept.append(stored)
        return wanted, shape

    def _run_in_background(self, wanted: EngineRequest, shape: ResponseShape) -> object:
        stored = self.store.get(wanted.rid)

        async def run() -> None:
            try:
                await collect(self._front, wanted, shape)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                shape.left(errors.explain(error))

        first = dict(shape.response)
        stored.task = asyncio.create_task(run(), name=wanted.rid)
        return first

    async def get(self, request: Request, response_id: str = Path(description="Id of a stored response.")) -> Response:
        if request.query_params.get("stream", "false").lower() == "true":
            raise BadRequest("stream: a stored response comes whole; poll until it has ended.", param="stream")
        return json_answer(self.store.get(response_id).response)

    async def delete(self, response_id: str = Path(description="Id of a stored response.")) -> Response:
        stored = self.store.delete(response_id)
        await self._stop(stored)
        return json_answer({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str = Path(description="Id of a response in the background.")) -> Response:
        stored = self.store.get(response_id)
        if not stored.response["background"]:
            raise BadRequest("only a response in the background can be cancelled.", param="response_id")
        await self._stop(stored)
        return json_answer(stored.response)

    async def _stop(self, stored: Stored) -> None:
        """End what still runs, in whatever state, and wait until it has ended."""
        if stored.task is None or stored.task.done():
            return
        if not self._front.abort(stored.response["id"]):
            await asyncio.sleep(0)  # it had not begun
            self._front.abort(stored.response["id"])
        await asyncio.gather(stored.task, return_exceptions=True)

    async def input_items(
        self,
        response_id: str = Path(description="Id of a stored response."),
        after: str | None = Query(default=None, description="Begin behind the one with this id."),
        limit: int = Query(default=20, description="At most so many, up to 100."),
        order: str = Query(default="desc", description="`desc` (newest first) or `asc`."),
    ) -> Response:
        stored = self.store.get(response_id)
        if order not in {"asc", "desc"}:
            raise BadRequest("order must be asc or desc.", param="order")
        items = [{**item, "id": item.get("id") or f"item_{i}"} for i, item in enumerate(stored.input)]
        return json_answer(page(items if order == "asc" else items[::-1], after, limit, 100))


def wire(routes: Routes, front: Front) -> Responses:
    """Adds the routes; the handlers answer batches, too."""
    handlers = Responses(front, front.config.server.enable_response_store)
    user = Access.USER
    one = "/v1/responses/{response_id}"
    routes.add(
        "/v1/responses",
        ("POST",),
        user,
        Operation("Answer (Responses API)", schemas.ResponsesRequest, schemas.ResponseAnswer, schemas.EventAnswer),
        handlers.create,
    )
    routes.add(one, ("GET",), user, Operation("A stored response", None, schemas.ResponseAnswer), handlers.get)
    routes.add(one, ("DELETE",), user, Operation("Forget a response", None, schemas.ResponseDeleted), handlers.delete)
    operation = Operation("Stop a response in the background", None, schemas.ResponseAnswer)
    routes.add(one + "/cancel", ("POST",), user, operation, handlers.cancel)
    operation = Operation("What a stored response answered", None, schemas.ItemsAnswer)
    routes.add(one + "/input_items", ("GET",), user, operation, handlers.input_items)
    return handlers
