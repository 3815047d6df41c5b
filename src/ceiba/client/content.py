"""What callers give, as the API wants it: images as URLs, output types as JSON schemas, keywords as request fields.

Owns these translations. Must never know connections.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ceiba.client.answers import Reader, checked_json, instance_of
from ceiba.core.errors import BadRequest

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)
_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
"""OpenAI's name -> the native route's."""
BODY_FIELDS = frozenset(
    {
        "add_special_tokens",
        "background",
        "cache_salt",
        "custom_logit_processor",
        "data_parallel_rank",
        "extra_key",
        "image_data",
        "input_ids",
        "log_metrics",
        "logprob_start_len",
        "lora_path",
        "priority",
        "return_hidden_states",
        "return_logprob",
        "return_text_in_logprobs",
        "rid",
        "routing_key",
        "session_params",
        "token_ids_logprob",
        "top_logprobs_num",
    }
)
"""Fields of /generate beside ``sampling_params``; every other keyword is a sampling parameter."""


def image_url(image: str | bytes) -> str:
    """A URL for ``image``: http(s), data: and file: URLs as they are, bytes and base64 as a data: URL.

    Raises BadRequest for what is neither a URL nor an image we can name the type of.
    """
    if isinstance(image, str):
        if image.partition(":")[0].lower() in {"http", "https", "data", "file"}:
            return image
        try:
            raw = base64.b64decode("".join(image.split()), validate=True)
        except (binascii.Error, ValueError):
            raise BadRequest(
                f"an image is neither a URL nor base64: {image[:40]!r}; give bytes, base64 or an http(s) URL.",
                param="images",
            ) from None
    else:
        raw = bytes(image)
    if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP":
        kind = "image/webp"
    else:
        found = next((name for magic, name in _MAGIC if raw.startswith(magic)), None)
        if found is None:
            raise BadRequest("an image is not PNG, JPEG, GIF, WebP or BMP.", param="images")
        kind = found
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


def image_message(prompt: str, images: Sequence[str | bytes]) -> dict[str, Any]:
    """One user message: the images, then the text."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image_url(image)}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a Pydantic model, of a type msgspec understands, or ``kind`` itself where it is a schema."""
    if isinstance(kind, Mapping):
        return dict(kind)
    if hasattr(kind, "model_json_schema"):
        return kind.model_json_schema()
    try:
        return msgspec.json.schema(kind)
    except TypeError as error:
        raise BadRequest(
            f"structured_output: no schema can be made of {kind!r} ({error}); give a Pydantic model, a dataclass, a "
            "TypedDict, a msgspec Struct or a JSON schema.",
            param="structured_output",
        ) from None


class Format:
    """The form an answer must have: what goes into the request, and how the answer is read."""

    def __init__(self, structured_output: Any, response_format: Mapping[str, Any] | None) -> None:
        if structured_output is not None and response_format is not None:
            raise BadRequest("give one of structured_output and response_format.", param="response_format")
        self.schema: dict[str, Any] | None = None
        self.structural_tag: dict[str, Any] | None = None
        self.read: Reader | None = None
        self.name = "output"
        if structured_output is not None:
            self.schema = schema_of(structured_output)
            self.name = getattr(structured_output, "__name__", "output")
            schema_itself = isinstance(structured_output, Mapping)
            self.read = (lambda text: text.json()) if schema_itself else instance_of(structured_output)
        elif response_format is not None:
            self._from_openai(dict(response_format))

    def _from_openai(self, given: dict[str, Any]) -> None:
        kind = given.get("type")
        if kind == "text":
            return
        if kind == "structural_tag":
            self.structural_tag = given
            return
        if kind == "json_object":
            self.schema = schema_of(given.get("schema") or {"type": "object"})
        elif kind == "json_schema":
            inner = given.get("json_schema") or {}
            schema = inner.get("schema") or given.get("schema")
            if schema is None:
                raise BadRequest("response_format has no json_schema.schema.", param="response_format")
            self.schema = schema_of(schema)
            self.name = inner.get("name", self.name)
        else:
            raise BadRequest(
                f"response_format.type is {kind!r}; known: text, json_object, json_schema, structural_tag.",
                param="response_format",
            )
        self.read = checked_json

    def native(self) -> dict[str, Any]:
        """As sampling parameters of /generate."""
        if self.structural_tag is not None:
            return {"structural_tag": _text(self.structural_tag)}
        return {"json_schema": _text(self.schema)} if self.schema is not None else {}

    def openai(self) -> dict[str, Any]:
        """As a field of /v1/chat/completions."""
        if self.structural_tag is not None:
            return {"response_format": self.structural_tag}
        if self.schema is None:
            return {}
        inner = {"name": self.name, "schema": self.schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": inner}}


def native_body(prompt: Any, fields: Mapping[str, Any], form: Format, stream: bool) -> dict[str, Any]:
    """A body for /generate. OpenAI's spellings of sampling parameters work beside the native ones."""
    body: dict[str, Any] = {} if prompt is None else {"text": prompt}
    sampling: dict[str, Any] = dict(fields.get("sampling_params") or {})
    for name, value in fields.items():
        if value is None or name == "sampling_params":
            continue
        if name in BODY_FIELDS:
            body[name] = value
        else:
            sampling[_RENAMED.get(name, name)] = value
    sampling.update(form.native())
    return {**body, "sampling_params": sampling, **({"stream": True} if stream else {})}


def openai_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Native spellings as OpenAI's, for prompts that go through the chat route."""
    back = {native: name for name, native in _RENAMED.items()}
    return {back.get(name, name): value for name, value in fields.items() if value is not None}


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
