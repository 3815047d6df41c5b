"""The official client against the real server: sync, async, streaming, n, logprobs, stop, seed, errors."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest

from live_server import SAME_BITS, LiveServer

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
LONG = "Write a long story about a lighthouse keeper."


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
async def aclient(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def test_the_capital_of_france(client, model):
    answer = client.chat.completions.create(model=model, messages=CAPITAL, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.role == "assistant"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens > 7


def test_a_stream_is_the_whole_answer_in_pieces(client, model):
    request = {"model": model, "messages": CAPITAL, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[0].choices[0].delta.role == "assistant"
    last = chunks[-1]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])
    assert {c.id for c in chunks} == {chunks[0].id}


async def test_many_async_requests_give_what_each_gives_alone(aclient, server):
    model = (await aclient.models.list()).data[0].id
    questions = [f"What is {a} plus {b}?" for a in range(3) for b in range(4)]

    async def ask(question: str) -> str:
        answer = await aclient.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=16
        )
        return answer.choices[0].message.content

    together = await asyncio.gather(*map(ask, questions))
    alone = [await ask(question) for question in questions]
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    assert same >= len(questions) - 1  # a tie may fall differently in another batch shape


async def test_async_stream_left_early_frees_the_server(aclient, server):
    model = (await aclient.models.list()).data[0].id
    stream = await aclient.completions.create(
        model=model, prompt=LONG, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    for _ in range(100):
        state = (await asyncio.to_thread(server.info))["internal_states"][0]
        if state["running"] == 0:
            break
        await asyncio.sleep(0.05)
    assert state["running"] == 0


def test_three_choices(client, model):
    request = {"model": model, "messages": [{"role": "user", "content": LONG}], "n": 3, "max_tokens": 16, "seed": 7}
    answer = client.chat.completions.create(**request, temperature=1.0)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    texts = [c.message.content for c in answer.choices]
    assert len(set(texts)) > 1
    assert answer.usage.completion_tokens <= 48
    again = client.chat.completions.create(**request, temperature=1.0)
    assert [c.message.content for c in again.choices] == texts
    streamed: dict[int, str] = {}
    ends: list[int] = []
    for chunk in client.chat.completions.create(**request, temperature=1.0, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                ends.append(choice.index)
    assert [streamed[i] for i in range(3)] == texts
    assert sorted(ends) == [0, 1, 2]


def test_logprobs(client, model):
    answer = client.chat.completions.create(
        model=model, messages=CAPITAL, temperature=0, max_tokens=8, logprobs=True, top_logprobs=4
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for position in content:
        assert position.logprob <= 1e-6
        assert len(position.top_logprobs) == 4
        values = [top.logprob for top in position.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert position.logprob == pytest.approx(values[0], abs=1e-5)  # greedy takes the best
        assert sum(map(math.exp, values)) <= 1 + 1e-5
    assert "".join(p.token for p in content).startswith(answer.choices[0].message.content[:5])


def test_completions_with_ids_echo_and_lists(client, model, server):
    ids = server.post("/tokenize", {"prompt": "The capital of France is", "model": model}).json()["tokens"]
    text = client.completions.create(model=model, prompt="The capital of France is", temperature=0, max_tokens=6)
    by_ids = client.completions.create(model=model, prompt=ids, temperature=0, max_tokens=6)
    assert by_ids.choices[0].text == text.choices[0].text
    assert "Paris" in text.choices[0].text
    both = client.completions.create(model=model, prompt=[ids, ids], temperature=0, max_tokens=6, echo=True)
    assert [c.text for c in both.choices] == ["The capital of France is" + text.choices[0].text] * 2
    assert both.usage.prompt_tokens == 2 * len(ids)


def test_stop_strings_are_cut_off(client, model):
    request = {"model": model, "prompt": "A, B, C, D, E, F,", "temperature": 0, "max_tokens": 32}
    free = client.completions.create(**request).choices[0].text
    stop = free[6:9]
    cut = client.completions.create(**request, stop=[stop])
    assert cut.choices[0].text == free[: free.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = [c.choices[0].text for c in client.completions.create(**request, stop=[stop], stream=True) if c.choices]
    assert "".join(pieces) == cut.choices[0].text


def test_the_same_seed_gives_the_same_text_whatever_else_runs():
    request = {"model": "m", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.0}

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as busy:

            async def text(seed: int, **changed: str) -> str:
                return (await busy.completions.create(**(request | changed), seed=seed)).choices[0].text

            alone = {seed: await text(seed) for seed in range(11, 17)}
            assert len(set(alone.values())) == len(alone)
            crowd = [text(seed, prompt=f"{seed} things") for seed in range(6)]
            crowded = await asyncio.gather(*map(text, alone), *crowd)
            assert crowded[: len(alone)] == list(alone.values())

    with LiveServer(*SAME_BITS) as server:
        asyncio.run(ask())


def test_length_is_a_reason_too(client, model):
    answer = client.completions.create(
        model=model, prompt="One two three", max_tokens=5, extra_body={"ignore_eos": True, "min_tokens": 5}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_errors_are_the_clients_own(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=CAPITAL, temperature=-1)
    assert "temperature" in str(caught.value)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, messages=[])
    assert client.completions.create(model=model, prompt="still here", max_tokens=1).usage.completion_tokens == 1
