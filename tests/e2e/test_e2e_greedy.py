"""Greedy tokens equal transformers', however the engine came to compute them.

Compared up to the first position whose reference margin is below the limit, where rounding decides.
"""

from __future__ import annotations

import pytest

import ceiba
from greedy_reference import assert_greedy, prompts

SAMPLING = {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True}
SOME = prompts()[::5]


def tokens_of(answers) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def check(chosen, answers) -> None:
    for prompt, tokens in zip(chosen, tokens_of(answers), strict=True):
        assert len(tokens) == 64
        assert_greedy(prompt, tokens)


@pytest.fixture(scope="module")
def engine():
    with ceiba.Engine(dtype="float32") as made:
        yield made


def test_alone(engine):
    engine.flush_cache()
    check(SOME, [engine.generate(input_ids=p["ids"], sampling_params=SAMPLING) for p in SOME])


def test_32_at_a_time(engine):
    engine.flush_cache()
    check(prompts()[:32], engine.generate(input_ids=[p["ids"] for p in prompts()[:32]], sampling_params=SAMPLING))


@pytest.mark.slow
def test_all_alone_and_all_together(engine):
    engine.flush_cache()
    check(prompts(), [engine.generate(input_ids=p["ids"], sampling_params=SAMPLING) for p in prompts()])
    engine.flush_cache()
    check(prompts(), engine.generate(input_ids=[p["ids"] for p in prompts()], sampling_params=SAMPLING))


def test_from_the_cache_and_with_shared_prefixes(engine):
    """Each prompt cut in two: the first part is in the cache, from another request, when the whole comes."""
    engine.flush_cache()
    half = {"max_new_tokens": 1, "temperature": 0}
    for prompt in SOME:
        engine.generate(input_ids=prompt["ids"][: max(1, len(prompt["ids"]) * 2 // 3)], sampling_params=half)
    answers = engine.generate(input_ids=[p["ids"] for p in SOME], sampling_params=SAMPLING)
    check(SOME, answers)
    for prompt, answer in zip(SOME, answers, strict=True):
        assert answer["meta_info"]["cached_tokens"] >= len(prompt["ids"]) * 2 // 3 - 1
    again = engine.generate(input_ids=[p["ids"] for p in SOME], sampling_params=SAMPLING)
    check(SOME, again)
    assert all(a["meta_info"]["cached_tokens"] == len(p["ids"]) - 1 for p, a in zip(SOME, again, strict=True))


def test_four_at_once_of_each(engine):
    """The same prompt several times in one batch decodes over one copy of its KV."""
    engine.flush_cache()
    chosen = [p for p in SOME[:4] for _ in range(4)]
    check(chosen, engine.generate(input_ids=[p["ids"] for p in chosen], sampling_params=SAMPLING))


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_chunked_at_17(overlap):
    with ceiba.Engine(dtype="float32", chunked_prefill_size=17, disable_overlap_schedule=not overlap) as engine:
        check(SOME, engine.generate(input_ids=[p["ids"] for p in SOME], sampling_params=SAMPLING))


def test_retracted_because_the_pool_is_too_small():
    chosen = sorted(prompts(), key=lambda p: len(p["ids"]))[:12]
    need = sum(len(p["ids"]) + 64 for p in chosen)
    largest = max(len(p["ids"]) for p in chosen) + 64
    pool = max(largest + 32, need // 2)
    with ceiba.Engine(dtype="float32", max_total_tokens=pool, schedule_conservativeness=0.05) as engine:
        check(chosen, engine.generate(input_ids=[p["ids"] for p in chosen], sampling_params=SAMPLING))
        assert engine.server_info()["internal_states"][0]["retractions"] > 0


@pytest.mark.slow
def test_without_the_compiled_kernels():
    with ceiba.Engine(dtype="float32", disable_cpu_kernels=True) as engine:
        check(SOME[:4], engine.generate(input_ids=[p["ids"] for p in SOME[:4]], sampling_params=SAMPLING))
