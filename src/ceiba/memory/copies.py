"""Copies between the device's KV pool, the host pool and blobs. Owns how bytes move; knows neither order nor threads.

``kernel``: slots are gathered and scattered by index, a layer at a time on the device, and cross the link as few long
copies. ``direct``: runs of consecutive slots are copied straight, without kernels: for layouts in which a run is one
piece of memory on both sides. On a CPU both are the same: numpy moves a token's bytes of a layer as one item, in this
thread alone (torch indexes byte by byte, twenty times slower, and wakes threads that then spin).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch

from ceiba.memory.host_pool import HostPlane, HostPool, device_planes, token_items
from ceiba.memory.pool import KVPool

IOBackend = Literal["kernel", "direct"]
STAGING_BYTES = 64 << 20
"""Device memory that one gather or scatter may take on its way."""


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
            for part in self._parts(len(device)):
                self._staged(device[part], host[part], to_host=True)

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
            for part in self._parts(len(device)):
                self._staged(device[part], host[part], to_host=False)

    def pack(self, slots: np.ndarray) -> np.ndarray:
        """KV of host slots as bytes: all keys [N, layers, width], then all values. The same for every layout."""
        return np.concatenate([plane.read(slots).reshape(-1) for plane in self.host.planes])

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

    def _parts(self, count: int) -> Iterator[slice]:
        step = max(1, STAGING_BYTES // self._row)
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def _staged(self, device: np.ndarray, host: np.ndarray, *, to_host: bool) -> None:
        """Through a buffer on the device that lies as the host plane does: kernels on one side, long copies across."""
        slots = _index(device).to(self._where, non_blocking=True)
        order = list(runs(np.arange(len(host)), host))
        for plane, layers in zip(self.host.planes, self._device, strict=True):
            by_layer = plane.layout != "page_first"
            size = (plane.layers, len(host), plane.width) if by_layer else (len(host), plane.layers, plane.width)
            staging = torch.empty(size, dtype=torch.uint8, device=self._where)
            if to_host:
                for layer, data in enumerate(layers):
                    part = staging[layer] if by_layer else staging[:, layer]
                    part.copy_(data.index_select(0, slots))
                self._across(plane, staging, order, to_host=True)
            else:
                self._across(plane, staging, order, to_host=False)
                for layer, data in enumerate(layers):
                    data.index_copy_(0, slots, staging[layer] if by_layer else staging[:, layer])

    def _across(
        self, plane: HostPlane, staging: torch.Tensor, order: list[tuple[int, int, int]], *, to_host: bool
    ) -> None:
        for at, slot, count in order:
            if plane.layout == "page_first":
                _copy(plane.data[slot : slot + count], staging[at : at + count], to_host)
                continue
            for layer in range(plane.layers):
                for offset, piece in plane.pieces(layer, slot, count):
                    _copy(piece, staging[layer, at + offset : at + offset + len(piece)], to_host)

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


def _index(slots: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64))
