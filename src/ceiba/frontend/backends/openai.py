"""Programs on any OpenAI-compatible service: ``OpenAI("gpt-4o-mini")``, through the ``openai`` package.

Owns the translation. A chat API shows neither its template nor the likelihood of given text, so there ``select`` is
refused, and there is no prefix to warm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ceiba.core.errors import BadRequest, ConfigError
from ceiba.frontend.backends.base import Prompt, Result, Scores
from ceiba.frontend.choices import Likelihood

_DIRECT = {
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "stop": "stop",
    "sampling_seed": "seed",
}
"""Native name -> OpenAI's. Other parameters go along as extensions, which the service may refuse by name."""


class OpenAI:
    """``model_name``: the service's name for the model. ``is_chat_model``: False for /v1/completions.

    ``options``: those of ``openai.OpenAI`` (api_key, base_url, timeout, max_retries, …).
    """

    def __init__(self, model_name: str, is_chat_model: bool = True, **options: Any) -> None:
        try:
            import openai
        except ImportError:
            raise ConfigError("the OpenAI backend needs the openai package: pip install 'ceiba[openai]'.") from None
        self.model_name = model_name
        self.messages_only = is_chat_model
        self._client = openai.OpenAI(**options)

    def seam(self, roles: tuple[str, ...]) -> str:
        raise BadRequest("a completions API has no chat template: use text and gen without roles.")

    def generate(self, prompt: Prompt, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> Result:
        _refuse(fields)
        if prompt.messages is not None:
            answer = self._client.chat.completions.create(**self._chat(prompt, sampling))
            choice = answer.choices[0]
            return Result(choice.message.content or "", _meta(answer.id, choice.finish_reason, answer.usage))
        done = self._client.completions.create(**self._completion(prompt, sampling))
        return Result(done.choices[0].text, _meta(done.id, done.choices[0].finish_reason, done.usage))

    def stream(self, prompt: Prompt, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[Result]:
        _refuse(fields)
        create: Any = self._client.completions.create
        if prompt.messages is not None:
            create = self._client.chat.completions.create
        request = self._chat(prompt, sampling) if prompt.messages is not None else self._completion(prompt, sampling)
        text, reason, usage, name = "", None, None, ""
        for event in create(**request, stream=True, stream_options={"include_usage": True}):
            usage, name = event.usage or usage, event.id
            for choice in event.choices:
                text += (choice.delta.content if prompt.messages is not None else choice.text) or ""
                reason = choice.finish_reason or reason
            yield Result(text, _meta(name, reason, usage))

    def score(self, prompt: Prompt, choices: Sequence[str], unconditional: bool) -> Scores:
        """Through ``echo`` and ``logprobs`` of /v1/completions."""
        if self.messages_only:
            raise BadRequest(
                "select needs the likelihood of given text, which chat APIs do not show: use gen with regex, "
                "RuntimeEndpoint, or OpenAI(…, is_chat_model=False).",
                param="choices",
            )
        conditional = self._echoed([prompt.text + choice for choice in choices], len(prompt.text))
        free = self._echoed(list(choices), 0) if unconditional else [()] * len(choices)
        return Scores([Likelihood(c, u) for c, u in zip(conditional, free, strict=True)])

    def _echoed(self, texts: list[str], start: int) -> list[tuple[float, ...]]:
        """Log-probabilities of the tokens that reach beyond character ``start``."""
        answer = self._client.completions.create(
            model=self.model_name, prompt=texts, max_tokens=0, echo=True, logprobs=0, temperature=0
        )
        rows = []
        for choice, text in zip(answer.choices, texts, strict=True):
            found = choice.logprobs
            if found is None or found.text_offset is None or found.token_logprobs is None:
                raise BadRequest("this service returns no log-probabilities of the prompt, which select needs.")
            ends = [*found.text_offset[1:], len(text)]
            values = [v for v, end in zip(found.token_logprobs, ends, strict=True) if end > start and v is not None]
            rows.append(tuple(values))
        return rows

    def warm(self, prompt: Prompt) -> None:
        """Nothing: such a service has no request that only fills its cache."""

    def flush_cache(self) -> Any:
        raise BadRequest("an OpenAI service has no cache of ours to flush.")

    def server_info(self) -> dict[str, Any]:
        raise BadRequest("an OpenAI service tells nothing about its server.")

    def _chat(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        request, extra = self._common(sampling)
        length = sampling.get("max_new_tokens")
        if length is not None:
            request["max_completion_tokens"] = length
        schema = extra.pop("json_schema", None)
        if schema is not None:
            inner = {"name": "output", "schema": msgspec.json.decode(schema), "strict": True}
            request["response_format"] = {"type": "json_schema", "json_schema": inner}
        if prompt.continued:
            extra |= {"continue_final_message": True, "add_generation_prompt": False}
        return {**request, "messages": prompt.messages, "extra_body": extra}

    def _completion(self, prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
        request, extra = self._common(sampling)
        length = sampling.get("max_new_tokens")
        if length is not None:
            request["max_tokens"] = length
        return {**request, "prompt": prompt.text, "extra_body": extra}

    def _common(self, sampling: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        request: dict[str, Any] = {"model": self.model_name}
        extra: dict[str, Any] = {}
        for name, value in sampling.items():
            if name in _DIRECT:
                request[_DIRECT[name]] = value
            elif name == "min_new_tokens":
                extra["min_tokens"] = value
            elif name != "max_new_tokens":
                extra[name] = value
        return request, extra


def _refuse(fields: Mapping[str, Any]) -> None:
    for name in fields:
        raise BadRequest(f"gen: {name} is not available with the OpenAI backend; use RuntimeEndpoint.", param=name)


def _meta(name: str, reason: str | None, usage: Any) -> dict[str, Any]:
    details = getattr(usage, "prompt_tokens_details", None)
    return {
        "id": name,
        "finish_reason": {"type": reason},
        "prompt_tokens": getattr(usage, "prompt_tokens", 0),
        "completion_tokens": getattr(usage, "completion_tokens", 0),
        "cached_tokens": getattr(details, "cached_tokens", 0) or 0,
    }
