"""HAZARDS 18, and 9 for seeds: an answer has the same bits, log-probabilities included, cold, from the cache, beside
sixteen others, in chunks and after a retraction. The real model, runner and scheduler, without asking for determinism
where the compiled kernels have it anyway: everywhere but on matrix tiles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ceiba.checkpoint.opening import open_checkpoint
from ceiba.config.records import Config
from ceiba.core.errors import ConfigError
from ceiba.core.messages import Generate, ids_to_bytes
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.kernels import cpu
from ceiba.models import fused
from ceiba.runner.worker import ModelRunner
from ceiba.scheduler.loop import Scheduler
from ceiba.scheduler.memory_port import Answer, MemoryPort
from plan_driver import make_config, recorded
from reference import smollm2_hf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cpu.available, reason="the compiled CPU kernels are not built"),
]
ENTRIES = json.loads((Path(smollm2_hf.__file__).parent / "smollm2_greedy.json").read_text())["prompts"]
PROMPT = [token for entry in ENTRIES[20:40] for token in entry["ids"]][:260]
NEW = 12
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_new_tokens=NEW, ignore_eos=True),
}
POOL = 1200


def config(**options: object) -> Config:
    """As a server has it by default: bfloat16, in which units with tiles need the flag."""
    options |= {"context_len": 1024, "threads": 2, "max_total_tokens": POOL}
    options |= {"dtype": "bfloat16", "deterministic": not cpu.same_bits()}
    return make_config(open_checkpoint(None).path, **options)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(config(), open_checkpoint(None))


class Engine:
    """The real scheduler on ``runner``, whose rows it leaves closed."""

    def __init__(self, runner: ModelRunner, **options: object) -> None:
        settings = config(chunked_prefill_size=1024, **options)
        self.port = MemoryPort()
        self.scheduler = Scheduler(settings.scheduler, runner, self.port)
        self.most_retractions = 0

    def ask(self, rid: str, ids: list[int], sampling: SamplingParams, prompt_start: int = -1) -> None:
        spec = LogprobSpec(output=True, top=3, prompt_start=prompt_start)
        self.port.push(
            Generate(rid=rid, input_ids=ids_to_bytes(np.array(ids, np.int32)), sampling=sampling, logprob=spec)
        )

    def finish(self, watch: str = "") -> None:
        while self.port.inbox or not self.scheduler.idle:
            self.scheduler.step(wait=0.0)
            seen = self.scheduler._requests.get(watch)
            if seen is not None:
                self.most_retractions = max(self.most_retractions, seen.retractions)

    def close_rows(self) -> None:
        """A last request takes the closed rows along, so that the next scheduler finds all of them free."""
        self.ask("last", [1, 2, 3], SamplingParams(max_new_tokens=2, ignore_eos=True))
        self.finish()
        closed = self.scheduler.rows.take_closed()
        self.scheduler.runner.rows.close(closed.tolist())


def bits(answer: Answer) -> tuple[object, ...]:
    """Everything that was reported, floats as their bytes."""
    parts = [
        b"".join(bytes(getattr(m, field)) for m in messages)
        for messages in (answer.logprobs, answer.prompt_logprobs)
        for field in ("values", "top_ids", "top_values")
    ]
    assert answer.finish is not None
    assert answer.finish.kind == "length"
    return (answer.tokens, *parts)


def alone(
    runner: ModelRunner, sampling: SamplingParams, prompt_start: int = -1, **options: object
) -> tuple[object, ...]:
    engine = Engine(runner, **options)
    engine.ask("main", PROMPT, sampling, prompt_start)
    engine.finish()
    engine.close_rows()
    return bits(engine.port.answers["main"])


def test_cold_cached_and_beside_sixteen_others_give_the_same_bits(runner: ModelRunner) -> None:
    sampling = SAMPLING["greedy"]
    cold = alone(runner, sampling)

    cached = Engine(runner)
    cached.ask("before", PROMPT[:199], sampling)
    cached.finish()
    cached.ask("main", PROMPT, sampling)
    cached.finish()
    assert 199 <= cached.port.answers["main"].usages[-1].cached_tokens < 230
    assert bits(cached.port.answers["main"]) == cold
    cached.ask("again", PROMPT, sampling)
    cached.finish()
    assert cached.port.answers["again"].usages[-1].cached_tokens == len(PROMPT) - 1
    assert bits(cached.port.answers["again"]) == cold
    cached.close_rows()

    batched = Engine(runner, enable_mixed_chunk=True)
    for i in range(16):
        batched.ask(str(i), ENTRIES[i]["ids"][: 20 + i], sampling)
        if i == 7:
            batched.ask("main", PROMPT, sampling)
        batched.scheduler.step(wait=0.0)
    batched.finish()
    assert bits(batched.port.answers["main"]) == cold
    batched.close_rows()


def test_under_a_prefix_that_is_read_once_for_five_it_has_the_same_bits(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy, shared = recorded(fused.host_groups)
    monkeypatch.setattr(fused, "host_groups", spy)
    cold = alone(runner, SAMPLING["greedy"])
    engine = Engine(runner)
    engine.ask("before", PROMPT, SAMPLING["greedy"])
    engine.finish()
    engine.ask("main", PROMPT, SAMPLING["greedy"])
    for i in range(4):
        engine.ask(str(i), [*PROMPT, *ENTRIES[i]["ids"][:5]], SAMPLING["sampled"])
    engine.finish()
    assert len([groups for groups in shared if groups is not None]) >= NEW // 2
    assert bits(engine.port.answers["main"]) == cold
    engine.close_rows()


def test_a_prompt_in_chunks_of_17_has_the_same_log_probabilities(runner: ModelRunner) -> None:
    engine = Engine(runner)
    engine.scheduler.admission.config = config(chunked_prefill_size=17).scheduler
    engine.ask("main", PROMPT, SAMPLING["greedy"], prompt_start=0)
    engine.finish()
    assert engine.scheduler.counters.forwards >= len(PROMPT) // 17 + NEW
    engine.close_rows()
    assert bits(engine.port.answers["main"]) == alone(runner, SAMPLING["greedy"], prompt_start=0)


@pytest.mark.parametrize("kind", sorted(SAMPLING))
def test_a_retracted_request_ends_with_the_same_bits(runner: ModelRunner, kind: str) -> None:
    """It comes last, so it has the shortest output when eight others have filled the pool."""
    engine = Engine(runner, conservativeness=0.0)
    longer = SamplingParams(temperature=0.0, max_new_tokens=80, ignore_eos=True)
    for i in range(8):
        engine.ask(str(i), [*ENTRIES[i]["ids"], *ENTRIES[8 + i]["ids"]][:60], longer)
    while engine.scheduler.leases.allocator.free > len(PROMPT) + 6 * NEW:
        engine.scheduler.step(wait=0.0)
    engine.ask("main", PROMPT, SAMPLING[kind])
    engine.finish(watch="main")
    assert engine.most_retractions > 0
    engine.close_rows()
    assert bits(engine.port.answers["main"]) == alone(runner, SAMPLING[kind])


def test_unseeded_requests_are_drawn_apart_and_seeded_ones_alike(runner: ModelRunner) -> None:
    engine = Engine(runner)
    free = SamplingParams(temperature=3.0, max_new_tokens=NEW, ignore_eos=True)  # none is likely
    for i in range(4):
        engine.ask(f"free {i}", PROMPT[:50], free)
        engine.ask(f"seeded {i}", PROMPT[:50], SAMPLING["sampled"])
    engine.finish()
    engine.close_rows()
    answers = {rid: tuple(answer.tokens) for rid, answer in engine.port.answers.items()}
    assert len({answers[f"free {i}"] for i in range(4)}) == 4
    assert len({answers[f"seeded {i}"] for i in range(4)}) == 1


def test_a_model_that_the_kernels_do_not_cover_is_refused(tmp_path: Path) -> None:
    from tiny_models import reference

    reference("qwen3-moe").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(ConfigError, match="do not cover this model"):
        ModelRunner(make_config(checkpoint.path, deterministic=True, context_len=128), checkpoint)
