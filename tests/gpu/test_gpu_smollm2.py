"""A real model on the device: greedy tokens in float32 are transformers' stored ones, and what fewer bits cost, of
activations, weights and KV cache, stays within stated bounds. The model (98 MB) is looked for in the catalogue's cache,
or under the path that CEIBA_TEST_SMOLLM2 names.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ceiba.checkpoint import catalogue
from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.errors import CeibaError
from ceiba.runner.worker import ModelRunner
from greedy_reference import assert_greedy, prompts, reference
from plan_driver import Driver, Request, make_config
from reference import smollm2_hf

pytestmark = pytest.mark.gpu

COUNT = 20
GRAPHS = {
    "cuda_graph_backend_decode": "full",
    "cuda_graph_max_bs_decode": 24,
    "cuda_graph_backend_prefill": "full",
    "cuda_graph_max_bs_prefill": 256,
}
EAGER = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}


@pytest.fixture(scope="module")
def model_path() -> str:
    named = os.environ.get("CEIBA_TEST_SMOLLM2")
    try:
        path = Path(named) if named else catalogue.fetch(catalogue.DEFAULT, progress=False)
    except (CeibaError, OSError) as error:
        pytest.skip(f"no SmolLM2 here and CEIBA_TEST_SMOLLM2 names none: {error}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == reference()["sha256"]
    return str(path)


def make(path: str, **options: object) -> Driver:
    config = make_config(
        path, device="cuda", attention_backend="triton", mem_fraction_static=0.99, context_len=1024,
        max_total_tokens=16384, **{**GRAPHS, **options},
    )  # fmt: skip
    return Driver(ModelRunner(config, open_checkpoint(path)))


@pytest.mark.parametrize("graphs", [GRAPHS, EAGER], ids=["captured", "eager"])
def test_greedy_tokens_in_float32(model_path: str, graphs: dict[str, object]) -> None:
    """Twenty prompts at once, three of them alone as well, and one in chunks."""
    driver = make(model_path, **graphs)
    chosen = prompts()[:COUNT]
    requests = [Request(list(prompt["ids"])) for prompt in chosen]
    driver.run(requests, 64)
    for prompt, request in zip(chosen, requests, strict=True):
        assert_greedy(prompt, request.output)
    for request in requests:
        driver.close(request)
    for prompt in chosen[:3]:
        request = Request(list(prompt["ids"]))
        driver.run([request], 64, chunk=17)
        assert_greedy(prompt, request.output)
        driver.close(request)
    assert (driver.runner.stats()["graph_hits"] > 0) == (graphs is GRAPHS)


def logits(driver: Driver) -> torch.Tensor:
    """[COUNT × 9, vocab]: after the prompt, and after each of eight given answer tokens, the prompt then being read
    from the KV cache."""
    found = []
    for prompt in prompts()[:COUNT]:
        text = list(prompt["ids"])
        first = Request(text)
        driver.run([first], 1)
        found.append(first.logits[0])
        for index in range(1, 9):
            request = Request(text + prompt["tokens"][:index], prefix_slots=first.slots[: len(text)])
            driver.run([request], 1)
            found.append(request.logits[0])
            driver.close(request)
        driver.close(first)
    return torch.stack(found).float().cpu()


@pytest.fixture(scope="module")
def exact(model_path: str) -> torch.Tensor:
    return logits(make(model_path))


def divergence(wanted: torch.Tensor, got: torch.Tensor) -> np.ndarray:
    """KL(wanted ‖ got) of each position, in nats."""
    p, q = wanted.log_softmax(-1), got.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).flatten().numpy()


BOUNDS = {
    "bfloat16": ({"dtype": "bfloat16"}, 0.003, 0.05),
    "kv-e4m3": ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, 0.02, 0.3),
    "kv-e5m2": ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"}, 0.06, 0.8),
    "weights": ({"dtype": "bfloat16", "quantization": "fp8"}, 0.06, 0.8),
}
"""What has fewer bits → the median and the largest divergence of a position's distribution from float32's."""


@pytest.mark.parametrize("kind", list(BOUNDS))
def test_what_fewer_bits_cost(model_path: str, exact: torch.Tensor, kind: str, tmp_path: Path) -> None:
    options, median, largest = BOUNDS[kind]
    path = str(smollm2_hf.save_directory(model_path, tmp_path)) if kind == "weights" else model_path
    found = divergence(exact, logits(make(path, **options)))
    print(f"{kind}: divergence median {np.median(found):.5f}, largest {found.max():.4f} nats")
    assert np.isfinite(found).all()
    assert np.median(found) < median
    assert found.max() < largest
    assert np.median(found) > 1e-7, "nothing was rounded"
