"""Log set-up for every process, and the request log of the front. Plain lines a person can read.

Owns the root handler and the wording of request lines. Must never raise into the request path, and never write a
credential: it sees requests, not headers.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, Protocol

import msgspec

from ceiba.config.records import ObsConfig
from ceiba.core.messages import Finish, Usage

log = logging.getLogger("ceiba.requests")

PARTIAL_CHARS = 2048
"""How much of a prompt or answer --log-requests-level 2 shows."""


def setup(config: ObsConfig, role: str = "") -> None:
    """Send all records of this process to standard error, as ``[date time role] level: message``.

    Safe to call again (the level changes, lines are not doubled). ``role`` names the process: ``scheduler``, ….
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if getattr(handler, "ceiba", False):
            root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.ceiba = True  # type: ignore[attr-defined]
    handler.setFormatter(_Line(role))
    root.addHandler(handler)
    root.setLevel(config.log_level.upper())
    http = (config.log_level_http or config.log_level).upper()
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(http)
    for name in ("asyncio", "httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class _Line(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._role = f" {role}" if role else ""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"[{self.formatTime(record, self.datefmt)}{self._role}] {level}{text}"


class LoggedRequest(Protocol):
    rid: str
    inputs: Any
    stream: bool


class RequestLog:
    """--log-requests: one line when a request comes and one per choice when it ends.

    Level 0: ids, counts, times. 1: sampling too. 2: prompts and answers up to ``PARTIAL_CHARS``. 3: all of them.
    """

    def __init__(self, config: ObsConfig) -> None:
        self._on = config.log_requests
        self._level = config.log_requests_level
        self._json = config.log_requests_format == "json"
        self.wants_text = self._on and self._level >= 2
        """Whether ``finished`` shows the answer, so that streamed pieces must be kept for it."""

    def received(self, request: LoggedRequest) -> None:
        if not self._on:
            return
        fields: dict[str, Any] = {"rid": request.rid, "prompts": len(request.inputs), "stream": request.stream}
        if self._level >= 1:
            fields["sampling"] = [msgspec.to_builtins(i.sampling, str_keys=True) for i in request.inputs[:8]]
        if self._level >= 2:
            fields["input"] = [self._cut(_shown(i.prompt)) for i in request.inputs[:8]]
        self._write("request received", fields)

    def finished(
        self, request: LoggedRequest, index: int, seconds: float, usage: Usage | None, text: str, end: Finish
    ) -> None:
        """Choice ``index`` ended; ``text`` is its whole answer when ``wants_text``."""
        if not self._on:
            return
        fields: dict[str, Any] = {"rid": request.rid, "choice": index, "finish": end.kind, "seconds": round(seconds, 4)}
        if usage is not None:
            fields |= {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
                "queue_seconds": round(usage.queue_time, 4),
            }
        if end.message:
            fields["message"] = end.message
        if self.wants_text:
            fields["output"] = self._cut(text)
        self._write("request finished", fields)

    def cut_short(self, request: LoggedRequest, kind: str) -> None:
        if self._on:
            self._write("request finished", {"rid": request.rid, "finish": kind})

    def _cut(self, text: str) -> str:
        if self._level >= 3 or len(text) <= PARTIAL_CHARS:
            return text
        return f"{text[:PARTIAL_CHARS]}… ({len(text)} characters)"

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        try:
            if self._json:
                log.info("%s", json.dumps({"event": event, **fields}, ensure_ascii=False, default=str))
            else:
                log.info("%s: %s", event, " ".join(f"{name}={value!r}" for name, value in fields.items()))
        except Exception:
            log.exception("a request could not be logged")


def _shown(prompt: Any) -> str:
    for name in ("text", "messages"):
        value = getattr(prompt, name, None)
        if value is not None:
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return f"{len(prompt)} token ids: {prompt[:256].tolist()}"
