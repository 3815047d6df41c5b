"""From OpenAI's fields to the engine's request: defaults, names, and what is refused.

Owns the parts that chat and text completions share. Must never know how an answer is sent.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.datastructures import Headers

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.core.sampling import SamplingParams
from ceiba.server import structured
from ceiba.server.front import Front
from ceiba.server.openai.schemas import CommonFields
from ceiba.server.request import TextPrompt
from ceiba.server.validate import MAX_SEED
from ceiba.text.infill import find_infill

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs_num": "top_logprobs",
}
ROUTING_HEADERS = ("x-smg-routing-key", "x-routing-key")


def refuse(body: Any, table: Mapping[str, tuple[str, tuple[Any, ...]]]) -> None:
    """Raise for the first field of ``body`` that would change something and cannot."""
    for name, (reason, harmless) in table.items():
        value = getattr(body, name)
        if value is None or value is False or value in ([], {}, "") or value in harmless:
            continue
        raise BadRequest(f"{name}: {reason}.", param=name, code="not_available")


def only(given: Mapping[str, Any], names: frozenset[str], where: str) -> None:
    """Raise for the first key of a part of a request that is none of ``names`` and says something."""
    for name, value in given.items():
        if name not in names and value is not None and value is not False and value not in ([], {}, ""):
            shown = name[: limits.MAX_ID_CHARS]
            raise BadRequest(
                f"unknown field {where}.{shown}: it is refused, because ignoring it would mislead you.",
                param=f"{where}.{shown}",
            )


def check_callers(tool: Mapping[str, Any], where: str) -> None:
    """Raise for a tool that the model itself may not call: nobody else does here."""
    callers = tool.get("allowed_callers")
    if callers and not (isinstance(callers, list) and "direct" in callers):
        raise BadRequest(
            f"{where}.allowed_callers: no code is run here that could call it; add direct, or leave it out.",
            param=f"{where}.allowed_callers",
        )


def rid(body: CommonFields, prefix: str) -> str:
    return body.rid if body.rid is not None else f"{prefix}-{uuid.uuid4().hex}"


def routing_key(field: str | None, headers: Headers) -> str:
    if field is not None:
        return field
    return next((headers[name] for name in ROUTING_HEADERS if name in headers), "")


def fold_seed(seed: int | None, name: str = "seed") -> int | None:
    """Any 64-bit seed, signed or not, as one of the engine's (63 bits)."""
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**64:
        raise BadRequest(f"{name} must fit 64 bits.", param=name)
    return seed & MAX_SEED


def bias(given: Mapping[str, float] | None, name: str = "logit_bias") -> dict[int, float]:
    """JSON's text keys as token ids."""
    result: dict[int, float] = {}
    for key, value in (given or {}).items():
        if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) <= 20):
            raise BadRequest(f"{name}: key {key[:50]!r} is not a token id.", param=name)
        result[int(key)] = float(value)
    return result


def strings(given: str | list[str] | None) -> tuple[str, ...]:
    return () if given is None else ((given,) if isinstance(given, str) else tuple(given))


def sampling(body: CommonFields, front: Front, max_new_tokens: int) -> SamplingParams:
    """Fields that were sent, over the operator's and the model's defaults, over ours."""
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": body.repetition_penalty,
        "min_new_tokens": body.min_tokens,
    }
    values: dict[str, Any] = {
        **front.sampling_defaults,
        **{name: value for name, value in given.items() if value is not None},
        "max_new_tokens": max_new_tokens,
    }
    for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
        values.setdefault(name, default)
    if body.stop is not None:
        values["stop"] = strings(body.stop)
    if body.stop_regex is not None:
        values["stop_regex"] = strings(body.stop_regex)
    if body.stop_token_ids is not None:
        values["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.logit_bias is not None:
        values["logit_bias"] = bias(body.logit_bias)
    if body.seed is not None:
        values["seed"] = fold_seed(body.seed)
    for name in ("ignore_eos", "no_stop_trim"):
        values[name] = getattr(body, name) or values.get(name, False)
    values["skip_special_tokens"] = body.skip_special_tokens
    values["spaces_between_special_tokens"] = body.spaces_between_special_tokens
    values.update(structured.sampling_fields(body, front))
    return SamplingParams(**values)


def infilled(
    prompts: Sequence[TextPrompt | np.ndarray], suffix: str, sampling: SamplingParams, front: Front
) -> tuple[list[TextPrompt | np.ndarray], SamplingParams]:
    """Prompts that end at a gap before ``suffix``, and sampling that ends where it is filled. Raises BadRequest where
    the model has no tokens for that, and for prompts of token ids."""
    known = None if front.tokenizer is None else find_infill(front.tokenizer.token_to_id)
    if known is None or front.tokenizer is None:
        raise BadRequest(
            "suffix: this model's vocabulary has no fill-in-the-middle tokens; leave it out, or serve a code model "
            "that was trained for it.",
            param="suffix",
            code="not_available",
        )
    made: list[TextPrompt | np.ndarray] = []
    for prompt in prompts:
        if not isinstance(prompt, TextPrompt):
            raise BadRequest("suffix needs prompts that are texts, not token ids.", param="suffix")
        made.append(TextPrompt(known.prompt(prompt.text, suffix), prompt.add_special_tokens))
    ends = known.stop_ids(front.tokenizer.token_to_id)
    return made, msgspec.structs.replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ends))


def check_stream(body: CommonFields) -> None:
    if body.stream_options is None:
        return
    if not body.stream:
        raise BadRequest("stream_options is only for stream: true.", param="stream_options")
    if body.stream_options.include_obfuscation:
        raise BadRequest("stream_options.include_obfuscation: not available.", param="stream_options")
