"""Which class gets which part of the configuration: the front's side of the graph. No torch in here.

Owns construction only. The scheduler's side is in ``children``, next to the process that runs it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ceiba.checkpoint import open_checkpoint
from ceiba.checkpoint.base import Checkpoint, TokenizerSource
from ceiba.config.records import Config, ModelFacts
from ceiba.core.ports import FrontPort
from ceiba.text.detokenizer import Detokenizer
from ceiba.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import uvicorn

    from ceiba.server.front import Front
    from ceiba.text.template import ChatTemplate

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Of generation_config.json: what a model's authors suggest and a request may leave out."""
FLUSH_SECONDS = 2
"""How long connections may stay open once the server ends: enough for an error to arrive."""


@dataclass(frozen=True, slots=True)
class Text:
    """What this process knows of the model: ids and words, no weights."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    facts: ModelFacts
    sampling_defaults: Mapping[str, Any]


def open_text(config: Config) -> Text:
    """Tokenizer and chat template as the configuration names them; a model's own unless another path is given."""
    from ceiba.text.template import choose_template

    model = config.model
    checkpoint = open_checkpoint(model.path, model.load_format, progress=False)
    try:
        facts = checkpoint.facts()
        suggested = checkpoint.generation_config
        source = _source(config, checkpoint)
    finally:
        checkpoint.close()
    tokenizer = load_tokenizer(source)
    template = choose_template(
        model.chat_template,
        source.chat_templates,
        tokenizer.special_tokens,
        defaults=config.server.default_chat_template_kwargs,
    )
    defaults = {name: suggested[name] for name in SAMPLING_FIELDS if suggested.get(name) is not None}
    return Text(tokenizer, template, facts, defaults)


def _source(config: Config, model: Checkpoint) -> TokenizerSource:
    path = config.model.tokenizer_path
    if not path or path == config.model.path:
        return model.tokenizer()
    other = open_checkpoint(path, progress=False)
    try:
        return other.tokenizer()
    finally:
        other.close()


def open_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer alone, for a detokenizer in a process of its own."""
    checkpoint = open_checkpoint(config.model.path, config.model.load_format, progress=False)
    try:
        return load_tokenizer(_source(config, checkpoint))
    finally:
        checkpoint.close()


def make_detokenizer(config: Config, tokenizer: Tokenizer) -> Detokenizer:
    return Detokenizer(tokenizer, stream_interval=config.scheduler.stream_interval)


def make_front(config: Config, text: Text, port: FrontPort) -> Front:
    from ceiba.obs.metrics import FrontMetrics
    from ceiba.server.front import Front

    return Front(
        config,
        text.tokenizer,
        text.template,
        port,
        vocab_size=text.facts.vocab_size,
        facts=text.facts,
        sampling_defaults=text.sampling_defaults,
        metrics=FrontMetrics(config.obs.enable_metrics, config.model.name),
    )


def make_http_server(config: Config, front: Front) -> uvicorn.Server:
    """The HTTP server of ``front``, not started. The graph has started the front, so the app's lifespan stays off."""
    from ceiba.server.app import create_app

    return _server(config, create_app(front, config))


def make_metrics_server(config: Config, front: Front) -> uvicorn.Server:
    """/metrics alone, for --metric-port."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def metrics(request: Request) -> Response:
        return Response(front.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return _server(config, Starlette(routes=[Route("/metrics", metrics)]))


def _server(config: Config, app: Any) -> uvicorn.Server:
    import uvicorn

    from ceiba.launch.http_protocol import PunctualProtocol

    class Server(uvicorn.Server):
        """Leaves signals to ``launch.run``, which decides what they mean for all parts."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    http_level = config.obs.log_level_http
    if http_level is None:  # its start and stop lines say nothing that ours do not
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return Server(
        uvicorn.Config(
            app,
            http=PunctualProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=http_level in ("info", "debug"),
            server_header=False,
            timeout_keep_alive=config.server.timeout_keep_alive,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
    )
