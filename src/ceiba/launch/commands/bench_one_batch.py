"""``ceiba bench one-batch``: the model runner alone, one batch of equal prompts: prefill once, then decode steps.

Owns the plans of that batch. No scheduler, no cache, no other process: what is left is what the device and its kernels
take, the floor under every served request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ceiba.config.parse import parse_args
from ceiba.core.errors import ConfigError
from ceiba.core.sampling import SamplingParams
from ceiba.core.step import RowOpen, StepPlan
from ceiba.launch.configure import configure

if TYPE_CHECKING:
    from ceiba.runner.worker import ModelRunner


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="ceiba bench one-batch",
        description="Latency of one batch, without a scheduler. Other flags go to the model, as for ceiba serve.",
        allow_abbrev=False,
    )
    p.add_argument("--batch-size", "--batch", type=int, nargs="+", default=[1], help="one or several")
    p.add_argument("--input-len", type=int, default=256)
    p.add_argument("--output-len", type=int, default=64)
    p.add_argument("--repeat", type=int, default=3, help="runs per size; the best counts")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--output-file", help="append results as JSON lines")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args, rest = parser().parse_known_args(argv)
    if args.input_len < 1 or args.output_len < 2 or args.repeat < 1 or min(args.batch_size) < 1:
        raise ConfigError("--batch-size, --input-len and --repeat must be at least 1, --output-len at least 2")
    config = configure(parse_args(rest))
    console = Console()
    largest = max(args.batch_size)
    chunk = config.scheduler.chunked_prefill_size
    room = args.input_len + args.output_len
    if room > config.model.context_len:
        raise ConfigError(f"--input-len + --output-len is {room}; the context is {config.model.context_len}")
    if largest > config.scheduler.max_running_requests or largest * room > config.scheduler.max_total_tokens:
        raise ConfigError(
            f"a batch of {largest} takes {largest * room} KV slots and {largest} rows; there are "
            f"{config.scheduler.max_total_tokens} and {config.scheduler.max_running_requests}: "
            "raise --max-total-tokens and --max-running-requests, or take a smaller batch"
        )
    with console.status("loading the model …"):
        from ceiba.checkpoint import open_checkpoint
        from ceiba.runner.worker import ModelRunner

        runner = ModelRunner(config, open_checkpoint(config.model.path, config.model.load_format))
    table = Table("batch", "prefill ms", "prefill tok/s", "decode ms/step", "p99 ms", "decode tok/s")
    for size in args.batch_size:
        batch = Batch(runner, size, args.input_len, args.output_len, chunk, args.seed)
        record = {"model": config.model.name, "device": config.runner.device, **batch.best_of(args.repeat)}
        table.add_row(
            str(size),
            f"{record['prefill_ms']:.1f}",
            f"{record['prefill_throughput']:.0f}",
            f"{record['decode_ms']:.2f}",
            f"{record['decode_p99_ms']:.2f}",
            f"{record['decode_throughput']:.1f}",
        )
        if args.output_file:
            with Path(args.output_file).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    runner.close()
    console.print(table)
    return 0


class Batch:
    """``size`` rows of random prompts, back to back in the pool."""

    def __init__(self, runner: ModelRunner, size: int, prompt: int, output: int, chunk: int, seed: int) -> None:
        self._runner = runner
        self._size, self._prompt, self._output = size, prompt, output
        self._chunk = prompt * size if chunk <= 0 else chunk
        vocab = runner.info.vocab_size
        self._tokens = np.random.default_rng(seed).integers(0, vocab, (size, prompt)).astype(np.int32)
        self._slots = np.arange(size * (prompt + output), dtype=np.int32).reshape(size, prompt + output)
        self._rows = np.arange(size, dtype=np.int32)
        self._step = 0
        self._closed = np.empty(0, np.int32)

    def best_of(self, repeat: int) -> dict[str, Any]:
        """Of ``repeat`` runs after one that is not counted, the fastest prefill and the fastest decode."""
        self._run()
        prefills, decodes = zip(*(self._run() for _ in range(repeat)), strict=True)
        prefill = min(prefills)
        decode = min(decodes, key=statistics.median)
        step = statistics.median(decode)
        return {
            "batch_size": self._size,
            "input_len": self._prompt,
            "output_len": self._output,
            "prefill_ms": prefill * 1e3,
            "prefill_throughput": self._size * self._prompt / prefill,
            "decode_ms": step * 1e3,
            "decode_p99_ms": sorted(decode)[min(len(decode) - 1, int(0.99 * len(decode)))] * 1e3,
            "decode_throughput": self._size / step,
        }

    def _run(self) -> tuple[float, list[float]]:
        start = time.perf_counter()
        last = self._prefill()
        prefill = time.perf_counter() - start
        decode = []
        for position in range(self._prompt, self._prompt + self._output - 1):
            start = time.perf_counter()
            last = self._execute(
                rows=self._rows,
                starts=np.full(self._size, position, np.int32),
                lengths=np.ones(self._size, np.int32),
                tokens=last,
                slots=np.ascontiguousarray(self._slots[:, position]),
                samples=np.ones(self._size, bool),
                num_prefill=0,
            )
            decode.append(time.perf_counter() - start)
        self._closed = self._rows
        return prefill, decode

    def _prefill(self) -> np.ndarray:
        """All prompts in steps of at most the chunk; returns the first sampled token of each row."""
        first = np.zeros(self._size, np.int32)
        work = [(row, 0) for row in range(self._size)]
        while work:
            pieces: list[tuple[int, int, int]] = []
            left = self._chunk
            while work and left:
                row, start = work.pop(0)
                length = min(left, self._prompt - start)
                pieces.append((row, start, length))
                left -= length
                if start + length < self._prompt:
                    work.insert(0, (row, start + length))
            done = [row for row, start, length in pieces if start + length == self._prompt]
            tokens = self._execute(
                rows=np.array([row for row, _, _ in pieces], np.int32),
                starts=np.array([start for _, start, _ in pieces], np.int32),
                lengths=np.array([length for _, _, length in pieces], np.int32),
                tokens=np.concatenate([self._tokens[row, s : s + n] for row, s, n in pieces]),
                slots=np.concatenate([self._slots[row, s : s + n] for row, s, n in pieces]),
                samples=np.array([s + n == self._prompt for _, s, n in pieces]),
                num_prefill=len(pieces),
                opened=[self._open(row) for row, start, _ in pieces if start == 0],
            )
            first[done] = tokens
        return first

    def _open(self, row: int) -> RowOpen:
        return RowOpen(
            row=row,
            tokens=self._tokens[row],
            prompt_len=self._prompt,
            prefix_slots=np.empty(0, np.int32),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=self._output, ignore_eos=True),
            seed=row,
        )

    def _execute(self, **fields: Any) -> np.ndarray:
        plan = StepPlan(step=self._step, closed=self._closed, **fields)
        self._step += 1
        self._closed = np.empty(0, np.int32)
        return self._runner.sample(self._runner.forward(plan), None).wait().tokens


if __name__ == "__main__":
    sys.exit(main())
