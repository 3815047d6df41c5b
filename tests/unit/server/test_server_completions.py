"""/v1/completions over the fake engine: forms of prompt, echo, best_of, older log-probabilities."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from ceiba.server import answers
from support.fake_engine import logprob_of, text_for
from support.front_world import events

URL = "/v1/completions"


async def complete(world, **fields):
    reply = await world.client.post(URL, json={"model": "m", **fields})
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=answers.Completion)


async def stream(world, **fields):
    reply = await world.client.post(URL, json={"model": "m", "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    data = events(reply.text)
    assert data[-1] == "[DONE]"
    return [msgspec.json.decode(d, type=answers.Completion) for d in data[:-1]]


A, B = list(b"first"), list(b"second")


@pytest.mark.parametrize("prompt", ["first", A, ["first"], [A]])
async def test_one_prompt_in_four_forms(world, prompt):
    answer = await complete(world, prompt=prompt)
    assert [c.text for c in answer.choices] == [text_for(A, None)[:16]]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 5


@pytest.mark.parametrize("prompt", [["first", "second"], [A, B]])
async def test_many_prompts_number_their_choices_prompt_by_prompt(world, prompt):
    answer = await complete(world, prompt=prompt, n=2, seed=3, max_tokens=6)
    expected = [text_for(p, s)[:6] for p in (A, B) for s in (3, 4)]
    assert [c.text for c in answer.choices] == expected
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 11
    assert answer.usage.completion_tokens == 24


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["first", "second"], "n": 2, "seed": 1},
        {"prompt": "first", "echo": True},
        {"prompt": "first", "echo": True, "logprobs": 2},
        {"prompt": A, "logprobs": 0},
        {"prompt": "first", "stop": ["d", "q"]},
    ],
)
async def test_a_stream_adds_up_to_the_whole_answer(world, fields):
    whole = await complete(world, max_tokens=9, **fields)
    chunks = await stream(world, max_tokens=9, **fields)
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        if choice.logprobs is None:
            assert all(c.logprobs is None for c in mine)
            continue
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [x for c in mine if c.logprobs for x in getattr(c.logprobs, name)]
            assert joined == getattr(choice.logprobs, name)


async def test_legacy_logprobs(world):
    answer = await complete(world, prompt="ab", max_tokens=2, logprobs=1, echo=True)
    (choice,) = answer.choices
    said = text_for(list(b"ab"), None)[:2]
    tokens = list("ab" + said)
    assert choice.text == "ab" + said
    assert choice.logprobs.tokens == tokens
    assert choice.logprobs.token_logprobs == [None, *(logprob_of(ord(t)) for t in tokens[1:])]
    assert choice.logprobs.top_logprobs == [None, *({t: logprob_of(ord(t))} for t in tokens[1:])]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]


async def test_text_offsets_of_characters_split_over_tokens(world):
    answer = await complete(world, prompt="aé€b", max_tokens=1, logprobs=0, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs.text_offset == [0, 1, 1, 2, 2, 2, 3, 4]
    assert logprobs.tokens[1:3] == ["bytes:\\xc3", "bytes:\\xa9"]


async def test_scoring_a_prompt_without_generating(world):
    answer = await complete(world, prompt="abc", max_tokens=0, logprobs=0, echo=True)
    (choice,) = answer.choices
    assert choice.text == "abc"
    assert choice.logprobs.tokens == list("abc")
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 0


async def test_best_of_returns_the_likeliest(world):
    seeds = range(4)
    texts = [text_for(A, s)[:5] for s in seeds]
    score = [float(np.mean([logprob_of(ord(c)) for c in t])) for t in texts]
    ranked = [texts[i] for i in sorted(seeds, key=lambda i: -score[i])]
    answer = await complete(world, prompt=A, max_tokens=5, best_of=4, n=2, seed=0)
    assert [c.text for c in answer.choices] == ranked[:2]
    assert [c.index for c in answer.choices] == [0, 1]
    assert all(c.logprobs is None for c in answer.choices)
    assert answer.usage.completion_tokens == 20


async def test_sampling_fields_reach_the_engine(world):
    await complete(
        world,
        prompt="x",
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        frequency_penalty=0.2,
        presence_penalty=-0.2,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "7": 3.5},
        stop_token_ids=[9],
        stop_regex="z+",
        ignore_eos=True,
        no_stop_trim=True,
        skip_special_tokens=False,
        seed=-1,
    )
    s = world.engine.received[-1].sampling
    assert (s.max_new_tokens, s.min_new_tokens, s.temperature, s.top_p, s.top_k, s.min_p) == (7, 2, 0.5, 0.9, 40, 0.1)
    assert (s.frequency_penalty, s.presence_penalty, s.repetition_penalty) == (0.2, -0.2, 1.1)
    assert s.logit_bias == {5: -100.0, 7: 3.5}
    assert (s.stop_token_ids, s.stop_regex) == ((9,), ("z+",))
    assert (s.ignore_eos, s.no_stop_trim, s.skip_special_tokens) == (True, True, False)
    assert s.seed == 2**63 - 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt[1]"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(world, fields, param):
    reply = await world.client.post(URL, json={"model": "m", **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
