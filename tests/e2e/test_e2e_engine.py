"""ceiba.Engine: batches, streams, foreign loops, threads, leaving early, errors, and nothing left at exit."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import ceiba
from ceiba.core.errors import BadRequest, ConfigError, Unavailable
from live_server import alive

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def engine():
    with ceiba.Engine(max_total_tokens=20000) as made:
        yield made


def test_one_prompt_one_answer(engine):
    answer = engine.generate(PROMPT, GREEDY)
    assert answer["text"].startswith(" Paris")
    assert len(answer["output_ids"]) == 8
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 8)
    assert meta["e2e_latency"] > 0
    assert meta["id"]
    assert engine.detokenize(answer["output_ids"]) == answer["text"]
    assert engine.generate(input_ids=engine.tokenize(PROMPT), sampling_params=GREEDY)["text"] == answer["text"]


def test_lists_give_lists_and_each_prompt_may_have_its_own_sampling(engine):
    answers = engine.generate([PROMPT, PROMPT], [GREEDY, {**GREEDY, "max_new_tokens": 3}])
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [8, 3]
    assert isinstance(engine.generate([PROMPT], GREEDY), list)
    assert len(engine.generate(PROMPT, {**GREEDY, "n": 2})) == 2


def test_a_stream_grows_to_the_answer(engine):
    parts = list(engine.generate(PROMPT, GREEDY, stream=True))
    texts = [part["text"] for part in parts]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    assert texts[-1] == engine.generate(PROMPT, GREEDY)["text"]
    assert len(parts) > 1
    assert [p["meta_info"]["finish_reason"] is None for p in parts] == [True] * (len(parts) - 1) + [False]


def test_logprobs(engine):
    answer = engine.generate(PROMPT, GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert len(meta["input_token_logprobs"]) == 5
    assert meta["input_token_logprobs"][0][0] is None
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])


async def test_from_a_running_loop(engine):
    answers = await asyncio.gather(*(engine.async_generate(PROMPT, GREEDY) for _ in range(4)))
    assert len({answer["text"] for answer in answers}) == 1
    stream = await engine.async_generate(PROMPT, GREEDY, stream=True)
    texts = [part["text"] async for part in stream]
    assert texts[-1] == answers[0]["text"]
    assert engine.generate(PROMPT, GREEDY)["text"] == answers[0]["text"]  # a notebook cell calls it plainly


def test_from_several_threads(engine):
    with ThreadPoolExecutor(4) as pool:
        texts = set(pool.map(lambda _: engine.generate(PROMPT, GREEDY)["text"], range(8)))
    assert len(texts) == 1


def running(engine) -> float:
    return engine.server_info()["internal_states"][0]["running"]


def test_leaving_a_stream_early_ends_the_request(engine):
    stream = engine.generate(PROMPT, {"temperature": 0, "max_new_tokens": 5000, "ignore_eos": True}, stream=True)
    next(stream)
    assert running(engine) == 1
    stream.close()
    for _ in range(100):
        if running(engine) == 0:
            break
    assert running(engine) == 0


def test_flush_and_info(engine):
    engine.generate(PROMPT, GREEDY)
    assert engine.generate(PROMPT, GREEDY)["meta_info"]["cached_tokens"] == 4
    engine.flush_cache()
    assert engine.generate(PROMPT, GREEDY)["meta_info"]["cached_tokens"] == 0
    info = engine.server_info()
    assert info["internal_states"][0]["max_total_num_tokens"] == 20000


def test_errors_name_the_field(engine):
    with pytest.raises(BadRequest, match="temperature"):
        engine.generate(PROMPT, {"temperature": -1})
    with pytest.raises(BadRequest, match="max_tokens"):
        engine.generate(PROMPT, {"max_tokens": 4})
    with pytest.raises(BadRequest, match="text"):
        engine.generate()
    with pytest.raises(BadRequest, match="nonsense"):
        engine.generate(PROMPT, GREEDY, nonsense=1)
    with pytest.raises(BadRequest, match="embedding"):
        engine.encode("x")
    with pytest.raises(BadRequest, match="logit_bias"):
        engine.generate(PROMPT, {**GREEDY, "logit_bias": {10**9: 1.0}})
    with pytest.raises(ConfigError):
        ceiba.Engine(no_such_flag=1)
    with pytest.raises(ConfigError):
        ceiba.Engine("/no/such/model.gguf")
    assert engine.generate(PROMPT, GREEDY)["text"]


def test_after_shutdown_it_says_so_and_its_processes_are_gone():
    engine = ceiba.Engine(max_total_tokens=4096, detokenizer="process")
    processes = [psutil.Process(pid) for pid in engine._graph.pids.values()]
    assert len(processes) == 2
    engine.shutdown()
    engine.shutdown()
    assert not any(map(alive, processes))
    with pytest.raises(Unavailable, match="shut down"):
        engine.generate(PROMPT, GREEDY)


def test_a_plain_script_without_a_main_guard_leaves_nothing_behind():
    script = """
        import ceiba, psutil
        engine = ceiba.Engine(max_total_tokens=4096, detokenizer="process")
        print(engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 2})["text"])
        print(*[p.pid for p in psutil.Process().children(recursive=True)])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=200, check=True
    )
    text, pids = done.stdout.splitlines()
    assert text.startswith(" Paris")
    assert len(pids.split()) >= 2
    assert not any(psutil.pid_exists(int(pid)) and alive(psutil.Process(int(pid))) for pid in pids.split())
    assert done.stderr == ""


def test_a_killed_scheduler_fails_its_requests_at_once():
    with ceiba.Engine(max_total_tokens=4096) as engine:
        stream = engine.generate(PROMPT, {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}, stream=True)
        next(stream)
        psutil.Process(engine._graph.pids["scheduler"]).kill()
        with pytest.raises(Unavailable, match="scheduler process died"):
            list(stream)
        with pytest.raises(Unavailable):
            engine.generate(PROMPT, GREEDY)
