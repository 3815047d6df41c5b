"""HAZARDS 33: model files from strangers. Whatever the header says, opening ends in an error that names the file, fast
and without a large allocation; or in a checkpoint whose every tensor lies inside the file."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ceiba.checkpoint import open_checkpoint
from ceiba.checkpoint.gguf_header import MAX_STRINGS
from ceiba.core.errors import CheckpointError
from support.tiny_gguf import llama_tensors, raw_gguf, string, tensor_entry, u32, u64, write_gguf

HUGE = [2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
SECONDS = 3.0
"""Of this thread's processor, so that a busy machine is no slow reader."""
BYTES = 64 << 20
FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

ARCH = string("general.architecture") + u32(8) + string("llama")


def key(name: str, kind: int, payload: bytes) -> bytes:
    return string(name) + u32(kind) + payload


def open_file(raw: bytes, path: Path) -> Any:
    path.write_bytes(raw)
    return open_checkpoint(path)


def refuse(raw: bytes, tmp_path: Path, match: str) -> None:
    """An error that says why, within the time and memory a bad file may cost."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(CheckpointError, match=match) as caught:
            open_checkpoint(path)
        assert time.thread_time() - began < SECONDS
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in caught.value.message


def read_everything(checkpoint: Any, size: int) -> None:
    """Touch what a loader and a tokenizer would."""
    total = 0
    for raw in checkpoint:
        total += raw.data.nbytes
        raw.data.tobytes()
    assert total <= size
    checkpoint.facts()
    try:
        checkpoint.tokenizer()
    except CheckpointError:
        return


@pytest.mark.parametrize("count", HUGE)
def test_counts_larger_than_the_file(tmp_path: Path, count: int) -> None:
    refuse(raw_gguf([ARCH], [], entry_count=count), tmp_path, "metadata entries")
    refuse(raw_gguf([ARCH], [], tensor_count=count), tmp_path, "tensors")


@pytest.mark.parametrize("length", HUGE)
def test_lengths_larger_than_the_file(tmp_path: Path, length: int) -> None:
    refuse(raw_gguf([u64(length) + b"k" * 40], []), tmp_path, "a metadata key claims")
    refuse(raw_gguf([key("a", 8, u64(length) + b"x" * 40)], []), tmp_path, "a claims|needs")
    refuse(raw_gguf([key("a", 9, u32(4) + u64(length) + b"x" * 40)], []), tmp_path, "needs")
    refuse(raw_gguf([key("a", 9, u32(8) + u64(length) + b"x" * 40)], []), tmp_path, "needs|limit")
    refuse(raw_gguf([key("a", 9, u32(8) + u64(2) + u64(length) + b"x" * 40)], []), tmp_path, "past the end")
    refuse(raw_gguf([ARCH], [u64(length) + b"t" * 60]), tmp_path, "a tensor name claims")


@pytest.mark.parametrize("dimension", [0, *HUGE])
def test_dimensions(tmp_path: Path, dimension: int) -> None:
    for shape in ((dimension,), (32, dimension), (dimension, dimension, dimension, dimension)):
        refuse(raw_gguf([ARCH], [tensor_entry("t", shape)], bytes(64)), tmp_path, "empty shape|the file has")
    refuse(
        raw_gguf([ARCH], [tensor_entry("t", (dimension or 1, 2), kind=2)], bytes(64)), tmp_path, "multiple|the file has"
    )


@pytest.mark.parametrize("rank", [0, 5, 255, 2**32 - 1])
def test_ranks(tmp_path: Path, rank: int) -> None:
    entry = string("t") + u32(rank) + u64(1) * 5 + u32(0) + u64(0)
    refuse(raw_gguf([ARCH], [entry], bytes(64)), tmp_path, "dimensions")


@pytest.mark.parametrize("offset", [1, 31, 64, 96, *HUGE])
def test_offsets(tmp_path: Path, offset: int) -> None:
    refuse(raw_gguf([ARCH], [tensor_entry("t", (16,), offset=offset)], bytes(64)), tmp_path, "alignment|the file has")


@pytest.mark.parametrize("kind", [4, 5, 31, 36, 99, 2**31, 2**32 - 1])
def test_tensor_types(tmp_path: Path, kind: int) -> None:
    refuse(raw_gguf([ARCH], [tensor_entry("t", (32,), kind=kind)], bytes(64)), tmp_path, "unknown tensor type")


@pytest.mark.parametrize("kind", [13, 99, 2**32 - 1])
def test_value_types(tmp_path: Path, kind: int) -> None:
    refuse(raw_gguf([key("a", kind, bytes(64))], []), tmp_path, "unknown value type")
    refuse(raw_gguf([key("a", 9, u32(kind) + u64(1) + bytes(64))], []), tmp_path, "unknown or nested")


def test_nested_arrays(tmp_path: Path) -> None:
    refuse(raw_gguf([key("a", 9, (u32(9) + u64(1)) * 100_000)], []), tmp_path, "unknown or nested")


@pytest.mark.parametrize("alignment", [0, 3, 33, 2**21, 2**31, 2**32 - 1])
def test_alignments(tmp_path: Path, alignment: int) -> None:
    entry = key("general.alignment", 4, u32(alignment))
    refuse(raw_gguf([ARCH, entry], [tensor_entry("t", (8,))], bytes(64)), tmp_path, "power of two")


def test_an_alignment_that_is_no_number(tmp_path: Path) -> None:
    for payload in (key("general.alignment", 8, string("32")), key("general.alignment", 7, b"\1")):
        refuse(raw_gguf([ARCH, payload], []), tmp_path, "power of two")


def test_the_same_name_twice(tmp_path: Path) -> None:
    refuse(raw_gguf([ARCH, ARCH], []), tmp_path, "appears twice")
    twice = [tensor_entry("t", (8,)), tensor_entry("t", (8,), offset=32)]
    refuse(raw_gguf([ARCH], twice, bytes(64)), tmp_path, "appears twice")


def test_overlapping_tensors(tmp_path: Path) -> None:
    for second in (0, 32):
        both = [tensor_entry("t", (16,)), tensor_entry("u", (8,), offset=second)]
        refuse(raw_gguf([ARCH], both, bytes(64)), tmp_path, "overlaps")


@pytest.mark.parametrize("name", ["", b"\xff\xfe", "a\nb", "a\0b", "x" * 600, "\x1b[2J"])
def test_names_that_are_no_names(tmp_path: Path, name: str | bytes) -> None:
    refuse(raw_gguf([ARCH], [tensor_entry(name, (8,))], bytes(64)), tmp_path, "tensor name")
    refuse(raw_gguf([string(name) + u32(4) + u32(1)], []), tmp_path, "metadata key")


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "empty"),
        (b"GGUF", "needs"),
        (b"GGUF" + bytes(19), "needs"),
        (b"GGML" + bytes(60), "not a GGUF file"),
        (raw_gguf([], [], version=1), "version 1"),
        (raw_gguf([], [], version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(40), "big-endian"),
        (raw_gguf([], []), r"general\.architecture"),
        (raw_gguf([ARCH], []), r"token_embd\.weight"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, raw: bytes, match: str) -> None:
    refuse(raw, tmp_path, match)


def test_a_sparse_file_of_empty_strings_costs_no_time(tmp_path: Path) -> None:
    """Zeros on disk cost an attacker nothing and read as strings of length 0."""
    path = tmp_path / "hostile.gguf"
    for count, match in ((MAX_STRINGS + 1, "over the limit"), (2**36, "needs|over the limit")):
        path.write_bytes(raw_gguf([key("a", 9, u32(8) + u64(count))], [], entry_count=1))
        with open(path, "r+b") as file:
            file.truncate(1 << 40)
        began = time.thread_time()
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(path)
        assert time.thread_time() - began < SECONDS


def test_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    for path, match in (
        (tmp_path / "pipe.gguf", "no such|not a regular"),
        (tmp_path / "loop.gguf", "no such|cannot open"),
    ):
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(path)
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)


@cache
def valid_gguf() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        stored = llama_tensors()
        kinds = {name: "Q4_1" for name, array in stored.items() if array.ndim == 2}
        return write_gguf(Path(folder) / "m.gguf", stored, kinds=kinds).read_bytes()


def gguf_header_size() -> int:
    raw = valid_gguf()
    return raw.index(b"blk.1.ffn_down.weight") + 64


def try_to_open(raw: bytes, path: Path) -> None:
    path.write_bytes(raw)
    began = time.thread_time()
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        message = error.message
    else:
        message = str(path)
        read_everything(checkpoint, len(raw))
        checkpoint.close()
    assert str(path) in message
    assert time.thread_time() - began < SECONDS


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@FUZZ
@given(st.data())
def test_gguf_with_flipped_bits(scratch: Path, data: st.DataObject) -> None:
    raw = bytearray(valid_gguf())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, gguf_header_size()))
        raw[position] ^= 1 << data.draw(st.integers(0, 7))
    try_to_open(bytes(raw), scratch / "m.gguf")


@FUZZ
@given(st.integers(0, 2**20), st.sampled_from(HUGE) | st.integers(0, 2**64 - 1))
def test_gguf_with_a_planted_number(scratch: Path, position: int, number: int) -> None:
    raw = bytearray(valid_gguf())
    position %= gguf_header_size()
    raw[position : position + 8] = u64(number)
    try_to_open(bytes(raw), scratch / "m.gguf")


@FUZZ
@given(st.integers(0, 2**20), st.booleans())
def test_gguf_cut_short(scratch: Path, length: int, header_only: bool) -> None:
    raw = valid_gguf()
    path = scratch / "m.gguf"
    path.write_bytes(raw[: length % (gguf_header_size() if header_only else len(raw))])
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


@FUZZ
@given(st.binary(max_size=400))
def test_gguf_with_a_random_body(scratch: Path, body: bytes) -> None:
    try_to_open(b"GGUF" + u32(3) + body, scratch / "m.gguf")


# safetensors


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return u64(len(raw) if length is None else length) + raw + data


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def model_dir(tmp_path: Path, raw: bytes) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(raw)
    return tmp_path


GOOD = {"a": entry(), "b": entry("F16", [2, 2], [16, 24])}


def test_the_good_file_opens(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model_dir(tmp_path, safetensors(GOOD, bytes(range(24)))))
    assert checkpoint.get("b").data.tolist() == list(range(16, 24))


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "empty"),
        (b"1234567", "no safetensors file"),
        *[(safetensors({}, length=n), "claims a header") for n in (3, *HUGE)],
        (safetensors(b"{"), "not valid JSON"),
        (safetensors(b"[1]"), "object is needed"),
        (safetensors(b"\xff\xfe{}"), "not valid JSON"),
        (safetensors(b"[" * 200_000), "not valid JSON"),
        (safetensors(b'{"a":' * 100_000), "not valid JSON"),
        (safetensors(b'{"a": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
        (
            safetensors(
                b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}", bytes(16)
            ),
            "twice",
        ),
        (safetensors({"a": 3}), "must have"),
        (safetensors({"a": {"dtype": "F32"}}), "must have"),
        (safetensors({"a": {**entry(), "extra": 1}}, bytes(16)), "must have"),
        (safetensors({"a": entry("F33")}, bytes(16)), "unknown dtype"),
        (safetensors({"a": entry(["F32"])}, bytes(16)), "unknown dtype"),
        (safetensors({"a": entry(shape=4)}, bytes(16)), "shape"),
        (safetensors({"a": entry(shape=[4.0])}, bytes(16)), "shape"),
        (safetensors({"a": entry(shape=[True] * 4)}, bytes(16)), "shape"),
        (safetensors({"a": entry(shape=[-4])}, bytes(16)), "shape"),
        (safetensors({"a": entry(shape=[1] * 1000)}, bytes(16)), "shape"),
        (safetensors({"a": entry(shape=[2**60, 16])}, bytes(16)), "shape"),
        (safetensors({"a": entry(shape=[2**40, 2**40])}, bytes(16)), "fill"),
        (safetensors({"a": entry(shape=[5])}, bytes(16)), "fill"),
        (safetensors({"a": entry("F4", [3], [0, 1])}, bytes(1)), "fill"),
        (safetensors({"a": entry(offsets=[0])}, bytes(16)), "offsets"),
        (safetensors({"a": entry(offsets=[0, 16.0])}, bytes(16)), "offsets"),
        (safetensors({"a": entry(offsets=[-16, 0])}, bytes(16)), "lies at"),
        (safetensors({"a": entry(offsets=[16, 0])}, bytes(16)), "lies at"),
        (safetensors({"a": entry(offsets=[0, 16])}, bytes(15)), "cut short"),
        (safetensors({"a": entry(offsets=[2**63, 2**63 + 16])}, bytes(16)), "lies at"),
        (safetensors({"a": entry(), "b": entry()}, bytes(16)), "overlaps"),
        (safetensors({"a": entry(), "b": entry(offsets=[8, 24])}, bytes(24)), "overlaps"),
        (safetensors({"a": entry(), "b": entry(offsets=[20, 36])}, bytes(36)), "gap"),
        (safetensors({"a": entry(offsets=[4, 20])}, bytes(20)), "gap"),
        (safetensors({"a": entry()}, bytes(17)), "tensors end at"),
    ],
)
def test_hostile_safetensors(tmp_path: Path, raw: bytes, match: str) -> None:
    directory = model_dir(tmp_path, raw)
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(directory)
        assert time.thread_time() - began < SECONDS
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()


NUMBERS = st.sampled_from([-1, 0, 1, 4, 8, 16, 24, *HUGE, 2**70]) | st.integers()
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BOOL", "F4"]) | JUNK,
        "shape": st.lists(NUMBERS, max_size=4) | JUNK,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | JUNK,
    }
)


@FUZZ
@given(st.dictionaries(st.text(max_size=4), ENTRIES | JUNK, max_size=3), st.binary(max_size=32))
@example({}, b"")
def test_safetensors_with_a_random_header(scratch: Path, header: dict[str, Any], data: bytes) -> None:
    try_directory(scratch, safetensors(header, data))


@FUZZ
@given(st.data())
def test_safetensors_with_flipped_bits(scratch: Path, data: st.DataObject) -> None:
    raw = bytearray(safetensors(GOOD, bytes(24)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 25))] ^= 1 << data.draw(st.integers(0, 7))
    try_directory(scratch, bytes(raw))


def try_directory(directory: Path, raw: bytes) -> None:
    model_dir(directory, raw)
    try:
        checkpoint = open_checkpoint(directory, "safetensors")
    except CheckpointError:
        return
    assert sum(tensor.data.nbytes for tensor in checkpoint) <= len(raw)
    for tensor in checkpoint:
        assert np.isfinite(tensor.data.astype(np.float32)).all()


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b'{"a": 1, "a": 2}', b" " * (33 << 20)])
def test_json_beside_the_weights(tmp_path: Path, name: str, raw: bytes) -> None:
    directory = model_dir(tmp_path, safetensors(GOOD, bytes(24)))
    (directory / name).write_bytes(raw)
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(directory).tokenizer()
