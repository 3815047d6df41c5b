"""FP8 weights through the whole model in plain torch: a checkpoint in blocks equals transformers with the values its
scales give, weights rounded at load equal transformers with rounded weights, and ranks add up. No kernel runs here:
those are in tests/gpu, and in Triton's interpreter at the end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ceiba.checkpoint.base import RawTensor
from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.errors import CheckpointError, ConfigError
from ceiba.layers.ops import Ops
from ceiba.layers.quant.base import ExpertSpec, Part, WeightSpec
from ceiba.layers.quant.fp8 import Fp8Method, stored_fp8
from ceiba.layers.scaled import Scaled
from ceiba.models.loader import load_model
from ceiba.runner.worker import ModelRunner
from plan_driver import Driver, Request, make_config
from tiny_models import SIZE, logits_of

CPU = torch.device("cpu")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "dense": (Qwen3Config, Qwen3ForCausalLM, {"intermediate_size": 384}),
    "experts": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
    ),
}


@pytest.fixture(params=list(KINDS))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    config, family, extra = KINDS[request.param]
    sizes = {**SIZE, "hidden_size": 256, "head_dim": 32, "num_key_value_heads": 4, "tie_word_embeddings": False}
    torch.manual_seed(7)
    model = family(config(**{**sizes, **extra})).float().eval()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.15) if value.dim() > 1 else value.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def rounded(path: Path, blocks: bool) -> PreTrainedModel:
    """transformers with every matrix replaced by what eight bits keep of it; with ``blocks`` the files as well."""
    file = path / "model.safetensors"
    tensors, kept = {}, {}
    for name, value in load_file(file).items():
        tensors[name] = kept[name] = value
        if not name.removesuffix(".weight").endswith(MATRICES):
            continue
        rows, columns = value.shape
        if blocks:
            scales = torch.zeros(-(-rows // 128), -(-columns // 128))
            values = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
            for r in range(0, rows, 128):
                for c in range(0, columns, 128):
                    block = value[r : r + 128, c : c + 128]
                    scale = block.abs().max() / 448
                    scales[r // 128, c // 128] = scale
                    values[r : r + 128, c : c + 128] = (block / scale).to(torch.float8_e4m3fn)
                    kept[name] = kept[name].clone()
                    kept[name][r : r + 128, c : c + 128] = values[r : r + 128, c : c + 128].float() * scale
            tensors[name] = values
            tensors[name.removesuffix(".weight") + ".weight_scale_inv"] = scales
        else:
            scale = value.abs().amax(1, keepdim=True) / 448
            kept[name] = (value / scale).to(torch.float8_e4m3fn).float() * scale
    wanted = path / "wanted"
    wanted.mkdir()
    (wanted / "config.json").write_text((path / "config.json").read_text())
    save_file(kept, wanted / "model.safetensors", metadata={"format": "pt"})
    family = Qwen3MoeForCausalLM if any(".experts." in name for name in kept) else Qwen3ForCausalLM
    model = family.from_pretrained(wanted, dtype=torch.float32, attn_implementation="eager").eval()
    if blocks:
        save_file(tensors, file, metadata={"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": BLOCKS}))
    return model


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_logits(saved: tuple[PreTrainedModel, Path], blocks: bool) -> None:
    plain, path = saved
    wanted = rounded(path, blocks)
    options = {} if blocks else {"quantization": "fp8"}
    config = make_config(str(path), cpu_kernels=False, attention_backend="torch_native", **options)
    driver = Driver(ModelRunner(config, open_checkpoint(str(path))))
    rng = np.random.default_rng(3)
    requests = [Request(rng.integers(0, 320, n).tolist()) for n in (1, 20)]
    driver.run(requests, 3)
    for request in requests:
        expected = logits_of(wanted, request.tokens[:-1])[len(request.prompt) - 1 :]
        torch.testing.assert_close(torch.stack(request.logits), expected, atol=5e-4, rtol=5e-4)
        other = logits_of(plain, request.tokens[:-1])[len(request.prompt) - 1 :]
        assert (other - expected).norm() > 0.01 * expected.norm(), "rounding must show, or the test compares nothing"


def test_dummy_weights_are_eight_bit_and_usable(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    config = make_config(str(path), cpu_kernels=False, quantization="fp8", load_format="dummy")
    model = load_model(open_checkpoint(str(path), "dummy"), config.model, config.runner, CPU)
    block = model.blocks[0]
    assert isinstance(block.qkv.weight.dense, Scaled)
    std = block.qkv.weight.dense.plain(torch.float32).std()
    assert 0.018 < std < 0.022
    assert not isinstance(model.head.weight.dense, Scaled)
    if block.moe is not None:
        assert isinstance(block.moe.experts.down, Scaled)
        assert 0.018 < block.moe.experts.down.plain(torch.float32).std() < 0.022


def raw(name: str, value: torch.Tensor) -> RawTensor:
    kind = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16"}[value.dtype]
    return RawTensor(name, kind, tuple(value.shape), value.contiguous().view(torch.uint8).numpy().reshape(-1))


def test_shares_of_ranks_join_to_the_whole() -> None:
    """Rows of a fused matrix, and columns: the values of the ranks' blocks are the stored ones."""
    values = torch.randn(512, 512).to(torch.float8_e4m3fn)
    scales = torch.rand(4, 4)
    whole = Scaled(values, scales, blocked=True).plain(torch.float32)
    method = Fp8Method(Ops(), blocked=True)
    rows, columns = [], []
    for rank in range(2):
        parts = (Part("a", 256, 256 * rank, 512), Part("b", 256, 256 * rank, 512))
        for spec, found in (
            (WeightSpec(parts, 512, 0, 512, torch.float32, CPU), rows),
            (WeightSpec((Part("a", 512, 0, 512),), 256, 256 * rank, 512, torch.float32, CPU), columns),
        ):
            weight = method.create(spec)
            for part in spec.parts:
                for suffix, stored in (("weight", values), ("weight_scale_inv", scales)):
                    slot = weight.slots(part.name)[suffix]
                    slot.target.load(slot.part, raw(suffix, stored))
            assert isinstance(weight.dense, Scaled)
            found.append(weight.dense.plain(torch.float32))
    torch.testing.assert_close(torch.cat([rows[0][:256], rows[1][:256]]), whole, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([rows[0][256:], rows[1][256:]]), whole, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(columns, 1), whole, rtol=0, atol=0)


def test_shares_of_experts_join_to_the_whole() -> None:
    up, down = torch.randn(512, 384).to(torch.float8_e4m3fn), torch.randn(384, 512).to(torch.float8_e4m3fn)
    scales = {"up": torch.rand(4, 3), "down": torch.rand(3, 4)}
    wanted = {
        name: Scaled(value, scales[name], True).plain(torch.float32) for name, value in (("up", up), ("down", down))
    }
    found: dict[str, list[torch.Tensor]] = {"up": [], "down": []}
    for rank in range(2):
        experts = Fp8Method(Ops(), True).create_experts(ExpertSpec(2, 384, 256, 256 * rank, 512, torch.float32, CPU))
        for what, value in (("gate", up), ("up", up), ("down", down)):
            for suffix, tensor in (("weight", value), ("weight_scale_inv", scales["down" if what == "down" else "up"])):
                slot = experts.slots()[f"1.{what}_proj.{suffix}"]
                slot.target.load(slot.part, raw(suffix, tensor))
        assert isinstance(experts.gate_up, Scaled)
        assert isinstance(experts.down, Scaled)
        gate, own = experts.gate_up[1].plain(torch.float32).chunk(2)
        assert torch.equal(gate, own)
        found["up"].append(own)
        found["down"].append(experts.down[1].plain(torch.float32))
    torch.testing.assert_close(torch.cat(found["up"]), wanted["up"], rtol=0, atol=0)
    torch.testing.assert_close(torch.cat(found["down"], 1), wanted["down"], rtol=0, atol=0)


def test_what_cannot_stay_in_blocks_is_named() -> None:
    method = Fp8Method(Ops(), blocked=True)
    parts = (Part("q", 192, 0, 192), Part("k", 64, 0, 64))
    with pytest.raises(ConfigError, match="begin inside a block"):
        method.create(WeightSpec(parts, 256, 0, 256, torch.float32, CPU))
    weight = method.create(WeightSpec((Part("", 128, 0, 128),), 256, 0, 256, torch.float32, CPU))
    with pytest.raises(CheckpointError, match=r"stored as BF16.*F8_E4M3"):
        weight.load("", raw("x", torch.zeros(128, 256, dtype=torch.bfloat16)))
    for change in ({"weight_block_size": None}, {"weight_block_size": [64, 64]}, {"activation_scheme": "static"}):
        with pytest.raises(ConfigError, match="weight_block_size"):
            stored_fp8({**BLOCKS, **change}, Ops())
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down_proj"):
        stored_fp8({**BLOCKS, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"]}, Ops())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    """Kernels' indices, masks and scales; their speed and a device's arithmetic are tests/gpu's."""
    folder = Path(__file__).parents[1] / "gpu"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
