"""The choice of an attention backend: what the model, the flags and the device need against what each one declares.

A refusal lists every candidate with its reasons. Never knows how a backend works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

import torch

from ceiba.attention.base import AttentionBackend, AttentionBatch, AttentionLayer, Capabilities
from ceiba.core.errors import ConfigError
from ceiba.memory.pool import KVPool

BACKENDS: Mapping[str, tuple[str, str]] = {
    "cpu": ("ceiba.attention.backends.cpu", "CPUAttention"),
    "triton": ("ceiba.attention.backends.triton", "TritonAttention"),
    "torch_native": ("ceiba.attention.backends.torch_native", "TorchNative"),
}
"""Name -> (module, class), best first; a module is imported only when its backend is considered."""
ALIASES = {"intel_amx": "cpu"}


@dataclass(frozen=True, slots=True)
class Needs:
    """What one start asks of attention."""

    device: str
    """``cpu``, ``cuda``, …"""
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dims: frozenset[int]
    page_size: int = 1
    sliding_window: bool = False
    softcap: bool = False
    sinks: bool = False
    cuda_graph: bool = False

    @classmethod
    def of(
        cls,
        layers: list[AttentionLayer],
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        page_size: int,
    ) -> Needs:
        """The needs of a model's layers."""
        dims = {layer.head_dim for layer in layers} | {layer.v_head_dim for layer in layers if layer.v_head_dim}
        return cls(
            device=device.type,
            dtype=dtype,
            kv_dtype=kv_dtype,
            head_dims=frozenset(dims),
            page_size=page_size,
            sliding_window=any(layer.window for layer in layers),
            softcap=any(layer.softcap for layer in layers),
        )


def objections(needs: Needs, has: Capabilities) -> list[str]:
    """Why a backend with these capabilities cannot serve; empty when it can."""

    def short(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    found = []
    if needs.device not in has.devices:
        found.append(f"runs on {', '.join(sorted(has.devices))}, not {needs.device}")
    if needs.dtype not in has.dtypes:
        found.append(f"no dtype {short(needs.dtype)}")
    if needs.kv_dtype not in has.kv_dtypes:
        found.append(f"no KV cache dtype {short(needs.kv_dtype)}")
    if has.head_dims is not None and not needs.head_dims <= has.head_dims:
        found.append(f"head dimensions {sorted(needs.head_dims)} not among {sorted(has.head_dims)}")
    if has.page_sizes is not None and needs.page_size not in has.page_sizes:
        found.append(f"page size {needs.page_size} not among {sorted(has.page_sizes)}")
    for feature in ("sliding_window", "softcap", "sinks", "cuda_graph"):
        if getattr(needs, feature) and not getattr(has, feature):
            found.append(f"no {feature.replace('_', ' ')}")
    return found


def _load(name: str) -> Callable[[], AttentionBackend]:
    module, attribute = BACKENDS[name]
    return getattr(import_module(module), attribute)


def select(name: str, needs: Needs) -> AttentionBackend:
    """A new backend: the one called ``name``, or with ``auto`` the first that can serve.

    Raises ConfigError that lists what every candidate lacks.
    """
    name = ALIASES.get(name, name)
    if name != "auto" and name not in BACKENDS:
        known = ", ".join([*BACKENDS, *ALIASES])
        raise ConfigError(f"attention backend {name!r} is not available; available: {known}")
    refusals = {}
    for candidate in BACKENDS:
        try:
            backend = _load(candidate)
            against = objections(needs, backend.capabilities)  # type: ignore[attr-defined]
        except ImportError as error:
            against = [f"cannot be imported: {error}"]
        if not against and name in {"auto", candidate}:
            return backend()
        refusals[candidate] = "; ".join(against) or "could serve"
    listed = "\n".join(f"  {candidate}: {why}" for candidate, why in refusals.items())
    asked = "no attention backend can serve" if name == "auto" else f"attention backend {name!r} cannot serve"
    raise ConfigError(f"{asked} this model on this device with these flags:\n{listed}")


class SplitAttention:
    """One backend for steps that hold prefill segments, another for steps of decode alone."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill, self.decode = prefill, decode
        self.name = f"{prefill.name}+{decode.name}"
        self.capabilities = decode.capabilities
        self._active = decode

    @property
    def slots(self) -> torch.Tensor | None:
        return self._active.slots

    @property
    def wants_kv(self) -> bool:
        return self._active.wants_kv

    def prepare(self, layers: list[AttentionLayer]) -> None:
        for backend in (self.prefill, self.decode):
            backend.prepare(layers)

    def plan(self, batch: AttentionBatch) -> None:
        self._active = self.prefill if batch.num_prefill else self.decode
        self._active.plan(batch)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        pool: KVPool,
        sinks: torch.Tensor | None = None,
        written: bool = False,
    ) -> torch.Tensor:
        return self._active.run(q, k, v, layer, pool, sinks, written)


def select_pair(default: str, prefill: str | None, decode: str | None, needs: Needs) -> AttentionBackend:
    """The backend for all steps, or a pair where --prefill-attention-backend or --decode-attention-backend differ."""
    first, second = prefill or default, decode or default
    if first == second:
        return select(first, needs)
    return SplitAttention(select(first, needs), select(second, needs))
