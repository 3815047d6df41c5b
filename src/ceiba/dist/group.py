"""The collectives that sharded layers need, as a protocol, and the group of one.

Layers receive a group when they are built and never ask how many processes there are elsewhere; so tensor parallelism
is one more implementation of ``Group``. Knows nothing of models, weights or requests.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ceiba.core.errors import ConfigError


class Group(Protocol):
    """Ranks that hold shards of one model."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of ``x`` over the ranks; may reuse ``x``'s storage. Graph-safe."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' equal-shaped ``x`` joined along ``dim`` in rank order. Graph-safe."""


class SingleGroup:
    """The group of one rank: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x


def partition(total: int, group: Group, what: str, *, replicate: bool = False) -> tuple[int, int]:
    """This rank's (count, start) of ``total`` equal units (heads, columns).

    With ``replicate``, fewer units than ranks are shared: each rank holds one, neighbours hold the same. Raises
    ConfigError when the ranks do not divide the units.
    """
    if total % group.size == 0:
        count = total // group.size
        return count, group.rank * count
    if replicate and group.size % total == 0:
        return 1, group.rank // (group.size // total)
    raise ConfigError(
        f"{what}: {total} cannot be split over {group.size} ranks; choose a tensor-parallel size that divides it"
    )
