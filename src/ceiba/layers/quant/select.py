"""Which quantization method a checkpoint's matrices need, by name."""

from __future__ import annotations

from collections.abc import Callable

from ceiba.core.errors import ConfigError
from ceiba.layers.ops import Ops
from ceiba.layers.quant.base import QuantMethod
from ceiba.layers.quant.gguf import GGUFMethod
from ceiba.layers.quant.packed import PackedMethod
from ceiba.layers.quant.plain import PlainMethod

METHODS: dict[str, Callable[[Ops], QuantMethod]] = {"plain": PlainMethod, "gguf": GGUFMethod}


def quant_method(stored: str | None, requested: str | None, ops: Ops) -> QuantMethod:
    """``stored`` is how the checkpoint is packed (None: plain), ``requested`` the --quantization flag.

    Raises ConfigError for a method we do not have, or for one that contradicts the checkpoint.
    """
    name = stored or "plain"
    if name not in METHODS:
        raise ConfigError(
            f"the checkpoint is quantized as {name!r}, which is not available; available: {', '.join(METHODS)}"
        )
    if requested is not None and requested != name:
        raise ConfigError(
            f"--quantization {requested} does not fit a checkpoint stored as {name!r}; leave the flag out"
        )
    if ops.host is not None:
        return PackedMethod(ops, ops.host)
    return METHODS[name](ops)
