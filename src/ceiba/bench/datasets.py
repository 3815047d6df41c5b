"""Datasets of ``bench serve --dataset-name``: random ids, generated shared prefixes, and conversations from a file.

Everything is drawn from one seed. Reads local files only; what a dataset needs and does not have is named.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ceiba.bench.client import Job
from ceiba.bench.workloads import random_ids
from ceiba.core.errors import ConfigError

NAMES = ("random", "random-ids", "generated-shared-prefix", "sharegpt", "speed_bench", "custom")
_CHARS_PER_TOKEN = 4.0
"""Only to sort out texts that are far too long or short before the server counts them."""


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    num_prompts: int = 1000
    vocab: int = 49000
    random_input: int = 1024
    random_output: int = 1024
    random_range_ratio: float = 0.0
    """Lengths are uniform over [ratio × length, length]; 1 makes them all equal."""
    groups: int = 64
    prompts_per_group: int = 16
    system_prompt_len: int = 2048
    question_len: int = 128
    output_len: int = 256
    path: str = ""
    fixed_output: int | None = None
    """--sharegpt-output-len: replaces the length of the recorded answer."""


def load(name: str, options: DatasetOptions, seed: int) -> list[Job]:
    rng = random.Random(seed)
    return _LOADERS[name.replace("_", "-")](options, rng)


def _length(rng: random.Random, full: int, ratio: float) -> int:
    return rng.randint(max(1, int(full * ratio)), max(1, full))


def _random(options: DatasetOptions, rng: random.Random) -> list[Job]:
    jobs = []
    for _ in range(options.num_prompts):
        prompt = random_ids(rng, _length(rng, options.random_input, options.random_range_ratio), options.vocab)
        jobs.append(Job(prompt, _length(rng, options.random_output, options.random_range_ratio)))
    return jobs


def _shared_prefix(options: DatasetOptions, rng: random.Random) -> list[Job]:
    """``groups`` system prompts, each followed by ``prompts_per_group`` questions, in random order."""
    jobs = []
    for _ in range(options.groups):
        system = random_ids(rng, options.system_prompt_len, options.vocab)
        for _ in range(options.prompts_per_group):
            jobs.append(Job(system + random_ids(rng, options.question_len, options.vocab), options.output_len))
    rng.shuffle(jobs)
    return jobs


def _sharegpt(options: DatasetOptions, rng: random.Random) -> list[Job]:
    """First question and length of the first answer of each conversation in a ShareGPT JSON file."""
    jobs = []
    for record in _records(options.path, "sharegpt"):
        turns = record.get("conversations") or record.get("conversation") or []
        if len(turns) < 2:
            continue
        prompt, answer = (str(turn.get("value") or turn.get("content") or "") for turn in turns[:2])
        output = options.fixed_output or int(len(answer) / _CHARS_PER_TOKEN)
        if len(prompt) >= 16 and output >= 4:
            jobs.append(Job(prompt, output))
    return _pick(jobs, options, rng)


def _prompts(options: DatasetOptions, rng: random.Random) -> list[Job]:
    """A file of prompts: ``prompt``, ``question``, ``text`` or the first of ``turns`` (SPEED-Bench) in each record."""
    jobs = []
    for record in _records(options.path, "speed_bench"):
        prompt = record.get("prompt") or record.get("question") or record.get("text")
        turns = record.get("turns") or record.get("messages")
        if prompt is None and turns:
            first = turns[0]
            prompt = first.get("content") if isinstance(first, dict) else first
        if prompt:
            output = record.get("output_len") or record.get("max_tokens") or options.fixed_output or options.output_len
            jobs.append(Job(str(prompt), int(output)))
    return _pick(jobs, options, rng)


def _records(path: str, name: str) -> list[dict[str, Any]]:
    if not path:
        raise ConfigError(f"--dataset-name {name} reads a local file: give it with --dataset-path (JSON or JSON lines)")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--dataset-path {path}: no such file")
    text = file.read_text(encoding="utf-8")
    try:
        data = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path}: neither a JSON list nor JSON lines ({error})") from None
    return [record for record in data if isinstance(record, dict)]


def _pick(jobs: list[Job], options: DatasetOptions, rng: random.Random) -> list[Job]:
    if not jobs:
        raise ConfigError(f"--dataset-path {options.path}: no usable record in it")
    rng.shuffle(jobs)
    return [jobs[i % len(jobs)] for i in range(options.num_prompts)]


_LOADERS: dict[str, Callable[[DatasetOptions, random.Random], list[Job]]] = {
    "random": _random,
    "random-ids": _random,
    "generated-shared-prefix": _shared_prefix,
    "sharegpt": _sharegpt,
    "speed-bench": _prompts,
    "custom": _prompts,
}
