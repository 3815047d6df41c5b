"""GGUF files written with the gguf package, read back through the Checkpoint interface."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from ceiba.checkpoint import open_checkpoint
from ceiba.checkpoint.base import Checkpoint
from ceiba.checkpoint.dequantize import dequantize
from ceiba.checkpoint.gguf import GgufCheckpoint
from ceiba.core.errors import CheckpointError
from support.tiny_gguf import FEED_FORWARD, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, llama_tensors, tokens, write_gguf

QUANTIZABLE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: (head, half, i) -> (head, i, half)."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def value(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return dequantize(checkpoint.get(name))


def test_a_llama_reads_back_in_hugging_face_names_and_layout(tmp_path: Path) -> None:
    hf_q = np.arange(HIDDEN * HIDDEN, dtype=np.float32).reshape(HIDDEN, HIDDEN)
    hf_k = hf_q[: HIDDEN // 2] * 2
    stored = llama_tensors()
    stored["blk.1.attn_q.weight"] = permuted(hf_q, HEADS)
    stored["blk.1.attn_k.weight"] = permuted(hf_k, KV_HEADS)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", stored))
    assert checkpoint.load_format == "gguf"
    np.testing.assert_array_equal(value(checkpoint, "model.layers.1.self_attn.q_proj.weight"), hf_q)
    np.testing.assert_array_equal(value(checkpoint, "model.layers.1.self_attn.k_proj.weight"), hf_k)
    for name, source in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }.items():
        np.testing.assert_array_equal(value(checkpoint, name), stored[source])
    assert len(checkpoint.names()) == len(stored)
    assert [t.name for t in checkpoint] == checkpoint.names()


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_packed_rows_are_unpermuted_as_they_are(tmp_path: Path, kind: str) -> None:
    stored = llama_tensors()
    hf_q = stored["blk.0.attn_q.weight"]
    stored["blk.0.attn_q.weight"] = permuted(hf_q, HEADS)
    kinds = {name: kind for name, array in stored.items() if array.ndim == 2}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", stored, kinds=kinds))
    raw = checkpoint.get("model.layers.0.self_attn.q_proj.weight")
    type_ = gguf.GGMLQuantizationType[kind]
    assert (raw.kind, raw.shape, raw.data.dtype) == (kind, (HIDDEN, HIDDEN), np.uint8)
    # Rows are quantized one by one, so that permuting and quantizing commute.
    np.testing.assert_array_equal(dequantize(raw), gguf.dequantize(gguf.quants.quantize(hf_q, type_), type_))
    packed = checkpoint.get("model.layers.1.mlp.down_proj.weight")
    assert packed.data.ndim == (1 if kind in ("F16", "BF16") else 2)
    assert checkpoint.facts().quantized == (None if kind in ("F16", "BF16") else "gguf")


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_types_the_writer_cannot_quantize_to(tmp_path: Path, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(5)
    data = rng.integers(0, 60, (HIDDEN, size * 256 // values), dtype=np.uint8)  # below 60: no scale is infinite
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    for key, number in (("embedding_length", 256), ("block_count", 1), ("attention.head_count", 4)):
        writer.add_uint32(f"qwen2.{key}", number)
    writer.add_tensor("token_embd.weight", data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    raw = checkpoint.get("model.embed_tokens.weight")
    assert (raw.kind, raw.shape, raw.data.shape) == (kind, (HIDDEN, 256), data.shape)
    np.testing.assert_array_equal(raw.data, data)
    np.testing.assert_array_equal(dequantize(raw), gguf.dequantize(data, type_))


def test_metadata_becomes_the_config(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors()))
    config = checkpoint.config
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config.get(key) for key in expected} == expected
    assert "rope_scaling" not in config
    facts = checkpoint.facts()
    assert (facts.architecture, facts.num_layers, facts.head_dim, facts.context_len) == ("LlamaForCausalLM", 2, 16, 512)
    assert facts.num_params == sum(array.size for array in llama_tensors().values())
    assert facts.weight_bytes == 4 * facts.num_params
    assert (facts.dtype, facts.quantized, facts.is_generation) == ("float32", None, True)


def test_qwen2_keeps_its_rows_and_its_biases(tmp_path: Path) -> None:
    stored = llama_tensors()
    stored["output.weight"] = stored["token_embd.weight"] * 2
    stored["blk.0.attn_q.bias"] = np.arange(HIDDEN, dtype=np.float32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", stored, arch="qwen2"))
    assert checkpoint.config["architectures"] == ["Qwen2ForCausalLM"]
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["attention_bias"] is True
    q = "model.layers.0.self_attn.q_proj"
    np.testing.assert_array_equal(value(checkpoint, f"{q}.weight"), stored["blk.0.attn_q.weight"])
    np.testing.assert_array_equal(value(checkpoint, f"{q}.bias"), stored["blk.0.attn_q.bias"])
    np.testing.assert_array_equal(value(checkpoint, "lm_head.weight"), stored["output.weight"])


def test_a_llama_bias_is_unpermuted_too(tmp_path: Path) -> None:
    stored = llama_tensors()
    bias = np.arange(HIDDEN, dtype=np.float32)
    stored["blk.0.attn_q.bias"] = permuted(bias[:, None], HEADS)[:, 0]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", stored))
    np.testing.assert_array_equal(value(checkpoint, "model.layers.0.self_attn.q_proj.bias"), bias)


def test_gemma3_norms_and_names(tmp_path: Path) -> None:
    stored = llama_tensors()
    norm = np.linspace(-0.5, 0.5, HIDDEN, dtype=np.float32)
    for part in ("post_attention_norm", "post_ffw_norm", "ffn_norm", "attn_norm"):
        stored[f"blk.0.{part}.weight"] = norm + 1
    extra = {"attention.sliding_window": 512, "attention.key_length": 16, "rope.scaling.type": "linear"}
    path = write_gguf(tmp_path / "m.gguf", stored, arch="gemma3", extra={**extra, "rope.scaling.factor": 8.0})
    checkpoint = open_checkpoint(path)
    for part in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        np.testing.assert_allclose(value(checkpoint, f"model.layers.0.{part}_layernorm.weight"), norm, atol=1e-6)
    assert checkpoint.config["sliding_window"] == 512
    assert checkpoint.config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert checkpoint.config["query_pre_attn_scalar"] == 16


def test_stacked_experts_are_named_one_by_one(tmp_path: Path) -> None:
    stored = llama_tensors()
    experts = np.random.default_rng(2).standard_normal((4, FEED_FORWARD, HIDDEN)).astype(np.float32)
    stored["blk.0.ffn_gate_exps.weight"] = experts
    stored["blk.0.ffn_gate_inp.weight"] = experts[:, 0].copy()
    extra = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": FEED_FORWARD}
    kinds = {"blk.0.ffn_gate_exps.weight": "Q8_0"}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "q.gguf", stored, arch="qwen3moe", extra=extra, kinds=kinds))
    type_ = gguf.GGMLQuantizationType.Q8_0
    for i in range(4):
        raw = checkpoint.get(f"model.layers.0.mlp.experts.{i}.gate_proj.weight")
        assert (raw.shape, raw.data.shape) == ((FEED_FORWARD, HIDDEN), (FEED_FORWARD, HIDDEN // 32 * 34))
        np.testing.assert_array_equal(dequantize(raw), gguf.dequantize(gguf.quants.quantize(experts[i], type_), type_))
    assert "model.layers.0.mlp.gate.weight" in checkpoint.names()
    assert checkpoint.config["num_experts"] == 4
    assert checkpoint.facts().num_params == sum(array.size for array in stored.values())
    mixtral = open_checkpoint(write_gguf(tmp_path / "x.gguf", stored, extra=extra, kinds=kinds))
    assert mixtral.config["architectures"] == ["MixtralForCausalLM"]
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in mixtral.names()


def open_with_divisors(path: Path, divisors: np.ndarray) -> Checkpoint:
    extra = {"attention.key_length": 64, "rope.dimension_count": 64}
    write_gguf(path, {**llama_tensors(), "rope_freqs.weight": divisors}, extra=extra)
    return open_checkpoint(path)


def test_divisors_of_another_rule_come_through_as_they_are(tmp_path: Path) -> None:
    divisors = np.linspace(1, 3, 32, dtype=np.float32)
    scaling = open_with_divisors(tmp_path / "m.gguf", divisors).config["rope_scaling"]
    assert (scaling["rope_type"], scaling["attention_factor"]) == ("longrope", 1.0)
    np.testing.assert_array_equal(np.float32(scaling["long_factor"]), divisors)
    assert scaling["short_factor"] == scaling["long_factor"]
    with pytest.raises(CheckpointError, match="32 positive numbers"):
        open_with_divisors(tmp_path / "n.gguf", -divisors)


def test_yarn(tmp_path: Path) -> None:
    extra = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32768,
        "rope.scaling.yarn_beta_fast": 32.0,
    }
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors(), arch="qwen2", extra=extra))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 32.0,
    }
    assert checkpoint.facts().context_len == 131072


def test_tokenizer_arrays_templates_and_ids(tmp_path: Path) -> None:
    extra = {"=tokenizer.ggml.padding_token_id": 2**32 - 1, "=tokenizer.ggml.eot_token_id": 0}
    source = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors(), extra=extra)).tokenizer()
    assert source.gguf is not None
    assert source.gguf["tokens"] == tokens()
    assert source.gguf["merges"] == ["t o", "to k"]
    assert source.gguf["token_type"][:4] == [3, 3, 3, 1]
    assert (source.gguf["model"], source.gguf["pre"]) == ("gpt2", "qwen2")
    assert "padding_token_id" not in source.gguf
    assert (source.bos_id, source.eos_ids, source.add_bos) == (1, (2, 0), False)
    assert source.chat_templates == {"default": "{{ messages }}", "tools": "T"}


def test_split_files_open_by_any_part(tmp_path: Path) -> None:
    stored = llama_tensors()
    write_gguf(tmp_path / "m.gguf", stored, split_max_tensors=7)
    parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(parts) == 3
    for path in (parts[0], parts[2], tmp_path):
        checkpoint = open_checkpoint(path)
        assert len(checkpoint.names()) == len(stored)
        assert checkpoint.files == tuple(str(part) for part in parts)
        np.testing.assert_array_equal(value(checkpoint, "model.norm.weight"), stored["output_norm.weight"])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match="1 of 3 parts are missing"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError, match="misnamed"):
        open_checkpoint(parts[0])
    alone = tmp_path / "alone" / "m.gguf"
    alone.parent.mkdir()
    alone.write_bytes(parts[0].read_bytes())
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_checkpoint(alone)


def test_version_2_reads_as_version_3_does(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_tensors())
    raw = bytearray(path.read_bytes())
    raw[4:8] = (2).to_bytes(4, "little")
    (tmp_path / "v2.gguf").write_bytes(raw)
    assert open_checkpoint(tmp_path / "v2.gguf").names() == open_checkpoint(path).names()


def test_a_closed_checkpoint_says_so_and_its_tensors_live_on(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(str(write_gguf(tmp_path / "m.gguf", llama_tensors())))
    raw = checkpoint.get("model.norm.weight")
    checkpoint.close()
    np.testing.assert_array_equal(dequantize(raw), llama_tensors()["output_norm.weight"])
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.get("model.norm.weight")


def test_a_missing_tensor_and_an_unknown_architecture_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama_tensors()))
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.get("nothing")
    path = write_gguf(tmp_path / "n.gguf", llama_tensors(), arch="novelarch")
    with pytest.raises(CheckpointError, match=r"'novelarch' is not known.*llama"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"expert_count": 70000}, "expert_count"),
        ({"rope.scaling.type": "magic"}, "magic"),
        ({"attention.key_length": 0}, "key_length"),
        ({"rope.scaling.factor": float("nan")}, "factor"),
    ],
)
def test_metadata_out_of_range_is_named(tmp_path: Path, extra: dict[str, object], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), extra=extra)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)
