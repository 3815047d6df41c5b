"""/generate, /tokenize and /detokenize over the fake engine."""

from __future__ import annotations

import msgspec
import pytest

from ceiba.server import answers
from support.fake_engine import EOS, logprob_of, text_for
from support.front_world import events

A, B = list(b"first"), list(b"second")


async def generate(world, **fields):
    reply = await world.client.post("/generate", json=fields)
    assert reply.status_code == 200, reply.text
    kind = answers.GenerateAnswer | list[answers.GenerateAnswer]
    return msgspec.json.decode(reply.content, type=kind)


@pytest.mark.parametrize("prompt", [{"text": "first"}, {"input_ids": A}])
async def test_one_prompt_gives_one_object_and_128_tokens_by_default(world, prompt):
    answer = await generate(world, **prompt)
    assert answer.text == text_for(A, None)[:128]
    assert answer.output_ids == [ord(c) for c in answer.text]
    assert answer.meta_info.finish_reason == {"type": "length", "length": 128}
    assert (answer.meta_info.prompt_tokens, answer.meta_info.completion_tokens) == (5, 128)


@pytest.mark.parametrize("prompt", [{"text": ["first", "second"]}, {"input_ids": [A, B]}])
async def test_a_batch_takes_values_per_prompt(world, prompt):
    got = await generate(
        world,
        **prompt,
        sampling_params=[
            {"max_new_tokens": 2, "stop_token_ids": [1]},
            {"max_new_tokens": 3, "n": 2, "sampling_seed": 4},
        ],
        rid=["one", "two"],
        return_logprob=[True, False],
        logprob_start_len=[0, -1],
        top_logprobs_num=[1, 0],
    )
    assert [a.text for a in got] == [text_for(A, None)[:2], text_for(B, 4)[:3], text_for(B, 5)[:3]]
    assert [a.meta_info.id for a in got] == ["one", "two", "two"]
    first = got[0].meta_info
    assert first.input_token_logprobs == [[None, A[0], None], *([logprob_of(t), t, None] for t in A[1:])]
    assert first.output_token_logprobs == [[logprob_of(ord(c)), ord(c), None] for c in got[0].text]
    assert first.output_top_logprobs == [[[logprob_of(ord(c)), ord(c), None]] for c in got[0].text]
    assert first.input_top_logprobs[0] is None
    assert got[1].meta_info.output_token_logprobs == []
    assert {m.rid for m in world.engine.received} == {"one#0", "two#0", "two#1"}


async def test_fixed_ids_and_texts_in_logprobs(world):
    got = await generate(
        world,
        text="first",
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        token_ids_logprob=[65, 66],
        return_text_in_logprobs=True,
    )
    assert got.meta_info.output_token_ids_logprobs == [[[logprob_of(65), 65, "A"], [logprob_of(66), 66, "B"]]]
    assert got.meta_info.input_token_logprobs == []


async def test_a_stream_shows_the_whole_answer_so_far(world):
    reply = await world.client.post(
        "/generate", json={"text": "first", "stream": True, "sampling_params": {"max_new_tokens": 4}}
    )
    data = events(reply.text)
    assert data[-1] == "[DONE]"
    got = [msgspec.json.decode(d, type=answers.GenerateAnswer) for d in data[:-1]]
    text = text_for(A, None)
    assert [a.text for a in got] == [text[:i] for i in (1, 2, 3, 4)]
    assert [len(a.output_ids) for a in got] == [1, 2, 3, 4]
    assert [a.meta_info.finish_reason for a in got[:-1]] == [None] * 3
    assert got[-1].meta_info.finish_reason == {"type": "length", "length": 4}


async def test_streamed_choices_are_numbered(world):
    reply = await world.client.post(
        "/generate", json={"text": ["first", "second"], "stream": True, "sampling_params": {"max_new_tokens": 2}}
    )
    got = [msgspec.json.decode(d, type=answers.GenerateAnswer) for d in events(reply.text)[:-1]]
    for index, prompt in enumerate((A, B)):
        assert [a.text for a in got if a.index == index][-1] == text_for(prompt, None)[:2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [257]}, "input_ids"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "ebnf"),
        ({"text": "a", "sampling_params": {"beam_width": 4}}, "beam_width"),
        ({"text": "a", "sampling_params": {"max_tokens": 4}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "top_logprobs_num": 1}, "top_logprobs_num"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 7}, "logprob_start_len"),
        ({"text": "a", "sampling_params": {"stream_interval": 0}}, "stream_interval"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(world, fields, param):
    reply = await world.client.post("/generate", json=fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_back(world, prefix):
    reply = await world.client.post(f"{prefix}/tokenize", json={"prompt": "héllo"})
    tokens = msgspec.json.decode(reply.content, type=answers.TokenizeAnswer)
    assert tokens.tokens == list("héllo".encode())
    assert (tokens.count, tokens.max_model_len) == (6, 512)
    reply = await world.client.post(f"{prefix}/detokenize", json={"tokens": [*tokens.tokens, EOS]})
    assert msgspec.json.decode(reply.content, type=answers.DetokenizeAnswer).text == "héllo"
    reply = await world.client.post(f"{prefix}/detokenize", json={"tokens": [EOS], "skip_special_tokens": False})
    assert reply.json()["text"] == "<eos>"


async def test_tokenize_many_and_conversations(world):
    reply = await world.client.post("/tokenize", json={"prompt": ["a", "bc"]})
    assert reply.json() == {"tokens": [[97], [98, 99]], "count": [1, 2], "max_model_len": 512}
    reply = await world.client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
    assert bytes(reply.json()["tokens"]) == b"<user>a\n<assistant>"
    reply = await world.client.post("/detokenize", json={"tokens": [[97], [98, 99]]})
    assert reply.json() == {"text": ["a", "bc"]}


@pytest.mark.parametrize("tokens", [[257], [-1], [[1], 2], [2**40]])
async def test_detokenize_refuses_what_is_no_token(world, tokens):
    reply = await world.client.post("/detokenize", json={"tokens": tokens})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tokens"


async def test_long_texts_are_tokenized_off_the_loop_with_the_same_ids(worlds):
    from support.fake_engine import make_config

    world = await worlds(make_config(context=20000))
    text = "abc " * 3000
    got = await generate(world, text=text, sampling_params={"max_new_tokens": 1})
    assert got.meta_info.prompt_tokens == len(text)
    assert world.engine.received[-1].input_ids == b"".join(bytes([b, 0, 0, 0]) for b in text.encode())
