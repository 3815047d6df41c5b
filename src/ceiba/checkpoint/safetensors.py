"""A Hugging Face directory as a Checkpoint: owns the safetensors header and the joining of shards; also stands for
directories of torch's own files, which it lists and does not read. Must never interpret a tensor's values.

The header is that of the safetensors format: a little-endian uint64 length, so many bytes of JSON, then the data, which
the tensors fill without gap or overlap. All of it is checked before use (files come from strangers): the library's own
reader is not used, because it would want a framework's types and a second look at the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from ceiba.checkpoint.base import RawTensor, TokenizerSource
from ceiba.checkpoint.facts import config_dtype, facts_from_config
from ceiba.checkpoint.hf_dir import (
    parse_object,
    read_config,
    read_json,
    read_optional,
    tokenizer_source,
    weight_quantization,
)
from ceiba.checkpoint.mapping import MappedFile
from ceiba.config.records import ModelFacts
from ceiba.core.errors import CheckpointError

MAX_HEADER_BYTES: Final = 32 << 20
"""The format allows 100 MB; the largest real ones have a tenth of this, and JSON grows many times when parsed."""
MAX_RANK: Final = 8
MAX_SHARDS: Final = 4096
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
DTYPE_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
_COMPUTE: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Stored:
    """One checked header entry."""

    __slots__ = ("begin", "end", "file", "kind", "shape")

    def __init__(self, file: MappedFile, kind: str, shape: tuple[int, ...], begin: int, end: int) -> None:
        self.file, self.kind, self.shape, self.begin, self.end = file, kind, shape, begin, end


def read_header(file: MappedFile) -> dict[str, _Stored]:
    """Tensor name -> where it lies, in file order. Raises CheckpointError on anything the format does not allow."""
    if file.size < 8:
        raise CheckpointError(f"{file.path}: {file.size} bytes are no safetensors file; fetch it again")
    length = int.from_bytes(file.map[:8], "little")
    if length > min(file.size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{file.path}: claims a header of {length} bytes; the file has {file.size}, the limit is {MAX_HEADER_BYTES}"
        )
    header = parse_object(file.map[8 : 8 + length], f"{file.path} (header)")
    header.pop("__metadata__", None)
    room = file.size - 8 - length
    stored = {name: _entry(file, name, value, 8 + length, room) for name, value in header.items()}
    reached = 8 + length
    ordered = dict(sorted(stored.items(), key=lambda item: (item[1].begin, item[1].end)))
    for name, entry in ordered.items():
        if entry.begin != reached:
            raise CheckpointError(f"{file.path}: {name} overlaps its neighbour or leaves a gap at byte {reached}")
        reached = entry.end
    if reached != file.size:
        raise CheckpointError(f"{file.path}: the tensors end at byte {reached} and the file has {file.size} bytes")
    return ordered


def _entry(file: MappedFile, name: str, value: Any, base: int, room: int) -> _Stored:
    where = f"{file.path}: the header entry of {name[:200]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have dtype, shape and data_offsets")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPE_BITS:
        raise CheckpointError(f"{where} has the unknown dtype {kind!r:.40}")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_RANK
        or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
    ):
        raise CheckpointError(f"{where} has the shape {shape!r:.80}; up to {MAX_RANK} sizes from 0 up are allowed")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise CheckpointError(f"{where} has the offsets {offsets!r:.80}; two whole numbers are needed")
    begin, end = offsets
    if not 0 <= begin <= end <= room:
        raise CheckpointError(
            f"{where} lies at {begin}..{end} of {room} data bytes; it may be cut short: fetch it again"
        )
    bits = DTYPE_BITS[kind]
    for size in shape:
        bits *= size
    if bits != 8 * (end - begin):
        raise CheckpointError(f"{where}: {kind} {shape} does not fill its {end - begin} bytes exactly")
    return _Stored(file, kind, tuple(shape), base + begin, base + end)


class SafetensorsCheckpoint:
    """One safetensors file or the shards of an index, with the directory's configuration; see ``base.Checkpoint``."""

    load_format = "safetensors"

    def __init__(self, directory: str) -> None:
        """Open and check every shard's header. Raises CheckpointError."""
        self.path = os.path.abspath(directory)
        self.config: dict[str, Any] = read_config(self.path)
        self.generation_config: dict[str, Any] = read_optional(self.path, "generation_config.json")
        self.files, placement = _weight_files(self.path)
        self._mapped = [MappedFile(name) for name in self.files]
        self._stored: dict[str, _Stored] = {}
        for file in self._mapped:
            for name, entry in read_header(file).items():
                if placement and placement.get(name) != os.path.basename(file.path):
                    continue  # the index decides: shards may carry spare copies
                if name in self._stored:
                    raise CheckpointError(f"{file.path}: the tensor {name} is in another shard already")
                self._stored[name] = entry
        missing = [name for name in placement if name not in self._stored]
        if missing:
            raise CheckpointError(
                f"{self.path}: {INDEX} places {missing[0]} in {placement[missing[0]]}, which lacks it"
            )
        self._closed = False

    def facts(self) -> ModelFacts:
        entries = self._stored.values()
        count = sum((entry.end - entry.begin) * 8 // DTYPE_BITS[entry.kind] for entry in entries)
        largest = max(entries, key=lambda entry: entry.end - entry.begin, default=None)
        stored = _COMPUTE.get(largest.kind, "bfloat16") if largest else "bfloat16"
        return facts_from_config(
            self.path,
            self.config,
            weight_bytes=sum(entry.end - entry.begin for entry in entries),
            num_params=count,
            quantized=weight_quantization(self.config),
            dtype=config_dtype(self.config, stored),
        )

    def tokenizer(self) -> TokenizerSource:
        return tokenizer_source(self.path, self.config, self.generation_config)

    def names(self) -> list[str]:
        return list(self._stored)

    def get(self, name: str) -> RawTensor:
        """One tensor, mapped. Raises CheckpointError when there is none or after ``close``."""
        if self._closed:
            raise CheckpointError(f"{self.path}: the checkpoint is closed")
        entry = self._stored.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: no tensor {name}")
        return RawTensor(name, entry.kind, entry.shape, entry.file.slice(entry.begin, entry.end))

    def __iter__(self) -> Iterator[RawTensor]:
        return (self.get(name) for name in self._stored)

    def close(self) -> None:
        self._closed = True
        for file in self._mapped:
            file.close()


def _weight_files(directory: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The files in order and, with an index, tensor name -> file name (empty without one)."""
    index = os.path.join(directory, INDEX)
    if not os.path.exists(index):
        single = os.path.join(directory, SINGLE)
        if os.path.exists(single):
            return (single,), {}
        names = sorted(n for n in os.listdir(directory) if n.endswith(".safetensors"))
        if not names or len(names) > MAX_SHARDS:
            raise CheckpointError(f"{directory}: {len(names)} safetensors files; 1 to {MAX_SHARDS} are needed")
        return tuple(os.path.join(directory, name) for name in names), {}
    placement = read_json(index).get("weight_map")
    if not isinstance(placement, dict) or not placement:
        raise CheckpointError(f"{index}: no weight_map")
    for file in placement.values():
        # A name, never a path: an index must not reach outside its directory.
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or os.path.basename(file) != file
            or "\\" in file
        ):
            raise CheckpointError(f"{index}: {file!r:.200} is not the name of a safetensors file beside it")
    files = sorted(set(placement.values()))
    if len(files) > MAX_SHARDS:
        raise CheckpointError(f"{index}: {len(files)} shards, over the limit of {MAX_SHARDS}")
    return tuple(os.path.join(directory, file) for file in files), placement


class TorchCheckpoint:
    """A directory of pytorch_model*.bin: configuration and tokenizer from here, ``files`` for the loader, which reads
    them with torch's weights-only unpickler. Nothing here opens them.
    """

    load_format = "pt"

    def __init__(self, directory: str) -> None:
        self.path = os.path.abspath(directory)
        self.config: dict[str, Any] = read_config(self.path)
        self.generation_config: dict[str, Any] = read_optional(self.path, "generation_config.json")
        names = torch_files(self.path)
        if not names:
            raise CheckpointError(f"{self.path}: no pytorch_model.bin and no pytorch_model-*.bin")
        self.files = tuple(os.path.join(self.path, name) for name in names)

    def facts(self) -> ModelFacts:
        return facts_from_config(
            self.path,
            self.config,
            weight_bytes=sum(os.path.getsize(file) for file in self.files),
            num_params=None,
            quantized=weight_quantization(self.config),
            dtype=config_dtype(self.config),
        )

    def tokenizer(self) -> TokenizerSource:
        return tokenizer_source(self.path, self.config, self.generation_config)

    def names(self) -> list[str]:
        return []

    def get(self, name: str) -> RawTensor:
        raise CheckpointError(f"{self.path}: {name} is in torch's own format, which is read through torch: see files")

    def __iter__(self) -> Iterator[RawTensor]:
        return iter(())

    def close(self) -> None:
        """Nothing is held."""


def torch_files(directory: str) -> list[str]:
    """pytorch_model.bin, or its numbered parts."""
    names = sorted(os.listdir(directory))
    single = [name for name in names if name == "pytorch_model.bin"]
    return single or [name for name in names if name.startswith("pytorch_model-") and name.endswith(".bin")]
