"""The tokenizer manager: requests go down as token ids, text comes back and finds the task that waits for it.

Owns tokenization and template rendering (off the event loop when long), fan-out into single choices, the table of live
choices, control operations and health. One task receives from the engine; it alone reads the port. Must never know
HTTP, JSON or sockets: ``ceiba.Engine`` uses it as the HTTP server does. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from ceiba.config.records import Config, ModelFacts
from ceiba.core import limits
from ceiba.core.errors import BadRequest, CeibaError, ConfigError, EngineFault, Unavailable
from ceiba.core.messages import Abort, Control, Finish, Generate, Heartbeat, Pooled, Reply, TextBatch, ids_to_bytes
from ceiba.core.ports import FrontPort
from ceiba.core.sampling import SamplingParams
from ceiba.obs.logs import RequestLog
from ceiba.obs.metrics import FrontMetrics
from ceiba.server import thinking, validate
from ceiba.server.choices import Choice, choices_of
from ceiba.server.generation import Generation, failed, stopped
from ceiba.server.health import Health, HealthMonitor
from ceiba.server.output import choose_parsers, template_text
from ceiba.server.pooling import PoolTable
from ceiba.server.request import ChatPrompt, Chunk, EngineRequest, Input, Template, TextPrompt, Tokenizer
from ceiba.server.thinking import BoundedThinking

log = logging.getLogger(__name__)

INLINE_CHARS = 4096
"""Texts up to this long are tokenized on the event loop: cheaper than a hop to a thread and back."""
ENDLESS_CHARS = 256 << 10
"""Texts beyond this are compared with what the context can hold before they are tokenized."""
ABORT_GRACE = 5.0
"""Seconds the engine has to confirm an abort before the front ends the choice by itself."""
CONTROL_SECONDS = 30.0
PROBE_SECONDS = 20.0
_YIELD_SECONDS = 0.001
"""The receive task gives way to the answering tasks at least this often, and meanwhile lets chunks gather."""
_REMEMBERED = 4096
"""Wire ids kept of choices that ended before the scheduler said so."""


class Front:
    """``start`` it on an event loop, then ``submit``. ``vocab_size``: ids the model knows, when that is not the
    tokenizer's count. ``sampling_defaults``: native field -> value from the model's generation_config.json."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer | None,
        template: Template | None,
        port: FrontPort,
        *,
        vocab_size: int | None = None,
        facts: ModelFacts | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        metrics: FrontMetrics | None = None,
    ) -> None:
        if vocab_size is None:
            if tokenizer is None:
                raise ValueError("vocab_size is required without a tokenizer")
            vocab_size = tokenizer.vocab_size
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.vocab_size = vocab_size
        self.facts = facts
        """What the checkpoint's header says; None where nobody read it."""
        self.capacity = min(config.model.context_len, config.scheduler.max_total_tokens)
        """Tokens that a prompt and its answer may have together."""
        self.sampling_defaults = _defaults(config, sampling_defaults)
        """Native field -> value, for fields that a request leaves out."""
        self.parsers = choose_parsers(
            config.server.tool_call_parser,
            config.server.reasoning_parser,
            template_text(template),
            tokenizer,
        )
        self.metrics = metrics or FrontMetrics(False, config.model.name)
        self.monitor = HealthMonitor(config.launch.watchdog_timeout)
        self.started = time.time()
        self._port = port
        self._log = RequestLog(config.obs)
        self._live: dict[str, tuple[Generation, int]] = {}
        self._generations: dict[Generation, None] = {}
        self._by_rid: dict[str, tuple[Generation, range]] = {}
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._stopped: OrderedDict[str, None] = OrderedDict()
        """Ended by the detokenizer (a stop string): the scheduler may not have heard of it yet."""
        self._serial = itertools.count(1)
        self._longest_token: int | None = None
        """Bytes; counted when the first very long prompt comes."""
        self._bounded: dict[str, BoundedThinking] = {}
        self.pool = PoolTable(port.to_scheduler, config.model.context_len)
        """Texts that become numbers, where the model gives numbers."""
        self._controls: dict[int, asyncio.Future[Reply]] = {}
        self._receiver: asyncio.Task[None] | None = None
        self._probe: asyncio.Task[Health] | None = None
        self._closers: list[Callable[[], None]] = []
        self._probing: Generation | None = None
        workers = max(1, min(4, os.cpu_count() or 1))
        self._encoders = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        self._renderers = ThreadPoolExecutor(workers, thread_name_prefix="template")

    # ── life ─────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Begin to receive, on the loop that all requests will use. A second call does nothing."""
        if self._receiver is None:
            self._receiver = asyncio.create_task(self._receive(), name="front-receive")

    async def close(self) -> None:
        """End every request with an error and stop receiving."""
        self.fail("it was shut down")
        if self._receiver is not None:
            self._receiver.cancel()
            with suppress(asyncio.CancelledError):
                await self._receiver
        for work in self._closers:
            work()
        self._closers.clear()
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self._renderers.shutdown(wait=False, cancel_futures=True)

    def at_close(self, work: Callable[[], None]) -> None:
        """Do ``work`` once the front has closed: for what lives as long as it does."""
        self._closers.append(work)

    def drain(self) -> None:
        """Take no new request; those in flight go on. For a graceful stop."""
        self.monitor.drain()

    def fail(self, reason: str) -> None:
        """The engine is gone for good: every request in flight ends with an error, and health turns red."""
        first = self.monitor.stopped is None or self.monitor.stopped.state != "failed"
        self.monitor.fail(reason)
        if not first:
            return
        for generation in list(self._generations):
            generation.fail(stopped(reason))
            self._retire(generation, "error")
        self.pool.fail(stopped(reason))
        for future in self._controls.values():
            if not future.done():
                future.set_exception(stopped(reason))
        self._controls.clear()

    @property
    def num_live(self) -> int:
        """Requests in flight."""
        return len(self._generations)

    def health(self) -> Health:
        return self.monitor.now()

    # ── requests ─────────────────────────────────────────────────────────────

    def open(self, request: EngineRequest) -> Generation:
        """Check ``request`` and register it; nothing is tokenized or sent yet. Raises BadRequest or Unavailable."""
        if self.monitor.stopped is not None:
            raise stopped(self.monitor.stopped.reason)
        if self.config.model.task != "generate":
            raise BadRequest(f"this server's model gives numbers ({self.config.model.task}) and generates no text.")
        validate.check_request(request, self.vocab_size, self.capacity, self.config.scheduler)
        generation = Generation(request, self._leave)
        spans: dict[str, range] = {}
        at = 0
        for entry in request.inputs:
            if entry.rid is not None:
                if entry.rid in spans:
                    raise BadRequest(f"rid {entry.rid!r} is given twice.", param=request.name("rid"))
                spans[entry.rid] = range(at, at + entry.n)
            at += entry.n
        spans.setdefault(request.rid, range(at))
        for rid in spans:
            if rid in self._by_rid:
                raise BadRequest(f"rid {rid!r} is in use by a request that still runs.", param=request.name("rid"))
        generation.open = set(range(at))
        generation.last_at = [0.0] * at
        for rid, span in spans.items():
            self._by_rid[rid] = (generation, span)
        generation.rids = tuple(spans)
        self._generations[generation] = None
        if not request.internal:
            self.metrics.started(at)
            self._log.received(request)
            if self._log.wants_text:
                generation.said = [[] for _ in range(at)]
        return generation

    async def begin(self, generation: Generation) -> None:
        """Tokenize and send. Raises what is wrong with the prompts; returns at once if the reader has left."""
        request = generation.request
        try:
            prompts = await self._tokenize(generation)
            if generation.left or not generation.open:
                generation.prompts = prompts
                return
            if generation.error is not None:
                raise generation.error
            generation.prompts = [
                validate.fit(entry, ids, request, self.capacity, self.config.server.allow_auto_truncate)
                for entry, ids in zip(request.inputs, prompts, strict=True)
            ]
            thinking.settle(request, generation.texts)
            self._send(generation)
        except BaseException:
            self._cancel(generation, generation.open)  # what was sent before a later choice failed
            self._retire(generation, "error")
            raise

    async def submit(self, request: EngineRequest) -> Generation:
        """``open`` and ``begin``. Use the result as ``async with``: leaving early aborts what still runs."""
        generation = self.open(request)
        await self.begin(generation)
        return generation

    async def generate(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        """Chunks of all choices as they come. Closing the iterator early aborts the request."""
        async with await self.submit(request) as generation:
            async for chunk in generation:
                yield chunk

    async def collect(self, request: EngineRequest) -> list[Choice]:
        """Whole answers, in choice order."""
        async with await self.submit(request) as generation:
            choices = choices_of(request, generation.prompts, generation.texts)
            async for chunk in generation:
                choices[chunk.index].feed(chunk)
            return choices

    def abort(self, rid: str) -> int:
        """End the request or input called ``rid``, wherever it is; its client gets finish reason ``abort``.

        Returns how many choices were still open; 0 for an id nobody knows.
        """
        found = self._by_rid.get(rid)
        return 0 if found is None else self._abort_choices(found[0], found[1])

    def abort_all(self) -> int:
        return sum(self._abort_choices(g, range(len(g.last_at))) for g in list(self._generations))

    async def control(self, op: str, args: dict[str, object] | None = None, seconds: float = CONTROL_SECONDS) -> Any:
        """Ask the scheduler for ``op`` and return its value. Raises Unavailable when no answer comes in time."""
        if self.monitor.stopped is not None and self.monitor.stopped.state == "failed":
            raise stopped(self.monitor.stopped.reason)
        number = next(self._serial)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._controls[number] = future
        try:
            self._port.to_scheduler(Control(id=number, op=op, args=args or {}))
            async with asyncio.timeout(seconds):
                reply = await future
        except OverflowError:  # from a client's free-form JSON; messages carry 64 bits
            raise BadRequest(f"{op}: a number in the request does not fit 64 bits.") from None
        except TimeoutError:
            raise Unavailable(f"the scheduler did not answer {op} in {seconds:g} s", code="engine_timeout") from None
        finally:
            self._controls.pop(number, None)
        if not reply.ok:
            raise EngineFault(f"{op}: {reply.error}", code=op)
        return reply.value

    async def probe(self) -> Health:
        """Health by one real token when idle, by the heartbeat when busy. Any number of callers share one probe."""
        health = self.health()
        if self.config.model.task != "generate":
            return health  # its process answers heartbeats between batches; there is no token to make
        if not health.ok or len(self._generations) > (self._probing is not None):
            return health
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._generate_one(), name="health-probe")
        return await asyncio.shield(self._probe)

    async def _generate_one(self) -> Health:
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        request = EngineRequest(
            [Input(np.zeros(1, np.int32), sampling)], rid=f"health-{uuid.uuid4().hex}", internal=True
        )
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                generation = self._probing = self.open(request)
                async with generation:
                    await self.begin(generation)
                    async for _ in generation:
                        pass
        except TimeoutError:
            return Health("stuck", f"no token within {PROBE_SECONDS:g} s")
        except CeibaError as error:
            return Health("stuck", error.message)
        finally:
            self._probing = None
        return self.health()

    # ── tokenizing ───────────────────────────────────────────────────────────

    async def encode(self, prompt: TextPrompt | ChatPrompt) -> np.ndarray:
        """Token ids of one prompt, rendered and tokenized as a request's would be."""
        if isinstance(prompt, ChatPrompt):
            prompt = TextPrompt(await self.render(prompt), add_special_tokens=False)
        return (await self.encode_texts([prompt.text], prompt.add_special_tokens))[0]

    async def encode_texts(self, texts: list[str], add_special_tokens: bool = True) -> list[np.ndarray]:
        if self.tokenizer is None:
            raise BadRequest("this server was started without a tokenizer: send token ids instead of text.")
        if sum(map(len, texts)) <= INLINE_CHARS:
            return [self.tokenizer.encode(text, add_special=add_special_tokens) for text in texts]
        loop, tokenizer = asyncio.get_running_loop(), self.tokenizer
        return await loop.run_in_executor(
            self._encoders, lambda: tokenizer.encode_batch(texts, add_special=add_special_tokens)
        )

    async def decode(self, ids: list[np.ndarray], skip_special_tokens: bool) -> list[str]:
        """Texts of token ids; long ones off the event loop."""
        if self.tokenizer is None:
            raise BadRequest("this server was started without a tokenizer.")
        tokenizer = self.tokenizer

        def run() -> list[str]:
            return [tokenizer.decode(i, skip_special_tokens=skip_special_tokens) for i in ids]

        if sum(map(len, ids)) <= INLINE_CHARS // 4:
            return run()
        return await asyncio.get_running_loop().run_in_executor(self._encoders, run)

    async def render(self, prompt: ChatPrompt) -> str:
        """The conversation as the model's template writes it; never on the event loop."""
        template = self.template
        if template is None:
            raise BadRequest(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
                code="no_chat_template",
            )
        kwargs = {**self.config.server.default_chat_template_kwargs, **prompt.kwargs}

        def run() -> str:
            return template.render(
                prompt.messages,
                prompt.tools,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                **kwargs,
            )

        # The template stops itself at its own limit; ours only keeps a client from waiting for a stuck thread.
        try:
            work = asyncio.get_running_loop().run_in_executor(self._renderers, run)
            async with asyncio.timeout(limits.TEMPLATE_SECONDS + 1.0):  # wait_for can lose a cancellation (Python 3.11)
                text = await work
        except TimeoutError:
            raise BadRequest(
                f"the chat template did not finish in {limits.TEMPLATE_SECONDS:g} s.", param="messages"
            ) from None
        except CeibaError:
            raise
        except Exception as error:
            raise BadRequest(f"the chat template refuses these messages: {error}"[:1000], param="messages") from error
        if not text:
            raise BadRequest("the chat template rendered these messages to an empty prompt.", param="messages")
        return text

    async def _tokenize(self, generation: Generation) -> list[np.ndarray]:
        request = generation.request
        generation.texts = [""] * len(request.inputs)
        prompts: list[np.ndarray | None] = []
        texts: dict[bool, list[tuple[int, str]]] = {}
        for position, entry in enumerate(request.inputs):
            prompt = entry.prompt
            if isinstance(prompt, ChatPrompt):
                text = await self.render(prompt)
                prompt = TextPrompt(thinking.prepared(text, entry, request.output), add_special_tokens=False)
            if isinstance(prompt, TextPrompt):
                await self._refuse_endless(prompt.text, entry, request)
                generation.texts[position] = prompt.text
                texts.setdefault(prompt.add_special_tokens, []).append((position, prompt.text))
                prompts.append(None)
            else:
                validate.check_ids(prompt, self.vocab_size, request.name("prompt"))
                prompts.append(np.ascontiguousarray(prompt, np.int32))
        for special, members in texts.items():
            encoded = await self.encode_texts([text for _, text in members], special)
            for (position, _), ids in zip(members, encoded, strict=True):
                prompts[position] = ids
        return [ids for ids in prompts if ids is not None]

    async def _refuse_endless(self, text: str, entry: Input, request: EngineRequest) -> None:
        """Refuse unread what is too long whatever its tokens are: 30 MB take half a minute of a tokenizer's time."""
        if len(text) <= ENDLESS_CHARS or self.tokenizer is None or self.config.server.allow_auto_truncate:
            return
        if self._longest_token is None:
            tokenizer = self.tokenizer
            self._longest_token = await asyncio.get_running_loop().run_in_executor(
                self._encoders, lambda: max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
            )
        validate.check_length(text, entry, request, self.capacity, self._longest_token)

    # ── to the engine ────────────────────────────────────────────────────────

    def _send(self, generation: Generation) -> None:
        request, index = generation.request, 0
        namespace = request.namespace()
        shares = self.config.scheduler.fair_share
        drops: list[int] = []
        for entry, ids, text in zip(request.inputs, generation.prompts, generation.texts, strict=True):
            data = ids_to_bytes(ids)
            for k in range(entry.n):
                if index not in generation.open:  # aborted while we tokenized
                    generation.wire_ids.append("")
                    index += 1
                    continue
                sampling = entry.sampling
                if sampling.max_new_tokens == 0:
                    drops.append(index)
                    sampling = msgspec.structs.replace(sampling, max_new_tokens=1)
                if sampling.seed is not None and k:
                    sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + k) & validate.MAX_SEED)
                wire_id = self._wire_id(request, entry, index, k)
                generation.wire_ids.append(wire_id)
                self._live[wire_id] = (generation, index)
                message = Generate(
                    rid=wire_id,
                    input_ids=data,
                    sampling=sampling,
                    logprob=entry.logprob,
                    stream=request.stream,
                    namespace=namespace,
                    priority=request.priority,
                    routing_key=request.routing_key,
                    arrival=generation.arrival,
                    queue_timeout=request.queue_timeout or self.config.scheduler.queue_timeout,
                    tenant=request.tenant or (request.routing_key if shares == "routing-key" else ""),
                    pin=request.pin or (f"prompt:{wire_id}" if request.pin_seconds else ""),
                    pin_seconds=request.pin_seconds,
                    pin_output=request.pin_output,
                )
                bounded = thinking.bounded(message, entry, text, request.output)
                if bounded is not None:
                    self._bounded[wire_id] = bounded
                    message = bounded.first()
                self._port.to_scheduler(message)
                index += 1
        generation.drops = frozenset(drops)

    def _wire_id(self, request: EngineRequest, entry: Input, index: int, k: int) -> str:
        rid = f"{request.rid}#{index}" if entry.rid is None else f"{entry.rid}#{k}"
        # Text of an aborted request may still be on its way; a second request of that name must not receive it. And
        # the scheduler refuses a name that it still holds.
        return f"{rid}~{next(self._serial)}" if rid in self._aborted or rid in self._stopped else rid

    def _leave(self, generation: Generation) -> None:
        """The reader of ``generation`` has gone."""
        if generation in self._generations:
            self._cancel(generation, generation.open)
            self._retire(generation, "abort")

    def _cancel(self, generation: Generation, indices: set[int] | list[int]) -> None:
        if not generation.wire_ids:
            return
        rids = [generation.wire_ids[i] for i in sorted(indices)]
        rids = [rid for rid in rids if rid in self._live]
        if rids:
            for rid in rids:
                _remember(self._aborted, rid)
            self._port.to_scheduler(Abort(rids=rids))

    def _abort_choices(self, generation: Generation, span: range) -> int:
        indices = [i for i in span if i in generation.open]
        if not indices:
            return 0
        if not generation.wire_ids:
            self._finish_aborted(generation, indices)
        else:
            self._cancel(generation, indices)
            asyncio.get_running_loop().call_later(ABORT_GRACE, self._finish_aborted, generation, indices)
        return len(indices)

    def _finish_aborted(self, generation: Generation, indices: list[int]) -> None:
        """End choices that the engine has not ended itself (or never saw)."""
        if generation not in self._generations:
            return
        for index in indices:
            if index in generation.open:
                if generation.wire_ids:
                    self._live.pop(generation.wire_ids[index], None)
                finish = Finish(kind="abort", message="aborted by request")
                chunk = Chunk(index=index, text="", count=0, finish=finish)
                generation.push(chunk)
                self._ended(generation, chunk, finish)

    # ── from the engine ──────────────────────────────────────────────────────

    async def _receive(self) -> None:
        yielded = time.monotonic()
        while True:
            try:
                message = await self._port.receive()
            except Exception as error:
                log.exception("the front cannot receive")
                self.fail(f"the front cannot receive: {error}")
                return
            try:
                if isinstance(message, TextBatch):
                    if message.rids:
                        self._on_text(message)
                    else:
                        self.monitor.text_beat()
                elif isinstance(message, Pooled):
                    self.pool.arrived(message)
                elif isinstance(message, Heartbeat):
                    self.monitor.beat(message.at, message.stats)
                    self.metrics.heartbeat(message.stats)
                else:
                    future = self._controls.get(message.id)
                    if future is not None and not future.done():
                        future.set_result(message)
            except Exception:
                log.exception("a message from the engine could not be handled: %s", type(message).__name__)
            now = time.monotonic()
            if now - yielded > _YIELD_SECONDS:
                await asyncio.sleep(0)
                yielded = now

    def _on_text(self, batch: TextBatch) -> None:
        """Hand each entry to its reader. Entries of choices that nobody waits for any more are dropped."""
        now = time.monotonic()
        live, tokens, texts = self._live, batch.tokens, batch.texts
        finishes, usages, logprobs, prompts = batch.finishes, batch.usages, batch.logprobs, batch.prompt_logprobs
        offset = 0
        for i, (rid, count) in enumerate(
            zip(batch.rids, np.frombuffer(batch.counts, dtype="<i4").tolist(), strict=True)
        ):
            start, offset = offset, offset + 4 * count
            found = live.get(rid)
            if found is None:
                continue
            generation, index = found
            finish = finishes.get(i) if finishes else None
            if finish is not None and (isinstance(finish.matched, str) or finish.kind == "error"):
                _remember(self._stopped, rid)
            chunk = Chunk(
                index=index,
                text=texts[i],
                count=count,
                tokens=tokens[start:offset],
                finish=finish,
                usage=usages.get(i) if usages else None,
                logprobs=logprobs.get(i) if logprobs else None,
                prompt_logprobs=prompts.get(i) if prompts else None,
            )
            if index in generation.drops:
                chunk = _without_output(chunk)
            if self._bounded and rid in self._bounded:
                self._bound(rid, chunk, generation)
                finish = chunk.finish
            if count and generation.request.stream:
                self._observe(generation, index, count, now)
            if finish is not None:
                live.pop(rid, None)
                self._bounded.pop(rid, None)
            if generation.said is not None:
                generation.said[index].append(chunk.text)
            generation.push(chunk)
            if finish is not None:
                self._ended(generation, chunk, finish)

    def _bound(self, rid: str, chunk: Chunk, generation: Generation) -> None:
        """Let a choice whose thinking has a limit go on with its answer, once its thinking is over."""
        bounded = self._bounded[rid]
        _, follow = bounded.after(chunk)
        if follow is None:
            return
        if rid in self._aborted:
            chunk.finish = Finish(kind="abort", message="aborted")
            return
        del self._bounded[rid], self._live[rid]
        self._bounded[follow.rid] = bounded
        self._live[follow.rid] = (generation, chunk.index)
        generation.wire_ids[chunk.index] = follow.rid
        self._port.to_scheduler(follow)

    def _observe(self, generation: Generation, index: int, count: int, now: float) -> None:
        if self.metrics.enabled and not generation.request.internal:
            before = generation.last_at[index]
            if before:
                self.metrics.between_tokens(now - before, count)
            else:
                self.metrics.first_token(now - generation.arrival)
            generation.last_at[index] = now

    def _ended(self, generation: Generation, chunk: Chunk, finish: Finish) -> None:
        request, index = generation.request, chunk.index
        if not request.internal:
            seconds = time.monotonic() - generation.arrival
            self.metrics.finished(finish.kind, seconds, chunk.usage)
            said = generation.said
            text = "".join(said[index]) if said is not None else ""
            self._log.finished(request, index, seconds, chunk.usage, text, finish)
        if generation.error is not None:
            self._cancel(generation, generation.open)
            self._retire(generation, "error")
        elif not generation.open:
            self._retire(generation, "")

    def _retire(self, generation: Generation, cut_short: str) -> None:
        """Forget a request. ``cut_short``: how its still open choices ended, for the metrics."""
        if self._generations.pop(generation, self) is self:
            return
        for rid in generation.rids:
            self._by_rid.pop(rid, None)
        for rid in generation.wire_ids:
            self._live.pop(rid, None)
            self._bounded.pop(rid, None)
        if cut_short and generation.open and not generation.request.internal:
            seconds = time.monotonic() - generation.arrival
            for _ in generation.open:
                self.metrics.finished(cut_short, seconds, None)
            self._log.cut_short(generation.request, cut_short)


def _remember(ids: OrderedDict[str, None], rid: str) -> None:
    ids[rid] = None
    if len(ids) > _REMEMBERED:
        ids.popitem(last=False)


def _defaults(config: Config, suggested: Mapping[str, Any] | None) -> dict[str, Any]:
    """The operator's preferred values over those the model's authors suggest. Raises ConfigError for unknown names."""
    preferred = config.server.preferred_sampling_params
    wanted = {**(suggested or {} if config.server.sampling_defaults == "model" else {}), **preferred}
    if isinstance(wanted.get("stop"), str):
        wanted["stop"] = [wanted["stop"]]
    unknown = sorted(wanted.keys() - set(SamplingParams.__struct_fields__))
    if unknown:
        raise ConfigError(
            f"--preferred-sampling-params: {unknown[0]} is not a sampling parameter; known: "
            f"{', '.join(SamplingParams.__struct_fields__)}."
        )
    try:
        values = msgspec.convert(wanted, SamplingParams, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--preferred-sampling-params: {error}") from None
    return {name: getattr(values, name) for name in wanted}


def _without_output(chunk: Chunk) -> Chunk:
    """The caller asked for no token (a scoring request); the one that was computed stays here."""
    usage = chunk.usage
    finish = chunk.finish
    return Chunk(
        index=chunk.index,
        text="",
        count=0,
        finish=None if finish is None else (finish if failed(finish) else Finish(kind="length")),
        usage=None if usage is None else msgspec.structs.replace(usage, completion_tokens=0),
        prompt_logprobs=chunk.prompt_logprobs,
    )
