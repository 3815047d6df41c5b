"""The process in which chat templates run, because they come from strangers and may loop, grow or crash.

Owns the Jinja environment (immutable sandbox, the extras that Hugging Face templates rely on) and a loop that answers
length-prefixed msgpack requests on standard input with answers on standard output. Every request runs under a kernel
alarm that ends this process, and the process under an address-space limit, so that no construct of the language needs
to be foreseen. Must never know tokenizers or requests.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from datetime import datetime, timedelta, timezone
from typing import Any, BinaryIO, NoReturn

import jinja2
import msgspec
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 2 << 30
MAX_FRAME = 1 << 30


class GenerationBlock(Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's part for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """The dialect of chat templates, as transformers documents it."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, LoopControls], cache_size=0
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class Renderer:
    """Compiled templates by number."""

    def __init__(self) -> None:
        self._env = environment()
        self._zone = 0
        self._env.globals["strftime_now"] = self._strftime_now
        self._templates: list[jinja2.Template] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """``{"op": "load", "source"}`` -> ``{"id"}``; ``{"op": "render", "id", "variables", "limit"}`` -> ``{"text"}``;
        a template's own refusal, or its mistake, is ``{"error", "refused"}``."""
        try:
            self._zone = request["zone"]
            if request["op"] == "load":
                self._templates.append(self._env.from_string(request["source"]))
                return {"id": len(self._templates) - 1}
            limit, size, parts = request["limit"], 0, []
            for part in self._templates[request["id"]].generate(**request["variables"]):
                size += len(part)
                if size > limit:
                    return {"error": f"the result is longer than {limit} characters", "refused": True}
                parts.append(part)
            return {"text": "".join(parts)}
        except jinja2.TemplateSyntaxError as error:
            return {"error": f"line {error.lineno}: {error.message}", "refused": False}
        except jinja2.TemplateError as error:
            return {"error": str(error), "refused": type(error) is jinja2.TemplateError}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500], "refused": False}

    def _strftime_now(self, form: str) -> str:
        """Local time of the parent, whose TZ this process does not have."""
        return datetime.now(timezone(timedelta(seconds=self._zone))).strftime(form)


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    return stream.read(length) if length <= MAX_FRAME else None


def main(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Answer until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    renderer = Renderer()
    while (frame := _read(stdin)) is not None:
        request = msgspec.msgpack.decode(frame)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        data = msgspec.msgpack.encode(renderer.answer(request))
        signal.setitimer(signal.ITIMER_REAL, 0)
        stdout.write(struct.pack("<I", len(data)) + data)
        stdout.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
