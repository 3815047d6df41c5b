"""Which quantization method a checkpoint's matrices need, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ceiba.checkpoint.packed_cache import PackedCache
from ceiba.core.errors import ConfigError
from ceiba.layers.ops import Ops
from ceiba.layers.quant.base import QuantMethod
from ceiba.layers.quant.fp8 import Fp8Method, stored_fp8
from ceiba.layers.quant.gguf import GGUFMethod
from ceiba.layers.quant.packed import ONLINE_BLOCKS, PackedMethod
from ceiba.layers.quant.plain import PlainMethod

METHODS: dict[str, Callable[[Ops], QuantMethod]] = {"plain": PlainMethod, "gguf": GGUFMethod}
ONLINE: dict[str, Callable[[Ops], QuantMethod]] = {"fp8": Fp8Method}
"""Methods that round plain weights when they are loaded."""


def quant_method(
    stored: str | None,
    requested: str | None,
    ops: Ops,
    settings: Mapping[str, Any] | None = None,
    cache: PackedCache | None = None,
) -> QuantMethod:
    """``stored`` is how the checkpoint is packed (None: plain), ``requested`` the --quantization flag, ``settings`` the
    checkpoint's ``quantization_config``, ``cache`` what an earlier start packed.

    Raises ConfigError for a method we do not have, or for one that contradicts the checkpoint.
    """
    if stored is None and requested in ONLINE:
        return ONLINE[requested](ops)
    if stored == "fp8" and requested in {None, "fp8"}:
        return stored_fp8(settings or {}, ops)
    name = stored or "plain"
    if name not in METHODS:
        raise ConfigError(
            f"the checkpoint is quantized as {name!r}, which is not available; available: {', '.join(METHODS)}"
        )
    if requested in ONLINE_BLOCKS:
        if stored is not None:
            raise ConfigError(f"--quantization {requested}: the weights are quantized already, as {name!r}")
        if ops.host is None:
            raise ConfigError(f"--quantization {requested} needs the compiled kernels of a CPU")
        return PackedMethod(ops, ops.host, requested, cache)
    if requested is not None and requested != name:
        raise ConfigError(
            f"--quantization {requested} does not fit a checkpoint stored as {name!r}; leave the flag out"
        )
    if ops.host is not None:
        return PackedMethod(ops, ops.host, cache=cache)
    return METHODS[name](ops)
