"""Batches: every line of a file is a request, every line of another its answer. They survive a restart.

Owns the life of a batch and its state on disk: an answer is written before it counts, so after a restart only what has
no answer yet is asked again. Must never know what a request means: each endpoint is a function from body to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ceiba.core import limits
from ceiba.core.errors import BadRequest, CeibaError, NotFound, Overloaded, Unavailable
from ceiba.server import errors
from ceiba.server.decode import INLINE_BYTES, check_depth
from ceiba.server.files.store import FileStore, new_id, read_json, write_json

log = logging.getLogger(__name__)
Endpoint = Callable[[bytes], Awaitable[bytes]]
_ID = re.compile(r"batch_[0-9a-f]{32}\Z")
WINDOW_SECONDS = 24 * 3600
MAX_LARGE = 4
"""Requests of all batches at a time whose line is larger than INLINE_BYTES: each may take several times its size."""
ENDED = {"completed", "failed", "cancelled", "expired"}


class Counts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch as OpenAI shows it; also its state on disk."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    object: str = "batch"
    completion_window: str = "24h"
    status: str = "validating"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None


class Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One request of a batch's file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Written(msgspec.Struct):
    custom_id: str


class Invalid(Exception):
    """A line that makes the whole batch fail."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.detail = {"code": "invalid_line", "line": number, "message": message, "param": None}


class Batches:
    """All batches of one folder. ``endpoints``: path -> what answers one body. Methods belong to the event loop."""

    def __init__(self, files: FileStore, endpoints: Mapping[str, Endpoint], most_running: int) -> None:
        self._files = files
        self._endpoints = endpoints
        self._slots = max(1, min(most_running, limits.MAX_BATCH_RUNNING))
        self._folder = files.folder / "batches"
        self._folder.mkdir(exist_ok=True, mode=0o700)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._live: dict[str, BatchObject] = {}
        self._large = asyncio.Semaphore(MAX_LARGE)
        self._started = False

    def start(self) -> None:
        """Go on with the batches that a restart interrupted. A second call does nothing."""
        if self._started:
            return
        self._started = True
        for path in sorted(self._folder.glob("batch_*.json")):
            batch = read_json(path, BatchObject)
            if batch is not None and batch.status not in ENDED:
                log.info("going on with %s", batch.id)
                self._run(batch)

    def create(self, input_file_id: str, endpoint: str, window: str, metadata: dict[str, str] | None) -> BatchObject:
        """Raises BadRequest and NotFound."""
        if endpoint not in self._endpoints:
            raise BadRequest(
                f"endpoint {endpoint[:100]!r}: batches take {', '.join(self._endpoints)}.", param="endpoint"
            )
        if window != "24h":
            raise BadRequest("completion_window must be 24h.", param="completion_window")
        if metadata and len(metadata) > limits.MAX_METADATA:
            raise BadRequest(f"{len(metadata)} entries; the limit is {limits.MAX_METADATA}.", param="metadata")
        if self._files.get(input_file_id).purpose != "batch":
            raise BadRequest("input_file_id: the file's purpose must be batch.", param="input_file_id")
        if len(self._live) >= limits.MAX_BATCHES:
            raise Overloaded(f"{len(self._live)} batches have not ended; the limit is {limits.MAX_BATCHES}.")
        now = int(time.time())
        batch = BatchObject(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=metadata,
        )
        self._save(batch)
        self._run(batch)
        return batch

    def get(self, batch_id: str) -> BatchObject:
        """Raises NotFound."""
        found = self._live.get(batch_id)
        if found is None and _ID.match(batch_id):
            found = read_json(self._path(batch_id), BatchObject)
        if found is None:
            shown = batch_id[: limits.MAX_ID_CHARS]
            raise NotFound(f"batch {shown!r} is not here.", param="batch_id", code="no_such_batch")
        return found

    def all(self) -> list[BatchObject]:
        """Newest first."""
        found = [read_json(path, BatchObject) for path in self._folder.glob("batch_*.json")]
        known = [self._live.get(b.id, b) for b in found if b is not None]
        return sorted(known, key=lambda b: (-b.created_at, b.id))

    def uses(self, file_id: str) -> bool:
        """Whether a batch that has not ended reads this file."""
        return any(b.input_file_id == file_id for b in self._live.values())

    async def cancel(self, batch_id: str) -> BatchObject:
        """Stop it; answers that have come stay. One that has ended stays as it is. Raises NotFound."""
        batch = self.get(batch_id)
        task = self._tasks.get(batch_id)
        if task is not None and batch.status not in ENDED:
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            self._save(batch)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return batch

    # ── running ──────────────────────────────────────────────────────────────

    def _path(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.json"

    def _save(self, batch: BatchObject) -> None:
        write_json(self._path(batch.id), batch)

    def _run(self, batch: BatchObject) -> None:
        self._live[batch.id] = batch
        self._tasks[batch.id] = asyncio.create_task(self._live_through(batch), name=batch.id)

    async def _live_through(self, batch: BatchObject) -> None:
        try:
            if batch.status == "cancelling":
                await self._end(batch, "cancelled")
                return
            async with asyncio.timeout(max(0.0, batch.expires_at - time.time())):
                await self._work(batch)
        except Invalid as problem:
            batch.errors = {"object": "list", "data": [problem.detail]}
            await self._end(batch, "failed")
        except TimeoutError:
            await self._end(batch, "expired")
        except asyncio.CancelledError:
            if batch.status == "cancelling":  # else the server stops, and goes on with it when it comes back
                await self._end(batch, "cancelled")
            raise
        except Unavailable:
            log.warning("%s waits for the next start: the engine is not running", batch.id)
        except Exception as error:
            ours = errors.explain(error)
            detail = {"code": ours.code, "line": None, "message": ours.message, "param": None}
            batch.errors = {"object": "list", "data": [detail]}
            await self._end(batch, "failed")
        finally:
            self._tasks.pop(batch.id, None)
            self._live.pop(batch.id, None)

    async def _end(self, batch: BatchObject, status: str) -> None:
        """Publish what has been written, under the final status."""
        for name in ("output_file_id", "error_file_id"):
            file_id = getattr(batch, name)
            if file_id is None:
                continue
            path = self._files.path(file_id)
            if path.exists() and path.stat().st_size:
                self._files.publish(file_id, f"{batch.id}_{name.partition('_')[0]}.jsonl", "batch_output")
            else:
                setattr(batch, name, None)
        setattr(batch, f"{status}_at", int(time.time()))
        batch.status = status
        self._save(batch)

    async def _work(self, batch: BatchObject) -> None:
        if batch.status == "validating":
            batch.request_counts.total = await asyncio.to_thread(self._check, batch)
            batch.output_file_id, batch.error_file_id = new_id(), new_id()
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
            self._save(batch)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        answered = await asyncio.to_thread(_answered, self._files.path(batch.output_file_id))
        refused = await asyncio.to_thread(_answered, self._files.path(batch.error_file_id))
        counts = batch.request_counts
        counts.completed, counts.failed = len(answered), len(refused)
        await self._ask_all(batch, answered | refused)
        batch.status, batch.finalizing_at = "finalizing", int(time.time())
        await self._end(batch, "completed")

    def _check(self, batch: BatchObject) -> int:
        """How many requests there are. Raises Invalid for the first line that is none."""
        seen: set[str] = set()
        for number, raw in enumerate(self._files.lines(batch.input_file_id), 1):
            if number > limits.MAX_BATCH_LINES:
                raise Invalid(
                    number, f"more than {limits.MAX_BATCH_LINES} requests, which is the limit: split the file."
                )
            if len(raw) > limits.MAX_BODY_BYTES:
                raise Invalid(number, f"{len(raw)} bytes; the limit is {limits.MAX_BODY_BYTES}, as for any body.")
            try:
                check_depth(raw)
                line = msgspec.json.decode(raw, type=Line)
            except BadRequest as error:
                raise Invalid(number, error.message) from None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise Invalid(number, f"not a request: {error}") from None
            if line.method != "POST" or line.url != batch.endpoint:
                raise Invalid(number, f"method and url must be POST {batch.endpoint}.")
            if not 1 <= len(line.custom_id) <= limits.MAX_ID_CHARS:
                raise Invalid(number, f"custom_id must have 1..{limits.MAX_ID_CHARS} characters.")
            if line.custom_id in seen:
                raise Invalid(number, f"custom_id {line.custom_id!r} is given twice.")
            seen.add(line.custom_id)
        if not seen:
            raise Invalid(1, "the file holds no request.")
        return len(seen)

    async def _ask_all(self, batch: BatchObject, done: set[str]) -> None:
        """As many at a time as there are slots, in the order of the file."""
        lines: Iterator[bytes] = self._files.lines(batch.input_file_id)

        async def work() -> None:
            for raw in lines:
                async with self._large if len(raw) > INLINE_BYTES else contextlib.nullcontext():
                    line = msgspec.json.decode(raw, type=Line)
                    if line.custom_id not in done:
                        await self._ask(batch, line)
                await asyncio.sleep(0)  # lines that are refused at once would never let others have the loop

        lost = ""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._slots, batch.request_counts.total)):
                    group.create_task(work())
        except* Unavailable as error:
            lost = str(error.exceptions[0])
        if lost:
            raise Unavailable(lost)

    async def _ask(self, batch: BatchObject, line: Line) -> None:
        while True:
            try:
                body = await self._endpoints[batch.endpoint](bytes(line.body))
                status = 200
                break
            except Overloaded as full:
                await asyncio.sleep(full.retry_after)
            except Unavailable:
                raise
            except CeibaError as error:
                body, status = errors.body(error), error.status
                break
            except Exception as error:
                problem = errors.explain(error)
                body, status = errors.body(problem), problem.status
                break
        number = uuid.uuid4().hex
        response = {"status_code": status, "request_id": number, "body": msgspec.Raw(body)}
        record = {"id": f"batch_req_{number}", "custom_id": line.custom_id, "response": response, "error": None}
        good = status == 200
        file_id = batch.output_file_id if good else batch.error_file_id
        assert file_id is not None
        _append(self._files.path(file_id), msgspec.json.encode(record) + b"\n")
        if good:
            batch.request_counts.completed += 1
        else:
            batch.request_counts.failed += 1


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as out:
        out.write(data)


def _answered(path: Path) -> set[str]:
    """Ids that have an answer in the file; a last line that a crash cut off is taken out."""
    if not path.exists():
        return set()
    found: set[str] = set()
    end = 0
    with path.open("r+b") as source:
        for line in source:
            if not line.endswith(b"\n"):
                break
            found.add(msgspec.json.decode(line, type=_Written).custom_id)
            end += len(line)
        source.truncate(end)
    return found
