"""What calls give back: texts that know how they came about, and embeddings.

Owns the result types and how a server's answer becomes one. Must never send anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from ceiba.client.errors import InvalidOutput, ServerError

Reader = Callable[["Text"], Any]
"""Turns a finished text into what the caller asked for: itself, a checked text, or a model instance."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held."""


class Text(str):
    """An answer: a ``str`` with what the server said about it."""

    id: str
    usage: Usage
    finish_reason: str | None
    """``stop``, ``length``, ``tool_calls``, …"""
    tool_calls: list[dict[str, Any]]
    """Calls of a chat answer, in OpenAI's form."""
    reasoning: str
    """What a reasoning parser took out of the answer."""
    raw: dict[str, Any]
    """The server's object that this was read from."""

    def __new__(
        cls,
        text: str = "",
        *,
        id: str = "",
        usage: Usage | None = None,
        finish_reason: str | None = None,
        tool_calls: list[dict[str, Any]] | None = None,
        reasoning: str = "",
        raw: dict[str, Any] | None = None,
    ) -> Text:
        made = super().__new__(cls, text)
        made.id = id
        made.usage = usage or Usage()
        made.finish_reason = finish_reason
        made.tool_calls = tool_calls or []
        made.reasoning = reasoning
        made.raw = raw or {}
        return made

    def json(self) -> Any:
        """The text as JSON. Raises InvalidOutput where it is none."""
        try:
            return msgspec.json.decode(str(self))
        except msgspec.DecodeError as error:
            raise _invalid(self, str(error)) from None


class Embedding(list[float]):
    """One vector."""

    usage: Usage

    def __init__(self, values: list[float], usage: Usage) -> None:
        super().__init__(values)
        self.usage = usage


def native_text(answer: dict[str, Any]) -> Text:
    """One answer of ``/generate``."""
    meta = answer["meta_info"]
    finish = meta.get("finish_reason")
    usage = Usage(meta.get("prompt_tokens", 0), meta.get("completion_tokens", 0), meta.get("cached_tokens", 0))
    reason = finish["type"] if isinstance(finish, dict) else finish
    return Text(answer["text"], id=meta.get("id", ""), usage=usage, finish_reason=reason, raw=answer)


def usage_of(value: dict[str, Any] | None) -> Usage:
    value = value or {}
    cached = (value.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Usage(value.get("prompt_tokens") or 0, value.get("completion_tokens") or 0, cached)


def chat_texts(answer: dict[str, Any]) -> list[Text]:
    """The choices of ``/v1/chat/completions``; each has the whole request's usage, as the API counts it."""
    usage = usage_of(answer.get("usage"))
    texts = []
    for choice in answer["choices"]:
        message = choice["message"]
        texts.append(
            Text(
                message.get("content") or "",
                id=answer.get("id", ""),
                usage=usage,
                finish_reason=choice.get("finish_reason"),
                tool_calls=message.get("tool_calls"),
                reasoning=message.get("reasoning_content") or "",
                raw=answer,
            )
        )
    return texts


def embedding_list(answer: dict[str, Any]) -> list[Embedding]:
    usage = usage_of(answer.get("usage"))
    ordered = sorted(answer["data"], key=lambda entry: entry["index"])
    return [Embedding(cast("list[float]", entry["embedding"]), usage) for entry in ordered]


def checked_json(text: Text) -> Text:
    """``text`` itself, once it is known to be JSON."""
    text.json()
    return text


def instance_of(kind: Any) -> Reader:
    """Reads a text as ``kind``: a Pydantic model, or any type msgspec understands (Struct, dataclass, TypedDict)."""

    def read(text: Text) -> Any:
        try:
            if hasattr(kind, "model_validate_json"):
                return kind.model_validate_json(str(text))
            return msgspec.json.decode(str(text), type=kind)
        except (ValueError, msgspec.MsgspecError) as error:  # Pydantic's ValidationError is a ValueError
            raise _invalid(text, str(error)) from error

    return read


def _invalid(text: Text, reason: str) -> InvalidOutput:
    hint = " The answer was cut at its token limit: raise max_tokens." if text.finish_reason == "length" else ""
    return InvalidOutput(f"the answer does not fit the schema: {reason}.{hint}", str(text))


def read_answer(body: bytes, parse: Callable[[Any], Any]) -> Any:
    """``parse`` over a JSON body. Raises ServerError when the answer is not of the form the API promises."""
    try:
        return parse(msgspec.json.decode(body))
    except (msgspec.DecodeError, KeyError, TypeError, IndexError, AttributeError) as error:
        shown = body[:200].decode("utf-8", "replace")
        raise ServerError(f"this is not an answer of a Ceiba server ({error!r}): {shown}") from error
