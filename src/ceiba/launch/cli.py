"""The ``ceiba`` command: which command was meant, help, errors as one clear message. It imports a command's module only
to run it and must stay quick: no torch, no HTTP.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from ceiba import __version__


@dataclass(frozen=True, slots=True)
class Command:
    summary: str
    target: str
    """module of ``main(argv) -> int``; empty: not available yet, and ``summary`` says what instead"""
    examples: tuple[str, ...] = ()


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "serve a model over HTTP, with OpenAI's API",
        "ceiba.launch.commands.serve",
        (
            "ceiba serve                                    # the embedded model on 127.0.0.1:30000",
            "ceiba serve ./model.gguf --port 8000",
            "ceiba serve Qwen/Qwen2.5-7B-Instruct --api-key KEY --host 0.0.0.0",
            "ceiba serve --max-total-tokens 65536 --chunked-prefill-size 512 --schedule-policy lpm",
        ),
    ),
    "chat": Command(
        "talk to a model in the terminal",
        "ceiba.launch.chat",
        (
            "ceiba chat                                     # starts the embedded model itself",
            "ceiba chat --url http://127.0.0.1:30000        # a running server",
            "echo 'What is the capital of France?' | ceiba chat --temperature 0",
        ),
    ),
    "bench": Command(
        "measure: bench serve | offline | one-batch",
        "",
        (
            "ceiba bench serve --workload burst",
            "ceiba bench serve --dataset-name random --random-input 1024 --random-output 128 --num-prompts 100",
            "ceiba bench offline --num-prompts 64",
            "ceiba bench one-batch --batch-size 8",
        ),
    ),
    "pull": Command(
        "fetch a model and print where it is",
        "ceiba.checkpoint.catalogue",
        (
            "ceiba pull                                     # the embedded model",
            "ceiba pull --list",
        ),
    ),
    "flags": Command(
        "the server's flags and what works on this machine",
        "ceiba.launch.commands.flags",
        (
            "ceiba flags",
            "ceiba flags prefill                            # those with this text",
            "ceiba flags --all speculative                  # the refused ones too, with the reason",
            "ceiba flags --json",
        ),
    ),
    "doctor": Command(
        "check this machine and this installation",
        "ceiba.launch.commands.doctor",
        (
            "ceiba doctor",
            "ceiba doctor --port 8000 --json",
        ),
    ),
    "simulate": Command(
        "run the real scheduler on a trace, with a simulated device and clock",
        "ceiba.scheduler.simulate_command",
        ("ceiba simulate trace.jsonl",),
    ),
}
_BENCH = COMMANDS["bench"].examples
BENCHES: dict[str, Command] = {
    "serve": Command("load a running server", "ceiba.bench.serve", _BENCH[:2]),
    "offline": Command("throughput of an engine in this process", "ceiba.launch.commands.bench_offline", _BENCH[2:3]),
    "one-batch": Command(
        "latency of one batch, without a scheduler", "ceiba.launch.commands.bench_one_batch", _BENCH[3:]
    ),
}
LATER = {
    "gateway": "routing over several servers is not available yet: put a load balancer in front of them",
    "diffuse": "image and video generation is not available yet",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 1 for a failure, 2 for a mistake in what was asked, 130 for ^C."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`ceiba flags | head`): nothing is left to be said, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from ceiba.core.errors import CeibaError

        if not isinstance(error, CeibaError):
            raise
        return _mistake(error.message)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in {"-h", "--help", "help"}:
        print(_overview())
        return 0
    name, rest = words[0], words[1:]
    if name in {"--version", "-V", "version"}:
        print(f"ceiba {__version__}")
        return 0
    if name == "bench":
        return _bench(rest)
    if name in COMMANDS:
        return _run(name, COMMANDS[name], rest)
    if name in LATER:
        return _mistake(f"ceiba {name}: {LATER[name]}")
    return _mistake(f"ceiba {name}: no such command.{_closest(name, COMMANDS)} `ceiba --help` lists them.")


def _bench(rest: list[str]) -> int:
    if not rest or rest[0] in {"-h", "--help"}:
        print("usage: ceiba bench serve|offline|one-batch [flags]\n")
        for name, bench in BENCHES.items():
            print(f"  {name:<11}{bench.summary}")
        print(_examples(COMMANDS["bench"]))
        return 0
    if rest[0] not in BENCHES:
        return _mistake(
            f"ceiba bench {rest[0]}: no such benchmark.{_closest(rest[0], BENCHES)} There are {', '.join(BENCHES)}."
        )
    return _run(f"bench {rest[0]}", BENCHES[rest[0]], rest[1:])


def _run(name: str, command: Command, rest: list[str]) -> int:
    run: Callable[[list[str]], int] = import_module(command.target).main
    if rest and rest[0] in {"-h", "--help"}:
        try:
            code = run(["--help"])
        except SystemExit as stop:
            code = int(stop.code or 0)
        print(_examples(command))
        return code
    return run(rest)


def _overview() -> str:
    lines = [f"ceiba {__version__}: an LLM serving engine", "", "usage: ceiba COMMAND [flags]", ""]
    lines += [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "`ceiba COMMAND --help` explains one; `ceiba --version` prints the version.", "", "Examples:"]
    lines += [f"  {COMMANDS[name].examples[0]}" for name in ("serve", "chat", "bench", "doctor")]
    return "\n".join(lines)


def _examples(command: Command) -> str:
    return "\nExamples:\n" + "\n".join(f"  {line}" for line in command.examples)


def _closest(word: str, known: dict[str, Command]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f" Did you mean {close[0]}?" if close else ""


def _mistake(message: str) -> int:
    first, *others = message.splitlines() or [""]
    print(f"error: {first}", *(f"       {line}" for line in others), sep="\n", file=sys.stderr)
    return 2
