"""Whatever arrives, however it is scheduled: each request gets the tokens it gets alone, and no KV slot is lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ceiba.core.messages import Abort
from ceiba.core.sampling import LogprobSpec, SamplingParams
from support.scheduler_world import EOS, VOCAB, make_world, oracle


@dataclass
class Load:
    seed: int
    requests: int
    abort_share: float


CONFIGS = st.fixed_dictionaries(
    {
        "pool": st.sampled_from([64, 100, 160, 600]),
        "page": st.sampled_from([1, 1, 4, 16]),
        "rows": st.sampled_from([1, 2, 5, 12]),
        "eager": st.booleans(),
        "overlap": st.booleans(),
        "chunked_prefill_size": st.sampled_from([-1, 3, 17, 64]),
        "enable_mixed_chunk": st.booleans(),
        "disable_radix_cache": st.sampled_from([False, False, True]),
        "policy": st.sampled_from(
            ["fcfs", "lof", "random", "routing-key", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first"]
        ),
        "radix_eviction_policy": st.sampled_from(["lru", "lfu", "slru", "priority", "tlru"]),
        "prefill_decode_interval": st.sampled_from([0, 0, 1, 5]),
        "fair_share": st.sampled_from(["off", "routing-key"]),
        "conservativeness": st.sampled_from([0.0, 0.1, 1.0]),
        "prefill_max_requests": st.sampled_from([None, 1, 3]),
        "max_prefill_tokens": st.sampled_from([32, 200]),
        "in_batch_check_threshold": st.sampled_from([32, 4, -1]),
        "in_batch_deprioritize_threshold": st.sampled_from([32, 4]),
    }
)
LOADS = st.builds(Load, st.integers(0, 2**32), st.integers(1, 14), st.sampled_from([0.0, 0.3]))


def run(config, load):
    rng = np.random.default_rng(load.seed)
    world = make_world(context=60, **config)
    shared = [rng.integers(0, VOCAB, 40) for _ in range(2)]
    aborted, starts = set(), {}
    for i in range(load.requests):
        head = shared[int(rng.integers(2))][: int(rng.integers(0, 41))]
        tokens = np.concatenate([head, rng.integers(0, VOCAB, int(rng.integers(1, 20)))])
        if rng.random() < 0.2 and i:
            tokens = np.array(world.asked[str(i - 1)][0])  # a twin
        fields = {"max_new_tokens": int(rng.integers(1, 50))}
        if rng.random() < 0.3:
            fields["min_new_tokens"] = int(rng.integers(0, fields["max_new_tokens"] + 1))
        if rng.random() < 0.3:
            fields["stop_token_ids"] = tuple(rng.integers(0, VOCAB, 3).tolist())
        spec = None
        if rng.random() < 0.3:
            spec = LogprobSpec(output=True, top=2, prompt_start=int(rng.integers(-1, len(tokens))))
        starts[str(i)] = -1 if spec is None else spec.prompt_start
        world.ask(str(i), tokens, logprob=spec, stream=bool(rng.random() < 0.5), **fields)
        world.step(int(rng.integers(0, 4)))
        if rng.random() < load.abort_share:
            victim = str(int(rng.integers(i + 1)))
            if victim in world.scheduler._requests or any(getattr(m, "rid", "") == victim for m in world.port.inbox):
                aborted.add(victim)
                world.port.push(Abort(rids=[victim]))
    world.finish()
    for rid, (prompt, sampling) in world.asked.items():
        answer = world.answer(rid)
        if rid in aborted and answer.finish.kind == "abort":
            whole, _ = oracle(prompt, sampling, limit=world.scheduler.intake.max_len)
            assert answer.tokens == whole[: len(answer.tokens)]
        else:
            world.check(rid)
        check_logprobs(prompt, starts[rid], answer)
    return world


def alone(prompt, spec, sampling):
    world = make_world(context=60, overlap=False, disable_radix_cache=True, chunked_prefill_size=-1)
    fields = {name: getattr(sampling, name) for name in ("max_new_tokens", "min_new_tokens", "stop_token_ids")}
    world.ask("a", prompt, logprob=spec, **fields)
    world.finish()
    return world.answer("a")


def joined(messages, field="values", dtype=np.float32):
    return np.concatenate([np.empty(0, dtype), *(np.frombuffer(getattr(m, field), dtype) for m in messages)])


def check_logprobs(prompt, start, answer):
    """One log-probability per token, each belonging to its token: the first alternative names it."""
    if answer.logprobs:
        assert len(joined(answer.logprobs)) == len(answer.tokens)
        assert joined(answer.logprobs, "top_ids", np.int32)[::2].tolist() == answer.tokens
    if answer.prompt_logprobs:
        names = joined(answer.prompt_logprobs, "top_ids", np.int32)[::2].tolist()
        assert names == prompt[start : start + len(names)]
        assert start + len(names) == len(prompt) or answer.finish.kind == "abort"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS, LOADS)
def test_everyone_gets_the_tokens_of_an_isolated_run(config, load):
    run(config, load)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=700, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS, LOADS)
def test_everyone_gets_the_tokens_of_an_isolated_run_at_length(config, load):
    run(config, load)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([3, 17, -1]))
def test_logprobs_equal_those_of_an_isolated_run_under_retraction(seed, overlap, chunk):
    rng = np.random.default_rng(seed)
    world = make_world(context=60, pool=70, conservativeness=0.0, overlap=overlap, chunked_prefill_size=chunk, rows=6)
    specs = {}
    for i in range(6):
        prompt = rng.integers(0, VOCAB, int(rng.integers(5, 25)))
        specs[str(i)] = LogprobSpec(output=True, top=2, prompt_start=int(rng.integers(0, len(prompt))))
        world.ask(str(i), prompt, logprob=specs[str(i)], max_new_tokens=30)
    world.finish()
    for rid, (prompt, sampling) in world.asked.items():
        world.check(rid)
        expected, got = alone(prompt, specs[rid], sampling), world.answer(rid)
        assert np.array_equal(joined(expected.logprobs), joined(got.logprobs))
        assert np.array_equal(joined(expected.prompt_logprobs), joined(got.prompt_logprobs), equal_nan=True)


def test_the_small_pools_above_really_retract():
    """Guards the property tests: without retractions they would show less than they claim."""
    world = make_world(context=60, pool=70, conservativeness=0.0, rows=6)
    for i in range(6):
        world.ask(str(i), np.arange(10) + i, max_new_tokens=40, ignore_eos=True)
    world.finish()
    assert world.scheduler.counters.retractions > 0
    assert world.scheduler.counters.dropped_tokens == 0  # what is in flight is applied before anyone gives way
    for i in range(6):
        world.check(str(i))


def test_the_oracle_agrees_with_itself_about_ends():
    tokens, kind = oracle([1, 2, 3], SamplingParams(max_new_tokens=500), limit=10**6)
    assert kind == "stop"
    assert tokens[-1] in EOS
    assert not set(tokens[:-1]) & set(EOS)
