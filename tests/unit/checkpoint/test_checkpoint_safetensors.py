"""Hugging Face directories written with the safetensors library, read back through the Checkpoint interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ceiba.checkpoint import open_checkpoint
from ceiba.checkpoint.dequantize import dequantize
from ceiba.core.errors import CheckpointError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 20,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "eos_token_id": [2, 7],
}


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "model.embed_tokens.weight": rng.standard_normal((20, 32)).astype(np.float16),
        "model.norm.weight": rng.standard_normal(32).astype(np.float32),
        "model.layers.0.mlp.up_proj.weight": rng.standard_normal((48, 32)).astype(np.float32),
        "counts": np.arange(6, dtype=np.int64).reshape(2, 3),
        "empty": np.zeros((0, 4), np.float32),
    }


def write_config(directory: Path, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return directory


def write_sharded(directory: Path) -> Path:
    write_config(directory)
    names = list(arrays())
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, part in shards.items():
        save_file({name: arrays()[name] for name in part}, directory / file)
    placement = {name: file for file, part in shards.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placement}))
    return directory


@pytest.fixture
def single(tmp_path: Path) -> Path:
    directory = write_config(tmp_path / "model")
    save_file(arrays(), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_single_file(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    assert checkpoint.load_format == "safetensors"
    assert sorted(checkpoint.names()) == sorted(arrays())
    for name, array in arrays().items():
        raw = checkpoint.get(name)
        assert raw.shape == array.shape
        assert raw.data.tobytes() == array.tobytes()
    assert checkpoint.get("counts").kind == "I64"
    np.testing.assert_array_equal(dequantize(checkpoint.get("model.norm.weight")), arrays()["model.norm.weight"])
    facts = checkpoint.facts()
    assert (facts.architecture, facts.dtype, facts.quantized) == ("LlamaForCausalLM", "float16", None)
    assert facts.num_params == sum(array.size for array in arrays().values())
    assert facts.weight_bytes == sum(array.nbytes for array in arrays().values())


def test_data_is_mapped_and_cannot_be_written_to(single: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        open_checkpoint(single).get("model.norm.weight").data[0] = 1


def test_shards(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_sharded(tmp_path / "model"))
    assert [Path(file).name for file in checkpoint.files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert {raw.name: raw.data.tobytes() for raw in checkpoint} == {n: a.tobytes() for n, a in arrays().items()}


def test_a_shard_that_lacks_its_tensor_or_is_missing(tmp_path: Path) -> None:
    directory = write_sharded(tmp_path / "model")
    save_file({"counts": arrays()["counts"]}, directory / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="lacks it"):
        open_checkpoint(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        open_checkpoint(directory)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", 3, None])
def test_an_index_cannot_point_outside_its_directory(tmp_path: Path, file: Any) -> None:
    directory = write_config(tmp_path / "model")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="beside it"):
        open_checkpoint(directory)


def test_newer_spellings_of_the_config(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e6}
    directory = write_config(tmp_path / "model", rope_parameters=rope, dtype="bfloat16", torch_dtype=None)
    save_file(arrays(), directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config["rope_theta"] == 1e6
    assert checkpoint.config["rope_scaling"] == {k: v for k, v in rope.items() if k != "rope_theta"}
    assert (checkpoint.facts().dtype, checkpoint.facts().context_len) == ("bfloat16", 1024)


def test_tokenizer_files(single: Path) -> None:
    (single / "tokenizer.json").write_text("{}")
    (single / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, "temperature": 0.6}))
    settings = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}],
        "added_tokens_decoder": {"1": {"content": "<s>"}, "5": {"content": "</s>"}, "x": {}, "6": 3},
    }
    (single / "tokenizer_config.json").write_text(json.dumps(settings))
    checkpoint = open_checkpoint(single)
    assert checkpoint.generation_config["temperature"] == 0.6
    source = checkpoint.tokenizer()
    assert source.tokenizer_json == str(single / "tokenizer.json")
    assert (source.bos_id, source.eos_ids, source.add_bos, source.add_eos) == (1, (9, 2, 7, 5), True, False)
    assert source.chat_templates == {"default": "A", "rag": "B"}
    (single / "chat_template.jinja").write_text("C")
    (single / "additional_chat_templates").mkdir()
    (single / "additional_chat_templates" / "tool_use.jinja").write_text("D")
    assert open_checkpoint(single).tokenizer().chat_templates == {"default": "C", "rag": "B", "tool_use": "D"}


@pytest.mark.parametrize(
    ("dtype", "expected"), [(np.float32, "float32"), (np.float16, "float16"), (np.int8, "bfloat16")]
)
def test_without_a_dtype_in_the_config_the_weights_decide(tmp_path: Path, dtype: Any, expected: str) -> None:
    directory = write_config(tmp_path / "model", torch_dtype=None)
    save_file({"w": np.zeros((4, 4), dtype), "small": np.zeros(1, np.float64)}, directory / "model.safetensors")
    assert open_checkpoint(directory).facts().dtype == expected


def test_quantization_method_is_a_fact(tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    save_file(arrays(), directory / "model.safetensors")
    assert open_checkpoint(directory).facts().quantized == "fp8"


def test_torch_files_are_listed_and_left_to_torch(tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model")
    for i in (2, 1):
        (directory / f"pytorch_model-0000{i}-of-00002.bin").write_bytes(b"x" * i)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.load_format == "pt"
    assert [Path(f).name for f in checkpoint.files] == [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    assert (checkpoint.names(), list(checkpoint), checkpoint.facts().weight_bytes) == ([], [], 3)
    with pytest.raises(CheckpointError, match="torch"):
        checkpoint.get("a")


def test_dummy_has_a_config_and_no_weights(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_config(tmp_path / "model"), "dummy")
    assert (checkpoint.load_format, checkpoint.names(), checkpoint.files) == ("dummy", [], ())
    assert checkpoint.config["hidden_size"] == 32
    with pytest.raises(CheckpointError, match="dummy"):
        checkpoint.get("model.norm.weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": 1e9}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"architectures": []}, "architectures"),
        ({"num_attention_heads": True}, "num_attention_heads"),
    ],
)
def test_a_config_out_of_range_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_config(tmp_path / "model", **changes), "dummy").facts()
