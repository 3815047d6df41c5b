"""Programs on a Ceiba server: ``RuntimeEndpoint(url)``.

Owns nothing but the way to the server. Scores, generations and warm-ups are ``native``'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ceiba.client.answers import Text
from ceiba.client.clients import SyncClient
from ceiba.client.content import openai_names
from ceiba.frontend.backends.base import Prompt, Result
from ceiba.frontend.backends.native import NativeBackend


class RuntimeEndpoint(NativeBackend):
    """A running server. ``base_url``: where it listens; ``options``: those of ``ceiba.client.SyncClient``."""

    def __init__(self, base_url: str, api_key: str | None = None, **options: Any) -> None:
        super().__init__()
        self.client = SyncClient(base_url, api_key, **options)

    @property
    def base_url(self) -> str:
        return self.client.url

    def get_model_name(self) -> str:
        return self.client.models()[0]

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        body = {"messages": messages, "add_generation_prompt": add_generation_prompt, "return_text": True}
        return self.client.call("POST", "/v1/tokenize", body)["text"]

    def _ask(self, body: dict[str, Any]) -> Any:
        return self.client.call("POST", "/generate", body)

    def _ask_stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        fields = {name: value for name, value in body.items() if name != "text"}
        with self.client.generate(body["text"], stream=True, **fields) as stream:
            for _ in stream:
                yield stream.text.raw
            yield stream.text.raw

    def _tokenize(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return self.client.tokenize(texts, add_special_tokens=add_special_tokens)

    def _ask_chat(
        self, prompt: Prompt, sampling: Mapping[str, Any], fields: Mapping[str, Any], stream: bool
    ) -> Iterator[Result]:
        options = openai_names({**sampling, **fields})
        if prompt.continued:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        assert prompt.messages is not None
        if not stream:
            yield _chat_result(self.client.chat(prompt.messages, **options))
            return
        with self.client.chat(prompt.messages, stream=True, **options) as pieces:
            for _ in pieces:
                yield _chat_result(pieces.text)
            yield _chat_result(pieces.text)

    def flush_cache(self) -> Any:
        return self.client.flush_cache()

    def server_info(self) -> dict[str, Any]:
        return self.client.server_info()

    def close(self) -> None:
        self.client.close()


def _chat_result(text: Text) -> Result:
    usage = text.usage
    meta = {
        "id": text.id,
        "finish_reason": {"type": text.finish_reason},
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    return Result(str(text), meta)
