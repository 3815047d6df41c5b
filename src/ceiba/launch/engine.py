"""``ceiba.Engine``: the same engine without HTTP, for scripts, notebooks and tests.

Owns a thread with an event loop on which the front lives, so that it works from plain code, from a running loop and
from several threads. Must never know how requests are scheduled. Answers have the shape of the native ``/generate``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ceiba.config.records import Config
from ceiba.core.errors import BadRequest, CeibaError, Unavailable
from ceiba.launch.graph import EngineGraph

if TYPE_CHECKING:
    from ceiba.server.choices import Choice
    from ceiba.server.front import Front
    from ceiba.server.generation import Generation
    from ceiba.server.request import Chunk

log = logging.getLogger(__name__)

T = TypeVar("T")
_QUIET = "warning"
"""Log level of an engine inside somebody else's program, unless --log-level is given."""


class Engine:
    """One model, ready to generate.

    >>> with Engine() as engine:
    ...     engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 8})["text"]

    ``model``: as for ``ceiba serve``, the embedded default without one. Further keywords are its flags with
    underscores (``max_total_tokens=4096``). Raises ConfigError for what cannot work, before anything is started where
    that can be known.
    """

    config: Config
    front: Front
    _graph: EngineGraph
    _loop: asyncio.AbstractEventLoop
    _thread: threading.Thread
    _closed: bool
    _at_exit: Callable[[], None]

    def __init__(self, model: str | None = None, **flags: Any) -> None:
        from ceiba.config.flags import flags_from_kwargs

        flags.setdefault("log_level", _QUIET)
        if model is not None:
            flags["model_path"] = model
        self._open(_configured(flags_from_kwargs(**flags)))

    @classmethod
    def from_config(cls, config: Config) -> Engine:
        engine = cls.__new__(cls)
        engine._open(config)
        return engine

    @classmethod
    def from_args(cls, argv: Sequence[str]) -> Engine:
        """With the arguments of ``ceiba serve``."""
        from ceiba.config.parse import parse_args

        return cls.from_config(_configured(parse_args([*argv]).filled(log_level=_QUIET)))

    # ── generating ───────────────────────────────────────────────────────────

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> dict[str, Any] | list[dict[str, Any]] | Iterator[dict[str, Any]]:
        """One answer per prompt (and per ``n``): {text, output_ids, meta_info}; a list when a list was given.

        ``prompt`` or ``input_ids``, single or many. ``sampling_params``: one for all or one each, the fields of
        ``/generate``. ``fields``: its other fields (return_logprob, logprob_start_len, top_logprobs_num,
        token_ids_logprob, rid, …). ``stream``: an iterator of answers as they grow; closing it aborts. Raises
        BadRequest naming the field at fault.
        """
        body = _body(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return self._iterate(self._native_stream(body))
        return self._run(self._native(body))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> dict[str, Any] | list[dict[str, Any]] | AsyncIterator[dict[str, Any]]:
        """``generate`` for a running event loop: await it; with ``stream`` the result is an async iterator."""
        body = _body(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return self._aiterate(self._native_stream(body))
        return await self._await(self._native(body))

    def chat_stream(
        self, messages: list[dict[str, Any]], sampling_params: dict[str, Any], max_new_tokens: int | None = None
    ) -> Generator[Chunk, None, None]:
        """The next turn of a conversation through the model's chat template, chunk by chunk. Without
        ``max_new_tokens`` it may take all the context that is left."""
        return self._iterate(self._chat(messages, sampling_params, max_new_tokens))

    # ── the rest ─────────────────────────────────────────────────────────────

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """What the model's chat template makes of ``messages``; ``variables`` go to the template."""
        from ceiba.server.openai.chat import conversation, template_variables

        kwargs = template_variables(variables)
        prompt = conversation(messages, add_generation_prompt=add_generation_prompt, kwargs=kwargs)
        return self._run(self.front.render(prompt))

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._run(self.front.encode_texts([text], add_special_tokens))[0].tolist()

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        import numpy as np

        return self._run(self.front.decode([np.asarray(ids, np.int32)], skip_special_tokens))[0]

    def encode(
        self,
        prompt: str | Sequence[str] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The vector of each text as the model gives it, as /encode answers: {embedding, meta_info}, a list for a list.

        Of an embedding model or a classifier (its logits). Raises BadRequest on a model that generates; for token ids
        there is ``tokenize``.
        """
        return self._run(self._encoded(prompt, input_ids))

    async def async_encode(
        self,
        prompt: str | Sequence[str] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """``encode`` for a running event loop."""
        return await self._await(self._encoded(prompt, input_ids))

    def rerank(self, query: str, documents: Sequence[str], top_n: int | None = None) -> list[dict[str, Any]]:
        """[{score, index, document}], best first, of a cross-encoder; as /v1/rerank answers."""
        from ceiba.server.embeddings import RerankRequest, rerank

        return self._run(rerank(RerankRequest(query=query, documents=list(documents), top_n=top_n), self.front))

    def flush_cache(self) -> Any:
        """Empty the prefix cache. Raises EngineFault while requests run."""
        return self._run(self.front.control("flush_cache"))

    def server_info(self) -> dict[str, Any]:
        """Configuration, counters and the scheduler's state, as /server_info shows them."""
        from ceiba.config.report import public

        state = self._run(self.front.control("state"))
        return {**public(self.config), "runner": self._graph.info, "internal_states": [state]}

    def abort(self, rid: str) -> None:
        """End the request with this id, wherever it is."""

        async def run() -> None:
            self.front.abort(rid)

        self._run(run())

    def shutdown(self) -> None:
        """End the processes; requests in flight get an error. Safe to call again; done at exit in any case."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._loop.is_running():
            future = asyncio.run_coroutine_threadsafe(self._graph.stop(), self._loop)
            with contextlib.suppress(Exception):
                future.result(15.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
        self._graph.kill()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # ── inside ───────────────────────────────────────────────────────────────

    def _open(self, config: Config) -> None:
        self.config = config
        self._closed = False
        self._graph = EngineGraph(config, self._on_failure)
        self._loop = asyncio.new_event_loop()
        # The children are started from this thread, which lives as long as they do: the kernel ties them to it.
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="ceiba-engine", daemon=True)
        self._thread.start()
        reference = weakref.ref(self)

        def at_exit() -> None:
            engine = reference()
            if engine is not None:
                engine.shutdown()

        self._at_exit = at_exit
        atexit.register(at_exit)
        try:
            self.front = self._run(self._start())
        except BaseException:
            self.shutdown()
            raise

    async def _start(self) -> Front:
        self._graph.spawn()
        front = await self._graph.start()
        await self._graph.wait_ready()
        return front

    def _on_failure(self, reason: str) -> None:
        log.error("the engine is gone: %s; make a new one", reason)

    def _check(self) -> None:
        if self._closed:
            raise self._gone()
        if threading.current_thread() is self._thread:
            raise CeibaError("called from the engine's own thread, which would wait for itself")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work`` on the engine's loop; a Ctrl-C meanwhile cancels it, which aborts its request."""
        future = self._schedule(work)
        try:
            return future.result()
        except BaseException as error:
            if future.cancelled() and self._closed:
                raise self._gone() from error
            future.cancel()
            raise

    def _schedule(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Hand ``work`` to the engine's loop. Raises Unavailable after ``shutdown``."""
        try:
            self._check()
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except CeibaError:
            work.close()
            raise
        except RuntimeError as error:  # the loop was closed since the check
            work.close()
            raise self._gone() from error

    @staticmethod
    def _gone() -> Unavailable:
        return Unavailable("this engine was shut down: make a new one")

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._schedule(work))

    def _iterate(self, source: AsyncIterator[T]) -> Generator[T, None, None]:
        iterator = _Pull(source)
        try:
            while True:
                batch = self._run(iterator.more())
                if not batch:
                    return
                yield from batch
        finally:
            if not self._closed:
                self._run(iterator.close())

    async def _aiterate(self, source: AsyncIterator[T]) -> AsyncIterator[T]:
        iterator = _Pull(source)
        try:
            while True:
                batch = await self._await(iterator.more())
                if not batch:
                    return
                for item in batch:
                    yield item
        finally:
            if not self._closed:
                await self._await(iterator.close())

    async def _encoded(self, prompt: Any, input_ids: Any) -> Any:
        from ceiba.server.embeddings import EncodeRequest, encode

        given = {"text": _plain(prompt), "input_ids": _plain(input_ids)}
        return await encode(_converted(given, EncodeRequest, "encode"), self.front)

    async def _native(self, body: dict[str, Any]) -> Any:
        opened = _Opened(self.front, body)
        async with await self.front.submit(opened.request) as generation:
            choices = opened.choices(generation)
            async for chunk in generation:
                choices[chunk.index].feed(chunk)
        answers = [opened.shape.answer(choice, choice.finish) for choice in choices]
        return answers if opened.many else answers[0]

    async def _native_stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        opened = _Opened(self.front, body)
        async with await self.front.submit(opened.request) as generation:
            choices = opened.choices(generation)
            async for chunk in generation:
                choice = choices[chunk.index]
                delta = choice.feed(chunk)
                if not (delta.count or delta.text or delta.finish):
                    continue
                answer = opened.shape.answer(choice, delta.finish)
                yield {**answer, "index": choice.index} if opened.many else answer

    async def _chat(
        self, messages: list[dict[str, Any]], sampling_params: dict[str, Any], max_new_tokens: int | None
    ) -> AsyncIterator[Chunk]:
        from ceiba.server import native
        from ceiba.server.native_schemas import SamplingFields
        from ceiba.server.request import ChatPrompt, EngineRequest, Input, LengthRule

        fields = _converted({**sampling_params, "max_new_tokens": max_new_tokens}, SamplingFields, "sampling_params")
        rule: LengthRule = "fill" if max_new_tokens is None else "exact"
        entry = Input(ChatPrompt(messages), native.sampling_of(fields, self.front), length=rule)
        request = EngineRequest([entry], rid=uuid.uuid4().hex, stream=True)
        async for chunk in self.front.generate(request):
            yield chunk


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Until it is stopped, then close it: no thread may wait for ever for a call that came in too late to run."""

    async def cancel() -> None:
        await asyncio.sleep(0)  # such calls become tasks
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        loop.run_forever()
        loop.run_until_complete(cancel())
    finally:
        loop.close()


class _Opened:
    """A native request as this engine reads it: the same checks and the same answers as POST /generate."""

    def __init__(self, front: Front, body: dict[str, Any]) -> None:
        from starlette.datastructures import Headers

        from ceiba.server.logprobs import TokenTexts
        from ceiba.server.native import GenerateShape, engine_request
        from ceiba.server.native_schemas import GenerateRequest

        fields = _converted(body, GenerateRequest, "")
        self.request, self.many = engine_request(fields, front, Headers({}))
        self.shape = GenerateShape(fields, self.request, front, TokenTexts(front.tokenizer), self.many)

    def choices(self, generation: Generation) -> list[Choice]:
        from ceiba.server.choices import choices_of

        choices = choices_of(self.request, generation.prompts)
        self.shape.opened(choices)
        return choices


def _converted(values: dict[str, Any], kind: type[T], where: str) -> T:
    """``values`` as the request struct. Raises BadRequest naming the field of wrong type or name."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        raise BadRequest(f"{where}: {text}" if where else text) from None


class _Pull:
    """Takes an async iterator's items in batches from another thread: whatever has come since the last call."""

    def __init__(self, source: AsyncIterator[Any]) -> None:
        self._source = source
        self._items: list[Any] = []
        self._error: BaseException | None = None
        self._done = False
        self._changed: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    async def more(self) -> list[Any]:
        """At least one item, or none at the end. Raises the source's error after its last good item."""
        if self._task is None:
            self._changed = asyncio.Event()
            self._task = asyncio.create_task(self._read())
        assert self._changed is not None
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._done:
                return []
            self._changed.clear()
            await self._changed.wait()
        items, self._items = self._items, []
        return items

    async def _read(self) -> None:
        assert self._changed is not None
        try:
            async for item in self._source:
                self._items.append(item)
                self._changed.set()
        except Exception as error:
            self._error = error
        finally:
            self._done = True
            self._changed.set()

    async def close(self) -> None:
        """End the source; an unfinished request is aborted."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        aclose = getattr(self._source, "aclose", None)
        if aclose is not None:
            with contextlib.suppress(RuntimeError):
                await aclose()


def _configured(flags: Any) -> Config:
    from ceiba.launch.configure import configure

    return configure(flags)


def _body(prompt: Any, sampling: Any, input_ids: Any, stream: bool, fields: dict[str, Any]) -> dict[str, Any]:
    body = {"text": prompt, "input_ids": input_ids, "sampling_params": sampling, "stream": stream, **fields}
    return {name: _plain(value) for name, value in body.items() if value is not None}


def _plain(value: Any) -> Any:
    """Arrays, tensors, tuples and numbers as keys (of logit_bias) as JSON would hold them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value] if value and not isinstance(value[0], int | str) else list(value)
    return value
