"""``ceiba serve``: parse, decide, run. What runs is ``launch.run``."""

from __future__ import annotations

from ceiba.config.parse import parse_args
from ceiba.launch.starting import SCHEDULER, command, start

USAGE = """usage: ceiba serve [MODEL] [flags]

Serve MODEL (a local directory, a GGUF file, a hub name or a catalogue name; by default the embedded
SmolLM2-135M-Instruct) on http://127.0.0.1:30000, with OpenAI's API.

Write --flag value, --flag=value, and for a switch also --no-flag. These flags work; `ceiba flags --all`
also shows those that are known and refused."""


def main(argv: list[str]) -> int:
    """Runs until stopped; the exit status of the server. Raises ConfigError where it cannot start."""
    if "--help" in argv or "-h" in argv:
        from ceiba.config.reference import help_text

        print(USAGE + "\n" + help_text())
        return 0
    flags = parse_args(argv)

    early = start(SCHEDULER, command(SCHEDULER))
    try:
        from ceiba.launch.configure import configure

        config = configure(flags)

        from ceiba.launch.run import serve
    except BaseException:
        early.discard()
        raise
    return serve(config, early)
