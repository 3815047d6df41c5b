"""Log-probabilities of a prompt are right wherever its tokens lie in the cache, and requests without a seed never share
one (HAZARDS 9)."""

from __future__ import annotations

import math

import numpy as np
import pytest

import ceiba
from support.tiny_model_dir import write_tiny_model

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    flags = {"load_format": "dummy", "dtype": "float32", "max_total_tokens": 4096, "chunked_prefill_size": 64}
    with ceiba.Engine(str(folder), **flags) as made:
        yield made


def scored(engine, text, start=0, **more):
    """(log-probabilities from ``start`` on, tokens that came from the cache)"""
    sampling = {"temperature": 0, "max_new_tokens": 2}
    answer = engine.generate(text, sampling, return_logprob=True, logprob_start_len=start, **more)
    meta = answer["meta_info"]
    return [value for value, *_ in meta["input_token_logprobs"]], meta["cached_tokens"]


def same(got, wanted):
    assert len(got) == len(wanted)
    assert [v is None for v in got] == [v is None for v in wanted]
    real = [(a, b) for a, b in zip(got, wanted, strict=True) if a is not None]
    assert all(math.isfinite(a) and a <= 1e-5 for a, _ in real)
    assert np.allclose([a for a, _ in real], [b for _, b in real], atol=1e-4)


@pytest.mark.slow
def test_cached_positions_have_the_values_of_a_cold_run(engine):
    count = len(engine.tokenize(TEXT))
    engine.flush_cache()
    wanted, cached = scored(engine, TEXT)
    assert cached == 0
    assert len(wanted) == count
    assert wanted[0] is None  # nothing stands before the first token
    engine.generate(TEXT, {"max_new_tokens": 1})
    assert engine.generate(TEXT, {"max_new_tokens": 1})["meta_info"]["cached_tokens"] > 0
    for start in (0, 1, 7, 63, 64, 65, count // 2, count - 2, count - 1):
        got, cached = scored(engine, TEXT, start)
        assert cached <= start + 1
        same(got, wanted[start:] if start else wanted)


@pytest.mark.slow
def test_partly_cached_and_batched_prompts_too(engine):
    engine.flush_cache()
    longer = TEXT + "A second thought."
    cold, _ = scored(engine, longer)
    engine.flush_cache()
    engine.generate(TEXT[: len(TEXT) // 3], {"max_new_tokens": 1})
    engine.generate(TEXT, {"max_new_tokens": 1})
    same(scored(engine, longer)[0], cold)
    answers = engine.generate(
        [longer, longer[:50], longer],
        {"temperature": 0, "max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )
    for answer, wanted in zip(answers, (cold, cold[:50], cold), strict=True):
        meta = answer["meta_info"]
        same([v for v, *_ in meta["input_token_logprobs"]], wanted)
        for best in meta["input_top_logprobs"]:
            assert best is None or len(best) == 2


@pytest.mark.slow
def test_without_a_seed_requests_differ_in_deterministic_mode_too():
    with ceiba.Engine(max_total_tokens=4096, enable_deterministic_inference=True) as engine:
        # So hot that no continuation is likely: two that are drawn apart are never the same by chance.
        sampling = {"temperature": 3.0, "max_new_tokens": 16, "ignore_eos": True}
        texts = [tuple(a["output_ids"]) for a in engine.generate([TEXT] * 8, sampling)]
        assert len(set(texts)) == 8
        seeded = {**sampling, "sampling_seed": 5}
        again = [tuple(a["output_ids"]) for a in engine.generate([TEXT] * 3, seeded)]
        assert len(set(again)) == 1
