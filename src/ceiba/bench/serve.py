"""``ceiba bench serve``: load a running server and report first-token time, gaps, throughput.

Owns the command line. Two kinds of traffic: ``--workload`` runs named, fixed workloads and prints one JSON line each on
standard output; otherwise ``--dataset-name`` draws requests and prints a table, with a JSON line in ``--output-file``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

try:
    import aiohttp
except ImportError:  # pragma: no cover - depends on how the package was installed
    sys.exit('ceiba bench serve needs aiohttp: pip install "ceiba[bench]"')

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ceiba.bench import datasets, workloads
from ceiba.bench.client import Job, Outcome, Protocol, Target
from ceiba.bench.drive import Run, drive, get_json, post
from ceiba.bench.report import print_summary, print_workloads, summary, workload_line
from ceiba.core.errors import ConfigError

BACKENDS: dict[str, Protocol] = {
    "ceiba": "completions",
    "sglang": "native",
    "native": "native",
    "openai": "completions",
    "sglang-oai": "completions",
    "vllm": "completions",
    "lmdeploy": "completions",
    "openai-chat": "chat",
    "ceiba-chat": "chat",
    "sglang-oai-chat": "chat",
    "vllm-chat": "chat",
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="ceiba bench serve", description="Load a running server and measure it.", allow_abbrev=False
    )
    where = p.add_argument_group("server")
    where.add_argument("--backend", choices=sorted(BACKENDS), default="ceiba", help="which API to speak")
    where.add_argument("--host", default="127.0.0.1")
    where.add_argument("--port", type=int, default=30000)
    where.add_argument("--base-url", "--url", help="instead of --host and --port, http://… without a path")
    where.add_argument("--model", help="default: the first one that /v1/models names")
    where.add_argument("--api-key", default="", help="sent as a bearer token")
    where.add_argument("--extra-request-body", default="{}", metavar="JSON", help="fields added to every request")
    where.add_argument("--disable-ignore-eos", action="store_true", help="let answers end where the model ends them")
    where.add_argument("--temperature", type=float, default=0.0)
    where.add_argument("--flush-cache", action="store_true", help="POST /flush_cache first")
    where.add_argument("--ready-timeout", type=float, default=60.0, help="seconds to wait for the server to answer")

    fixed = p.add_argument_group("named workloads")
    fixed.add_argument("--workload", metavar="A,B", help=f"any of {', '.join(workloads.NAMES)}, or all")
    fixed.add_argument("--scale", type=float, default=1.0, help="number of requests")
    fixed.add_argument("--len-scale", type=float, default=1.0, help="lengths")
    fixed.add_argument("--conc", type=int, default=256, help="requests at once in burst")
    fixed.add_argument("--pconc", type=int, default=64, help="requests at once in prefix")
    fixed.add_argument("--rate", type=float, default=16.0, help="requests per second of online")
    fixed.add_argument("--vocab", type=int, default=49000, help="prompt ids are drawn below this")

    drawn = p.add_argument_group("datasets")
    drawn.add_argument("--dataset-name", choices=datasets.NAMES, default="random")
    drawn.add_argument("--dataset-path", default="", help="local file of sharegpt, speed_bench and custom")
    drawn.add_argument("--num-prompts", type=int, default=1000)
    drawn.add_argument("--random-input-len", "--random-input", dest="random_input", type=int, default=1024)
    drawn.add_argument("--random-output-len", "--random-output", dest="random_output", type=int, default=1024)
    drawn.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths from [ratio × length, length]")
    drawn.add_argument("--sharegpt-output-len", type=int, help="instead of the recorded answers' lengths")
    drawn.add_argument("--gsp-num-groups", type=int, default=64)
    drawn.add_argument("--gsp-prompts-per-group", type=int, default=16)
    drawn.add_argument("--gsp-system-prompt-len", type=int, default=2048)
    drawn.add_argument("--gsp-question-len", type=int, default=128)
    drawn.add_argument("--gsp-output-len", type=int, default=256)
    drawn.add_argument("--request-rate", type=float, default=math.inf, help="arrivals per second, inf: all at once")
    drawn.add_argument("--max-concurrency", type=int, help="requests in flight at most")
    drawn.add_argument("--warmup-requests", type=int, default=1)
    drawn.add_argument("--seed", type=int, default=1)

    out = p.add_argument_group("output")
    out.add_argument("--output-file", help="append JSON lines to this file")
    out.add_argument("--output-details", action="store_true", help="with every request's figures")
    out.add_argument("--tag", help="kept in the record")
    out.add_argument("--disable-tqdm", "--no-progress", dest="quiet", action="store_true", help="no progress bar")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when every request was right, 1 when some failed, 2 for a wrong command line or no server."""
    args = parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        return asyncio.run(_main(args, console))
    except ConfigError as error:
        console.print(f"[red]error:[/red] {error.message}", highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130


async def _main(args: argparse.Namespace, console: Console) -> int:
    names = _workload_names(args.workload)
    target = await _target(args)
    if args.flush_cache:
        status = await post(f"{target.base_url}/flush_cache", target.headers)
        if status != 200:
            raise ConfigError(f"/flush_cache answered {status}; an admin key or an idle server may be needed")
    if names:
        return await _workloads(args, names, target, console)
    return await _dataset(args, target, console)


async def _workloads(args: argparse.Namespace, names: list[str], target: Target, console: Console) -> int:
    sizes = workloads.Sizes(
        vocab=args.vocab,
        scale=args.scale,
        len_scale=args.len_scale,
        burst_concurrency=args.conc,
        prefix_concurrency=args.pconc,
        rate=args.rate,
    )
    lines = []
    for name in names:
        load = workloads.build(name, sizes)
        run = await _run(args, target, load.jobs, load.concurrency, load.rate, name, console)
        line = workload_line(name, run)
        lines.append(line)
        print(json.dumps(line), flush=True)
        _append(args, {**line, "date": _now(), "tag": args.tag} | _details(args, run))
    if sys.stdout.isatty():
        print_workloads(console, lines)
    return 1 if any(line["err"] for line in lines) else 0


async def _dataset(args: argparse.Namespace, target: Target, console: Console) -> int:
    options = datasets.DatasetOptions(
        num_prompts=args.num_prompts,
        vocab=args.vocab,
        random_input=args.random_input,
        random_output=args.random_output,
        random_range_ratio=args.random_range_ratio,
        groups=args.gsp_num_groups,
        prompts_per_group=args.gsp_prompts_per_group,
        system_prompt_len=args.gsp_system_prompt_len,
        question_len=args.gsp_question_len,
        output_len=args.gsp_output_len,
        path=args.dataset_path,
        fixed_output=args.sharegpt_output_len,
    )
    jobs = datasets.load(args.dataset_name, options, args.seed)
    if target.protocol == "chat" and not isinstance(jobs[0].prompt, str):
        raise ConfigError(
            f"--dataset-name {args.dataset_name} makes token ids and --backend {args.backend} takes text: "
            "use --backend ceiba, or a dataset of texts (sharegpt, speed_bench, custom)"
        )
    if args.warmup_requests:
        warm = [Job(jobs[0].prompt, min(jobs[0].max_tokens, 32))] * args.warmup_requests
        first = await drive(target, warm)
        if first.outcomes[0].error:
            raise ConfigError(f"the warm-up request failed: {first.outcomes[0].error}")
    rate = None if math.isinf(args.request_rate) else args.request_rate
    run = await _run(args, target, jobs, args.max_concurrency, rate, args.dataset_name, console, args.seed)
    record = {
        "tag": args.tag,
        "date": _now(),
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "model": target.model,
        "num_prompts": len(jobs),
        "request_rate": "inf" if rate is None else rate,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        **summary(run),
    }
    print_summary(Console(), f"{args.dataset_name} on {target.model}", record)
    _append(args, record | _details(args, run))
    return 1 if record["failed"] else 0


def _workload_names(text: str | None) -> list[str]:
    if not text:
        return []
    names = list(workloads.NAMES) if text == "all" else text.split(",")
    for name in names:
        if name not in workloads.NAMES:
            raise ConfigError(f"--workload {name}: unknown; there are {', '.join(workloads.NAMES)} and all")
    return names


async def _target(args: argparse.Namespace) -> Target:
    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        extra = json.loads(args.extra_request_body)
    except ValueError as error:
        raise ConfigError(f"--extra-request-body: not JSON ({error})") from None
    if not isinstance(extra, dict):
        raise ConfigError("--extra-request-body: give a JSON object")
    model = args.model or await _first_model(base, headers, args.ready_timeout)
    return Target(
        base_url=base,
        model=model,
        protocol=BACKENDS[args.backend],
        ignore_eos=not args.disable_ignore_eos,
        temperature=args.temperature,
        headers=headers,
        extra=extra,
    )


async def _first_model(base: str, headers: dict[str, str], patience: float) -> str:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while True:
        try:
            models = (await get_json(f"{base}/v1/models", headers)).get("data")
            if isinstance(models, list) and models:
                return str(models[0]["id"])
            raise ConfigError(f"{base}/v1/models names no model: give --model")
        except (TimeoutError, aiohttp.ClientError) as error:
            if loop.time() > deadline:
                raise ConfigError(f"no server answers at {base} ({error}); start one with: ceiba serve") from None
        await asyncio.sleep(0.5)


async def _run(
    args: argparse.Namespace,
    target: Target,
    jobs: Sequence[Job],
    concurrency: int | None,
    rate: float | None,
    title: str,
    console: Console,
    arrival_seed: int | None = None,
) -> Run:
    pacing: dict[str, Any] = {"concurrency": concurrency, "rate": rate}
    if arrival_seed is not None:
        pacing["arrival_seed"] = arrival_seed
    if args.quiet or not console.is_terminal:
        return await drive(target, jobs, **pacing)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=len(jobs), rate="")
        tokens = 0

        def tick(outcome: Outcome) -> None:
            nonlocal tokens
            tokens += outcome.output_tokens
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, advance=1, rate=f"{tokens / elapsed:.0f} tok/s" if elapsed else "")

        return await drive(target, jobs, progress=tick, **pacing)


def _details(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    if not args.output_details:
        return {}
    return {
        "input_lens": [o.prompt_tokens for o in run.outcomes],
        "output_lens": [o.output_tokens for o in run.outcomes],
        "cached_tokens": [o.cached_tokens for o in run.outcomes],
        "ttfts": [o.ttft for o in run.outcomes],
        "itls": [o.gaps for o in run.outcomes],
        "errors": [o.error for o in run.outcomes],
    }


def _append(args: argparse.Namespace, record: dict[str, Any]) -> None:
    if args.output_file:
        with Path(args.output_file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
