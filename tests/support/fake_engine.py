"""An engine without a model, behind a real ``FrontPort``: deterministic text through the same messages as the real one.

Token ids are bytes (0..255) plus an end token; choice text is a function of prompt and seed. Stop strings, stop ids,
length limits, log-probabilities, queue limits and aborts behave as the contracts in ``core.messages`` say.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np

from ceiba.config.records import (
    Config,
    LaunchConfig,
    ModelConfig,
    ObsConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)
from ceiba.core.messages import (
    Abort,
    Control,
    Finish,
    Generate,
    Heartbeat,
    Pool,
    Pooled,
    Reply,
    TextBatch,
    TopLogprobs,
    Usage,
    bytes_to_ids,
    ids_to_bytes,
)
from ceiba.text.template import Capabilities, normalize

EOS = 256
VOCAB = 257
ALPHABET = "abcdefghijklmnopqrstuvwxyz "


class ByteTokenizer:
    """Token id = byte; 256 is the end token."""

    vocab_size = VOCAB

    def encode(self, text: str, *, add_special: bool = True) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Any, *, add_special: bool = True) -> list[np.ndarray]:
        return [self.encode(t) for t in texts]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        tail = "" if skip_special_tokens else "<eos>"
        return b"".join(bytes([i]) if i < 256 else tail.encode() for i in np.asarray(ids).tolist()).decode(
            "utf-8", "replace"
        )

    def token_to_id(self, token: str) -> int | None:
        return EOS if token == "<eos>" else None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<eos>"


TEXT_ONLY = Capabilities(
    text_content=True,
    part_content=False,
    developer_role=False,
    object_arguments=True,
    null_content=False,
    empty_content=True,
)


class PlainTemplate:
    """Takes messages as real templates do, through the same normalization."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        if kwargs.get("refuse"):
            raise ValueError("roles must alternate")
        if kwargs.get("slow"):
            time.sleep(kwargs["slow"])
        shown = [normalize(m, TEXT_ONLY, f"messages[{i}]") for i, m in enumerate(messages)]
        text = "".join(f"<{m['role']}>{m['content']}\n" for m in shown)
        if continue_final_message:
            return text.removesuffix("\n")
        return text + ("<assistant>" if add_generation_prompt else "")


def make_config(
    context: int = 512,
    max_queued: int | None = None,
    obs: ObsConfig | None = None,
    watchdog: float = 300.0,
    pool: int = 65536,
    task: Any = "generate",
    **server: Any,
) -> Config:
    return Config(
        model=ModelConfig(
            path="/models/fake", name="fake-model", tokenizer_path="/models/fake", context_len=context, task=task
        ),
        scheduler=SchedulerConfig(max_queued_requests=max_queued, max_total_tokens=pool),
        runner=RunnerConfig(),
        server=ServerConfig(**server),
        obs=obs or ObsConfig(),
        launch=LaunchConfig(watchdog_timeout=watchdog),
    )


def text_for(prompt: list[int], seed: int | None) -> str:
    """What the fake says after ``prompt``: letters that run on from a point the prompt and the seed choose."""
    start = (sum(prompt) + 7 * (seed or 0)) % len(ALPHABET)
    return "".join(ALPHABET[(start + i) % len(ALPHABET)] for i in range(4096))


@dataclass
class _Job:
    message: Generate
    prompt: list[int]
    text: str
    cached: int
    sent: int = 0
    tokens: list[int] = field(default_factory=list)
    said: str = ""
    held: str = ""
    kept: str = ""
    reported: bool = False


class ThinkingTemplate(PlainTemplate):
    """Looks like that of a model that thinks (``<think>``) and calls tools in Hermes form; says what it was given."""

    sources: ClassVar[dict[str, str]] = {"default": '{{ tools }} <tool_call>{"name" </think> enable_thinking'}

    def __init__(self, opened: bool = False) -> None:
        self.opened = opened
        self.calls: list[dict[str, Any]] = []

    def source(self) -> str:
        return self.sources["default"]

    def render(self, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> str:  # type: ignore[override]
        self.calls.append({"messages": messages, "tools": tools, **kwargs})
        kwargs.pop("enable_thinking", None)
        text = super().render([{**m, "content": m.get("content") or ""} for m in messages], **kwargs)
        return text + ("<think>\n" if self.opened else "")


class FakeEngine:
    """Scheduler and detokenizer in one task. ``step_seconds``: time between two tokens of the batch.

    Knobs for tests: ``max_running`` (others wait), ``max_waiting`` (others get 503), ``frozen`` (no step is made),
    ``beats`` (heartbeats are sent), ``speak`` (rid -> text to say), ``burst`` (tokens a step), ``faults``.
    """

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.max_running = 64
        self.max_waiting: int | None = None
        self.frozen = False
        self.beats = True
        self.answers_aborts = True
        self.burst = 1
        self.speak: str | Callable[[bytes], str] | None = None
        self.faults: dict[str, Finish] = {}
        self.received: list[Any] = []
        self.aborted: list[str] = []
        self.flushes = 0
        self.steps = 0
        self._inbox: deque[Any] = deque()
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._waiting: OrderedDict[str, _Job] = OrderedDict()
        self._running: OrderedDict[str, _Job] = OrderedDict()
        self._pools: OrderedDict[str, Pool] = OrderedDict()
        self.width = 4
        self._seen: list[list[int]] = []
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._round = time.monotonic()

    # ── FrontPort ─────────────────────────────────────────────────────────────

    def to_scheduler(self, message: Any) -> None:
        self.received.append(message)
        self._inbox.append(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)))
        self._woken.set()

    async def receive(self) -> Any:
        return await self._outbox.get()

    # ── life ──────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running and not self._pools

    @property
    def live(self) -> list[str]:
        return [*self._running, *self._waiting]

    def beat(self, at: float | None = None) -> None:
        stats = {"running": float(len(self._running)), "waiting": float(len(self._waiting)), "token_usage": 0.5}
        self._outbox.put_nowait(Heartbeat(at=self._round if at is None else at, stats=stats))

    async def _run(self) -> None:
        last_beat = 0.0
        while True:
            now = time.monotonic()
            if self.beats and now - last_beat > 0.05:
                self.beat()
                last_beat = now
            self._take()
            if not self.frozen:
                self._round = now
                self._admit()
                self._pool()
                self._step()
            if self.idle or self.frozen:
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), 0.05)
            else:
                await asyncio.sleep(self.step_seconds)

    def _take(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Generate):
                if self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
                    self._end(message.rid, Finish(kind="error", message="the queue is full", status=503))
                    continue
                prompt = bytes_to_ids(message.input_ids).tolist()
                speak = self.speak(bytes(t % 256 for t in prompt)) if callable(self.speak) else self.speak
                text = speak if speak is not None else text_for(prompt, message.sampling.seed)
                self._waiting[message.rid] = _Job(message, prompt, text, self._match(message.namespace, prompt))
            elif isinstance(message, Pool):
                self._pools[message.rid] = message
            elif isinstance(message, Abort):
                for rid in message.rids:
                    if self._pools.pop(rid, None):
                        self.aborted.append(rid)
                for rid in self.live if message.everything else message.rids:
                    if self._waiting.pop(rid, None) or self._running.pop(rid, None):
                        self.aborted.append(rid)
                        if self.answers_aborts:
                            self._end(rid, Finish(kind="abort", message="aborted"))
            elif isinstance(message, Control):
                self._outbox.put_nowait(self._control(message))

    def _pool(self) -> None:
        batch = list(self._pools.values())[: self.max_running]
        if not batch:
            return
        vectors = [vector_of(bytes_to_ids(m.input_ids).tolist(), m.second, self.width) for m in batch]
        for message in batch:
            del self._pools[message.rid]
        self._outbox.put_nowait(
            Pooled(
                rids=[m.rid for m in batch],
                widths=ids_to_bytes([0 if m.rid in self.faults else self.width for m in batch]),
                values=b"".join(
                    np.asarray(v, "<f4").tobytes()
                    for m, v in zip(batch, vectors, strict=True)
                    if m.rid not in self.faults
                ),
                finishes={i: self.faults[m.rid] for i, m in enumerate(batch) if m.rid in self.faults},
            )
        )

    def _control(self, message: Control) -> Reply:
        if message.op == "flush_cache":
            if not self.idle:
                return Reply(id=message.id, ok=False, error="requests are running")
            self.flushes += 1
            self._seen.clear()
            return Reply(id=message.id, ok=True, value={"flushed_tokens": 1})
        if message.op == "state":
            return Reply(id=message.id, ok=True, value={"running": len(self._running)})
        if message.op == "load":
            return Reply(id=message.id, ok=True, value={"running": len(self._running), "waiting": len(self._waiting)})
        return Reply(id=message.id, ok=False, error=f"operation {message.op!r} is not known")

    def _match(self, namespace: str, prompt: list[int]) -> int:
        key = [namespace, *prompt]
        best = 0
        for seen in self._seen:
            common = 0
            for a, b in zip(seen, key, strict=False):
                if a != b:
                    break
                common += 1
            best = max(best, common - 1)
        self._seen.append(key)
        return min(best, len(prompt) - 1)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_running:
            rid, job = self._waiting.popitem(last=False)
            self._running[rid] = job

    def _step(self) -> None:
        if not self._running:
            return
        self.steps += 1
        rids, texts, counts, tokens = [], [], [], []
        finishes: dict[int, Finish] = {}
        usages: dict[int, Usage] = {}
        logprobs: dict[int, TopLogprobs] = {}
        prompts: dict[int, TopLogprobs] = {}
        for rid, job in list(self._running.items()):
            said, ids, finish = "", [], None
            while finish is None and len(ids) < self.burst:
                text, token, finish = self._next(job)
                said += text
                ids.append(token)
            if not job.message.stream:
                job.held += said
                if finish is None:
                    continue
                said, ids = job.held, list(job.tokens)
            i = len(rids)
            rids.append(rid)
            texts.append(said)
            counts.append(len(ids))
            tokens += ids
            if finish is not None:
                finishes[i] = finish
                del self._running[rid]
            if finish is not None or not job.reported:
                usages[i] = Usage(
                    prompt_tokens=len(job.prompt),
                    cached_tokens=job.cached,
                    completion_tokens=len(job.tokens),
                    queue_time=0.001,
                )
            spec = job.message.logprob
            if spec.output:
                logprobs[i] = _logprobs(ids, spec, False)
            if spec.prompt_start >= 0 and not job.reported:
                prompts[i] = _logprobs(job.prompt[spec.prompt_start :], spec, spec.prompt_start == 0)
            job.reported = True
        if not rids:
            return
        self._outbox.put_nowait(
            TextBatch(
                rids=rids,
                texts=texts,
                counts=ids_to_bytes(counts),
                tokens=ids_to_bytes(tokens),
                finishes=finishes,
                usages=usages,
                logprobs=logprobs,
                prompt_logprobs=prompts,
            )
        )

    def _next(self, job: _Job) -> tuple[str, int, Finish | None]:
        sampling = job.message.sampling
        if job.message.rid in self.faults:
            job.tokens.append(0)
            return "", 0, self.faults[job.message.rid]
        if job.sent >= len(job.text):
            job.tokens.append(EOS)
            return job.kept, EOS, Finish(kind="stop", matched=EOS)
        char = job.text[job.sent]
        job.sent += 1
        token = char.encode()[0]
        job.tokens.append(token)
        job.said += char
        text, job.kept = job.kept + char, ""
        for stop in sampling.stop:
            if job.said.endswith(stop):
                shown = text if sampling.no_stop_trim else text[: len(text) - len(stop)]
                return shown, token, Finish(kind="stop", matched=stop)
        if token in sampling.stop_token_ids:
            return text[:-1], token, Finish(kind="stop", matched=token)
        if len(job.tokens) >= sampling.max_new_tokens:
            return text, token, Finish(kind="length")
        held = max((_overlap(text, stop) for stop in sampling.stop), default=0)
        if held:
            text, job.kept = text[:-held], text[-held:]
        return text, token, None

    def _end(self, rid: str, finish: Finish) -> None:
        self._outbox.put_nowait(
            TextBatch(rids=[rid], texts=[""], counts=ids_to_bytes([0]), tokens=b"", finishes={0: finish})
        )


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that may be the start of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _logprobs(ids: list[int], spec: Any, first_is_none: bool) -> TopLogprobs:
    values = np.array([logprob_of(t) for t in ids], np.float32)
    if first_is_none and len(ids):
        values[0] = np.nan
    top_ids = np.array([[(t + j) % 256 for j in range(spec.top)] for t in ids], np.int32)
    top_values = np.array([[logprob_of(t) - j for j in range(spec.top)] for t in ids], np.float32)
    fixed = np.array([[logprob_of(f) for f in spec.token_ids] for _ in ids], np.float32)
    return TopLogprobs(
        values=values.tobytes(),
        top=spec.top,
        top_ids=top_ids.tobytes(),
        top_values=top_values.tobytes(),
        fixed_values=fixed.tobytes(),
    )


def vector_of(ids: list[int], second: int, width: int) -> list[float]:
    """What the fake makes of one text (and of a second one at its end)."""
    return [float(sum(ids) % 97 + 1), float(len(ids)), float(second), *range(1, width - 2)]


def logprob_of(token: int) -> float:
    """A log-probability that tests can compute: exact in float32."""
    return -(token % 16) / 4 - 0.25
