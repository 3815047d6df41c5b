"""Copies between the device's KV pool, the host pool and blobs. Owns how bytes move; knows neither order nor threads.

``kernel``: a kernel on the device reads rows by index and writes them by index, across the link, all layers in one
launch. ``direct``: runs of consecutive slots are copied straight, without kernels: for layouts in which a run is one
piece of memory on both sides. On a CPU both are the same: numpy moves a token's bytes of a layer as one item, in this
thread alone (torch indexes byte by byte, twenty times slower, and wakes threads that then spin).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from ceiba.memory.host_pool import HostPlane, HostPool, device_planes, token_items
from ceiba.memory.pool import KVPool

if TYPE_CHECKING:
    from ceiba.kernels.triton.move import Matrices

IOBackend = Literal["kernel", "direct"]


def runs(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(a, b, count) of the stretches in which both arrays count up together."""
    if not len(a):
        return
    cuts = np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1)) + 1
    starts = np.concatenate([[0], cuts])
    ends = np.concatenate([cuts, [len(a)]])
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield int(a[start]), int(b[start]), end - start


class Copier:
    """Between one device pool and one host pool. On CUDA everything goes to the current stream."""

    def __init__(self, pool: KVPool, host: HostPool, io: IOBackend) -> None:
        self.host = host
        self.io = io
        self._device = device_planes(pool)
        self._where = self._device[0][0].device
        self._row = host.row_bytes
        self._planes: list[tuple[Matrices, Matrices, int]] = []
        """Device side, host side and row bytes of each plane, for the kernel."""
        if self._where.type == "cuda" and io == "kernel":
            self._make_kernel_ready()
        self._items = [list(map(token_items, layers)) for layers in self._device] if self._where.type == "cpu" else []

    def backup(self, device: np.ndarray, host: np.ndarray) -> None:
        """KV of ``device`` slots to ``host`` slots, int32 [N] each."""
        if self._where.type == "cpu":
            for plane, layers in zip(self.host.planes, self._items, strict=True):
                where = plane.where(host)
                for layer, data in enumerate(layers):
                    plane.items(layer)[where] = data[device]
        elif self.io == "direct":
            self._straight(device, host, to_host=True)
        else:
            self._by_index(device, host, to_host=True)

    def restore(self, host: np.ndarray, device: np.ndarray) -> None:
        """KV of ``host`` slots to ``device`` slots, int32 [N] each."""
        if self._where.type == "cpu":
            for plane, layers in zip(self.host.planes, self._items, strict=True):
                where = plane.where(host)
                for layer, data in enumerate(layers):
                    data[device] = plane.items(layer)[where]
        elif self.io == "direct":
            self._straight(device, host, to_host=False)
        else:
            self._by_index(device, host, to_host=False)

    def pack(self, slots: np.ndarray) -> np.ndarray:
        """KV of host slots as bytes: all keys [N, layers, width], then all values. The same for every layout."""
        blob, at = np.empty(len(slots) * self._row, np.uint8), 0
        for plane in self.host.planes:
            size = len(slots) * plane.layers * plane.width
            plane.read(slots, blob[at : at + size].reshape(len(slots), plane.layers, plane.width))
            at += size
        return blob

    def unpack(self, blob: np.ndarray, slots: np.ndarray, skip: int) -> None:
        """The tokens of ``blob`` after the first ``skip`` to host slots. ValueError when the sizes do not fit."""
        tokens = len(slots) + skip
        if blob.nbytes != tokens * self._row:
            raise ValueError(f"a page of {blob.nbytes} bytes for {tokens} tokens of {self._row}")
        at = 0
        for plane in self.host.planes:
            size = tokens * plane.layers * plane.width
            plane.write(slots, blob[at : at + size].reshape(tokens, plane.layers, plane.width)[skip:])
            at += size

    # ── inside ───────────────────────────────────────────────────────────────

    def _make_kernel_ready(self) -> None:
        """Compile and run it once each way, on a slot that holds nothing yet on either side, and wait for the end."""
        from ceiba.kernels.triton.launch import expected

        if not self.host.pinned:
            raise ValueError("a device copies to and from host memory by its address only if it is pinned")
        with torch.cuda.device(self._where), expected():
            self._planes = list(map(self._addresses, self.host.planes, self._device))
            for to_host in (True, False):
                self._by_index(np.zeros(1, np.int32), np.zeros(1, np.int32), to_host=to_host)
            torch.cuda.current_stream().synchronize()

    def _addresses(self, plane: HostPlane, layers: list[torch.Tensor]) -> tuple[Matrices, Matrices, int]:
        from ceiba.kernels.triton.move import Matrices

        views = [plane.layer(layer) for layer in range(plane.layers)]
        host = Matrices.of([view.data_ptr() for view in views], views[0].stride(0), self._where)
        return Matrices.of([data.data_ptr() for data in layers], plane.width, self._where), host, plane.width

    def _by_index(self, device: np.ndarray, host: np.ndarray, *, to_host: bool) -> None:
        from ceiba.kernels.triton.move import move_rows

        rows = torch.from_numpy(np.stack([device, host])).pin_memory().to(self._where, non_blocking=True)
        for on_device, on_host, width in self._planes:
            if to_host:
                move_rows(on_device, on_host, rows[0], rows[1], width)
            else:
                move_rows(on_host, on_device, rows[1], rows[0], width)

    def _straight(self, device: np.ndarray, host: np.ndarray, *, to_host: bool) -> None:
        for source, target, count in runs(device, host):
            for plane, layers in zip(self.host.planes, self._device, strict=True):
                for layer, data in enumerate(layers):
                    for offset, piece in plane.pieces(layer, target, count):
                        _copy(piece, data[source + offset : source + offset + len(piece)], to_host)


def _copy(host: torch.Tensor, device: torch.Tensor, to_host: bool) -> None:
    if to_host:
        host.copy_(device, non_blocking=True)
    else:
        device.copy_(host, non_blocking=True)
