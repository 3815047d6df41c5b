"""The table of every server flag and the values a user gave. It owns names, types, defaults and what is refused; the
rows lie in ``flags.tsv`` and the help, the reference and the parser all come from them. It must not know what a value
does to the engine: that is ``resolve``.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal, cast

from ceiba.config.available import VALUES
from ceiba.config.needs import VALUES_NEED, refusal
from ceiba.core.errors import ConfigError

Status = Literal["works", "hint", "refused"]

RANGES: Final[dict[str, tuple[float, float]]] = {
    "--port": (1, 65535),
    "--metric-port": (1, 65535),
    "--base-gpu-id": (0, 1023),
    "--random-seed": (0, 2**63 - 1),
    "--watchdog-timeout": (1, math.inf),
    "--context-length": (2, 2**31 - 1),
    "--max-running-requests": (1, 65536),
    "--max-queued-requests": (0, 2**31 - 1),
    "--max-total-tokens": (2, 2**31 - 1),
    "--chunked-prefill-size": (-1, 2**31 - 1),
    "--max-prefill-tokens": (1, 2**31 - 1),
    "--max-num-batched-tokens": (1, 2**31 - 1),
    "--prefill-max-requests": (1, 65536),
    "--page-size": (1, 1024),
    "--mem-fraction-static": (0.01, 0.99),
    "--gpu-memory-utilization": (0.01, 0.99),
    "--schedule-conservativeness": (0, 100),
    "--stream-interval": (1, 65536),
    "--decode-log-interval": (1, 2**31 - 1),
    "--log-requests-level": (0, 3),
    "--threads": (1, 4096),
    "--timeout-keep-alive": (0, 86400),
    "--queue-timeout": (0.001, math.inf),
    "--cuda-graph-max-bs-decode": (1, 4096),
    "--cuda-graph-max-bs-prefill": (64, 65536),
    "--mixed-chunk-target-ms": (0, 60_000),
    "--prefill-decode-interval": (0, 2**31 - 1),
    "--prefill-decode-interval-min-bs": (0, 65536),
    "--default-priority-value": (-(2**31) + 1, 2**31 - 1),
    "--priority-scheduling-preemption-threshold": (0, 2**32),
    "--cache-pin-budget": (0, 2**31 - 1),
    "--hicache-ratio": (0.001, 10_000),
    "--hicache-size": (0, 1_000_000),
    "--hicache-host-memory-fraction": (0.01, 0.99),
    "--hicache-storage-prefetch-retry-poll-interval": (1, 2**31 - 1),
    "--hicache-storage-prefetch-retry-max-attempts": (0, 2**31 - 1),
    "--constrained-json-max-whitespace-cnt": (1, 4096),
    "--speculative-num-draft-tokens": (2, 256),
    "--speculative-ngram-max-trie-depth": (3, 1024),
}
"""Numbers a flag takes, both ends included."""

ELSEWHERE: Final[dict[str, str]] = {
    "--policy": "ceiba gateway",
    "--balance-abs-threshold": "ceiba gateway",
    "--balance-rel-threshold": "ceiba gateway",
    "--cache-threshold": "ceiba gateway",
    "--worker-urls": "ceiba gateway",
    "--service-discovery": "ceiba gateway",
    "--pd-disaggregation": "ceiba gateway",
    "--prefill": "ceiba gateway",
    "--decode": "ceiba gateway",
    "--enable-igw": "ceiba gateway",
    "--backend": "ceiba bench serve",
    "--dataset-name": "ceiba bench serve",
    "--random-input": "ceiba bench serve",
    "--random-output": "ceiba bench serve",
    "--num-prompts": "ceiba bench serve",
    "--max-concurrency": "ceiba bench serve",
    "--request-rate": "ceiba bench serve",
}
"""Flags of other commands, for a better answer than "unknown"."""

OLD_SPELLINGS: Final = frozenset({"--max-num-seqs"})
"""Aliases from other engines: using one leaves a line in the log."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One row. ``text``: the help of a flag that works, the remark of a hint, or the area (``NEEDS``) of a refusal."""

    component: str
    name: str
    aliases: tuple[str, ...]
    type: str
    """bool, int, float, str, json, list[str], list[int] or list[float]"""
    default: Any
    choices: tuple[str, ...]
    status: Status
    text: str

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def is_list(self) -> bool:
        return self.type.startswith("list[")

    def values(self) -> tuple[str, ...]:
        """The values that work, for a flag with choices."""
        return VALUES.get(self.name, self.choices)

    def parse(self, text: str | list[str]) -> Any:
        """Text of the command line to a value. Raises ConfigError naming the flag."""
        if self.is_list:
            return self._parse_list(text if isinstance(text, list) else [text])
        assert isinstance(text, str)
        return self._parse_one(text, self.type)

    def _parse_list(self, texts: list[str]) -> list[Any]:
        if len(texts) == 1 and texts[0].lstrip().startswith("["):
            parsed = _json(self.name, texts[0])
            texts = [str(item) for item in parsed] if isinstance(parsed, list) else texts
        return [self._parse_one(item, self.type[5:-1]) for item in texts]

    def _parse_one(self, text: str, kind: str) -> Any:
        try:
            if kind == "int":
                return int(text)
            if kind == "float":
                value = float(text)
                if not math.isfinite(value):
                    raise ValueError(text)
                return value
        except ValueError:
            noun = "a whole number" if kind == "int" else "a number"
            raise ConfigError(f"{self.name} {text}: expected {noun}.", param=self.name) from None
        if kind == "bool":
            if text.lower() in {"true", "1", "yes", "on"}:
                return True
            if text.lower() in {"false", "0", "no", "off"}:
                return False
            raise ConfigError(f"{self.name}={text}: expected true or false.", param=self.name)
        return _json(self.name, text) if kind == "json" else text

    def check(self, value: Any) -> str | None:
        """Why ``value`` is wrong or refused, in one line; None where it works."""
        if self.status == "refused":
            return None if value == self.default else refusal(self.name, value, self.text)
        bounds = RANGES.get(self.name)
        if bounds and not bounds[0] <= value <= bounds[1]:
            low, high = bounds
            limit = f"at least {low:g}" if high in {math.inf, 2**31 - 1, 2**63 - 1} else f"from {low:g} to {high:g}"
            return f"{self.name} {value}: out of range, the value must be {limit}."
        works = self.values()
        if not works or value is None or str(value) in works:
            return None
        if str(value) in self.choices:
            why = VALUES_NEED.get(self.name, {}).get(str(value))
            reason = f": {why}" if why else ""
            return f"{self.name} {value}: not available yet{reason}. Instead: {', '.join(works)}."
        close = difflib.get_close_matches(str(value), works, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        return f"{self.name} {value}: no such choice. Choose from {', '.join(works)}.{hint}"


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ConfigError(
            f"{name}: not valid JSON ({err}): quote it for the shell, like '{{\"a\": 1}}'.", param=name
        ) from None


def _row(line: str) -> Flag:
    component, name, aliases, kind, default, choices, status, text = line.split("\t")
    flag = Flag(
        component=component,
        name=name,
        aliases=tuple(aliases.split()),
        type=kind,
        default=False if kind == "bool" else None,
        choices=tuple(choices.split("|")) if choices else (),
        status=cast(Status, status),
        text=text,
    )
    if not default:
        return flag
    value = flag.parse(default)
    return Flag(component, name, flag.aliases, kind, value, flag.choices, flag.status, text)


@cache
def table() -> dict[str, Flag]:
    """Every server flag by its main name, in the order of the reference."""
    lines = files("ceiba.config").joinpath("flags.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return {flag.name: flag for flag in map(_row, lines)}


@cache
def names() -> dict[str, Flag]:
    """Every spelling, aliases included."""
    spellings: dict[str, Flag] = {}
    for flag in table().values():
        for name in (flag.name, *flag.aliases):
            spellings[name] = flag
    return spellings


def lookup(name: str) -> Flag:
    """The flag of a spelling. Raises ConfigError with the closest names."""
    flag = names().get(name)
    if flag is not None:
        return flag
    if name in ELSEWHERE:
        raise ConfigError(f"{name} belongs to `{ELSEWHERE[name]}`, not to the server.", param=name)
    close = difflib.get_close_matches(name, names(), 3, 0.6)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise ConfigError(f"{name}: unknown flag.{hint} `ceiba flags` lists those that work.", param=name)


@dataclass(frozen=True, slots=True)
class Flags:
    """What the user asked for, checked one by one; nothing is decided yet."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Given flags by their name in Python (``max_total_tokens``)."""
    notes: tuple[str, ...] = ()

    def get(self, dest: str) -> Any:
        """The given value, else the flag's default."""
        if dest in self.values:
            return self.values[dest]
        return table()[f"--{dest.replace('_', '-')}"].default

    def given(self, dest: str) -> bool:
        """Whether the user gave it, be it the default. A misspelt name is a bug and raises KeyError."""
        _ = table()[f"--{dest.replace('_', '-')}"]
        return dest in self.values

    def filled(self, **defaults: Any) -> Flags:
        """With ``defaults`` for flags that were not given."""
        return Flags({**defaults, **self.values}, self.notes)


def make_flags(given: Iterable[tuple[str, Any]]) -> Flags:
    """Check (spelling, value) pairs; the last of a repeated flag wins. One ConfigError lists all that is wrong."""
    values: dict[str, Any] = {}
    notes: list[str] = []
    problems: list[str] = []
    for spelling, value in given:
        flag = lookup(spelling)
        problem = flag.check(value)
        if problem:
            problems.append(problem)
        if flag.status == "hint" and value:
            notes.append(f"{flag.name}: {flag.text}.")
        if spelling in OLD_SPELLINGS:
            notes.append(f"{spelling} is an older spelling of {flag.name}.")
        values[flag.dest] = value
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return Flags(values, tuple(dict.fromkeys(notes)))


_PYTHON_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
}


def flags_from_kwargs(**given: Any) -> Flags:
    """Flags as Python keywords (``ceiba.Engine(max_total_tokens=4096)``), under the rules of the command line."""
    pairs: list[tuple[str, Any]] = []
    for dest, value in given.items():
        flag = lookup(f"--{dest.replace('_', '-')}")
        wanted = _PYTHON_TYPES.get(flag.type)
        wrong_bool = isinstance(value, bool) and flag.type in {"int", "float"}
        if value is not None and wanted and (wrong_bool or not isinstance(value, wanted)):
            raise ConfigError(f"{dest}={value!r}: expected {flag.type}.", param=dest)
        if value is not None:
            pairs.append((flag.name, value))
    return make_flags(pairs)
