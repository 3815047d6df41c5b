"""Backends that speak the engine's own protocol: what is common to a server and an engine in this process.

Owns how generations, scores and warm-ups become native requests. Subclasses say how a request is performed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ceiba.core.errors import BadRequest
from ceiba.frontend.backends.base import Prompt, Result, Scores
from ceiba.frontend.backends.template import SeamFinder
from ceiba.frontend.choices import Likelihood


class NativeBackend(ABC):
    messages_only = False

    def __init__(self) -> None:
        self._seams = SeamFinder(self._render)

    # ── performed by subclasses ──────────────────────────────────────────────

    @abstractmethod
    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str: ...

    @abstractmethod
    def _ask(self, body: dict[str, Any]) -> Any:
        """POST /generate, or its equal: an answer, or a list for a list of prompts."""

    @abstractmethod
    def _ask_stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Answers as they grow."""

    @abstractmethod
    def _tokenize(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]: ...

    @abstractmethod
    def _ask_chat(
        self, prompt: Prompt, sampling: Mapping[str, Any], fields: Mapping[str, Any], stream: bool
    ) -> Iterator[Result]:
        """Messages with images: the whole text so far, once or as it grows."""

    @abstractmethod
    def flush_cache(self) -> Any: ...

    @abstractmethod
    def server_info(self) -> dict[str, Any]: ...

    # ── the backend protocol ─────────────────────────────────────────────────

    def seam(self, roles: tuple[str, ...]) -> str:
        return self._seams.seam(roles)

    def generate(self, prompt: Prompt, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> Result:
        if prompt.messages is not None:
            return list(self._ask_chat(prompt, sampling, fields, stream=False))[-1]
        return _result(self._ask(_body(prompt, sampling, fields)))

    def stream(self, prompt: Prompt, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[Result]:
        if prompt.messages is not None:
            yield from self._ask_chat(prompt, sampling, fields, stream=True)
            return
        for answer in self._ask_stream(_body(prompt, sampling, fields)):
            yield _result(answer)

    def warm(self, prompt: Prompt) -> None:
        if prompt.messages is None and prompt.text:
            self._ask(_body(prompt, {"max_new_tokens": 0}, {}))

    def score(self, prompt: Prompt, choices: Sequence[str], unconditional: bool) -> Scores:
        """One scoring request per choice, sent together. Prompt and choice are tokenized as one text, so the score is
        that of the text the model would have written."""
        if prompt.messages is not None:
            raise BadRequest("select does not work in a state with images: use gen with regex.", param="choices")
        texts = [prompt.text + choice for choice in choices]
        ids = self._tokenize([prompt.text, *texts] if prompt.text else texts, not prompt.templated)
        common = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*ids, strict=False)))
        rows = ids[-len(texts) :]
        common = min(common, *(len(row) - 1 for row in rows))  # a choice that begins another keeps a token of its own
        answers = self._score_rows(rows, common)
        conditional = [_values(answer, len(row) - common) for answer, row in zip(answers, rows, strict=True)]
        free: list[tuple[float, ...]] = [()] * len(rows)
        if unconditional:
            begin = self._tokenize([""], True)[0]
            bare = [[*begin, *row[common:]] for row in rows]
            found = self._score_rows(bare, len(begin))
            free = [_values(answer, len(row) - len(begin)) for answer, row in zip(found, bare, strict=True)]
        entries = [Likelihood(c, u) for c, u in zip(conditional, free, strict=True)]
        metas = [answer["meta_info"] for answer in answers]
        return Scores(
            entries,
            {
                "input_token_logprobs": [meta["input_token_logprobs"] for meta in metas],
                "prompt_tokens": sum(meta["prompt_tokens"] for meta in metas),
                "cached_tokens": sum(meta["cached_tokens"] for meta in metas),
            },
        )

    def _score_rows(self, rows: list[list[int]], start: int) -> list[dict[str, Any]]:
        return self._ask(
            {
                "input_ids": rows,
                "sampling_params": {"max_new_tokens": 0, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": start,
            }
        )


def _values(answer: dict[str, Any], count: int) -> tuple[float, ...]:
    """Log-probabilities of the last ``count`` tokens; the first token of a text has none and is left out."""
    found = answer["meta_info"]["input_token_logprobs"][-count:]
    return tuple(value for value, *_ in found if value is not None)


def _body(prompt: Prompt, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    if not prompt.text:
        raise BadRequest("gen needs text or turns before it: this state is empty.")
    special = {"add_special_tokens": False} if prompt.templated else {}
    return {"text": prompt.text, **special, "sampling_params": dict(sampling), **fields}


def _result(answer: dict[str, Any]) -> Result:
    return Result(answer["text"], answer["meta_info"])
