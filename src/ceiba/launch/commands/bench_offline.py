"""``ceiba bench offline``: throughput of an engine without HTTP, over the datasets of ``bench serve``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ceiba.bench import datasets
from ceiba.bench.client import Job
from ceiba.core.errors import CeibaError
from ceiba.launch.engine import Engine


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="ceiba bench offline",
        description="Throughput of an engine in this process. Other flags go to the model, as for ceiba serve.",
        allow_abbrev=False,
    )
    p.add_argument("--dataset-name", choices=datasets.NAMES, default="random")
    p.add_argument("--dataset-path", default="")
    p.add_argument("--num-prompts", type=int, default=64)
    p.add_argument("--random-input-len", "--random-input", dest="random_input", type=int, default=256)
    p.add_argument("--random-output-len", "--random-output", dest="random_output", type=int, default=64)
    p.add_argument("--random-range-ratio", type=float, default=1.0)
    p.add_argument("--gsp-num-groups", type=int, default=8)
    p.add_argument("--gsp-prompts-per-group", type=int, default=8)
    p.add_argument("--gsp-system-prompt-len", type=int, default=512)
    p.add_argument("--gsp-question-len", type=int, default=32)
    p.add_argument("--gsp-output-len", type=int, default=32)
    p.add_argument("--vocab", type=int, default=0, help="prompt ids are drawn below this; default: the model's")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--skip-warmup", action="store_true")
    p.add_argument("--output-file", help="append the result as a JSON line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 when an answer lacked tokens."""
    args, rest = parser().parse_known_args(argv)
    console = Console()
    with console.status("loading the model …"):
        engine = Engine.from_args(rest)
    with engine:
        vocab = args.vocab or engine.front.vocab_size
        jobs = datasets.load(args.dataset_name, _options(args, vocab), args.seed)
        if not args.skip_warmup:
            _generate(engine, [Job(job.prompt, min(job.max_tokens, 8)) for job in jobs[:4]])
            engine.flush_cache()
        with console.status(f"{len(jobs)} requests …"):
            start = time.perf_counter()
            answers = _generate(engine, jobs)
            seconds = time.perf_counter() - start
        state = engine.server_info()["internal_states"][0]
    record = _record(args, engine, jobs, answers, seconds, state)
    _print(console, record)
    if args.output_file:
        with Path(args.output_file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 0 if record["completed"] == len(jobs) else 1


def _options(args: argparse.Namespace, vocab: int) -> datasets.DatasetOptions:
    return datasets.DatasetOptions(
        num_prompts=args.num_prompts,
        vocab=vocab,
        random_input=args.random_input,
        random_output=args.random_output,
        random_range_ratio=args.random_range_ratio,
        groups=args.gsp_num_groups,
        prompts_per_group=args.gsp_prompts_per_group,
        system_prompt_len=args.gsp_system_prompt_len,
        question_len=args.gsp_question_len,
        output_len=args.gsp_output_len,
        path=args.dataset_path,
    )


def _generate(engine: Engine, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    sampling = [{"temperature": 0.0, "max_new_tokens": job.max_tokens, "ignore_eos": True} for job in jobs]
    if isinstance(jobs[0].prompt, str):
        answers = engine.generate([str(job.prompt) for job in jobs], sampling)
    else:
        ids = [[int(i) for i in job.prompt] for job in jobs]
        answers = engine.generate(input_ids=ids, sampling_params=sampling)
    if not isinstance(answers, list):
        raise CeibaError("a list of prompts must give a list of answers")
    return answers


def _record(
    args: argparse.Namespace,
    engine: Engine,
    jobs: Sequence[Job],
    answers: list[dict[str, Any]],
    seconds: float,
    state: dict[str, Any],
) -> dict[str, Any]:
    metas = [answer["meta_info"] for answer in answers]
    prompt = sum(meta["prompt_tokens"] for meta in metas)
    output = sum(meta["completion_tokens"] for meta in metas)
    complete = sum(meta["completion_tokens"] == job.max_tokens for meta, job in zip(metas, jobs, strict=True))
    return {
        "model": engine.config.model.name,
        "dataset_name": args.dataset_name,
        "num_prompts": len(jobs),
        "completed": complete,
        "duration": seconds,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "total_cached_tokens": sum(meta["cached_tokens"] for meta in metas),
        "request_throughput": len(jobs) / seconds,
        "input_throughput": prompt / seconds,
        "output_throughput": output / seconds,
        "total_throughput": (prompt + output) / seconds,
        "retractions": state["retractions"],
    }


def _print(console: Console, record: dict[str, Any]) -> None:
    table = Table(title=f"{record['dataset_name']} on {record['model']}", show_header=False, title_justify="left")
    table.add_row("requests", f"{record['completed']} of {record['num_prompts']} complete")
    table.add_row("duration", f"{record['duration']:.2f} s")
    table.add_row(
        "tokens",
        f"{record['total_input_tokens']} in ({record['total_cached_tokens']} from the cache), "
        f"{record['total_output_tokens']} out",
    )
    table.add_row("requests/s", f"{record['request_throughput']:.2f}")
    table.add_row(
        "tokens/s",
        f"{record['input_throughput']:.1f} in, {record['output_throughput']:.1f} out, "
        f"{record['total_throughput']:.1f} in all",
    )
    table.add_row("retractions", f"{record['retractions']:.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
