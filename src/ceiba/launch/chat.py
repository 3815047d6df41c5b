"""``ceiba chat``: a conversation in the terminal, with a model started here or with any OpenAI-compatible server.

Owns the prompt, the slash commands and the figures under each answer. Knows answers only as pieces of text from a
``Backend``; must never know how they are computed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import msgspec
from rich.console import Console

from ceiba.core.errors import CeibaError

if TYPE_CHECKING:
    from ceiba.launch.engine import Engine

HELP = """\
/system TEXT       set the system message (without TEXT: show it); starts the conversation anew
/reset             forget the conversation, keep the system message
/temperature X     0 is greedy (without X: show it)
/stats             figures of the last answer and of the session
/save FILE         write the conversation as JSON
/help              this
/exit              leave; so does Ctrl-D. Ctrl-C stops an answer.
A line that ends in \\ goes on in the next."""
HISTORY_LINES = 1000
MILD = {"temperature": 0.5, "top_p": 0.9}
"""For a model whose authors suggest nothing: what the API's neutral default (1) makes of a small model is babble."""


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Options:
    """Sampling of the next answer. None leaves a value to the server."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


class Backend(Protocol):
    name: str
    suggested: bool
    """Whether the model or its operator says how to sample it."""

    def stream(self, messages: list[dict[str, str]], options: Options, usage: Usage) -> Iterator[str]:
        """Pieces of the answer as they come; fills ``usage``. Closing the iterator stops the answer. Raises
        CeibaError."""

    def close(self) -> None: ...


class HttpBackend:
    """Any server that speaks /v1/chat/completions."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=httpx.Timeout(10.0, read=None)
        )
        try:
            models = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise CeibaError(f"no server answers at {url} ({error}): start one with ceiba serve") from None
        if models.status_code != 200:
            raise CeibaError(f"{url}: {_error_text(models)}")
        self.name = model or str(models.json()["data"][0]["id"])
        self.suggested = self._suggested()

    def _suggested(self) -> bool:
        """A server that does not say so is left its own defaults."""
        try:
            defaults = self._client.get("/model_info").json()["sampling_defaults"]
            return "temperature" in defaults or "top_p" in defaults
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return True

    def stream(self, messages: list[dict[str, str]], options: Options, usage: Usage) -> Iterator[str]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for field_name in ("temperature", "top_p", "max_tokens", "seed"):
            value = getattr(options, field_name)
            if value is not None:
                body[field_name] = value
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise CeibaError(_error_text(response))
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise CeibaError(str(event["error"].get("message", event["error"])))
                    _read_usage(event.get("usage"), usage)
                    for choice in event.get("choices", ()):
                        text = choice["delta"].get("content")
                        if text:
                            yield text
        except httpx.HTTPError as error:
            raise CeibaError(f"the connection broke: {error}") from None

    def close(self) -> None:
        self._client.close()


def _read_usage(event: dict[str, Any] | None, usage: Usage) -> None:
    if event:
        usage.prompt_tokens = event["prompt_tokens"]
        usage.completion_tokens = event["completion_tokens"]
        usage.cached_tokens = (event.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:200]}"


class EngineBackend:
    """A model in processes of our own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = engine.config.model.name
        self.suggested = bool({"temperature", "top_p"} & engine.front.sampling_defaults.keys())

    def stream(self, messages: list[dict[str, str]], options: Options, usage: Usage) -> Iterator[str]:
        sampling = {"temperature": options.temperature, "top_p": options.top_p, "sampling_seed": options.seed}
        params = {key: value for key, value in sampling.items() if value is not None}
        with contextlib.closing(self._engine.chat_stream(messages, params, options.max_tokens)) as chunks:
            for chunk in chunks:
                if chunk.usage is not None:
                    usage.prompt_tokens = chunk.usage.prompt_tokens
                    usage.cached_tokens = chunk.usage.cached_tokens
                usage.completion_tokens += chunk.count
                if chunk.text:
                    yield chunk.text

    def close(self) -> None:
        self._engine.shutdown()


@dataclass(slots=True)
class Figures:
    """One answer's."""

    usage: Usage
    first: float
    """Seconds to the first piece."""
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (self.usage.completion_tokens - 1) / (self.seconds - self.first) if self.seconds > self.first else 0.0

    def __str__(self) -> str:
        usage = self.usage
        return (
            f"{usage.completion_tokens} tokens, {self.rate:.1f} tok/s, first after {self.first:.2f} s, "
            f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
        )


@dataclass(slots=True)
class Session:
    """A conversation and its settings; reads no terminal, so it can be driven by a test or a pipe."""

    backend: Backend
    console: Console
    options: Options = field(default_factory=Options)
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[Figures] = field(default_factory=list)
    show_figures: bool = True

    def say(self, text: str) -> bool:
        """Send one user message and print the answer as it comes. Returns whether the answer came without an error.
        An answer stopped with Ctrl-C stays in the conversation as far as it came."""
        turn = [*self._prefix(), *self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        usage, start, first = Usage(), time.perf_counter(), 0.0
        fine = True
        try:
            for piece in self.backend.stream(turn, self.options, usage):
                first = first or time.perf_counter() - start
                pieces.append(piece)
                self.console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            self.console.print(" …", end="", style="dim")
        except CeibaError as error:
            fine = False
            self.console.print(f"error: {error.message}", style="red", markup=False, highlight=False)
        self.console.print()
        if pieces:
            self.messages += [turn[-1], {"role": "assistant", "content": "".join(pieces)}]
            self.answers.append(Figures(usage, first, time.perf_counter() - start))
            if self.show_figures:
                self.console.print(str(self.answers[-1]), style="dim", highlight=False)
        return fine

    def _prefix(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def command(self, line: str) -> bool:
        """Run one slash command; False means leave."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        match name:
            case "exit" | "quit" | "q":
                return False
            case "system":
                self._set_system(rest)
            case "reset":
                self.messages.clear()
                self._note("the conversation is empty")
            case "temperature" | "temp":
                self._set_temperature(rest)
            case "stats":
                self._note(self._stats())
            case "save":
                self._save(rest)
            case "help" | "h" | "?":
                self._note(HELP)
            case _:
                self._note(f"no command /{name}; there are:\n{HELP}")
        return True

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, highlight=False)

    def _set_system(self, text: str) -> None:
        if text:
            self.system = text
            self.messages.clear()
            self._note("system message set; the conversation is empty")
        else:
            self._note(self.system or "no system message")

    def _set_temperature(self, text: str) -> None:
        if text:
            try:
                value = float(text)
            except ValueError:
                self._note(f"/temperature takes a number, not {text!r}")
                return
            if not 0.0 <= value <= 100.0:
                self._note(f"/temperature {value:g}: it must lie in 0..100")
                return
            self.options.temperature = value
        shown = self.options.temperature
        self._note(f"temperature {'as the model suggests' if shown is None else f'{shown:g}'}")

    def _stats(self) -> str:
        if not self.answers:
            return "no answer yet"
        tokens = sum(a.usage.completion_tokens for a in self.answers)
        prompt, cached = (
            sum(getattr(a.usage, name) for a in self.answers) for name in ("prompt_tokens", "cached_tokens")
        )
        seconds = sum(a.seconds for a in self.answers)
        return (
            f"last answer: {self.answers[-1]}\n"
            f"session: {len(self.answers)} answers, {tokens} tokens in {seconds:.1f} s, "
            f"{cached} of {prompt} prompt tokens cached"
        )

    def _save(self, name: str) -> None:
        if not name:
            self._note("/save needs a file name")
            return
        record = {"model": self.backend.name, "messages": [*self._prefix(), *self.messages]}
        try:
            Path(name).expanduser().write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        except OSError as error:
            self._note(f"/save {name}: {error.strerror}")
        else:
            self._note(f"saved {len(self.messages)} messages to {name}")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="ceiba chat",
        description="Talk to a model in the terminal. Other flags go to the model, as for ceiba serve.",
        allow_abbrev=False,
    )
    p.add_argument("--url", help="talk to a running server instead of starting a model")
    p.add_argument("--api-key", help="the server's key")
    p.add_argument("--model", help="with --url: which of its models")
    p.add_argument("--system", default="", help="system message")
    for name, value in MILD.items():
        words = f"default: what the model's authors suggest, else {value:g}"
        p.add_argument(f"--{name.replace('_', '-')}", type=float, help=words)
    p.add_argument("--max-tokens", type=int)
    p.add_argument("--seed", type=int)
    p.add_argument("--each-line", action="store_true", help="piped input: every line is a turn, not all one message")
    p.add_argument("--no-stats", action="store_true", help="no figures under the answers")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when an answer failed in piped mode; 2 when there is nobody to talk to."""
    args, rest = parser().parse_known_args(argv)
    piped = not sys.stdin.isatty()
    console = Console()
    errors = Console(stderr=True)
    try:
        backend = _backend(args, rest, errors)
    except CeibaError as error:
        errors.print(f"error: {error.message}", style="red", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130
    options = Options(args.temperature, args.top_p, args.max_tokens, args.seed)
    if not backend.suggested and options.temperature is None and options.top_p is None:
        options.temperature, options.top_p = MILD["temperature"], MILD["top_p"]
    session = Session(backend, console, options, args.system, show_figures=not args.no_stats and not piped)
    try:
        return _piped(session, args.each_line) if piped else _interactive(session)
    except KeyboardInterrupt:
        return 130
    finally:
        backend.close()


def _backend(args: argparse.Namespace, rest: list[str], errors: Console) -> Backend:
    if args.url:
        if rest:
            raise CeibaError(f"{' '.join(rest)}: flags of a model started here do not go with --url")
        return HttpBackend(args.url, args.model, args.api_key)
    from ceiba.launch.engine import Engine

    words = ["--model-path", args.model, *rest] if args.model else rest
    with errors.status("loading the model …"):
        return EngineBackend(Engine.from_args(words))


def _piped(session: Session, each_line: bool) -> int:
    text = sys.stdin.read()
    turns = text.splitlines() if each_line else [text]
    fine = True
    for turn in turns:
        if not turn.strip():
            continue
        if each_line and turn.startswith("/"):
            if not session.command(turn.strip()):
                break
        else:
            fine = session.say(turn.strip()) and fine
    return 0 if fine else 1


def _interactive(session: Session) -> int:
    session.console.print(f"[bold]{session.backend.name}[/bold]  [dim]/help for commands, Ctrl-D to leave[/dim]")
    with _history():
        while True:
            try:
                line = _read()
            except EOFError:
                session.console.print()
                return 0
            except KeyboardInterrupt:
                session.console.print("[dim]Ctrl-D or /exit to leave[/dim]")
                continue
            if not line:
                continue
            if line.startswith("/"):
                if not session.command(line):
                    return 0
            else:
                session.say(line)


def _read() -> str:
    parts = [input("\n> ")]
    while parts[-1].endswith("\\"):
        parts[-1] = parts[-1][:-1]
        parts.append(input(". "))
    return "\n".join(parts).strip()


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing with the prompts of earlier sessions, where the platform has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    from ceiba.config.env import cache_dir

    file = cache_dir() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
            file.chmod(0o600)


if __name__ == "__main__":
    sys.exit(main())
