"""Which of Ollama's routes there are. Owns wiring only; the probe on ``/`` is the page's."""

from __future__ import annotations

from fastapi import Request, Response

from ceiba.server.auth import Access
from ceiba.server.decode import read
from ceiba.server.front import Front
from ceiba.server.logprobs import TokenTexts
from ceiba.server.ollama import chat, models, schemas
from ceiba.server.openapi import Operation
from ceiba.server.routes import Routes, hinting, json_answer
from ceiba.server.sse import Answer


def wire(routes: Routes, front: Front) -> None:
    texts = TokenTexts(front.tokenizer)

    async def api_chat(request: Request) -> Response:
        body = await read(request, schemas.OllamaChatRequest)
        if (ready := chat.loaded(body)) is not None:
            return hinting(body)(ready)
        wanted = chat.chat_request(body, front, request.headers)
        return Answer(front, wanted, chat.LineShape(body, front, texts, chat=True), chat.hints(body, front))

    async def api_generate(request: Request) -> Response:
        body = await read(request, schemas.OllamaGenerateRequest)
        if (ready := chat.loaded(body)) is not None:
            return hinting(body)(ready)
        wanted = chat.generate_request(body, front, request.headers)
        return Answer(front, wanted, chat.LineShape(body, front, texts, chat=False), chat.hints(body, front))

    async def api_tags() -> Response:
        return json_answer(models.tags(front))

    async def api_ps() -> Response:
        return json_answer(models.running(front))

    async def api_show(request: Request) -> Response:
        return hinting(await read(request, schemas.ShowRequest))(models.show(front))

    async def api_version() -> Response:
        return json_answer(models.version())

    get, post, user = ("GET",), ("POST",), Access.USER
    lines = "application/x-ndjson"
    answer: type = schemas.OllamaChatAnswer
    operation = Operation("Answer a conversation (Ollama)", schemas.OllamaChatRequest, answer, answer)
    routes.add("/api/chat", post, user, operation.streaming(lines), api_chat)
    answer = schemas.OllamaGenerateAnswer
    operation = Operation("Answer or continue a text (Ollama)", schemas.OllamaGenerateRequest, answer, answer)
    routes.add("/api/generate", post, user, operation.streaming(lines), api_generate)
    routes.add("/api/tags", get, user, Operation("The loaded model (Ollama)", None, schemas.TagsAnswer), api_tags)
    routes.add("/api/ps", get, user, Operation("The running model (Ollama)", None, schemas.TagsAnswer), api_ps)
    operation = Operation("What the model is (Ollama)", schemas.ShowRequest, schemas.ShowAnswer)
    routes.add("/api/show", post, user, operation, api_show)
    operation = Operation("Version of this server (Ollama)", None, schemas.VersionAnswer)
    routes.add("/api/version", get, user, operation, api_version)
