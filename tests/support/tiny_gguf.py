"""Small GGUF models for tests, written with the gguf package; and raw headers put together byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD, VOCAB = 64, 4, 2, 2, 96, 40


def tokens(count: int = VOCAB) -> list[str]:
    return [f"<s{i}>" if i < 3 else f"tok{i}é" for i in range(count)]


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Stored name -> float32, in GGUF's layout of a tiny Llama with tied embeddings."""
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    head = HIDDEN // HEADS
    out = {"token_embd.weight": weight(VOCAB, HIDDEN), "output_norm.weight": weight(HIDDEN)}
    for i in range(LAYERS):
        out |= {
            f"blk.{i}.attn_norm.weight": weight(HIDDEN),
            f"blk.{i}.attn_q.weight": weight(HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": weight(KV_HEADS * head, HIDDEN),
            f"blk.{i}.attn_v.weight": weight(KV_HEADS * head, HIDDEN),
            f"blk.{i}.attn_output.weight": weight(HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm.weight": weight(HIDDEN),
            f"blk.{i}.ffn_gate.weight": weight(FEED_FORWARD, HIDDEN),
            f"blk.{i}.ffn_up.weight": weight(FEED_FORWARD, HIDDEN),
            f"blk.{i}.ffn_down.weight": weight(HIDDEN, FEED_FORWARD),
        }
    return out


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    arch: str = "llama",
    kinds: dict[str, str] | None = None,
    extra: dict[str, Any] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """A model file with a tokenizer. ``kinds``: stored name -> type to quantize to; ``extra``: keys after the
    architecture's prefix, or whole keys with a leading ``=``; a value may be int, float, bool, str or a list."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens())
    writer.add_token_types([3 if i < 3 else 1 for i in range(VOCAB)])
    writer.add_token_merges(["t o", "to k"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template([{"name": "default", "template": "{{ messages }}"}, {"name": "tools", "template": "T"}])
    for key, value in (extra or {}).items():
        name = key[1:] if key.startswith("=") else f"{arch}.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(name, value)
    for name, array in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def tensor_entry(name: str | bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """``shape`` fastest dimension first, as stored."""
    return string(name) + u32(len(shape)) + b"".join(map(u64, shape)) + u32(kind) + u64(offset)


def raw_gguf(
    entries: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    entry_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file from its parts, true counts unless told otherwise."""
    head = magic + u32(version)
    head += u64(len(tensors) if tensor_count is None else tensor_count)
    head += u64(len(entries) if entry_count is None else entry_count)
    body = head + b"".join(entries) + b"".join(tensors)
    return body + bytes(-len(body) % alignment) + data
