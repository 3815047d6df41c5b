"""What guessing brings: the same requests with and without --speculative-algorithm NGRAM, in turns, in one process.

``python benchmarks/cpu/speculative.py`` takes the default model (or ``--model``). Every answer must be the same both
ways. Printed are the ratio of the medians, all pairs, the tokens a request got from a decode step, and the share of
right guesses. ``--cpu-seconds`` counts the process's own time instead of the clock's: with ``--threads 1`` it can be
read beside other load.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, cast

import numpy as np

from ceiba.checkpoint import open_checkpoint
from ceiba.config.records import Config, ModelConfig, RunnerConfig, SchedulerConfig
from ceiba.core.messages import Generate, ids_to_bytes
from ceiba.core.sampling import SamplingParams
from ceiba.core.step import Runner
from ceiba.runner.worker import ModelRunner
from ceiba.scheduler.loop import Scheduler
from ceiba.scheduler.memory_port import MemoryPort
from ceiba.spec.ngram import NgramDrafter
from ceiba.text.tokenizer import load_tokenizer

TEXT = (
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. "
    "How vexingly quick daft zebras jump! "
)
CODE = "".join(
    f'def {name}(a, b):\n    """{name.capitalize()} two numbers and return the result."""\n    result = a {sign} b\n'
    "    return result\n\n"
    for name, sign in (("add", "+"), ("subtract", "-"), ("multiply", "*"))
)
STORY = "<|im_start|>user\nWrite a short story about a fox and {} birds.<|im_end|>\n<|im_start|>assistant\n"
EDIT = f"# original\n{CODE}\n# the same with other names\n{CODE.replace('add', 'plus')[:60]}"
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "a text that repeats itself": [(TEXT * 3 + "The quick", {})],
    "code with small changes": [(EDIT, {})],
    "code, penalties": [(CODE * 2, {"frequency_penalty": 0.1})],
    "free text": [(STORY.format(3), {})],
    "free text, temperature 1": [(STORY.format(3), {"temperature": 1.0, "seed": 4})],
    "4 texts that repeat themselves": [(f"{TEXT * 3}The quick {i}", {}) for i in range(4)],
    "16 free texts": [(STORY.format(i), {"temperature": 0.7, "seed": i}) for i in range(16)],
}


class Engine:
    """The real scheduler and runner, without processes around them."""

    def __init__(self, path: str | None, drafts: int, args: argparse.Namespace) -> None:
        checkpoint = open_checkpoint(path)
        model = ModelConfig(path=checkpoint.path, name="m", tokenizer_path=checkpoint.path, context_len=2048)
        scheduler = SchedulerConfig(
            max_total_tokens=16384, max_running_requests=16, chunked_prefill_size=512, disable_radix_cache=True,
            num_draft_tokens=drafts,
        )  # fmt: skip
        config = Config(model=model, scheduler=scheduler, runner=RunnerConfig(threads=args.threads))
        self.port = MemoryPort()
        self.scheduler = Scheduler(
            scheduler, cast(Runner, ModelRunner(config, checkpoint)), self.port, drafter=NgramDrafter(18)
        )
        self.clock = time.process_time if args.cpu_seconds else time.perf_counter
        self.count = 0

    def serve(self, prompts: list[np.ndarray], sampling: list[SamplingParams]) -> tuple[float, list[list[int]]]:
        """Seconds, and the answers."""
        rids = []
        for ids, params in zip(prompts, sampling, strict=True):
            self.count += 1
            rids.append(str(self.count))
            self.port.push(Generate(rid=rids[-1], input_ids=ids_to_bytes(ids), sampling=params))
        start = self.clock()
        while self.port.inbox or not self.scheduler.idle:
            self.scheduler.step(wait=0.0)
        return self.clock() - start, [self.port.answers[rid].tokens for rid in rids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local model; the embedded one without it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--num-draft-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-seconds", action="store_true")
    args = parser.parse_args()
    plain, guessing = (Engine(args.model, drafts, args) for drafts in (0, args.num_draft_tokens))
    tokenizer = load_tokenizer(open_checkpoint(args.model).tokenizer())
    counters = guessing.scheduler.counters
    for name, asked in CASES.items():
        prompts = [np.array(tokenizer.encode(text), np.int32) for text, _ in asked]
        sampling = [
            SamplingParams(**{"temperature": 0.0, "max_new_tokens": args.tokens, "ignore_eos": True, **fields})
            for _, fields in asked
        ]
        rows, drafted, right = counters.decode_rows, counters.spec_draft_tokens, counters.spec_accepted_tokens
        without, with_guesses = [], []
        for _ in range(args.repeats):
            seconds, answers = plain.serve(prompts, sampling)
            without.append(seconds)
            seconds, found = guessing.serve(prompts, sampling)
            with_guesses.append(seconds)
            if found != answers:
                raise SystemExit(f"{name}: an answer with guesses is another one")
        pairs = " ".join(f"{one / other:.2f}" for one, other in zip(without, with_guesses, strict=True))
        print(
            f"{name:32} {np.median(without) / np.median(with_guesses):.2f} times as fast ({pairs}), "
            f"{counters.accept_length(rows, right):.2f} tokens a step, "
            f"{counters.accept_rate(drafted, right):.2f} of the guesses right",
            flush=True,
        )


if __name__ == "__main__":
    main()
