"""The form of a response: its items, its events in their order, and the object that holds them.

Owns ids and order of items. Streamed or not, items are built by the same code. Must never know how tokens are made.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ceiba.core.errors import CeibaError
from ceiba.server import errors
from ceiba.server.choices import Choice, Delta
from ceiba.server.front import Front
from ceiba.server.logprobs import TokenTexts, chat_entries
from ceiba.server.request import EngineRequest
from ceiba.server.responses.schemas import Item, ResponsesRequest
from ceiba.server.sse import Shape
from ceiba.text.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning

_encode = msgspec.json.Encoder().encode
Emit = Callable[..., None]


class Items:
    """Output items as they grow; ``emit(type, **fields)`` hears of every step."""

    def __init__(self, emit: Emit) -> None:
        self.done: list[Item] = []
        self._emit = emit
        self._open: Item | None = None
        self._parts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    @property
    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.done)}

    def feed(self, events: Iterable[Event], logprobs: list[dict[str, Any]]) -> None:
        """``logprobs``: of the tokens that came with these events; they go with the first text."""
        for event in events:
            match event:
                case Content(text):
                    self._begin("message")
                    self._parts.append(text)
                    self._logprobs += logprobs
                    self._say("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)
                    logprobs = []
                case Reasoning(text):
                    self._begin("reasoning")
                    self._parts.append(text)
                    self._say("response.reasoning_text.delta", content_index=0, delta=text)
                case CallStart(_, call_id, name):
                    self.close()
                    self._begin("function_call", call_id=call_id, name=name, arguments="")
                case Arguments(_, text):
                    self._parts.append(text)
                    self._say("response.function_call_arguments.delta", delta=text)
                case CallEnd():
                    self.close()

    def _say(self, kind: str, **fields: Any) -> None:
        self._emit(kind, **self._where, **fields)

    def _begin(self, kind: str, **fields: Any) -> None:
        if self._open is not None and self._open["type"] == kind:
            return
        self.close()
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self._open = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            self._open |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            self._open |= {"summary": [], "content": []}
        self._emit("response.output_item.added", output_index=len(self.done), item=dict(self._open))
        if kind != "function_call":
            self._say("response.content_part.added", content_index=0, part=self._part(""))

    def _part(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs if text else []}

    def close(self, status: str = "completed") -> None:
        """End the item that is open, if one is."""
        item = self._open
        if item is None:
            return
        text = "".join(self._parts)
        if item["type"] == "function_call":
            item["arguments"] = text
            self._say("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            part = self._part(text)
            item["content"] = [part]
            if item["type"] == "message":
                done = {"text": text, "logprobs": self._logprobs}
                self._say("response.output_text.done", content_index=0, **done)
            else:
                self._say("response.reasoning_text.done", content_index=0, text=text)
            self._say("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        self._emit("response.output_item.done", output_index=len(self.done), item=item)
        self.done.append(item)
        self._open, self._parts, self._logprobs = None, [], []


class ResponseShape(Shape):
    """The Responses API's events, or one response. ``finished`` is called when it has ended."""

    def __init__(
        self,
        body: ResponsesRequest,
        request: EngineRequest,
        front: Front,
        texts: TokenTexts,
        finished: Callable[[], object],
    ) -> None:
        self.response = _skeleton(body, request, front)
        self._texts = texts
        self._finished = finished
        self._number = 0
        self._out: list[bytes] = []
        self._items = Items(self._emit)
        self._choice: Choice | None = None

    def _emit(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(event)))

    def _drain(self, out: list[bytes]) -> None:
        out += self._out
        self._out.clear()

    def opened(self, choices: list[Choice]) -> None:
        self._choice = choices[0]
        self.response["status"] = "in_progress"

    def event(self, choice: Choice, delta: Delta, out: list[bytes]) -> None:
        if delta.first:
            self._emit("response.created", response=self.response)
            self._emit("response.in_progress", response=self.response)
        entries = chat_entries(delta.logprobs, self._texts) if delta.logprobs is not None else []
        self._items.feed(delta.parts, entries)
        if delta.finish is not None:
            self._end(choice)
            self._emit(f"response.{_event_of(self.response['status'])}", response=self.response)
        self._drain(out)

    def closing(self, out: list[bytes]) -> None:
        pass

    def whole(self) -> bytes:
        choice = self._choice
        assert choice is not None
        entries = chat_entries(choice.logprobs, self._texts) if choice.logprobs is not None else []
        self._items.feed(choice.events, entries)
        self._end(choice)
        self._out.clear()
        return _encode(self.response)

    def _end(self, choice: Choice) -> None:
        finish = choice.finish
        assert finish is not None
        status = {"length": "incomplete", "abort": "cancelled"}.get(finish.kind, "completed")
        self._items.close(status if status == "completed" else "incomplete")
        response = self.response
        response["status"] = status
        response["output"] = self._items.done
        response["usage"] = {
            "input_tokens": choice.prompt_tokens,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": choice.prompt_tokens + choice.completion_tokens,
        }
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        self._finished()

    def left(self, error: CeibaError | None) -> None:
        if error is None:
            self.response["status"] = "cancelled"
        else:
            self.response["status"] = "failed"
            self.response["error"] = {"code": error.code or "server_error", "message": error.message}
        self._finished()

    def failure(self, error: CeibaError) -> bytes:
        self._emit("response.failed", response=self.response)
        out: list[bytes] = []
        self._drain(out)
        detail = errors.payload(error)["error"]
        assert isinstance(detail, dict)
        event = {
            "type": "error",
            "sequence_number": self._number,
            **{k: detail[k] for k in ("code", "message", "param")},
        }
        return b"".join([*out, b"event: error\ndata: " + _encode(event) + b"\n\n"])


def _event_of(status: str) -> str:
    return {"incomplete": "incomplete", "cancelled": "incomplete"}.get(status, "completed")


def _skeleton(body: ResponsesRequest, request: EngineRequest, front: Front) -> dict[str, Any]:
    sampling = request.inputs[0].sampling
    reasoning, text = body.reasoning, body.text
    return {
        "id": request.rid,
        "object": "response",
        "created_at": time.time(),
        "completed_at": None,
        "status": "queued",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": body.model or front.config.model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "service_tier": "default",
        "store": bool(body.store),
        "temperature": sampling.temperature,
        "text": {"format": (text.format if text else None) or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
