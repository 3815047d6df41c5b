"""The header of a GGUF file: owns its byte layout and every check on it. Must never know a model, a tensor's Hugging
Face name or what a metadata key means (``general.alignment`` apart, which the layout itself needs).

The layout is that of ggml's docs/gguf.md, versions 2 and 3, little endian. Files come from strangers: nothing that the
file says is used as a size, an offset or a loop count before it was compared with what the file can hold, and the
header as a whole is bounded, so that a hostile file costs an error and neither memory nor time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np

from ceiba.checkpoint.mapping import MappedFile
from ceiba.core.errors import CheckpointError

MAX_HEADER_BYTES: Final = 512 << 20
MAX_METADATA: Final = 1 << 16
MAX_TENSORS: Final = 1 << 18
MAX_NAME_BYTES: Final = 512
MAX_STRING_BYTES: Final = 64 << 20
MAX_STRINGS: Final = 8 << 20
"""Elements of all string arrays of a file together: the largest real vocabularies with merges have below a million."""
MAX_ALIGNMENT: Final = 1 << 20

GGML_TYPES: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""ggml type id -> (name, values per block, bytes per block)."""
BLOCK_TYPES: Final = {name: (values, size) for name, values, size in GGML_TYPES.values() if values > 1}

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final[dict[int, str]] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Metadata value type -> numpy dtype."""
_SCALAR_STRUCTS: Final = {
    kind: struct.Struct("<" + letter)
    for kind, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<4sIQQ")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table; ``begin`` and ``end`` are checked offsets from the start of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(slots=True)
class Header:
    version: int
    metadata: dict[str, Any]
    """Scalars and strings as Python values, numeric arrays as numpy, string arrays as ``StringArray``."""
    tensors: dict[str, TensorInfo]
    """In file order of the table."""


class StringArray:
    """A checked array of strings, decoded when first asked: a start that needs no tokenizer does not pay for it."""

    def __init__(self, data: bytes, count: int) -> None:
        self._data = data
        self._count = count

    def __len__(self) -> int:
        return self._count

    def decode(self) -> list[str]:
        """The strings. Bytes that are not UTF-8 become U+FFFD: a damaged token must not stop the others."""
        out = []
        position = 0
        data = self._data
        read = _U64.unpack_from
        for _ in range(self._count):
            begin = position + 8
            position = begin + read(data, position)[0]
            out.append(data[begin:position].decode("utf-8", "replace"))
        return out


class _Cursor:
    """A position in the mapped header that never passes ``limit``."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.data = file.map
        self.position = 0
        self.limit = min(file.size, MAX_HEADER_BYTES)
        self.strings = 0

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self.file.path}: damaged or hostile GGUF header at byte {self.position}: {message}")

    def need(self, count: int, what: str) -> None:
        if count > self.limit - self.position:
            self.fail(f"{what} needs {count} bytes and {self.limit - self.position} are left")

    def unpack(self, layout: struct.Struct, what: str) -> Any:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self.unpack(_U64, f"the length of {what}")
        if length > limit:
            self.fail(f"{what} claims {length} bytes, over the limit of {limit}")
        self.need(length, what)
        raw = self.data[self.position : self.position + length]
        self.position += length
        return raw.decode("utf-8", "replace")

    def name(self, what: str) -> str:
        name = self.string(what, MAX_NAME_BYTES)
        if not name or not name.isprintable() or "\ufffd" in name:
            self.fail(f"{what} is not a printable UTF-8 string")
        return name

    def value(self, key: str) -> Any:
        kind = self.unpack(_U32, f"the type of {key}")
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALAR_STRUCTS:
            self.fail(f"{key} has the unknown value type {kind}")
        return self.unpack(_SCALAR_STRUCTS[kind], key)

    def array(self, key: str) -> Any:
        kind = self.unpack(_U32, f"the element type of {key}")
        count = self.unpack(_U64, f"the length of {key}")
        if kind == _STRING:
            return self.string_array(key, count)
        if kind not in _SCALARS:
            self.fail(f"{key} is an array of the unknown or nested type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self.need(count * dtype.itemsize, key)
        begin = self.position
        self.position += count * dtype.itemsize
        if kind == 7:
            return self.file.slice(begin, self.position) != 0
        return self.file.slice(begin, self.position).view(dtype)

    def string_array(self, key: str, count: int) -> StringArray:
        self.need(count * 8, key)
        self.strings += count
        if self.strings > MAX_STRINGS:
            self.fail(f"{key} brings the string arrays to {self.strings} elements, over the limit of {MAX_STRINGS}")
        # The walk over lengths is the price of the format; everything is local because 100,000 steps are usual.
        data, position, last = self.data, self.position, self.limit - 8
        read = _U64.unpack_from
        for _ in range(count):
            if position > last:
                self.fail(f"{key} runs past the end of the header")
            position += 8 + read(data, position)[0]
        if position > self.limit:
            self.fail(f"{key} runs past the end of the header")
        raw = data[self.position : position]
        self.position = position
        return StringArray(raw, count)


def read_header(file: MappedFile) -> Header:
    """Parse and check the header of a mapped GGUF file. Raises CheckpointError, and only that, on any bad file."""
    cursor = _Cursor(file)
    cursor.need(_HEAD.size, "the fixed header")
    magic, version, tensor_count, metadata_count = _HEAD.unpack_from(file.map, 0)
    if magic != b"GGUF":
        raise CheckpointError(f"{file.path}: not a GGUF file (it begins with {magic!r})")
    if version not in (2, 3):
        if version in (2 << 24, 3 << 24):
            raise CheckpointError(f"{file.path}: a big-endian GGUF; convert it to little endian")
        raise CheckpointError(f"{file.path}: GGUF version {version}; versions 2 and 3 are read")
    cursor.position = _HEAD.size
    # Least sizes of an entry: metadata 8 + 1 + 4 + 1 bytes, tensor 8 + 1 + 4 + 8 + 4 + 8.
    _check_count(cursor, "metadata entries", metadata_count, MAX_METADATA, 14)
    _check_count(cursor, "tensors", tensor_count, MAX_TENSORS, 33)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.name("a metadata key")
        if key in metadata:
            cursor.fail(f"the metadata key {key} appears twice")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment!r}; a power of two up to {MAX_ALIGNMENT} is allowed")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        info = _read_tensor(cursor, alignment)
        if info.name in tensors:
            cursor.fail(f"the tensor {info.name} appears twice")
        tensors[info.name] = info
    data_begin = -(-cursor.position // alignment) * alignment
    return Header(version, metadata, _place(cursor.fail, file.size, data_begin, tensors))


def _check_count(cursor: _Cursor, what: str, count: int, limit: int, least_bytes: int) -> None:
    if count > limit:
        cursor.fail(f"{count} {what}, over the limit of {limit}")
    cursor.need(count * least_bytes, f"a table of {count} {what}")


def _read_tensor(cursor: _Cursor, alignment: int) -> TensorInfo:
    """One table entry; offsets are still relative to the data section."""
    name = cursor.name("a tensor name")
    rank = cursor.unpack(_U32, f"the rank of {name}")
    if not 1 <= rank <= 4:
        cursor.fail(f"{name} has {rank} dimensions; 1 to 4 are allowed")
    # ggml stores the fastest dimension first.
    shape = tuple(reversed([cursor.unpack(_U64, f"a dimension of {name}") for _ in range(rank)]))
    type_id = cursor.unpack(_U32, f"the type of {name}")
    offset = cursor.unpack(_U64, f"the offset of {name}")
    if type_id not in GGML_TYPES:
        cursor.fail(f"{name} has the unknown tensor type {type_id}")
    kind, block, block_bytes = GGML_TYPES[type_id]
    if min(shape) == 0:
        cursor.fail(f"{name} has the empty shape {shape}")
    if shape[-1] % block:
        cursor.fail(f"{name}: rows of {shape[-1]} values are no multiple of {kind}'s block of {block}")
    if offset % alignment:
        cursor.fail(f"{name}: offset {offset} is no multiple of the alignment {alignment}")
    values = 1
    for dimension in shape:
        values *= dimension
    return TensorInfo(name, kind, shape, offset, offset + values // block * block_bytes)


def _place(
    fail: Callable[[str], NoReturn], size: int, data_begin: int, tensors: dict[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Relative to absolute offsets; every tensor lies inside the file and none overlaps another."""
    placed = {}
    for info in tensors.values():
        begin, end = data_begin + info.begin, data_begin + info.end
        if end > size:
            fail(f"{info.name} ends at byte {end} and the file has {size}; it may be cut short: fetch it again")
        placed[info.name] = TensorInfo(info.name, info.kind, info.shape, begin, end)
    reached = data_begin
    for info in sorted(placed.values(), key=lambda t: t.begin):
        if info.begin < reached:
            fail(f"{info.name} overlaps the tensor before it")
        reached = info.end
    return placed
