"""--kv-cache-dtype with eight bits against transformers, in the kernels and in plain torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ceiba.checkpoint.opening import open_checkpoint
from ceiba.kernels import cpu
from ceiba.runner.worker import ModelRunner
from plan_driver import Driver, Request, make_config
from tiny_models import logits_of, reference

KERNELS = pytest.mark.skipif(not cpu.available, reason="the compiled CPU kernels are not built")
BOUNDS = {"int8": 0.06, "fp8_e4m3": 0.2, "fp8_e5m2": 0.4}
"""Relative error of the logits of these random models against a float32 cache."""


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=KERNELS)], ids=["torch", "kernels"])
@pytest.mark.parametrize("case", ["llama", "qwen2-window"])
def test_logits_stay_within_the_bound(case: str, kernels: bool, tmp_path: Path) -> None:
    model = reference(case)
    model.save_pretrained(tmp_path)
    prompt = np.random.default_rng(11).integers(0, 320, 60).tolist()
    sizes, shifts = {}, {}
    for kind, bound in BOUNDS.items():
        config = make_config(str(tmp_path), kv_cache_dtype=kind, cpu_kernels=kernels)
        runner = ModelRunner(config, open_checkpoint(str(tmp_path)))
        sizes[kind] = runner.pool.shape.bytes_per_token
        driver, request = Driver(runner), Request(prompt)
        driver.run([request], 8, chunk=23)
        got, wanted = torch.stack(request.logits), logits_of(model, request.tokens[:-1])[len(prompt) - 1 :]
        shifts[kind] = ((got - wanted).norm() / wanted.norm()).item()
        assert 0 < shifts[kind] < bound, (kind, shifts)
        driver.close(request)
    assert shifts["int8"] < shifts["fp8_e4m3"] < shifts["fp8_e5m2"], shifts
    assert sizes["fp8_e4m3"] == sizes["fp8_e5m2"] == 2 * 2 * 2 * 32
    assert sizes["int8"] == 2 * 2 * 2 * (32 + 4)
