"""Groups of ranks and their collectives, with a single-process implementation. Knows tensors, never models."""

from ceiba.dist.group import Group, SingleGroup, partition

__all__ = ["Group", "SingleGroup", "partition"]
