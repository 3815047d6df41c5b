"""POST /v1/completions: texts or token ids in, text out, with echo, best_of and the older form of log-probabilities.

Owns the completion request's meaning and the form of its answer. Must never know how tokens are made.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
from starlette.datastructures import Headers

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.core.sampling import LogprobSpec
from ceiba.server import structured, validate
from ceiba.server.choices import Choice, Delta, Positions, join
from ceiba.server.front import Front
from ceiba.server.logprobs import LegacyLogprobs, TokenTexts
from ceiba.server.openai import translate
from ceiba.server.openai.chat import finish_reason
from ceiba.server.openai.schemas import REFUSED_COMPLETION, CompletionRequest, Prompt
from ceiba.server.openai.usage import Usage
from ceiba.server.request import EngineRequest, Input, TextPrompt
from ceiba.server.sse import DONE, Shape

_encode = msgspec.json.Encoder().encode
DEFAULT_MAX_TOKENS = 16
NAMES = {**translate.NAMES, "top_logprobs_num": "logprobs"}


def prompts_of(prompt: Prompt, vocab_size: int, name: str) -> list[TextPrompt | np.ndarray]:
    """The prompts of any of the four forms. Raises BadRequest naming ``name``."""
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise BadRequest(f"{name} is empty: give a text or at least one token id.", param=name)
    if len(prompt) > limits.MAX_BATCH and not isinstance(prompt[0], int):
        raise BadRequest(f"{len(prompt)} prompts; the limit is {limits.MAX_BATCH}: split the request.", param=name)
    kind = type(prompt[0])
    if len(set(map(type, prompt))) > 1:
        raise BadRequest(f"{name} mixes texts, token ids and lists: use one form.", param=name)
    if kind is int:
        return [validate.as_ids(prompt, vocab_size, name)]  # type: ignore[arg-type]
    if kind is str:
        return [TextPrompt(text) for text in prompt]  # type: ignore[arg-type]
    return [validate.as_ids(ids, vocab_size, name) for ids in prompt]  # type: ignore[arg-type]


def engine_request(body: CompletionRequest, front: Front, headers: Headers) -> EngineRequest:
    """Raises BadRequest naming the field that cannot be served."""
    translate.refuse(body, REFUSED_COMPLETION)
    translate.check_stream(body)
    n = 1 if body.n is None else body.n
    best_of = n if body.best_of is None else body.best_of
    if not 1 <= n <= limits.MAX_N:
        raise BadRequest(f"n is {n}; it must lie in 1..{limits.MAX_N}.", param="n")
    if not n <= best_of <= limits.MAX_N:
        raise BadRequest(f"best_of is {best_of}; it must lie in n ({n})..{limits.MAX_N}.", param="best_of")
    if best_of > n and body.stream:
        raise BadRequest("best_of larger than n cannot stream: all choices must end first.", param="best_of")
    if body.logprobs is not None and body.logprobs < 0:
        raise BadRequest(f"logprobs is {body.logprobs}; it must be at least 0.", param="logprobs")
    wanted = body.logprobs is not None
    default = front.sampling_defaults.get("max_new_tokens", DEFAULT_MAX_TOKENS)
    longest = default if body.max_tokens is None else body.max_tokens
    spec = LogprobSpec(
        output=(wanted or best_of > n) and longest != 0,
        top=body.logprobs or 0,
        prompt_start=0 if wanted and body.echo else -1,
    )
    sampling = translate.sampling(body, front, longest)
    prompts = prompts_of(body.prompt, front.vocab_size, "prompt")
    if body.suffix:
        if body.echo:
            raise BadRequest("echo and suffix exclude each other.", param="echo")
        prompts, sampling = translate.infilled(prompts, body.suffix, sampling, front)
    inputs = [
        Input(prompt, sampling, spec, best_of, length="clamp" if body.max_tokens is None else "exact")
        for prompt in prompts
    ]
    return EngineRequest(
        inputs,
        rid=translate.rid(body, "cmpl"),
        stream=bool(body.stream),
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        priority=body.priority,
        routing_key=translate.routing_key(body.routing_key, headers),
        names={**NAMES, **({"n": "best_of"} if body.best_of is not None else {}), **structured.names(body)},
    )


class CompletionShape(Shape):
    """Text completion chunks, or one text completion."""

    def __init__(self, body: CompletionRequest, request: EngineRequest, front: Front, texts: TokenTexts) -> None:
        self._body = body
        self._request = request
        self._front = front
        self._texts = texts
        self._top = body.logprobs
        self._n = 1 if body.n is None else body.n
        self._created = int(time.time())
        self._model = body.model or front.config.model.name
        self._usage = Usage(request, body.stream_options, front.config.server.enable_cache_report)
        self._choices: list[Choice] = []
        self._heads: list[bytes] = []
        self._legacy: list[LegacyLogprobs] = []
        self._echoed: list[bool] = []
        common = {"id": request.rid, "object": "text_completion", "created": self._created, "model": self._model}
        self._common = b"data: " + _encode(common)[:-1]

    def opened(self, choices: list[Choice]) -> None:
        self._choices = choices
        self._heads = [self._common + b',"choices":[{"index":%d,"text":' % c.index for c in choices]
        self._legacy = [LegacyLogprobs(self._texts, self._top or 0) for _ in choices]
        self._echoed = [not self._body.echo] * len(choices)

    def _prompt_text(self, choice: Choice) -> str:
        at = choice.index
        for entry in self._request.inputs:
            if at < entry.n:
                if isinstance(entry.prompt, TextPrompt):
                    return entry.prompt.text
                break
            at -= entry.n
        tokenizer = self._front.tokenizer
        return tokenizer.decode(choice.prompt, skip_special_tokens=False) if tokenizer is not None else ""

    def event(self, choice: Choice, delta: Delta, out: list[bytes]) -> None:
        finish, text, index = delta.finish, delta.text, choice.index
        part = delta.logprobs if self._top is not None else None
        if not self._echoed[index]:
            if not (delta.count or finish):
                return  # log-probabilities of the prompt still come in pieces
            self._echoed[index] = True
            text = self._prompt_text(choice) + text
            if self._top is not None:
                part = _joined(choice.prompt_logprobs, part)
        if finish is None and not delta.count and not text:
            return
        logprobs = b"null" if part is None else _encode(self._legacy[index].add(part))
        if finish is None:
            end = b"null"
        else:
            reason, matched = finish_reason(choice)
            end = b'%b,"matched_stop":%b' % (_encode(reason), _encode(matched))
        out.append(
            b'%b%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n'
            % (self._heads[index], _encode(text), logprobs, end, self._usage.in_chunk(self._choices))
        )

    def closing(self, out: list[bytes]) -> None:
        if self._usage.at_end:
            out.append(self._common + b',"choices":[],"usage":' + _encode(self._usage.total(self._choices)) + b"}\n\n")
        out.append(DONE)

    def whole(self) -> bytes:
        chosen: list[Choice] = []
        at = 0
        for entry in self._request.inputs:
            chosen += _best(self._choices[at : at + entry.n], self._n)
            at += entry.n
        return _encode(
            {
                "id": self._request.rid,
                "object": "text_completion",
                "created": self._created,
                "model": self._model,
                "choices": [self._choice(index, choice) for index, choice in enumerate(chosen)],
                "usage": self._usage.total(self._choices),
            }
        )

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.finish is not None
        reason, matched = finish_reason(choice)
        echo = bool(self._body.echo)
        part = None
        if self._top is not None:
            part = _joined(choice.prompt_logprobs if echo else None, choice.logprobs)
        return {
            "index": index,
            "text": (self._prompt_text(choice) if echo else "") + choice.text,
            "logprobs": None if part is None else self._legacy[choice.index].add(part),
            "finish_reason": reason,
            "matched_stop": matched,
        }


def _joined(first: Positions | None, second: Positions | None) -> Positions | None:
    return join([part for part in (first, second) if part is not None])


def _best(choices: list[Choice], n: int) -> list[Choice]:
    """The ``n`` with the best mean log-probability per token, best first; in order when all are wanted."""
    if len(choices) == n:
        return choices

    def score(choice: Choice) -> float:
        part = choice.logprobs
        return float(np.mean(part.values)) if part is not None and len(part) else -np.inf

    return sorted(choices, key=score, reverse=True)[:n]
