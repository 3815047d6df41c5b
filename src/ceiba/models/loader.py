"""From an opened checkpoint to a filled model: quantization method, name mapping, missing and surplus tensors.

The checkpoint names tensors in one layout whatever its format, the model says where each name goes; this module only
brings the two together. It never knows a format or an architecture.
"""

from __future__ import annotations

import logging
import sys
import time
import zlib
from importlib import import_module
from typing import Any

import torch

from ceiba.checkpoint.base import Checkpoint
from ceiba.checkpoint.packed_cache import PackedCache
from ceiba.config.records import ModelConfig, RunnerConfig
from ceiba.core.errors import CheckpointError
from ceiba.dist import Group, SingleGroup
from ceiba.layers.context import LayerContext
from ceiba.layers.ops import select_ops
from ceiba.layers.quant.select import quant_method
from ceiba.models.decoder import Decoder
from ceiba.models.registry import model_class

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHOWN = 8
"""How many names an error lists before it says how many more there are."""


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    runner: RunnerConfig,
    device: torch.device,
    group: Group | None = None,
    packed: PackedCache | None = None,
) -> Decoder:
    """Build the model that ``checkpoint`` describes on ``device`` and load its weights, from ``packed`` where an
    earlier start has left them in the kernels' layout.

    Raises ConfigError for an architecture, option or quantization we do not have, and CheckpointError when tensors are
    missing, surplus or of the wrong shape.
    """
    facts = checkpoint.facts()
    settings: dict[str, Any] = {**checkpoint.config, **config.override_args}
    ops = select_ops(device, runner, DTYPES[config.dtype])
    dummy = config.load_format == "dummy"
    ctx = LayerContext(
        dtype=DTYPES[config.dtype],
        device=device,
        group=group or SingleGroup(),
        ops=ops,
        quant=quant_method(
            None if dummy else facts.quantized,
            config.quantization,
            ops,
            settings.get("quantization_config"),
            None if dummy else packed,
        ),
        context_len=config.context_len,
    )
    family = model_class(facts.architecture)
    model = family(family.describe(settings), ctx)
    with torch.inference_mode():
        if dummy:
            fill_dummy(model)
        else:
            fill_from(checkpoint, model)
    if packed is not None and not dummy:
        if packed.bytes_taken:
            log.info("packed weights mapped from %s (%.0f MB)", packed.path, packed.bytes_taken / 1e6)
        packed.finish()
    return model


def fill_from(checkpoint: Checkpoint, model: Decoder) -> None:
    """Copy every stored tensor to its place, in file order."""
    waiting = model.slots()
    surplus: list[str] = []
    progress = Progress("Loading weights", len(waiting))
    for raw in checkpoint:
        slot = waiting.pop(raw.name, None)
        if slot is not None:
            slot.target.load(slot.part, raw)
            progress.step()
        elif not model.ignores(raw.name):
            surplus.append(raw.name)
    progress.end()
    if waiting:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(waiting)} tensors the model needs: {_some(sorted(waiting))}"
        )
    if surplus:
        raise CheckpointError(
            f"{checkpoint.path} holds {len(surplus)} tensors this architecture has no place for: {_some(surplus)}; "
            "it is probably a different architecture than its configuration says"
        )


def fill_dummy(model: Decoder) -> None:
    """Random weights, the same for the same model on the same kind of device, whatever the number of layers before."""
    import_module("torch._prims.rng_prims")  # a generator needs it, and a lean import of torch leaves it out
    seen: set[int] = set()
    for name, slot in model.slots().items():
        if id(slot.target) in seen:
            continue
        seen.add(id(slot.target))
        generator = torch.Generator(device=model.rotary.table.device)
        generator.manual_seed(zlib.crc32(name.encode()))
        slot.target.fill(generator)


def _some(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


class Progress:
    """A progress line on stderr, only where someone watches, at most ten times a second."""

    WIDTH = 30

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done, self.shown = title, total, 0, 0.0
        self.visible = sys.stderr.isatty()

    def step(self) -> None:
        self.done += 1
        now = time.monotonic()
        if self.visible and (now - self.shown > 0.1 or self.done == self.total):
            self.shown = now
            filled = self.WIDTH * self.done // max(1, self.total)
            bar = "█" * filled + "·" * (self.WIDTH - filled)
            print(f"\r{self.title} {bar} {self.done}/{self.total}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.visible:
            print(file=sys.stderr, flush=True)
