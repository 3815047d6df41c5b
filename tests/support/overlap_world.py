"""The real scheduler on a real runner under random traffic, with and without overlap scheduling: arrivals at any step,
aborts, chunks, sampling with seeds and penalties, a pool too small for all."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ceiba.cache.ledger import assert_ledger
from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.messages import Abort, Generate, ids_to_bytes
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.core.step import Runner, StepHandle, StepOutput, StepPlan, StepResult, TokenMasks
from ceiba.runner.worker import ModelRunner
from ceiba.scheduler.loop import Scheduler
from ceiba.scheduler.memory_port import MemoryPort
from plan_driver import make_config

REQUESTS, POOL = 24, 900


def sampling(rng: np.random.Generator) -> SamplingParams:
    """Greedy, or drawn with a seed, with penalties in half of the cases."""
    drawn, penalty = rng.random() < 0.5, 0.4 * (rng.random() < 0.5)
    return SamplingParams(
        temperature=0.8 if drawn else 0.0,
        top_p=0.95,
        seed=int(rng.integers(1 << 30)),
        frequency_penalty=penalty,
        max_new_tokens=int(rng.integers(1, 40)),
        ignore_eos=True,
    )


class Late:
    """A result that says it is on its way, as a device's does while it works."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def ready(self) -> bool:
        return False

    def wait(self) -> StepOutput:
        return self._result.wait()


class Ahead:
    """A runner whose results are never there when asked for, so that the loop plans the next step without them."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.info, self.stats, self.close = runner.info, runner.stats, runner.close
        self.unknown = 0
        """Tokens that plans left to the runner."""

    def forward(self, plan: StepPlan) -> StepHandle:
        self.unknown += int(np.count_nonzero(plan.tokens < 0))
        return self._runner.forward(plan)

    def sample(self, handle: StepHandle, masks: TokenMasks | None) -> Late:
        return Late(self._runner.sample(handle, masks))


def answers(path: Path, seed: int, *, overlap: bool, **options: object) -> dict[str, tuple[int, ...]]:
    """Output tokens of each request that was not aborted."""
    config = make_config(
        str(path), overlap=overlap, max_total_tokens=POOL, chunked_prefill_size=48, max_running_requests=16, **options
    )
    port, rng = MemoryPort(), np.random.default_rng(seed)
    runner: Runner = ModelRunner(config, open_checkpoint(str(path)))
    if overlap and runner.info.device == "cpu":  # which computes inside of a step and has nothing to wait for
        runner = Ahead(runner)
    scheduler = Scheduler(config.scheduler, runner, port)
    aborted = set()
    for i in range(REQUESTS):
        ids = rng.integers(0, 320, int(rng.integers(1, 90)), dtype=np.int32)
        spec = LogprobSpec(output=True, top=2) if rng.random() < 0.3 else LogprobSpec()
        port.push(Generate(rid=str(i), input_ids=ids_to_bytes(ids), sampling=sampling(rng), logprob=spec))
        for _ in range(int(rng.integers(0, 4))):
            scheduler.step(wait=0.0)
        if rng.random() < 0.15:
            aborted.add(str(i))
            port.push(Abort(rids=[str(i)]))
    while port.inbox or not scheduler.idle:
        scheduler.step(wait=0.0)
    assert_ledger(scheduler.leases, idle=True)
    assert not isinstance(runner, Ahead) or runner.unknown > REQUESTS
    return {rid: tuple(answer.tokens) for rid, answer in port.answers.items() if rid not in aborted}
