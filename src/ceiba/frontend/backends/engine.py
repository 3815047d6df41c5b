"""Programs on an engine in this process: ``Runtime(model_path)``, or any ``ceiba.Engine`` that exists already.

Owns the adaptation. Imports no engine: it takes one, or makes one through the package's own name for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ceiba
from ceiba.core.errors import BadRequest
from ceiba.frontend.backends.base import Prompt, Result
from ceiba.frontend.backends.native import NativeBackend


class EngineBackend(NativeBackend):
    """``engine``: a ``ceiba.Engine``; whoever made it shuts it down."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = engine

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return self.engine.render(messages, add_generation_prompt)

    def _ask(self, body: dict[str, Any]) -> Any:
        return self.engine.generate(**_renamed(body))

    def _ask_stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.engine.generate(**_renamed(body), stream=True)

    def _tokenize(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.engine.tokenize(text, add_special_tokens) for text in texts]

    def _ask_chat(
        self, prompt: Prompt, sampling: Mapping[str, Any], fields: Mapping[str, Any], stream: bool
    ) -> Iterator[Result]:
        raise BadRequest("images go through a server: use RuntimeEndpoint instead of an engine.", param="image")

    def flush_cache(self) -> Any:
        return self.engine.flush_cache()

    def server_info(self) -> dict[str, Any]:
        return self.engine.server_info()


class Runtime(EngineBackend):
    """Starts an engine of its own in this process. ``flags``: those of ``ceiba serve`` with underscores."""

    def __init__(self, model_path: str | None = None, **flags: Any) -> None:
        super().__init__(ceiba.Engine(model_path, **flags))

    @property
    def endpoint(self) -> Runtime:
        """This backend itself."""
        return self

    def shutdown(self) -> None:
        self.engine.shutdown()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def _renamed(body: dict[str, Any]) -> dict[str, Any]:
    """The engine's name for ``text`` is ``prompt``."""
    return {("prompt" if name == "text" else name): value for name, value in body.items()}
