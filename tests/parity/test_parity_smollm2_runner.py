"""The embedded model through the runner against transformers in float32, on the torch path and on the compiled kernels:
logits of every prompt position and of decode steps, and greedy tokens against the stored reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.sampling import LogprobSpec
from ceiba.kernels import cpu
from ceiba.models.fused import FusedDecoder
from ceiba.runner.worker import ModelRunner
from plan_driver import PACKED_ERROR, Driver, Request, make_config, relative_error
from reference import smollm2_hf

REFERENCE: dict[str, Any] = json.loads((Path(smollm2_hf.__file__).parent / "smollm2_greedy.json").read_text())
KERNELS = pytest.mark.skipif(not cpu.available, reason="the compiled CPU kernels are not built")
PATHS = [pytest.param(False, id="torch"), pytest.param(True, id="kernels", marks=KERNELS)]
MARGIN = REFERENCE["margin_limit"]


def prompt_of(index: int) -> list[int]:
    return REFERENCE["prompts"][index]["ids"]


@pytest.fixture(scope="module", params=PATHS)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    checkpoint = open_checkpoint(None)
    config = make_config(checkpoint.path, cpu_kernels=request.param, context_len=1024, threads=1)
    return ModelRunner(config, checkpoint)


@pytest.fixture(scope="module")
def model() -> Any:
    return smollm2_hf.load_model(open_checkpoint(None).path)


@pytest.mark.slow
def test_logits(runner: ModelRunner, model: Any) -> None:
    """In chunks and through a cached prefix, shuffled slots."""
    driver = Driver(runner)
    prompt = prompt_of(0) + REFERENCE["prompts"][0]["tokens"][:20]
    request = Request(prompt, logprob=LogprobSpec(prompt_start=0, top=5))
    driver.run([request], 4, chunk=17)
    with torch.inference_mode():
        wanted = model(torch.tensor([request.tokens[:-1]])).logits[0]
    last = len(request.prompt) - 1
    bound = PACKED_ERROR if isinstance(runner.model, FusedDecoder) else 1e-5
    assert relative_error(torch.stack(request.logits), wanted[last:]) < bound
    at = 0
    logprobs = wanted.log_softmax(-1)
    for step in request.steps:
        piece = step.prompt_logprobs.get(request.row)
        for offset, value in enumerate([] if piece is None else piece.values):
            if at > 0:
                assert piece is not None
                assert piece.start + offset == at
                assert float(value) == pytest.approx(float(logprobs[at - 1, request.prompt[at]]), abs=5e-3)
            at += 1
    assert at == len(request.prompt)
    cached = Request(request.prompt, prefix_slots=request.slots[: last - 5])
    driver.run([cached], 2)
    assert relative_error(torch.stack(cached.logits), wanted[last : last + 2]) < bound


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 16, 32])
def test_greedy_tokens_of_a_mixed_batch(runner: ModelRunner, first: int) -> None:
    """Sixteen prompts at once, prefilled in chunks beside decodes, up to the first uncertain position of the
    reference."""
    driver = Driver(runner)
    entries = REFERENCE["prompts"][first : first + 16]
    requests = [Request(entry["ids"]) for entry in entries]
    driver.run(requests, 24, chunk=100, mixed=True)
    for request, entry in zip(requests, entries, strict=True):
        sure = next((i for i, margin in enumerate(entry["margins"]) if margin < MARGIN), len(entry["margins"]))
        count = min(sure, len(request.output))
        assert request.output[:count] == entry["tokens"][:count]
    for request in requests:
        driver.close(request)
