"""The real scheduler over the real runner: answers under nested shared prefixes are those of a run without sharing."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from ceiba.cache.ledger import assert_ledger
from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.messages import Generate, ids_to_bytes
from ceiba.core.sampling import SamplingParams
from ceiba.core.step import Runner, StepPlan
from ceiba.kernels import cpu
from ceiba.runner.worker import ModelRunner
from ceiba.scheduler.loop import Scheduler
from ceiba.scheduler.memory_port import MemoryPort
from plan_driver import make_config
from tiny_models import reference

pytestmark = pytest.mark.skipif(not cpu.available, reason="the compiled CPU kernels are not built")


def prompts() -> list[list[int]]:
    """Three branches of 300 tokens under a root of 400, six leaves under each, and one that shares nothing."""
    rng = np.random.default_rng(4)
    root = rng.integers(5, 320, 400).tolist()
    found = [rng.integers(5, 320, 200).tolist()]
    for _ in range(3):
        branch = root + rng.integers(5, 320, 300).tolist()
        found += [branch + rng.integers(5, 320, 1 + leaf).tolist() for leaf in range(6)]
    return found


def serve(path: str, **options: object) -> tuple[list[list[int]], list[StepPlan]]:
    """Answers of two rounds (the second finds everything cached), and every plan."""
    config = make_config(path, context_len=1024, max_total_tokens=20000, chunked_prefill_size=512, threads=1, **options)
    runner, port = ModelRunner(config, open_checkpoint(path)), MemoryPort()
    scheduler = Scheduler(config.scheduler, cast(Runner, runner), port)
    plans: list[StepPlan] = []
    forward = runner.forward

    def spy(plan: StepPlan) -> object:
        plans.append(plan)
        return forward(plan)

    runner.forward = spy  # type: ignore[method-assign,assignment]
    answers = []
    for turn in range(2):
        for i, prompt in enumerate(prompts()):
            sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
            ids = ids_to_bytes(np.array(prompt, np.int32))
            port.push(Generate(rid=f"{turn}.{i}", input_ids=ids, sampling=sampling))
        for _ in range(2000):
            scheduler.step(wait=0.0)
            if scheduler.idle and not port.inbox:
                break
        assert_ledger(scheduler.leases, idle=True)
        answers += [port.answers[f"{turn}.{i}"].tokens for i in range(len(prompts()))]
    return answers, plans


@pytest.mark.parametrize("mixed", [False, True])
def test_sharing_changes_no_answer(mixed: bool, tmp_path: Path) -> None:
    reference("qwen3").save_pretrained(tmp_path)
    apart, plans = serve(str(tmp_path), shared_prefix=False, enable_mixed_chunk=mixed)
    assert not any(plan.groups for plan in plans)
    together, plans = serve(str(tmp_path), shared_prefix=True, enable_mixed_chunk=mixed)
    nested = [sorted({group.length for group in plan.groups}) for plan in plans]
    assert [400, 700] in nested
    assert together == apart
    assert all(len(tokens) == 8 for tokens in together)
