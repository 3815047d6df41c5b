"""A GGUF model as a Checkpoint: owns the joining of split files and the presentation of stored tensors under Hugging
Face names and in Hugging Face's layout. Must never dequantize: block types are handed on as packed rows.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ceiba.checkpoint.base import RawTensor, TokenizerSource
from ceiba.checkpoint.facts import facts_from_config
from ceiba.checkpoint.gguf_config import Metadata, hf_config, tokenizer_source
from ceiba.checkpoint.gguf_header import BLOCK_TYPES, Header, TensorInfo, read_header
from ceiba.checkpoint.gguf_names import expert_name, hf_name, rotary_heads
from ceiba.checkpoint.mapping import MappedFile
from ceiba.config.records import ModelFacts
from ceiba.core.errors import CheckpointError

MAX_SPLITS: Final = 4096
MAX_EXPERTS: Final = 4096
_SPLIT: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_DTYPES: Final = {"F32": "float32", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one Hugging Face tensor lies: a stored tensor, or one expert of a stacked one."""

    file: MappedFile
    info: TensorInfo
    expert: int | None
    heads: int
    """> 0: the rows are permuted for interleaved rotary embedding, over so many heads."""
    shift: bool
    """The stored values are 1 + w."""


class GgufCheckpoint:
    """An opened GGUF model; see ``base.Checkpoint``.

    ``get`` maps, with two exceptions that copy one tensor each: q and k of the architectures whose converter permuted
    them (a Hugging Face consumer rotates halves of a head, GGUF stores pairs side by side), and Gemma's small norms
    (stored as 1 + w).
    """

    load_format = "gguf"

    def __init__(self, path: str) -> None:
        """Open and check a file, or all parts of a split one. Raises CheckpointError."""
        self.path = os.path.abspath(path)
        self.files = tuple(_split_paths(self.path))
        self._mapped = [MappedFile(name) for name in self.files]
        headers = [read_header(file) for file in self._mapped]
        self._check_splits(headers)
        self._metadata = Metadata(self.path, headers[0].metadata)
        stored: dict[str, tuple[MappedFile, TensorInfo]] = {}
        for file, header in zip(self._mapped, headers, strict=True):
            for name, info in header.tensors.items():
                if name in stored:
                    raise CheckpointError(f"{file.path}: the tensor {name} is in another part already")
                stored[name] = (file, info)
        shapes = {name: info.shape for name, (_, info) in stored.items()}
        freqs = stored.pop("rope_freqs.weight", None)
        self.config: dict[str, Any] = hf_config(self._metadata, shapes, _as_float32(freqs) if freqs else None)
        self.generation_config = self._generation_config()
        self._entries = self._index(stored)
        self._closed = False

    def facts(self) -> ModelFacts:
        infos = [entry.info for entry in self._stored()]
        packed = any(info.kind in BLOCK_TYPES for info in infos)
        embedding = next(info.kind for info in infos if info.name == "token_embd.weight")
        return facts_from_config(
            self.path,
            self.config,
            weight_bytes=sum(info.end - info.begin for info in infos),
            num_params=sum(int(np.prod(info.shape, dtype=object)) for info in infos),
            quantized="gguf" if packed else None,
            dtype="bfloat16" if packed else _DTYPES.get(embedding, "bfloat16"),
        )

    def tokenizer(self) -> TokenizerSource:
        return tokenizer_source(self._metadata)

    def metadata(self) -> dict[str, Any]:
        """The scalar metadata under GGUF's own keys: for display, not for decisions."""
        return {k: v for k, v in self._metadata.values.items() if isinstance(v, str | int | float | bool)}

    def names(self) -> list[str]:
        return list(self._entries)

    def get(self, name: str) -> RawTensor:
        """One tensor under its Hugging Face name. Raises CheckpointError when there is none or after ``close``."""
        if self._closed:
            raise CheckpointError(f"{self.path}: the checkpoint is closed")
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: no tensor {name}")
        info = entry.info
        begin, end, shape = info.begin, info.end, info.shape
        if entry.expert is not None:
            size = (end - begin) // shape[0]
            begin, shape = begin + entry.expert * size, shape[1:]
            end = begin + size
        data = entry.file.slice(begin, end)
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        if entry.heads:
            count = shape[0]
            data = unpermute(data.reshape(count, -1), entry.heads).reshape(-1)
        if entry.shift:
            data = (data.view("<f4") - np.float32(1)).view(np.uint8)
        return RawTensor(name, info.kind, shape, data.reshape(rows, -1) if info.kind in BLOCK_TYPES else data)

    def __iter__(self) -> Iterator[RawTensor]:
        order = {file.path: i for i, file in enumerate(self._mapped)}
        for name, _ in sorted(
            self._entries.items(), key=lambda item: (order[item[1].file.path], item[1].info.begin, item[1].expert or 0)
        ):
            yield self.get(name)

    def close(self) -> None:
        self._closed = True
        for file in self._mapped:
            file.close()

    def _stored(self) -> Iterator[_Entry]:
        """One entry per stored tensor: of a stack of experts the first only."""
        return (entry for entry in self._entries.values() if not entry.expert)

    def _check_splits(self, headers: list[Header]) -> None:
        count = headers[0].metadata.get("split.count", 1) or 1
        if type(count) is not int or count != len(headers):
            raise CheckpointError(
                f"{self.path}: the file says it is one of {count!r} parts and {len(headers)} are here; "
                "keep the parts together under their names NAME-00001-of-0000N.gguf"
            )
        for i, header in enumerate(headers):
            number = header.metadata.get("split.no", i)
            if number != i:
                raise CheckpointError(
                    f"{self.files[i]}: holds part {number!r}, part {i} was expected; a file is misnamed"
                )
        total = headers[0].metadata.get("split.tensors.count")
        if total is not None and total != sum(len(header.tensors) for header in headers):
            raise CheckpointError(f"{self.path}: the parts do not hold the {total!r} tensors the first one announces")

    def _index(self, stored: dict[str, tuple[MappedFile, TensorInfo]]) -> dict[str, _Entry]:
        architecture = self._metadata.architecture
        heads = {"q": self.config["num_attention_heads"], "k": self.config["num_key_value_heads"]}
        entries: dict[str, _Entry] = {}

        def add(name: str, entry: _Entry) -> None:
            if name in entries:
                raise CheckpointError(f"{entry.file.path}: two tensors mean {name}")
            entries[name] = entry

        for name, (file, info) in stored.items():
            if expert_name(architecture, name, 0) is not None:
                if len(info.shape) != 3 or info.shape[0] > MAX_EXPERTS:
                    raise CheckpointError(
                        f"{file.path}: {name} has the shape {info.shape}; [experts, rows, columns] is needed"
                    )
                for expert in range(info.shape[0]):
                    add(expert_name(architecture, name, expert) or name, _Entry(file, info, expert, 0, False))
                continue
            role = rotary_heads(architecture, name)
            if role and info.shape[0] % (2 * heads[role]):
                raise CheckpointError(f"{file.path}: {name} has {info.shape[0]} rows for {heads[role]} heads")
            shift = architecture.norm_plus_one and name.endswith("norm.weight")
            if shift and info.kind != "F32":
                raise CheckpointError(f"{file.path}: {name} is {info.kind}; norms are stored as F32")
            add(hf_name(architecture, name), _Entry(file, info, None, heads[role] if role else 0, shift))
        return entries

    def _generation_config(self) -> dict[str, Any]:
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        out = {key: self.config[key] for key in keys if key in self.config}
        # Authors' sampling advice, as recent converters store it.
        for hf_key, key in (("temperature", "temp"), ("top_p", "top_p"), ("top_k", "top_k"), ("min_p", "min_p")):
            value = self._metadata.values.get(f"general.sampling.{key}")
            if isinstance(value, int | float) and math.isfinite(value):
                out[hf_key] = value
        return out


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows from GGUF's rotary order to Hugging Face's; a copy.

    ``rows``: uint8 [heads × d, bytes per row] with row (head, i, half) holding what Hugging Face keeps at (head, half,
    i), i < d / 2. Only whole rows move, so packed block rows serve as well as plain ones; a bias is a column of one
    value per row.
    """
    count, width = rows.shape
    return np.ascontiguousarray(rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2)).reshape(count, width)


def _split_paths(path: str) -> list[str]:
    """All parts of a split model, given any one of them; just the path otherwise."""
    folder, file = os.path.split(path)
    match = _SPLIT.fullmatch(file)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= MAX_SPLITS:
        raise CheckpointError(f"{path}: part {match[2]} of {match[3]}; up to {MAX_SPLITS} parts are read")
    paths = [os.path.join(folder, f"{match[1]}-{i + 1:05d}-of-{match[3]}.gguf") for i in range(count)]
    missing = [p for p in paths if not os.path.exists(p)]
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} of {count} parts are missing, the first is {missing[0]}")
    return paths


def _as_float32(stored: tuple[MappedFile, TensorInfo]) -> np.ndarray:
    file, info = stored
    if info.kind != "F32" or info.end - info.begin > 1 << 20:
        raise CheckpointError(f"{file.path}: {info.name} must be a small F32 tensor")
    return file.slice(info.begin, info.end).view("<f4").reshape(-1)
