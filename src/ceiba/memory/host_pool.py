"""KV of tokens in host memory, addressed by host slot, in one of three layouts. Owns the bytes; knows no tree.

Keys and values are two planes of bytes, each [tokens, layers, width] to the outside, whatever its order in memory:

    layer_first         [layers, tokens, width]         one layer's copies are long and contiguous
    page_first          [tokens, layers, width]         a token is contiguous: one copy moves it through all layers
    page_first_direct   [pages, layers, page, width]    a page's layer is contiguous on both sides: plain copies
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch

from ceiba.memory.pool import KVPool, KVShape
from ceiba.memory.zeros import lazy_zeros

Layout = Literal["layer_first", "page_first", "page_first_direct"]


class HostPlane:
    """Keys or values of ``tokens`` slots: ``width`` bytes per token and layer. ``pin``: they will be pinned."""

    def __init__(self, layers: int, width: int, tokens: int, page_size: int, layout: Layout, *, pin: bool) -> None:
        self.layers, self.width, self.tokens, self.page_size, self.layout = layers, width, tokens, page_size, layout
        shape = {
            "layer_first": (layers, tokens, width),
            "page_first": (tokens, layers, width),
            "page_first_direct": (tokens // page_size, layers, page_size, width),
        }[layout]
        self.data = lazy_zeros(*shape, dtype=torch.uint8, device="cpu", huge_pages=pin)
        self.array = self.data.numpy()

    def read(self, slots: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Rows of ``slots`` int [N], uint8 [N, layers, width]; written to ``out`` where it is given."""
        rows = np.empty((len(slots), self.layers, self.width), np.uint8) if out is None else out
        if self.layout == "page_first":
            # "clip" checks no bounds, but without it numpy takes a buffer of its own and copies twice.
            tokens = _wide(self.array.reshape(self.tokens, -1))
            np.take(tokens, slots, out=_wide(rows.reshape(len(slots), -1)), mode="clip")
            return rows
        for layer in range(self.layers):
            _wide(rows[:, layer])[:] = self.items(layer)[self.where(slots)]
        return rows

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """``rows`` uint8 [N, layers, width] to ``slots`` int [N]."""
        if self.layout == "page_first":
            flat = np.ascontiguousarray(rows).reshape(len(slots), -1)
            _wide(self.array.reshape(self.tokens, -1))[slots] = _wide(flat)
            return
        for layer in range(self.layers):
            self.items(layer)[self.where(slots)] = _wide(rows[:, layer])

    def items(self, layer: int) -> np.ndarray:
        """One layer with a token's bytes as one item, to be indexed by ``where``: numpy moves items whole."""
        if self.layout == "page_first":
            return _wide(self.array[:, layer])
        if self.layout == "layer_first":
            return _wide(self.array[layer])
        return _wide(self.array[:, layer])

    def layer(self, layer: int) -> torch.Tensor:
        """One layer's rows by slot, uint8 [tokens, width] with any row stride; not of ``page_first_direct``."""
        return self.data[:, layer] if self.layout == "page_first" else self.data[layer]

    def where(self, slots: np.ndarray) -> Any:
        """The index of ``slots`` into ``items``."""
        return slots if self.layout != "page_first_direct" else (slots // self.page_size, slots % self.page_size)

    def pieces(self, layer: int, start: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """One layer of ``count`` consecutive slots as views: (offset, uint8 [n, width]), each as long as it can be."""
        match self.layout:
            case "page_first":
                yield 0, self.data[start : start + count, layer]
            case "layer_first":
                yield 0, self.data[layer, start : start + count]
            case _:
                size, done = self.page_size, 0
                while done < count:
                    page, at = divmod(start + done, size)
                    n = min(size - at, count - done)
                    yield done, self.data[page, layer, at : at + n]
                    done += n


def _wide(rows: np.ndarray) -> np.ndarray:
    """uint8 [..., width] as [...] of items that are ``width`` bytes long; shares memory."""
    return rows.view(np.dtype((np.void, rows.shape[-1])))[..., 0]


class HostPool:
    """Both planes. ``pin``: make the memory reachable for a CUDA device, by its copy engines and by its address."""

    def __init__(self, shape: KVShape, tokens: int, page_size: int, layout: Layout, *, pin: bool = False) -> None:
        self.shape = shape
        self.tokens = tokens - tokens % page_size
        size = shape.dtype.itemsize
        widths = tuple(shape.num_kv_heads * shape.stored(dim) * size for dim in (shape.head_dim, shape.v_head_dim))
        layers = shape.num_layers
        self.planes = [HostPlane(layers, width, self.tokens, page_size, layout, pin=pin) for width in widths if width]
        self._pinned: list[torch.Tensor] = []
        if pin:
            self._pin()

    @property
    def layout(self) -> Layout:
        return self.planes[0].layout

    @property
    def pinned(self) -> bool:
        return len(self._pinned) == len(self.planes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return sum(plane.layers * plane.width for plane in self.planes)

    def close(self) -> None:
        for data in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(data.data_ptr())
        self._pinned = []

    def _pin(self) -> None:
        """Register the memory in place: torch's own pinned allocations are rounded up to a power of two."""
        for plane in self.planes:
            data = plane.data
            code = int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0))
            if code:
                self.close()
                raise MemoryError(
                    f"{data.numel() >> 20} MiB of host memory could not be pinned (CUDA error {code}): lower "
                    "--hicache-size or --hicache-ratio, or raise the limit of locked memory (ulimit -l)"
                )
            self._pinned.append(data)


def device_planes(pool: KVPool) -> list[list[torch.Tensor]]:
    """The device pool's layers as bytes, uint8 [slots, width] each: keys, then values."""
    planes = []
    for layers in (pool.k, pool.v):
        flat = [layer.view(torch.uint8).view(len(layer), -1) if layer.numel() else layer for layer in layers]
        if flat[0].numel():
            planes.append(flat)
    return planes


def token_items(layer: torch.Tensor) -> np.ndarray:
    """One layer of a device pool on a CPU (uint8 [slots, width]) with a token's bytes as one item; shares memory."""
    return _wide(layer.numpy())
