"""Loading: what is missing, surplus or misshapen is named; dummy weights; sharded ranks add up to the whole model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.errors import CheckpointError, ConfigError
from ceiba.layers.context import LayerContext
from ceiba.layers.embedding import VocabMatrix
from ceiba.layers.linear import ColumnLinear, RowLinear
from ceiba.layers.ops import Ops
from ceiba.layers.quant.plain import PlainMethod
from ceiba.layers.quant.select import quant_method
from ceiba.layers.rotary import RopeSpec
from ceiba.models.decoder import Decoder
from ceiba.models.loader import fill_from, load_model
from ceiba.models.registry import ARCHITECTURES, model_class
from plan_driver import make_config
from tiny_models import reference

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m")
    reference("llama").save_pretrained(path)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "m"))


def load(path: Path, **options: object) -> Decoder:
    config = make_config(str(path), cpu_kernels=False, **options)
    return load_model(open_checkpoint(str(path), config.model.load_format), config.model, config.runner, CPU)


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, file, metadata={"format": "pt"})


def test_missing_tensors_are_named(copy: Path) -> None:
    rewrite(copy, **{"model.layers.1.mlp.up_proj.weight": None, "model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors.*layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight"):
        load(copy)


def test_surplus_tensors_are_named(copy: Path) -> None:
    rewrite(copy, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match=r"1 tensors this architecture has no place for: .*q_norm"):
        load(copy)


def test_old_rotary_tables_are_not_surplus(copy: Path) -> None:
    rewrite(copy, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(copy)


def test_a_wrong_shape_names_both(copy: Path) -> None:
    rewrite(copy, **{"model.layers.0.mlp.up_proj.weight": torch.ones(8, 128)})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has shape \[8, 128\].*\[160, 128\]"):
        load(copy)


def test_a_kind_that_needs_scales_is_refused(copy: Path) -> None:
    rewrite(copy, **{"model.layers.0.mlp.up_proj.weight": torch.ones(160, 128).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        load(copy)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_stored_halves_are_converted_once(copy: Path, stored: torch.dtype) -> None:
    original = load_file(copy / "model.safetensors")
    save_file({k: v.to(stored) for k, v in original.items()}, copy / "model.safetensors", metadata={"format": "pt"})
    model = load(copy)
    gate_up = model.blocks[1].gate_up.weight.value  # type: ignore[attr-defined]
    parts = [original[f"model.layers.1.mlp.{name}_proj.weight"].to(stored).float() for name in ("gate", "up")]
    assert torch.equal(gate_up, torch.cat(parts))


def test_dummy_weights_are_reproducible_and_usable(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    one, two = (load(copy, load_format="dummy") for _ in range(2))
    for name, slot in one.slots().items():
        first, second = slot.target.value, two.slots()[name].target.value  # type: ignore[attr-defined]
        assert torch.equal(first, second)
        if first.dim() == 2:
            assert float(first.std()) == pytest.approx(0.02, rel=0.1)
    first, second = (block.qkv.weight.value for block in one.blocks[:2])  # type: ignore[attr-defined]
    assert not torch.equal(first, second)


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'GPT5ForCausalLM'.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        model_class("GPT5ForCausalLM")


def test_every_registered_architecture_exists() -> None:
    for name in ARCHITECTURES:
        assert model_class(name).__name__ == name


def test_configuration_errors_name_the_key(copy: Path) -> None:
    with pytest.raises(ConfigError, match="hidden_act 'gelu'"):
        load(copy, override_args={"hidden_act": "gelu"})
    with pytest.raises(ConfigError, match=r"RoPE scaling 'longrope'.*llama3, yarn"):
        load(copy, override_args={"rope_parameters": {"rope_type": "longrope"}})
    with pytest.raises(ConfigError, match="'linear' needs 'factor'"):
        load(copy, override_args={"rope_parameters": {"rope_type": "linear"}})


def test_old_and_new_rope_configurations_are_the_same() -> None:
    old = RopeSpec.from_config(
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}, "max_position_embeddings": 64}, 16
    )
    new = RopeSpec.from_config(
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2}, "max_position_embeddings": 64}, 16
    )
    assert (old.dim, old.theta, old.kind, old.need("factor")) == (new.dim, new.theta, new.kind, new.need("factor"))


def test_quantization_flags_that_contradict_the_file() -> None:
    with pytest.raises(ConfigError, match=r"'awq'.*available: plain, gguf"):
        quant_method("awq", None, Ops())
    with pytest.raises(ConfigError, match="--quantization fp8"):
        quant_method("gguf", "fp8", Ops())
    assert quant_method("gguf", "gguf", Ops()).name == "gguf"


class Rank:
    """One of several ranks run one after the other: collectives are recorded and done by the test."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x


def context(rank: int, size: int) -> LayerContext:
    return LayerContext(torch.float32, CPU, Rank(rank, size), Ops(), PlainMethod(Ops()), 32)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_add_up_to_the_whole_layer(saved: Path, size: int) -> None:
    """Four query heads, two KV heads (shared by two ranks each when there are four), vocabulary 320 + odd ones."""
    checkpoint = open_checkpoint(str(saved))
    x = torch.randn(5, 128)
    weights = {n: torch.from_numpy(checkpoint.get(f"model.layers.0.self_attn.{n}_proj.weight").data.view("f4").copy())
               for n in "qkvo"}  # fmt: skip
    outputs: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
    partial = torch.zeros(5, 128)
    for rank in range(size):
        ctx = context(rank, size)
        fused = ColumnLinear(ctx, 128, (("q", 128, 32, False), ("k", 64, 32, True), ("v", 64, 32, True)))
        for part in "qkv":
            slot = fused.slots(part)["weight"]
            slot.target.load(slot.part, checkpoint.get(f"model.layers.0.self_attn.{part}_proj.weight"))
        widths = [part.rows for part in fused.weight.spec.parts]  # type: ignore[attr-defined]
        for part, value in zip("qkv", fused(x).split(widths, dim=1), strict=True):
            outputs[part].append(value)
        out = RowLinear(ctx, 128, 128, unit=32)
        slot = out.slots()["weight"]
        slot.target.load(slot.part, checkpoint.get("model.layers.0.self_attn.o_proj.weight"))
        partial += out(x[:, rank * (128 // size) : (rank + 1) * (128 // size)])
    torch.testing.assert_close(torch.cat(outputs["q"], 1), x @ weights["q"].view(128, 128).T)
    torch.testing.assert_close(partial, x @ weights["o"].view(128, 128).T, atol=1e-4, rtol=1e-4)
    for part in "kv":
        whole = x @ weights[part].view(64, 128).T
        heads = [whole[:, 32 * (rank * 2 // size) :][:, : 64 // min(size, 2)] for rank in range(size)]
        for got, wanted in zip(outputs[part], heads, strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_vocabulary_that_ranks_do_not_divide(saved: Path, size: int) -> None:
    raw = open_checkpoint(str(saved)).get("model.embed_tokens.weight")
    whole = torch.from_numpy(raw.data.view("f4").copy()).view(320, 128)
    ids, x = torch.tensor([0, 319, 107, 106, 45]), torch.randn(3, 128)
    embedded, logits = torch.zeros(5, 128), []
    for rank in range(size):
        matrix = VocabMatrix(context(rank, size), 320, 128)
        matrix.weight.load("", raw)
        embedded += matrix.embed(ids)
        logits.append(matrix.project(x))
    torch.testing.assert_close(embedded, whole[ids])
    assert len({part.shape for part in logits}) == 1 or size == 1
    torch.testing.assert_close(torch.cat(logits, 1)[:, :320], x @ whole.T)


def test_head_counts_that_ranks_do_not_divide(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"q: 4 cannot be split over 3 ranks"):
        ColumnLinear(context(0, 3), 128, (("q", 128, 32, False),))


def test_fill_from_needs_every_slot(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    family = model_class("LlamaForCausalLM")
    model = family(family.describe({**config, "num_hidden_layers": 3}), context(0, 1))
    with pytest.raises(CheckpointError, match="lacks 9 tensors"):
        fill_from(open_checkpoint(str(saved)), model)


def test_kinds_of_blocks_stand_for_all(tmp_path: Path) -> None:
    """A model with dense and sparse layers: one of each, twice; a pass over them is a pass over those blocks."""
    reference("qwen3-moe-mixed").save_pretrained(tmp_path)
    model = load(tmp_path)
    kinds = model.kinds
    assert [id(block) for block in kinds] == [id(model.blocks[index]) for index in (0, 0, 1, 1)]
    assert [block.moe is None for block in kinds] == [False, False, True, True]
