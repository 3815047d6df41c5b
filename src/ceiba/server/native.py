"""POST /generate, /tokenize and /detokenize: the engine's own protocol, with every sampling field.

Owns the native request's meaning (batches, per-prompt values) and the form of its answer. Must never know how tokens
are made.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.datastructures import Headers

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.core.messages import Finish
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.server import structured, validate
from ceiba.server.choices import Choice, Delta
from ceiba.server.conversation import conversation, template_variables
from ceiba.server.front import Front
from ceiba.server.logprobs import TokenTexts, native_fixed, native_pairs, native_top
from ceiba.server.native_schemas import (
    REFUSED_GENERATE,
    REFUSED_SAMPLING,
    DetokenizeRequest,
    GenerateRequest,
    SamplingFields,
    TokenizeRequest,
)
from ceiba.server.openai.completions import prompts_of
from ceiba.server.openai.translate import bias, fold_seed, refuse, routing_key, strings
from ceiba.server.request import EngineRequest, Input, TextPrompt
from ceiba.server.sse import DONE, Shape

_encode = msgspec.json.Encoder().encode
T = TypeVar("T")
INLINE_IDS = 100_000
"""Up to so many ids become JSON on the event loop."""


def engine_request(body: GenerateRequest, front: Front, headers: Headers) -> tuple[EngineRequest, bool]:
    """The request, and whether its answer is a list. Raises BadRequest naming the field that cannot be served."""
    refuse(body, REFUSED_GENERATE)
    if (body.text is None) == (body.input_ids is None):
        raise BadRequest("give exactly one of text and input_ids.", param="text")
    name = "text" if body.text is not None else "input_ids"
    given: Any = body.text if body.text is not None else body.input_ids
    prompts = prompts_of(given, front.vocab_size, name)
    batch = isinstance(given[0], list) if name == "input_ids" else isinstance(given, list)
    count = len(prompts)
    fields = _spread(body.sampling_params, count, "sampling_params", SamplingFields())
    rids: list[str | None] = [None] * count
    if isinstance(body.rid, list):
        rids = [*_spread(body.rid, count, "rid", "")]
    logprobs = _logprobs(body, count)
    inputs = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, TextPrompt) and not body.add_special_tokens:
            prompt = TextPrompt(prompt.text, add_special_tokens=False)
        entry = fields[i]
        refuse(entry, REFUSED_SAMPLING)
        clamp = entry.max_new_tokens is None
        sampling = sampling_of(entry, front)
        n = 1 if entry.n is None else entry.n
        inputs.append(Input(prompt, sampling, logprobs[i], n, rids[i], "clamp" if clamp else "exact"))
    rid = body.rid if isinstance(body.rid, str) else uuid.uuid4().hex
    request = EngineRequest(
        inputs,
        rid=rid,
        stream=body.stream,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        priority=body.priority,
        routing_key=routing_key(body.routing_key, headers),
        names={"prompt": name, "seed": "sampling_seed", **(structured.names(fields[0]) if count == 1 else {})},
    )
    return request, batch or any(entry.n > 1 for entry in inputs)


def _spread(value: T | list[T] | None, count: int, name: str, default: T) -> list[T]:
    """One value for each prompt."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise BadRequest(f"{name} has {len(value)} entries for {count} prompts.", param=name)
    return value


def _logprobs(body: GenerateRequest, count: int) -> list[LogprobSpec]:
    wanted = _spread(body.return_logprob, count, "return_logprob", False)
    starts = _spread(body.logprob_start_len, count, "logprob_start_len", -1)
    tops = _spread(body.top_logprobs_num, count, "top_logprobs_num", 0)
    given: Any = body.token_ids_logprob
    if given is None or not given or isinstance(given[0], int):
        given = [given or []] * count
    fixed = _spread(given, count, "token_ids_logprob", [])
    specs = []
    for want, start, top, ids in zip(wanted, starts, tops, fixed, strict=True):
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise BadRequest("token_ids_logprob mixes ids and lists.", param="token_ids_logprob")
        if not want and (start != -1 or top or ids):
            name = "logprob_start_len" if start != -1 else "top_logprobs_num" if top else "token_ids_logprob"
            raise BadRequest(f"{name} needs return_logprob: true.", param=name)
        specs.append(LogprobSpec(output=want, top=top, token_ids=tuple(ids), prompt_start=start))
    return specs


def sampling_of(fields: SamplingFields, front: Front) -> SamplingParams:
    values: dict[str, Any] = dict(front.sampling_defaults)
    for name in SamplingParams.__struct_fields__:
        value = getattr(fields, name, None)
        if value is not None:
            values[name] = value
    if fields.stop is not None:
        values["stop"] = strings(fields.stop)
    if fields.stop_regex is not None:
        values["stop_regex"] = strings(fields.stop_regex)
    if fields.stop_token_ids is not None:
        values["stop_token_ids"] = tuple(fields.stop_token_ids)
    if fields.logit_bias is not None:
        values["logit_bias"] = bias(fields.logit_bias)
    seed = fields.sampling_seed if fields.sampling_seed is not None else fields.seed
    if fields.seed is not None and fields.sampling_seed is not None and fields.seed != fields.sampling_seed:
        raise BadRequest("seed and sampling_seed differ: send one of them.", param="sampling_seed")
    if seed is not None:
        values["seed"] = fold_seed(seed, "sampling_seed")
    values.update(structured.sampling_fields(fields, front))
    return SamplingParams(**values)


class GenerateShape(Shape):
    """Native events (each the whole answer so far of one choice), or one object, or a list of them."""

    def __init__(
        self, body: GenerateRequest, request: EngineRequest, front: Front, texts: TokenTexts, many: bool
    ) -> None:
        self._request = request
        self._texts = texts
        self._with_text = body.return_text_in_logprobs
        self._many = many
        self._weight_version = front.config.server.weight_version
        self._arrival = time.monotonic()
        self._choices: list[Choice] = []
        self._specs: list[tuple[str, LogprobSpec]] = []

    def opened(self, choices: list[Choice]) -> None:
        self._choices = choices
        self._specs = [
            (entry.rid or self._request.rid, entry.logprob) for entry in self._request.inputs for _ in range(entry.n)
        ]

    def event(self, choice: Choice, delta: Delta, out: list[bytes]) -> None:
        if not (delta.count or delta.text or delta.finish):
            return
        answer = self.answer(choice, delta.finish)
        if self._many:
            answer["index"] = choice.index
        out.append(b"data: " + _encode(answer) + b"\n\n")

    def closing(self, out: list[bytes]) -> None:
        out.append(DONE)

    def whole(self) -> bytes:
        answers = [self.answer(choice, choice.finish) for choice in self._choices]
        return _encode(answers if self._many else answers[0])

    def answer(self, choice: Choice, finish: Finish | None) -> dict[str, Any]:
        rid, spec = self._specs[choice.index]
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": None if finish is None else native_finish(finish, choice.completion_tokens),
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": choice.completion_tokens,
            "cached_tokens": choice.cached_tokens,
            "cached_tokens_details": choice.cached_by_tier,
            "pinned_tokens": choice.pinned_tokens,
            "weight_version": self._weight_version,
            "queue_time": choice.queue_time,
            "e2e_latency": time.monotonic() - self._arrival,
        }
        if spec.wanted:
            self._add_logprobs(meta, choice, spec)
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _add_logprobs(self, meta: dict[str, Any], choice: Choice, spec: LogprobSpec) -> None:
        for side, part in (("input", choice.prompt_logprobs), ("output", choice.logprobs)):
            if side == "input" and spec.prompt_start < 0:
                part = None
            texts, with_text = self._texts, self._with_text
            meta[f"{side}_token_logprobs"] = native_pairs(part, texts, with_text) if part is not None else []
            if spec.top:
                meta[f"{side}_top_logprobs"] = native_top(part, texts, with_text) if part is not None else []
            if spec.token_ids:
                rows = native_fixed(part, spec.token_ids, texts, with_text) if part is not None else []
                meta[f"{side}_token_ids_logprobs"] = rows


def native_finish(finish: Finish, length: int) -> dict[str, Any]:
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": length}
    return {"type": finish.kind, "message": finish.message or None}


async def tokenize(body: TokenizeRequest, front: Front) -> dict[str, Any]:
    """Raises BadRequest when neither or both of prompt and messages are given."""
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give exactly one of prompt and messages.", param="prompt")
    rendered: str | None = None
    if body.messages is not None:
        kwargs = template_variables(body.chat_template_kwargs)
        rendered = await front.render(
            conversation(body.messages, add_generation_prompt=body.add_generation_prompt, kwargs=kwargs)
        )
        ids = await front.encode_texts([rendered], add_special_tokens=False)
    else:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
        if len(texts) > limits.MAX_BATCH:
            raise BadRequest(f"{len(texts)} texts; the limit is {limits.MAX_BATCH}.", param="prompt")
        if (size := sum(map(len, texts))) > limits.MAX_TOOL_TEXT_CHARS:
            raise BadRequest(
                f"prompt has {size} characters; the limit is {limits.MAX_TOOL_TEXT_CHARS}: split it.", param="prompt"
            )
        ids = await front.encode_texts(texts, body.add_special_tokens)
    counts = [len(i) for i in ids]
    if sum(counts) <= INLINE_IDS:
        lists = [i.tolist() for i in ids]
    else:
        lists = await asyncio.to_thread(lambda: [i.tolist() for i in ids])
    one = not isinstance(body.prompt, list)
    answer = {
        "tokens": lists[0] if one else lists,
        "count": counts[0] if one else counts,
        "max_model_len": front.capacity,
    }
    return answer | ({"text": rendered} if body.return_text and rendered is not None else {})


def _id_arrays(tokens: list[list[Any]], vocab_size: int) -> list[np.ndarray]:
    """Raises BadRequest for entries that are no ids of this model."""
    if any(type(token) is not int for entry in tokens for token in entry):
        raise BadRequest("tokens mixes ids and lists: use one form.", param="tokens")
    return [validate.as_ids(entry, vocab_size, "tokens") for entry in tokens]


async def detokenize(body: DetokenizeRequest, front: Front) -> dict[str, Any]:
    tokens: Any = body.tokens
    if not tokens or isinstance(tokens[0], int):
        tokens = [tokens]
    if any(not isinstance(entry, list) for entry in tokens):
        raise BadRequest("tokens mixes ids and lists: use one form.", param="tokens")
    if len(tokens) > limits.MAX_BATCH:
        raise BadRequest(f"{len(tokens)} lists; the limit is {limits.MAX_BATCH}.", param="tokens")
    if sum(map(len, tokens)) <= INLINE_IDS:
        ids = _id_arrays(tokens, front.vocab_size)
    else:
        ids = await asyncio.to_thread(_id_arrays, tokens, front.vocab_size)
    texts = await front.decode(ids, body.skip_special_tokens)
    one = not body.tokens or isinstance(body.tokens[0], int)
    return {"text": texts[0] if one else texts}
