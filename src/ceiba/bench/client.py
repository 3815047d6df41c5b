"""One streamed request against a server, timed token event by token event.

Owns the wire: the three protocols (``/v1/completions``, ``/v1/chat/completions``, ``/generate``), event parsing, the
check that a request really got every token it asked for. Knows nothing of workloads or reports.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

Protocol = Literal["completions", "chat", "native"]
PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "native": "/generate"}
_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send: a prompt as token ids or as text, and how many tokens it shall get."""

    prompt: Sequence[int] | str
    max_tokens: int


@dataclass(slots=True)
class Outcome:
    """What became of a job. Times in seconds; ``error`` empty when everything was right."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    ttft: float = 0.0
    latency: float = 0.0
    """From sending to the last token event."""
    gaps: list[float] = field(default_factory=list)
    """Between consecutive token events."""
    events: int = 0
    error: str = ""

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first."""
        return (self.latency - self.ttft) / max(1, self.output_tokens - 1)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Meta(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: Any = None


class _NativeEvent(msgspec.Struct):
    meta_info: _Meta | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_native = msgspec.json.Decoder(_NativeEvent).decode


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what every one of them carries."""

    base_url: str
    model: str
    protocol: Protocol = "completions"
    ignore_eos: bool = True
    """Also means: a request that got fewer tokens than it asked for has failed."""
    temperature: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + PATHS[self.protocol]

    def body(self, job: Job) -> dict[str, Any]:
        if self.protocol == "native":
            key = "text" if isinstance(job.prompt, str) else "input_ids"
            sampling = {
                "max_new_tokens": job.max_tokens,
                "temperature": self.temperature,
                "ignore_eos": self.ignore_eos,
            }
            return {key: job.prompt, "sampling_params": sampling, "stream": True, **self.extra}
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": job.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.protocol == "chat":
            body["messages"] = [{"role": "user", "content": job.prompt}]
        else:
            body["prompt"] = job.prompt
        return {**body, **self.extra}


def open_session() -> aiohttp.ClientSession:
    """A session without limits of its own: concurrency is the caller's to set."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=1 << 20,
    )


async def send(session: aiohttp.ClientSession, target: Target, job: Job) -> Outcome:
    """Send ``job`` and read its stream to the end; never raises for what the server does.

    A kept-alive connection may have been closed by the server just before we used it: such a request is sent again,
    once.
    """
    for attempt in (0, 1):
        try:
            return await _send(session, target, job)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            if attempt:
                return Outcome(error=repr(error)[:_ERROR_CHARS])
        except (TimeoutError, aiohttp.ClientError) as error:
            return Outcome(error=repr(error)[:_ERROR_CHARS])
    raise AssertionError("unreachable")


async def _send(session: aiohttp.ClientSession, target: Target, job: Job) -> Outcome:
    outcome = Outcome()
    reader = _NativeReader(outcome) if target.protocol == "native" else _OpenAIReader(outcome)
    body = msgspec.json.encode(target.body(job))
    headers = {"Content-Type": "application/json", **target.headers}
    reader.start = time.perf_counter()
    async with session.post(target.url, data=body, headers=headers) as response:
        if response.status != 200:
            outcome.error = (await response.text())[:_ERROR_CHARS] or f"HTTP {response.status}"
            return outcome
        rest = b""
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            now = time.perf_counter()
            for line in lines:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    reader.event(line[6:], now)
            if outcome.error:
                return outcome
    reader.finish()
    _check(outcome, target, job, reader.usage_seen)
    return outcome


class _Reader:
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.start = 0.0
        self.last = 0.0
        self.usage_seen = False

    def event(self, data: bytes, now: float) -> None:
        raise NotImplementedError

    def token(self, now: float) -> None:
        outcome = self.outcome
        if outcome.events:
            outcome.gaps.append(now - self.last)
        else:
            outcome.ttft = now - self.start
        outcome.events += 1
        self.last = now

    def finish(self) -> None:
        self.outcome.latency = self.last - self.start


class _OpenAIReader(_Reader):
    def event(self, data: bytes, now: float) -> None:
        event = _decode_event(data)
        if event.error is not None:
            self.outcome.error = str(event.error)[:_ERROR_CHARS]
            return
        if event.usage is not None:
            self.usage_seen = True
            self.outcome.prompt_tokens = event.usage.prompt_tokens
            self.outcome.output_tokens = event.usage.completion_tokens or 0
            if event.usage.prompt_tokens_details is not None:
                self.outcome.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        if not event.choices:
            return
        choice = event.choices[0]
        text = choice.text if choice.delta is None else _delta_text(choice.delta)
        if choice.finish_reason and not text:
            return  # a closing event carries no token
        if choice.delta is not None and not text and "role" in choice.delta:
            return  # nor does the event that opens a chat answer
        self.token(now)


class _NativeReader(_Reader):
    def event(self, data: bytes, now: float) -> None:
        event = _decode_native(data)
        if event.error is not None:
            self.outcome.error = str(event.error)[:_ERROR_CHARS]
            return
        if event.meta_info is None:
            return
        self.usage_seen = True
        before = self.outcome.output_tokens
        self.outcome.prompt_tokens = event.meta_info.prompt_tokens
        self.outcome.output_tokens = event.meta_info.completion_tokens
        self.outcome.cached_tokens = event.meta_info.cached_tokens
        if self.outcome.output_tokens > before:
            self.token(now)


def _delta_text(delta: dict[str, Any]) -> str:
    return delta.get("content") or delta.get("reasoning_content") or ""


def _check(outcome: Outcome, target: Target, job: Job, usage_seen: bool) -> None:
    """A request counts only when its usage has every prompt and output token."""
    if outcome.error:
        return
    if not usage_seen:
        outcome.error = "no usage event"
    elif not isinstance(job.prompt, str) and target.protocol != "chat" and outcome.prompt_tokens != len(job.prompt):
        outcome.error = f"prompt_tokens {outcome.prompt_tokens} for {len(job.prompt)} ids"
    elif target.ignore_eos and outcome.output_tokens != job.max_tokens:
        outcome.error = f"completion_tokens {outcome.output_tokens} of {job.max_tokens}"
    elif not outcome.events:
        outcome.error = "no token event"
