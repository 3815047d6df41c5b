"""--quantization int8 and int4 against transformers: with the same rounded weights, and with the weights as stored."""

from __future__ import annotations

import copy
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ceiba.checkpoint import packed_cache
from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.errors import ConfigError
from ceiba.kernels import cpu
from ceiba.layers.quant.packed import PackedWeight
from ceiba.models.fused import FusedDecoder
from ceiba.models.loader import load_model
from ceiba.runner.worker import ModelRunner
from plan_driver import PACKED_ERROR, Driver, Request, make_config, relative_error
from tiny_models import SIZE, logits_of, reference, write_gguf

pytestmark = pytest.mark.skipif(not cpu.available, reason="the compiled CPU kernels are not built")

KINDS = {"int8": ("Q8_0", 34, "Q8_0", 34), "int4": ("Q4_1", 20, "Q8_0", 34)}
BOUNDS = {"int8": 0.08, "int4": 0.7}
"""Relative error of the logits against the weights as stored. The tiny models have wide, random weights: real ones are
kinder (benchmarks/cpu/perplexity.py)."""
BFLOAT16_ERROR = 0.1
"""Of logits behind a prompt: typically 0.01 to 0.04, in wide random weights again; a wrong row gives about 1."""


def rounded(model: PreTrainedModel, method: str) -> PreTrainedModel:
    """The model with every matrix as its blocks say it, read by the gguf package."""
    kind, size, token_kind, token_size = KINDS[method]
    found = copy.deepcopy(model)
    done = set()
    with torch.no_grad():
        for name, value in found.named_parameters():
            if value.dim() != 2 or value.data_ptr() in done:
                continue
            done.add(value.data_ptr())
            chosen, width = (token_kind, token_size) if "embed" in name or "lm_head" in name else (kind, size)
            blocks = np.empty((len(value), value.shape[1] // 32 * width), np.uint8)
            cpu._cpu.quantize(cpu._cpu.Context(1), chosen, value.numpy(), blocks)
            read = gguf.dequantize(blocks, gguf.GGMLQuantizationType[chosen])
            value.copy_(torch.from_numpy(read.reshape(value.shape).copy()))
    return found


def weights_of(path: Path, **options: object) -> list[PackedWeight]:
    config = make_config(str(path), **options)
    checkpoint = open_checkpoint(str(path), config.model.load_format)
    targets = load_model(checkpoint, config.model, config.runner, torch.device("cpu")).slots().values()
    return list({id(slot.target): slot.target for slot in targets if isinstance(slot.target, PackedWeight)}.values())


@pytest.mark.parametrize("method", list(KINDS))
@pytest.mark.parametrize("case", ["llama-tied-biased", "qwen3", "qwen2-window"])
def test_logits_are_those_of_the_rounded_weights(case: str, method: str, tmp_path: Path) -> None:
    model = reference(case)
    model.save_pretrained(tmp_path)
    runner = ModelRunner(make_config(str(tmp_path), quantization=method), open_checkpoint(str(tmp_path)))
    assert isinstance(runner.model, FusedDecoder) == (case != "qwen2-window")
    driver = Driver(runner)
    prompt = np.random.default_rng(11).integers(0, 320, 60).tolist()
    request = Request(prompt)
    driver.run([request], 6, chunk=23)
    got = torch.stack(request.logits)
    wanted, stored = (logits_of(m, request.tokens[:-1])[len(prompt) - 1 :] for m in (rounded(model, method), model))
    assert relative_error(got, wanted) < PACKED_ERROR
    error = relative_error(got, stored)
    assert error < BOUNDS[method], error
    driver.close(request)


@pytest.mark.parametrize("method", list(KINDS))
@pytest.mark.parametrize("case", ["llama-tied-biased", "qwen3"])
def test_prompts_of_many_rows_in_bfloat16_stay_close(case: str, method: str, tmp_path: Path) -> None:
    """Around the numbers of rows where tiles of bfloat16 begin, end and are filled up, on units that have them."""
    model = reference(case)
    model.save_pretrained(tmp_path)
    config = make_config(
        str(tmp_path), quantization=method, dtype="bfloat16", context_len=512, chunked_prefill_size=512
    )
    driver = Driver(ModelRunner(config, open_checkpoint(str(tmp_path))))
    same = rounded(model, method)
    for length in (8, 9, 31, 32, 33, 255, 257, 300):
        request = Request(np.random.default_rng().integers(0, 320, length).tolist())
        driver.run([request], 1)
        wanted = logits_of(same, request.prompt)[-1]
        assert relative_error(request.logits[0], wanted) < BFLOAT16_ERROR, length
        driver.close(request)


def stored_bytes(path: Path, **options: object) -> int:
    return sum(len(part.data) for weight in weights_of(path, **options) for part in weight.parts.values())


def test_memory_is_what_the_blocks_take(tmp_path: Path) -> None:
    reference("qwen3").save_pretrained(tmp_path)
    plain = stored_bytes(tmp_path)
    assert stored_bytes(tmp_path, quantization="int8") == plain * 34 // 128
    assert stored_bytes(tmp_path, quantization="int4") < 0.2 * plain


def test_plain_gguf_files_and_dummy_weights(tmp_path: Path) -> None:
    model = reference("llama")
    write_gguf(model, tmp_path / "m.gguf")
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    driver = Driver(ModelRunner(make_config(str(tmp_path / "m.gguf"), quantization="int8"), checkpoint))
    request = Request(list(range(1, 30)))
    driver.run([request], 1)
    wanted = logits_of(rounded(model, "int8"), request.prompt)[-1]
    assert relative_error(request.logits[0], wanted) < PACKED_ERROR
    model.save_pretrained(tmp_path / "dummy")
    weights = weights_of(tmp_path / "dummy", quantization="int4", load_format="dummy")
    assert {part.kind for weight in weights for part in weight.parts.values()} == {"Q4_1", "Q8_0"}


@pytest.mark.parametrize("method", [None, "int4"])
def test_weights_packed_by_an_earlier_start_give_the_same_logits(
    method: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    reference("llama-tied-biased").save_pretrained(tmp_path)
    config = make_config(str(tmp_path), quantization=method)
    found = []
    for expected in (False, True):
        checkpoint = open_checkpoint(str(tmp_path))
        cache = packed_cache.PackedCache(tmp_path / "packed", packed_cache.identity_of(checkpoint.files, b"", {}))
        assert cache.ready is expected
        writer = cache.finish
        monkeypatch.setattr(cache, "finish", lambda writer=writer: [thread.join() for thread in [writer()] if thread])
        driver, request = Driver(ModelRunner(config, checkpoint, packed=cache)), Request(list(range(1, 40)))
        assert bool(cache.bytes_taken) is expected
        driver.run([request], 4)
        found.append(torch.stack(request.logits))
    assert torch.equal(*found)


def test_models_it_cannot_apply_to_are_refused(tmp_path: Path) -> None:
    odd = LlamaForCausalLM(LlamaConfig(**{**SIZE, "intermediate_size": 168}))
    for model, why in ((odd, "168 columns"), (reference("qwen3-moe"), "experts")):
        path = tmp_path / why
        model.save_pretrained(path)
        with pytest.raises(ConfigError, match=why):
            ModelRunner(make_config(str(path), quantization="int8"), open_checkpoint(str(path)))
    with pytest.raises(ConfigError, match="compiled kernels"):
        ModelRunner(make_config(str(path), quantization="int8", cpu_kernels=False), open_checkpoint(str(path)))
