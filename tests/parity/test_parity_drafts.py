"""Drafts on a real model: whatever is guessed, tokens and log-probabilities are those of one token a step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ceiba.cache.ledger import assert_ledger
from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.messages import Generate, ids_to_bytes
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.core.step import Runner
from ceiba.grammar.provider import Provider
from ceiba.kernels import cpu
from ceiba.runner.worker import ModelRunner
from ceiba.scheduler.loop import Scheduler
from ceiba.scheduler.memory_port import Answer, MemoryPort
from ceiba.spec.base import Drafter
from plan_driver import make_config
from support.letters import VOCAB, letter_provider
from support.replay import replay
from tiny_models import reference

SHAPE = "((ab|cd|e[f-h])[q-z]){2,6}(abcdefgh|ijklmnop)"
WANTED = LogprobSpec(output=True, top=2, token_ids=(5, 9), prompt_start=3)
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "ignore_eos": True, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0.8, "repetition_penalty": 1.7, "min_new_tokens": 30},
    {"temperature": 0.7, "min_p": 0.01, "logit_bias": {7: 3.0, 8: -5.0}, "stop_token_ids": (44,)},
    {"temperature": 0.0, "regex": SHAPE},
    {"temperature": 1.5, "regex": SHAPE, "frequency_penalty": 0.4},
    {"temperature": 1.0, "regex": SHAPE, "min_new_tokens": 8},
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


def prompt(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(36, VOCAB, 20).astype(np.int32)


def serve(
    path: str, provider: Provider, drafter: Drafter | None, **options: Any
) -> tuple[list[Answer], Scheduler, dict[str, float]]:
    """Answers to ASKED, which come in twos, so that some decode while others are prefilled."""
    config = make_config(path, num_draft_tokens=7, **options)
    runner, port = ModelRunner(config, open_checkpoint(path)), MemoryPort()
    scheduler = Scheduler(config.scheduler, cast(Runner, runner), port, grammar=provider, drafter=drafter)
    waiting = list(enumerate(ASKED))
    for turn in range(20_000):
        if waiting and turn % 3 == 0:
            for i, fields in waiting[:2]:
                sampling = SamplingParams(max_new_tokens=60, seed=i, **fields)
                logprob = WANTED if i % 2 == 0 else LogprobSpec()
                ids = ids_to_bytes(prompt(i))
                port.push(Generate(rid=str(i), input_ids=ids, sampling=sampling, logprob=logprob))
            del waiting[:2]
        scheduler.step(wait=0.0)
        assert_ledger(scheduler.leases)
        if scheduler.idle and not port.inbox and not waiting:
            break
        if len(scheduler.compiling):
            time.sleep(0.002)
    assert_ledger(scheduler.leases, idle=True)
    answers = [port.answers[str(i)] for i in range(len(ASKED))]
    assert all(answer.finish is not None and answer.finish.kind in {"stop", "length"} for answer in answers)
    return answers, scheduler, runner.stats()


def joined(answer: Answer) -> tuple[list[int], list[bytes], str]:
    parts = ("values", "top_ids", "top_values", "fixed_values")
    assert answer.finish is not None
    both = (answer.logprobs, answer.prompt_logprobs)
    values = [b"".join(getattr(p, name) for p in found) for found in both for name in parts]
    return answer.tokens, values, answer.finish.kind


@pytest.mark.parametrize(
    "options",
    [{}, {"jump_forward": False}, {"cpu_kernels": False}, {"page_size": 4, "enable_mixed_chunk": True},
     {"max_total_tokens": 200, "conservativeness": 0.05, "disable_radix_cache": True}],
    ids=["fused", "no jump", "torch", "pages and mixed", "retracted"],
)  # fmt: skip
def test_answers_are_those_of_one_token_a_step(path: str, provider: Provider, options: dict[str, Any]) -> None:
    plain, _, before = serve(path, provider, None, **options)
    drafter = replay([(prompt(i).tolist(), a.tokens) for i, a in enumerate(plain)], 0.8, VOCAB)
    drafted, scheduler, after = serve(path, provider, drafter, **options)
    counters = scheduler.counters
    for i, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        tokens, logprobs, kind = joined(one)
        found, values, end = joined(other)
        assert (found, end) == (tokens, kind), ASKED[i]
        if cpu.available and options.get("cpu_kernels", True):
            assert values == logprobs, ASKED[i]
        else:  # torch multiplies few rows and many in another order
            close = [np.frombuffer(raw[0], np.float32) for raw in (values, logprobs)]
            np.testing.assert_allclose(close[0], close[1], atol=1e-4)
    assert 0 < counters.spec_accepted_tokens < counters.spec_draft_tokens
    assert after["forwards"] < before["forwards"] or "max_total_tokens" in options
    if "max_total_tokens" in options:
        assert counters.retractions
