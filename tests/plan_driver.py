"""A scheduler of a few lines that drives a real runner: slots in random order, chunks, mixed steps, cached prefixes.

Owns the bookkeeping that a plan needs (rows, slots, positions) and nothing else, so tests can put a runner into any
state that a scheduler could.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ceiba.config.records import Config, ModelConfig, RunnerConfig, SchedulerConfig
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.core.step import FUTURE, PrefixGroup, RowOpen, StepOutput, StepPlan, TokenMasks
from ceiba.runner.worker import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
PACKED_ERROR = 1e-3
"""Of logits, where the compiled kernels round activations to 16 bits before packed weights: 2e-5 a product, through the
layers of a random model some ten times that."""


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted| / |wanted|, over all values."""
    return float((found - wanted).norm() / wanted.norm())


def make_config(path: str, **options: object) -> Config:
    """A configuration for tests: small pool, one thread. Options are split by the record that has the field."""
    records = {"scheduler": SchedulerConfig, "runner": RunnerConfig, "model": ModelConfig}
    chosen: dict[str, dict[str, object]] = {
        "model": {"path": path, "name": "m", "tokenizer_path": path, "dtype": "float32", "context_len": 256},
        "scheduler": {"max_total_tokens": 4096, "max_running_requests": 32, "chunked_prefill_size": 64},
        "runner": {},
    }
    for key, value in options.items():
        (owner,) = (name for name, record in records.items() if key in record.__struct_fields__)
        chosen[owner][key] = value
    built = {name: record(**chosen[name]) for name, record in records.items()}  # type: ignore[arg-type]
    return Config(**built)  # type: ignore[arg-type]


@dataclass(eq=False)
class Request:
    prompt: list[int]
    sampling: SamplingParams = GREEDY
    seed: int = 0
    logprob: LogprobSpec = field(default_factory=LogprobSpec)
    eos_ids: tuple[int, ...] = ()
    prefix_slots: list[int] = field(default_factory=list)
    """Cached: slots of another request's positions."""
    output: list[int] = field(default_factory=list)
    row: int = -1
    slots: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    """The logits each output token was chosen from."""
    steps: list[StepOutput] = field(default_factory=list)
    owned: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def prefilled(self) -> bool:
        return self.row >= 0 and len(self.slots) >= len(self.tokens) - 1 and bool(self.output)


class Driver:
    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        order = np.random.default_rng(seed).permutation(runner.info.num_slots)
        self.free = order.tolist()
        self.free_rows = np.random.default_rng(seed + 1).permutation(runner.info.max_rows).tolist()
        self.closed: list[int] = []
        self.count = 0
        self.grouping: Callable[[list[Request]], list[PrefixGroup]] | None = None
        """Prefix groups of a step's segments."""

    def step(
        self,
        prefill: list[tuple[Request, int]],
        decode: list[Request] = (),  # type: ignore[assignment]
        masks: dict[Request, list[int]] | None = None,
    ) -> StepOutput:
        """One plan: ``prefill`` lists (request, at most so many of its tokens), ``decode`` one token each."""
        opened, segments = [], []
        for request, limit in prefill:
            if request.row < 0:
                opened.append(self._open(request))
            start = len(request.slots)
            end = min(len(request.tokens), start + limit)
            segments.append((request, start, end, request.tokens[start:end], end == len(request.tokens)))
        for request in decode:
            start = len(request.slots)
            assert start == len(request.tokens) - 1
            segments.append((request, start, start + 1, [FUTURE], True))
        for request, start, end, _, _ in segments:
            taken = [self.free.pop() for _ in range(end - start)]
            request.slots += taken
            request.owned += taken
        i32 = np.int32
        plan = StepPlan(
            step=self.count,
            rows=np.array([r.row for r, *_ in segments], i32),
            starts=np.array([s for _, s, *_ in segments], i32),
            lengths=np.array([e - s for _, s, e, *_ in segments], i32),
            samples=np.array([last for *_, last in segments], bool),
            tokens=np.array([t for *_, tokens, _ in segments for t in tokens], i32),
            slots=np.array([slot for r, s, e, *_ in segments for slot in r.slots[s:e]], i32),
            num_prefill=len(prefill),
            opened=opened,
            closed=np.array(self.closed, i32),
            groups=self.grouping([r for r, *_ in segments]) if self.grouping else [],
        )
        self.closed = []
        self.count += 1
        handle = self.runner.forward(plan)
        sampled = [r for r, *_, last in segments if last]
        for index, request in enumerate(sampled):
            request.logits.append(handle.logits[index].float().clone())
        output = self.runner.sample(handle, self._masks(masks)).wait()
        assert output.rows.tolist() == [r.row for r in sampled]
        for request, token in zip(sampled, output.tokens.tolist(), strict=True):
            request.output.append(token)
            request.steps.append(output)
        for request, *_, last in segments:
            if not last:
                request.steps.append(output)
        return output

    def run(self, requests: list[Request], new_tokens: int, chunk: int = 1 << 20, mixed: bool = False) -> None:
        """To ``new_tokens`` outputs each. Mixed: one chunk of one request beside the decodes; else prefills first."""
        goal = {id(r): len(r.output) + new_tokens for r in requests}
        waiting = list(requests)
        while True:
            running = [r for r in requests if r not in waiting and len(r.output) < goal[id(r)]]
            if not waiting and not running:
                break
            if not waiting:
                self.step([], running)
                continue
            batch = waiting[:1] if mixed else waiting
            self.step([(r, chunk) for r in batch], running if mixed else [])
            waiting = [r for r in waiting if len(r.slots) < len(r.prompt)]
        for request in requests:
            assert len(request.output) == goal[id(request)]

    def close(self, request: Request, keep_slots: bool = False) -> None:
        self.closed.append(request.row)
        self.free_rows.append(request.row)
        if not keep_slots:
            self.free += request.owned
        request.row = -1

    def retract(self, request: Request) -> None:
        """Give everything back; the next prefill computes prompt and output again."""
        self.close(request)
        request.slots, request.owned = [], []

    def _open(self, request: Request) -> RowOpen:
        request.row = self.free_rows.pop()
        request.slots = list(request.prefix_slots)
        return RowOpen(
            row=request.row,
            tokens=np.array(request.tokens, np.int32),
            prompt_len=len(request.prompt),
            prefix_slots=np.array(request.prefix_slots, np.int32),
            sampling=request.sampling,
            seed=request.seed,
            logprob=request.logprob,
            eos_ids=request.eos_ids,
        )

    def _masks(self, masks: dict[Request, list[int]] | None) -> TokenMasks | None:
        if not masks:
            return None
        words = -(-self.runner.info.vocab_size // 32)
        bits = np.zeros((len(masks), words), np.uint32)
        for index, allowed in enumerate(masks.values()):
            for token in allowed:
                bits[index, token // 32] |= np.uint32(1 << (token % 32))
        return TokenMasks(np.array([r.row for r in masks], np.int32), bits.view(np.int32))


def recorded(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """``function`` and what its calls will have returned."""
    results: list[Any] = []

    def spy(*args: Any) -> Any:
        results.append(function(*args))
        return results[-1]

    return spy, results
