"""Jump-forward on a real model: penalties, noise and later tokens are those of a run that samples every token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ceiba.cache.ledger import assert_ledger
from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.messages import Generate, ids_to_bytes
from ceiba.core.sampling import SamplingParams
from ceiba.core.step import Runner
from ceiba.grammar.provider import Provider
from ceiba.runner.worker import ModelRunner
from ceiba.scheduler.loop import Scheduler
from ceiba.scheduler.memory_port import MemoryPort
from plan_driver import make_config
from support.letters import VOCAB, letter_provider
from tiny_models import reference

FORCED = "((abcdefgh|ijklmnop)[q-z]){4}"
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "regex": FORCED},
    {"temperature": 1.0, "regex": FORCED},
    {"temperature": 1.5, "regex": FORCED, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.0, "regex": FORCED, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0.8, "regex": FORCED, "repetition_penalty": 1.7},
    {"temperature": 0.0, "ignore_eos": True, "frequency_penalty": 0.4},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    where: Path = tmp_path_factory.mktemp("m")
    reference("llama").save_pretrained(where)
    return str(where)


@pytest.fixture(scope="module")
def provider():
    made = letter_provider()
    yield made
    made.close()


def serve(path: str, provider: Provider, **options: Any) -> tuple[list[list[int]], int]:
    """Answers, and how many tokens of them were not sampled."""
    config = make_config(path, **options)
    runner, port = ModelRunner(config, open_checkpoint(path)), MemoryPort()
    scheduler = Scheduler(config.scheduler, cast(Runner, runner), port, grammar=provider)
    for i, fields in enumerate(ASKED):
        ids = ids_to_bytes(np.random.default_rng(i).integers(36, VOCAB, 20).astype(np.int32))
        sampling = SamplingParams(max_new_tokens=60, seed=i, **fields)
        port.push(Generate(rid=str(i), input_ids=ids, sampling=sampling))
    for _ in range(20_000):
        scheduler.step(wait=0.0)
        if scheduler.idle and not port.inbox:
            break
        if len(scheduler.compiling):
            time.sleep(0.002)
    assert_ledger(scheduler.leases, idle=True)
    answers = [port.answers[str(i)] for i in range(len(ASKED))]
    assert all(answer.finish is not None and answer.finish.kind in {"stop", "length"} for answer in answers)
    return [answer.tokens for answer in answers], scheduler.counters.jumped_tokens


@pytest.mark.parametrize("cpu_kernels", [True, False])
def test_answers_are_those_of_sampling_every_token(path, provider, cpu_kernels):
    jumped, unsampled = serve(path, provider, cpu_kernels=cpu_kernels)
    plain, none = serve(path, provider, cpu_kernels=cpu_kernels, jump_forward=False)
    assert jumped == plain
    assert len(jumped[0]) >= 36, "every choice was followed by forced letters"
    assert unsampled >= 5 * 24
    assert none == 0
