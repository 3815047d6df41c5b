"""The HTTP application: which route leads to which protocol, who may call it, and the OpenAPI document.

Owns wiring only. Must never hold request logic: a route is a few lines that hand over to its protocol's module.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Path, Request, Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ceiba
from ceiba import ui
from ceiba.config.records import Config
from ceiba.core.errors import BadRequest, NotFound
from ceiba.obs.metrics import FrontMetrics
from ceiba.server import (
    admin,
    answers,
    cache_routes,
    embeddings,
    errors,
    hicache_routes,
    native,
    native_schemas,
    parsing,
    scheduling,
    scoring,
    sessions,
    state,
    unavailable,
)
from ceiba.server.anthropic import routes as anthropic
from ceiba.server.auth import Access, AccessTable, AuthMiddleware, is_loopback
from ceiba.server.decode import decoded, read
from ceiba.server.files import routes as files
from ceiba.server.files.batches import Endpoint
from ceiba.server.front import Front
from ceiba.server.hints import hint_header, hints_of
from ceiba.server.limits import LimitMiddleware
from ceiba.server.logprobs import TokenTexts
from ceiba.server.ollama import routes as ollama
from ceiba.server.openai import chat, completions, models, schemas
from ceiba.server.openapi import Operation
from ceiba.server.request import EngineRequest
from ceiba.server.responses import routes as responses
from ceiba.server.routes import Handler, Routes, json_answer
from ceiba.server.sse import Answer, Shape, collect


def create_app(front: Front, config: Config | None = None) -> FastAPI:
    """The application for ``uvicorn``, with ``front``'s own configuration unless another is given.

    Its lifespan starts and closes ``front``; with ``lifespan="off"`` that is the caller's part.
    """
    config = config or front.config

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await front.start()
        try:
            yield
        finally:
            await front.close()

    app = FastAPI(
        title="Ceiba",
        version=ceiba.__version__,
        description="An LLM serving engine. Errors have the shape of their route's protocol.",
        lifespan=lifespan,
        redoc_url=None,
        docs_url="/docs",
    )
    routes = Routes(app)
    _inference(routes, front)
    anthropic.wire(routes, front)
    ollama.wire(routes, front)
    endpoints = _endpoints(front) | {"/v1/responses": responses.wire(routes, front).answer}
    endpoints["/v1/embeddings"] = embeddings.endpoint(front)
    files.wire(routes, front, endpoints)
    scoring.wire(routes, front)
    embeddings.wire(routes, front)
    parsing.wire(routes, front)
    _state(routes, front)
    _admin(routes, front)
    cache_routes.wire(routes, front)
    hicache_routes.wire(routes, front)
    _unavailable(routes)
    _pages(routes, with_ui=not config.server.disable_ui)
    for path in ("/openapi.json", "/docs", "/docs/oauth2-redirect"):
        routes.table.declare(path, Access.USER)
    for route in app.routes:  # whatever else the framework may add stays closed
        path = getattr(route, "path", "")
        if path and not routes.table.known(path):
            routes.table.declare(path, Access.ADMIN)
    errors.install(app)
    app.openapi = routes.document.of(app)  # type: ignore[method-assign]
    app.add_middleware(LimitMiddleware)
    app.add_middleware(
        AuthMiddleware,
        table=routes.table,
        api_key=config.server.api_key,
        admin_api_key=config.server.admin_api_key,
        own_machine=is_loopback(config.server.host),
        origins=tuple(config.server.allowed_origins),
    )
    if config.server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.server.allowed_origins),
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-ceiba-hints", "retry-after"],
        )
    if front.metrics.enabled:
        app.add_middleware(CountMiddleware, metrics=front.metrics, table=routes.table)
    return app


def _chat_hints(body: schemas.ChatRequest, front: Front) -> dict[str, str]:
    return hint_header([*hints_of(body), *chat.unread_variables(body, front)])


def _endpoints(front: Front) -> dict[str, Endpoint]:
    """What a batch may ask: from one body to one whole answer."""
    texts = TokenTexts(front.tokenizer)

    async def chat_completion(data: bytes) -> bytes:
        body = await decoded(data, schemas.ChatRequest)
        wanted = chat.request_of(body, front, Headers())
        return await _whole(front, wanted, chat.ChatShape(body, wanted, front, texts))

    async def completion(data: bytes) -> bytes:
        body = await decoded(data, schemas.CompletionRequest)
        wanted = completions.engine_request(body, front, Headers())
        return await _whole(front, wanted, completions.CompletionShape(body, wanted, front, texts))

    return {"/v1/chat/completions": chat_completion, "/v1/completions": completion}


async def _whole(front: Front, wanted: EngineRequest, shape: Shape) -> bytes:
    if wanted.stream:
        raise BadRequest("stream is not for batches.", param="stream")
    return await collect(front, wanted, shape)


def _inference(routes: Routes, front: Front) -> None:
    texts = TokenTexts(front.tokenizer)
    conversations = sessions.Sessions(front)

    async def open_session(request: Request) -> Response:
        return json_answer(conversations.open(await read(request, sessions.OpenSession)))

    async def close_session(request: Request) -> Response:
        name = (await read(request, sessions.CloseSession)).session_id
        await conversations.close(name)
        return json_answer({"closed": name})

    async def chat_completions(request: Request) -> Response:
        body = await read(request, schemas.ChatRequest)
        wanted = scheduling.apply(body, front, chat.request_of(body, front, request.headers))
        return Answer(front, wanted, chat.ChatShape(body, wanted, front, texts), _chat_hints(body, front))

    async def text_completions(request: Request) -> Response:
        body = await read(request, schemas.CompletionRequest)
        wanted = scheduling.apply(body, front, completions.engine_request(body, front, request.headers))
        shape = completions.CompletionShape(body, wanted, front, texts)
        return Answer(front, wanted, shape, hint_header(hints_of(body)))

    async def generate(request: Request) -> Response:
        body = await read(request, native_schemas.GenerateRequest)
        wanted, many = native.engine_request(body, front, request.headers)
        scheduling.apply(body, front, wanted)
        shape = native.GenerateShape(body, wanted, front, texts, many)
        advice = hint_header(hints_of(body))
        if body.session_params is None:
            return Answer(front, wanted, shape, advice)
        turn = await conversations.continued(sessions.described(body.session_params), wanted)
        return sessions.SessionAnswer(front, wanted, shape, turn, advice)

    async def tokenize(request: Request) -> Response:
        answer = await native.tokenize(await read(request, native_schemas.TokenizeRequest), front)
        counts = answer["count"]
        if (counts if isinstance(counts, int) else sum(counts)) <= native.INLINE_IDS:
            return json_answer(answer)
        return await asyncio.to_thread(json_answer, answer)

    async def detokenize(request: Request) -> Response:
        return json_answer(await native.detokenize(await read(request, native_schemas.DetokenizeRequest), front))

    post, user = ("POST",), Access.USER
    routes.add(
        "/v1/chat/completions",
        post,
        user,
        Operation(
            "Answer a conversation",
            schemas.ChatRequest,
            answers.ChatCompletion,
            answers.ChatCompletionChunk,
            done=True,
        ),
        chat_completions,
    )
    routes.add(
        "/v1/completions",
        post,
        user,
        Operation("Continue a text", schemas.CompletionRequest, answers.Completion, answers.Completion, done=True),
        text_completions,
    )
    routes.add(
        "/generate",
        post,
        user,
        Operation(
            "Generate (native)",
            native_schemas.GenerateRequest,
            answers.GenerateAnswer | list[answers.GenerateAnswer],
            answers.GenerateAnswer,
            done=True,
        ),
        generate,
    )
    opening = Operation("Open a session for /generate; answers its id", sessions.OpenSession, str)
    routes.add("/open_session", post, user, opening, open_session)
    closing = Operation("Close a session", sessions.CloseSession, dict[str, str])
    routes.add("/close_session", post, user, closing, close_session)
    for prefix in ("/v1", ""):
        operation = Operation("Text to token ids", native_schemas.TokenizeRequest, answers.TokenizeAnswer)
        routes.add(f"{prefix}/tokenize", post, user, operation, tokenize)
        operation = Operation("Token ids to text", native_schemas.DetokenizeRequest, answers.DetokenizeAnswer)
        routes.add(f"{prefix}/detokenize", post, user, operation, detokenize)


def _state(routes: Routes, front: Front) -> None:
    async def health() -> Response:
        status, body = state.health_body(front.health())
        return json_answer(body, status)

    async def health_generate() -> Response:
        status, body = state.health_body(await front.probe())
        return json_answer(body, status)

    async def metrics() -> Response:
        if not front.metrics.enabled:
            raise NotFound("metrics are off: start the server with --enable-metrics.", code="metrics_disabled")
        return Response(front.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def model_list(request: Request) -> Response:
        return json_answer(models.listing(front, anthropic="anthropic-version" in request.headers))

    async def model(
        request: Request, model_id: str = Path(description="Name of the model, as /v1/models shows it.")
    ) -> Response:
        return json_answer(models.one(front, model_id, anthropic="anthropic-version" in request.headers))

    async def model_info() -> Response:
        return json_answer(state.model_info(front))

    async def server_info() -> Response:
        return json_answer(await state.server_info(front))

    async def loads() -> Response:
        return json_answer(await state.loads(front))

    get = ("GET",)
    state_of = Operation("Whether the engine is alive, from its heartbeat", None, answers.HealthAnswer)
    routes.add("/health", get, Access.OPEN, state_of, health)
    routes.add(
        "/health_generate",
        get,
        Access.OPEN,
        Operation("Health, proved by one token when idle", None, answers.HealthAnswer),
        health_generate,
    )
    routes.add("/metrics", get, Access.OPEN, Operation("Prometheus metrics", None, None), metrics)
    routes.add("/ready", get, Access.USER, state_of, health)
    routes.add("/ping", get, Access.USER, state_of, health)
    user = Access.USER
    routes.add("/v1/models", get, user, Operation("The loaded model", None, answers.ModelList), model_list)
    routes.add("/v1/models/{model_id:path}", get, user, Operation("One model", None, answers.ModelCard), model)
    for prefix in ("/", "/get_"):
        info = Operation("What the model is and can", None, dict[str, Any])
        routes.add(f"{prefix}model_info", get, user, info, model_info)
        info = Operation("Configuration and state, without secrets", None, dict[str, Any])
        routes.add(f"{prefix}server_info", get, user, info, server_info)
    for path in ("/v1/loads", "/get_load"):
        routes.add(path, get, user, Operation("How much there is to do", None, list[dict[str, Any]]), loads)


def _admin(routes: Routes, front: Front) -> None:
    async def flush_cache() -> Response:
        return json_answer(await admin.flush_cache(front))

    async def abort_request(request: Request) -> Response:
        return json_answer(admin.abort_request(front, await read(request, native_schemas.AbortRequest)))

    routes.add(
        "/flush_cache",
        ("GET", "POST"),
        Access.ADMIN,
        Operation("Forget all cached prefixes", None, answers.FlushAnswer),
        flush_cache,
    )
    routes.add(
        "/abort_request",
        ("POST",),
        Access.ADMIN,
        Operation("End a request in any state", native_schemas.AbortRequest, answers.AbortAnswer),
        abort_request,
    )


def _unavailable(routes: Routes) -> None:
    for path, methods, level, reason in unavailable.ROUTES:
        routes.add_refusal(path, methods, level, _bound(reason))


def _pages(routes: Routes, with_ui: bool) -> None:
    """What stands at ``/``: the page for browsers, Ollama's plain text for everyone else; its files under /ui."""

    def answer(found: ui.Asset, request: Request) -> Response:
        if request.headers.get("if-none-match") == found.headers["etag"]:
            return Response(status_code=304, headers=found.headers)
        return Response(found.data, media_type=found.media_type, headers=found.headers)

    async def root(request: Request) -> Response:
        if with_ui and ui.wants_page(request.headers.get("accept", "")):
            return answer(ui.page(), request)
        return Response(ui.PROBE, media_type="text/plain; charset=utf-8", headers={"vary": "accept"})

    async def file(request: Request) -> Response:
        found = ui.asset(request.path_params["name"])
        if found is None:
            raise NotFound(f"no such file: {request.url.path}", code="unknown_route")
        return answer(found, request)

    routes.add_page("/", root)
    if with_ui:
        routes.add_page("/ui/{name}", file)


def _bound(reason: str) -> Handler:
    async def refuse(request: Request) -> Response:
        raise errors.NotImplementedHere(f"{request.url.path}: {reason}.", code="not_available")

    return refuse


class CountMiddleware:
    """Counts HTTP requests and responses by declared path; unknown paths share one label. Pure ASGI."""

    def __init__(self, app: ASGIApp, metrics: FrontMetrics, table: AccessTable) -> None:
        self._app = app
        self._metrics = metrics
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method = self._table.label(scope["path"]), scope["method"]
        if method not in {"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"}:
            method = "OTHER"
        status = 500

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.http_started(path, method)
        try:
            await self._app(scope, receive, seen)
        finally:
            self._metrics.http_finished(path, method, status)
