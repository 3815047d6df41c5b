"""The routes of files and batches. Without --file-storage-path they say how to turn them on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import Path, Query, Request, Response
from msgspec import Meta
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse

from ceiba.core.errors import BadRequest
from ceiba.server.auth import Access
from ceiba.server.decode import read
from ceiba.server.files.batches import Batches, Endpoint
from ceiba.server.files.store import FileStore
from ceiba.server.front import Front
from ceiba.server.openapi import Operation
from ceiba.server.routes import Routes, json_answer, page

PURPOSES = {"batch", "user_data", "assistants", "evals", "fine-tune", "vision"}
_FILE = Path(description="Id of a file.")
_BATCH = Path(description="Id of a batch.")
_AFTER = Query(default=None, description="Begin behind the one with this id.")


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/batches."""

    input_file_id: Annotated[str, Meta(description="A file with purpose batch: one request a line.")]
    endpoint: Annotated[str, Meta(description="The route that all its requests are for.")]
    completion_window: Annotated[str, Meta(description="`24h`.")]
    metadata: Annotated[dict[str, str] | None, Meta(description="Given back as it is.")] = None
    output_expires_after: Annotated[Any, Meta(description="Refused: files stay until they are deleted.")] = None


class FileAnswer(msgspec.Struct, kw_only=True):
    id: Annotated[str, Meta(description="The file's id.")]
    object: Annotated[str, Meta(description="`file`.")]
    bytes: Annotated[int, Meta(description="Its size.")]
    created_at: Annotated[int, Meta(description="Unix time.")]
    filename: Annotated[str, Meta(description="The last part of the name that was given.")]
    purpose: Annotated[str, Meta(description="What it is for.")]
    status: Annotated[str, Meta(description="`processed`.")]


class BatchAnswer(msgspec.Struct, kw_only=True):
    id: Annotated[str, Meta(description="The batch's id.")]
    object: Annotated[str, Meta(description="`batch`.")]
    endpoint: Annotated[str, Meta(description="The route of its requests.")]
    status: Annotated[
        str,
        Meta(description="validating, in_progress, finalizing, completed, failed, cancelling, cancelled or expired."),
    ]
    input_file_id: Annotated[str, Meta(description="The requests.")]
    output_file_id: Annotated[str | None, Meta(description="The answers, at the end.")]
    error_file_id: Annotated[str | None, Meta(description="The refusals, at the end.")]
    request_counts: Annotated[dict[str, int], Meta(description="total, completed, failed.")]


class ListAnswer(msgspec.Struct, kw_only=True):
    object: Annotated[str, Meta(description="`list`.")]
    data: Annotated[list[dict[str, Any]], Meta(description="Newest first.")]
    first_id: Annotated[str | None, Meta(description="Id of the first.")]
    last_id: Annotated[str | None, Meta(description="Id of the last.")]
    has_more: Annotated[bool, Meta(description="Whether there are more behind the last.")]


class FileDeleted(msgspec.Struct, kw_only=True):
    id: Annotated[str, Meta(description="The file's id.")]
    object: Annotated[str, Meta(description="`file`.")]
    deleted: Annotated[bool, Meta(description="true.")]


class Files:
    """The handlers. ``folder`` None: nothing is stored here."""

    def __init__(self, folder: str | None, endpoints: Mapping[str, Endpoint], most_running: int) -> None:
        self._store = None if folder is None else FileStore(folder)
        self._batches = None if self._store is None else Batches(self._store, endpoints, most_running)

    def start(self) -> None:
        if self._batches is not None:
            self._batches.start()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    @property
    def store(self) -> FileStore:
        """Raises BadRequest where nothing is stored."""
        if self._store is None:
            raise BadRequest(
                "files and batches are off: start the server with --file-storage-path FOLDER.", code="not_available"
            )
        self.start()
        return self._store

    @property
    def batches(self) -> Batches:
        assert self.store is not None
        assert self._batches is not None
        return self._batches

    async def upload(self, request: Request) -> Response:
        store = self.store
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise BadRequest("send the file as multipart/form-data.", param="file")
        async with request.form(max_files=1, max_fields=8) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise BadRequest("file is missing.", param="file")
            if not isinstance(purpose, str) or purpose not in PURPOSES:
                raise BadRequest(f"purpose must be one of {', '.join(sorted(PURPOSES))}.", param="purpose")
            for name in form:
                if name not in {"file", "purpose"}:
                    raise BadRequest(f"{name[:50]}: not available; files stay until they are deleted.", param=name[:50])
            made = await asyncio.to_thread(store.create, file.file, file.filename, purpose)
        return json_answer(made)

    async def files(
        self,
        after: str | None = _AFTER,
        limit: int = Query(default=10_000, description="At most so many."),
        purpose: str | None = Query(default=None, description="Only files for this."),
        order: str = Query(default="desc", description="`desc` (newest first) or `asc`."),
    ) -> Response:
        found = [f for f in await asyncio.to_thread(self.store.all) if purpose is None or f.purpose == purpose]
        if order not in {"asc", "desc"}:
            raise BadRequest("order must be asc or desc.", param="order")
        return json_answer(page(found if order == "desc" else found[::-1], after, limit, 10_000))

    async def file(self, file_id: str = _FILE) -> Response:
        return json_answer(self.store.get(file_id))

    async def content(self, file_id: str = _FILE) -> Response:
        store = self.store
        store.get(file_id)
        return FileResponse(store.path(file_id), media_type="application/octet-stream")

    async def delete(self, file_id: str = _FILE) -> Response:
        store = self.store
        if self.batches.uses(file_id):
            raise BadRequest("a batch that has not ended reads this file: cancel it first.", param="file_id")
        await asyncio.to_thread(store.delete, file_id)
        return json_answer({"id": file_id, "object": "file", "deleted": True})

    async def create_batch(self, request: Request) -> Response:
        body = await read(request, BatchRequest)
        if body.output_expires_after is not None:
            raise BadRequest("output_expires_after: files stay until they are deleted.", param="output_expires_after")
        made = self.batches.create(body.input_file_id, body.endpoint, body.completion_window, body.metadata)
        return json_answer(made)

    async def all_batches(
        self, after: str | None = _AFTER, limit: int = Query(default=20, description="At most so many, up to 100.")
    ) -> Response:
        return json_answer(page(await asyncio.to_thread(self.batches.all), after, limit, 100))

    async def batch(self, batch_id: str = _BATCH) -> Response:
        return json_answer(self.batches.get(batch_id))

    async def cancel_batch(self, batch_id: str = _BATCH) -> Response:
        return json_answer(await self.batches.cancel(batch_id))


def wire(routes: Routes, front: Front, endpoints: Mapping[str, Endpoint]) -> None:
    config = front.config
    handlers = Files(config.server.file_storage_path, endpoints, config.scheduler.max_running_requests)
    try:
        asyncio.get_running_loop()
        handlers.start()
    except RuntimeError:
        pass  # no loop yet: the first request starts it
    front.at_close(handlers.close)
    get, post, delete, user = ("GET",), ("POST",), ("DELETE",), Access.USER
    routes.add("/v1/files", post, user, Operation("Keep a file", None, FileAnswer), handlers.upload)
    routes.add("/v1/files", get, user, Operation("All files", None, ListAnswer), handlers.files)
    one = "/v1/files/{file_id}"
    routes.add(one, get, user, Operation("What a file is", None, FileAnswer), handlers.file)
    routes.add(one, delete, user, Operation("Delete a file", None, FileDeleted), handlers.delete)
    routes.add(one + "/content", get, user, Operation("The bytes of a file", None, None), handlers.content)
    operation = Operation("Answer every line of a file", BatchRequest, BatchAnswer)
    routes.add("/v1/batches", post, user, operation, handlers.create_batch)
    routes.add("/v1/batches", get, user, Operation("All batches", None, ListAnswer), handlers.all_batches)
    one = "/v1/batches/{batch_id}"
    routes.add(one, get, user, Operation("How far a batch is", None, BatchAnswer), handlers.batch)
    routes.add(one + "/cancel", post, user, Operation("Stop a batch", None, BatchAnswer), handlers.cancel_batch)
