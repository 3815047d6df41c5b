"""The worker of one rank: owns model, KV pool, rows and buffers, and executes plans on them (``core.step.Runner``).

One call of ``forward`` is one pass of the model over a plan's segments; ``sample`` turns its logits into tokens.
Neither waits for the device on an accelerator. Knows rows and slots; never a request, a text or a cache policy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ceiba.attention.backends.host import HostAttention
from ceiba.attention.base import AttentionBatch
from ceiba.attention.select import Needs, objections, select_pair
from ceiba.checkpoint.base import Checkpoint
from ceiba.checkpoint.packed_cache import PackedCache
from ceiba.config.records import Config
from ceiba.core.errors import ConfigError
from ceiba.core.step import RunnerInfo, StepOutput, StepPlan, TokenMasks
from ceiba.dist import Group
from ceiba.memory.pool import KVPool
from ceiba.models.decoder import Decoder
from ceiba.models.fused import FusedDecoder, fuse
from ceiba.models.loader import DTYPES, load_model
from ceiba.runner.host_path import HostPath
from ceiba.runner.host_sampler import HostSampler
from ceiba.runner.inputs import StepInputs
from ceiba.runner.logprobs import PromptBlock, block_size, logprobs, prompt_block
from ceiba.runner.memory_check import final_slots
from ceiba.runner.results import DeviceValues, PendingResult, ReadyResult, output_of
from ceiba.runner.rows import Rows, SamplingBatch
from ceiba.runner.sampler import Sampled, sample
from ceiba.spec.verify import verify

if TYPE_CHECKING:
    from ceiba.runner.device_path import DevicePath

KV_DTYPES = {
    **DTYPES,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


@dataclass(slots=True)
class ForwardHandle:
    """See ``core.step.StepHandle``."""

    plan: StepPlan
    rows: np.ndarray
    """[S] rows that sample"""
    logits: torch.Tensor
    """[sum of the plan's lanes, vocab]"""
    hidden: torch.Tensor | None
    """[T or more, hidden], prefill tokens first, in the plan's order; None for a captured decode step"""
    launched: Any = None
    """What ``DevicePath`` keeps between the two halves of a step"""


class ModelRunner:
    """See ``core.step.Runner``. Plans must come in order, and ``sample`` between one ``forward`` and the next."""

    def __init__(
        self,
        config: Config,
        checkpoint: Checkpoint,
        group: Group | None = None,
        packed: PackedCache | None = None,
    ) -> None:
        """Load the checkpoint onto the device that ``config.runner`` names and allocate the KV pool. ``packed``: its
        weights as an earlier start left them.

        Raises ConfigError for what this device or model cannot do, CheckpointError for a file that does not fit.
        """
        runner, scheduler = config.runner, config.scheduler
        self.device = _device(runner.device, runner.gpu_id)
        if self.device.type == "cpu":
            torch.set_num_threads(max(1, runner.threads))
        model = load_model(checkpoint, config.model, runner, self.device, group, packed)
        self.model: Decoder | FusedDecoder = model
        dtype = DTYPES[config.model.dtype]
        kv_name = runner.kv_cache_dtype
        if kv_name != "auto" and kv_name not in KV_DTYPES:
            raise ConfigError(f"--kv-cache-dtype {kv_name!r} is not available; available: auto, {', '.join(KV_DTYPES)}")
        kv_dtype = dtype if kv_name == "auto" else KV_DTYPES[kv_name]
        needs = Needs.of(self.model.layers, self.device, dtype, kv_dtype, scheduler.page_size)
        self.attention = select_pair(
            runner.attention_backend, runner.prefill_attention_backend, runner.decode_attention_backend, needs
        )
        self.attention.prepare(self.model.layers)
        shape = self.model.kv_shape(kv_dtype)
        vocab = self.model.spec.vocab_size
        max_rows = scheduler.max_running_requests
        self.rows = Rows(max_rows, config.model.context_len, vocab, self.device)
        slots = scheduler.max_total_tokens
        if self.device.type == "cuda":
            # The slot table counts as used: it was allocated first.
            free, total = torch.cuda.mem_get_info(self.device)
            slots = final_slots(
                total_bytes=total,
                free_bytes=free,
                fraction=runner.mem_fraction_static,
                bytes_per_token=shape.bytes_per_token,
                planned=slots,
                page_size=scheduler.page_size,
            )
        self.pool = KVPool(shape, slots, scheduler.page_size, self.device)
        self._device_path: DevicePath | None = None
        if self.device.type == "cuda":
            from ceiba.runner.device_path import DevicePath

            chunk, longest = scheduler.chunked_prefill_size, scheduler.max_prefill_tokens
            longest = min(chunk, longest) if chunk > 0 else longest
            self._device_path = DevicePath(runner, model, self.attention, self.pool, self.rows, longest)
            self._device_path.warm_up()
        self._host_path: HostPath | None = None
        host = model.ops.host
        if host is not None and self.attention.name == "cpu" and not objections(needs, HostAttention.capabilities):
            self.attention = HostAttention(host)
            fused = fuse(model, self.pool, self.attention)
            if fused is not None:
                self.model, self._host_path = fused, HostPath(fused, self.rows)
        self.inputs: StepInputs | None = None
        if self._device_path is None and self._host_path is None:
            self.inputs = StepInputs(max(scheduler.chunked_prefill_size, max_rows), max_rows)
        if runner.deterministic and not isinstance(self.model, FusedDecoder):
            raise ConfigError(
                "--enable-deterministic-inference: only the compiled CPU kernels sum in an order that does not depend "
                f"on the batch, and they do not cover this model on {self.device.type}. Instead: a dense Llama, Qwen2 "
                "or Qwen3 model on --device cpu, or a seed with each request."
            )
        self._sample = sample if host is None else HostSampler(host).sample
        # With the host path there is hardly a torch call in a step, and the mode would cost as much as sampling does.
        host_path = self._host_path is not None
        self._mode: Callable[[], AbstractContextManager[object]] = nullcontext if host_path else torch.inference_mode
        self._prompt_block = block_size(vocab)
        self._stats = {"forwards": 0.0, "decode_forwards": 0.0, "tokens": 0.0, "sampled_tokens": 0.0, "graph_hits": 0.0}
        self.info = RunnerInfo(
            num_slots=slots,
            max_rows=max_rows,
            vocab_size=vocab,
            context_len=config.model.context_len,
            page_size=scheduler.page_size,
            eos_ids=_eos_ids(checkpoint),
            device=str(self.device),
            available_memory=_available(self.device),
        )

    def forward(self, plan: StepPlan) -> ForwardHandle:
        with self._mode():
            return self._forward(plan)

    def _forward(self, plan: StepPlan) -> ForwardHandle:
        if plan.positions is not None:
            raise ValueError("this model has one position per token; the plan carries three (mrope)")
        rows = self.rows
        if len(plan.closed):
            rows.close(plan.closed.tolist())
        rows.open(plan.opened)
        if plan.num_jumps:
            rows.jump(plan)
        sampled, launched = plan.rows[plan.samples], None
        if self._device_path is not None:
            launched = self._device_path.forward(plan)
            logits, hidden = launched.logits, launched.hidden
        elif self._host_path is not None:
            logits, hidden = self._host_path.forward(plan)
        else:
            logits, hidden = self._forward_by_layer(plan)
        self._count(plan, len(sampled) if launched is not None else len(logits))
        return ForwardHandle(plan, sampled, logits, hidden, launched)

    def _forward_by_layer(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, hidden states) of a plan on the CPU, a call or more for each layer."""
        rows, model, inputs = self.rows, self.model, self.inputs
        assert isinstance(model, Decoder)
        assert inputs is not None
        inputs.fill(plan)
        ids = inputs.tokens
        if inputs.has_future:
            ids = torch.where(ids < 0, rows.last_token.index_select(0, inputs.token_rows), ids)
        rows.slot_table.index_put_((inputs.token_rows, inputs.positions), inputs.slots.to(torch.int32))
        self.attention.plan(
            AttentionBatch(
                rows=plan.rows,
                starts=plan.starts,
                lengths=plan.lengths,
                num_prefill=plan.num_prefill,
                slot_table=rows.slot_table,
                slots=inputs.slots,
                rows_device=inputs.rows,
                kv_lens_device=inputs.kv_lens,
                query_offsets_device=inputs.offsets,
                groups=plan.groups,
            )
        )
        hidden = model.forward(ids, inputs.positions, self.attention, self.pool)
        last = hidden if len(inputs.select) == len(hidden) else hidden.index_select(0, inputs.select)
        return model.logits(last), hidden

    def sample(self, handle: ForwardHandle, masks: TokenMasks | None = None) -> PendingResult | ReadyResult:
        with self._mode():
            return self._sampled(handle, masks)

    def _sampled(self, handle: ForwardHandle, masks: TokenMasks | None) -> PendingResult | ReadyResult:
        plan = handle.plan
        if len(plan.drafts) and self._device_path is None:

            def choose(rows: np.ndarray, lines: np.ndarray, masks: TokenMasks | None, first: bool) -> StepOutput:
                logits = handle.logits.index_select(0, torch.from_numpy(lines))
                part = ForwardHandle(plan, rows, logits, handle.hidden)
                return output_of(self._values(part, masks, first))

            return ReadyResult(verify(plan, masks, choose))
        values = self._values(handle, masks, True)
        return ReadyResult(output_of(values)) if self._device_path is None else PendingResult(values)

    def _values(self, handle: ForwardHandle, masks: TokenMasks | None, first: bool) -> DeviceValues:
        """Sample once for each of the handle's rows. Unless it is for the ``first`` time in a step, tokens of rows at
        fault are not recorded, and prompts have had theirs."""
        batch = self.rows.batch(handle.rows)
        values = DeviceValues(handle.plan.step, handle.rows)
        if self._device_path is not None:
            found = self._device_path.sample(handle.launched, batch, masks)
            raw, values.packed, values.tokens = found.raw, found.result, found.tokens
        else:
            chosen = self._sample(handle.logits, batch, self.rows, masks)
            self._record(batch, chosen, first)
            raw, values.tokens, values.faults = chosen.raw, chosen.tokens, chosen.faults
        wanted = batch.logprob_segments
        if wanted is not None and raw is not None:
            tokens = values.tokens
            if len(wanted) < len(handle.rows):
                segments = self.rows.move(torch.from_numpy(wanted))
                raw, tokens = raw.index_select(0, segments), tokens.index_select(0, segments)
            fixed = batch.fixed or []
            values.logprobs = logprobs(raw, tokens, batch.top, [(index, ids) for index, _, ids in fixed])
            values.logprob_segments = wanted
            values.fixed_rows = {index: row for index, row, _ in fixed}
        if handle.plan.num_prefill and first:
            values.prompt = self._prompt_logprobs(handle)
        return values

    def _record(self, batch: SamplingBatch, chosen: Sampled, first: bool) -> None:
        if first:
            self.rows.sampled(batch, chosen.tokens)
            return
        sound = chosen.faults == 0
        if bool(sound.any()):
            self.rows.sampled(self.rows.batch(batch.rows[sound.numpy()]), chosen.tokens[sound])

    def _prompt_logprobs(self, handle: ForwardHandle) -> list[tuple[int, PromptBlock]]:
        """Of this step's prefill segments: the hidden state at position p predicts the prompt token at p + 1."""
        plan, found, offset = handle.plan, [], 0
        for index in range(plan.num_prefill):
            row, start, length = int(plan.rows[index]), int(plan.starts[index]), int(plan.lengths[index])
            asked = self.rows.prompt(row)
            begin, offset = offset, offset + length
            if asked is None:
                continue
            spec, prompt = asked
            ids = self.rows.move(torch.as_tensor(np.asarray(spec.token_ids, np.int64))) if spec.token_ids else None
            if start == 0 and spec.prompt_start == 0:
                found.append((row, self._first_position(spec.top, ids)))
            first, end = max(spec.prompt_start, start + 1), min(start + length + 1, len(prompt))
            for at in range(first, end, self._prompt_block):
                stop = min(at + self._prompt_block, end)
                assert handle.hidden is not None  # a decode step has no position of a prompt
                states = handle.hidden[begin + at - 1 - start : begin + stop - 1 - start]
                targets = self.rows.move(torch.from_numpy(prompt[at:stop].astype(np.int64)))
                block = prompt_block(at, self.model.logits(states).float(), targets, spec.top, ids)
                found.append((row, block))
        return found

    def _first_position(self, top: int, ids: torch.Tensor | None) -> PromptBlock:
        """Position 0, which nothing predicts."""

        def unknown(*shape: int) -> torch.Tensor:
            return torch.full(shape, float("nan"), device=self.device)

        top = min(top, self.info.vocab_size)
        top_ids = torch.zeros(1, top, dtype=torch.int64, device=self.device) if top else None
        return PromptBlock(
            0, unknown(1), top_ids, unknown(1, top) if top else None, None if ids is None else unknown(1, len(ids))
        )

    def _count(self, plan: StepPlan, sampled: int) -> None:
        stats = self._stats
        stats["forwards"] += 1
        stats["decode_forwards"] += plan.num_prefill == 0
        stats["tokens"] += plan.num_tokens
        stats["sampled_tokens"] += sampled

    def stats(self) -> dict[str, float]:
        if self._device_path is not None:
            self._stats["graph_hits"] = float(self._device_path.graph_hits)
        return dict(self._stats)

    def close(self) -> None:
        """Drop what holds device memory, and host memory that a step under way may use. The runner cannot be used
        afterwards."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._device_path = self._host_path = self.inputs = None
        del self.model, self.pool, self.rows, self.attention
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _device(kind: str, index: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    name = "cuda" if kind == "hip" else kind
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
    return torch.device(name, index)


def _eos_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The model's end ids: those its authors suggest for generation, else those of its configuration."""
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(int(item) for item in (value if isinstance(value, list | tuple) else (value,)))
    return ()


def _available(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    import psutil

    return float(psutil.virtual_memory().available)
