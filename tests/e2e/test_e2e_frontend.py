"""The front-end language on the real model: over HTTP and in process, with transformers as the judge of select."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

import ceiba as sgl
from ceiba.checkpoint import catalogue
from live_server import LiveServer
from reference import smollm2_hf

PREFIX = "The employee handbook says that holidays are computed by the month of entry and expenses are paid at the end."
PROMPT, CHOICES = "The capital of France is", [" Berlin", " Paris", " a big red apple"]


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine(max_total_tokens=8192) as made:
        yield made


@pytest.fixture(params=["http", "engine"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "engine":
        return request.getfixturevalue("engine")
    server: LiveServer = request.getfixturevalue("server")
    return sgl.RuntimeEndpoint(server.url)


@sgl.function
def branches(s: Any, topic: str) -> None:
    s += sgl.system(PREFIX)
    s += sgl.user(f"{topic}?")
    s["shared"] = len(s.text())
    with s.fork(3) as forks:
        forks += lambda i: sgl.assistant(f"Answer {i}:" + sgl.gen("answer", max_tokens=3))
    s["meta"] = [fork.get_meta_info("answer") for fork in forks]


def test_branches_find_their_shared_prefix_in_the_tree(backend: Any) -> None:
    sgl.flush_cache(backend)
    state = branches.run(topic="Who pays", backend=backend, temperature=0)
    for meta in state["meta"]:
        # All but the seam into the assistant's turn and "Answer i:" was computed before the branches left.
        assert meta["prompt_tokens"] - meta["cached_tokens"] <= 12, meta
        assert meta["cached_tokens"] >= 30
    assert len(state["answer"]) == 3


def test_later_turns_hit_everything_that_was_said(backend: Any) -> None:
    @sgl.function
    def talk(s: Any) -> None:
        s += sgl.user("Name a colour.")
        s += sgl.assistant(sgl.gen("first", max_tokens=6))
        s += sgl.user("Another one.")
        s += sgl.assistant(sgl.gen("second", max_tokens=2))

    state = talk.run(backend=backend, temperature=0)
    first, second = state.get_meta_info("first"), state.get_meta_info("second")
    assert second["cached_tokens"] >= first["prompt_tokens"]


def test_the_text_is_what_the_chat_route_renders(server: LiveServer) -> None:
    @sgl.function
    def ask(s: Any) -> None:
        s += sgl.system("Be brief.")
        s += sgl.user("What is the capital of France?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=8))

    state = ask.run(backend=server.url, temperature=0)
    with sgl.SyncClient(server.url) as c:
        messages = state.messages()[:-1]
        assert state["answer"] == c.chat(messages, max_tokens=8, temperature=0)
        rendered = c.call("POST", "/v1/tokenize", {"messages": messages, "return_text": True})["text"]
    assert state.text() == rendered + state["answer"]


@pytest.mark.slow
def test_select_scores_as_transformers_does(backend: Any) -> None:
    import torch

    path: Path = catalogue.fetch(catalogue.DEFAULT, progress=False)
    tokenizer, model = smollm2_hf.load_tokenizer(path), smollm2_hf.load_model(path)
    rows = [tokenizer.encode(PROMPT + choice).ids for choice in CHOICES]
    alone = tokenizer.encode(PROMPT).ids
    common = sum(1 for _ in takewhile(lambda c: len(set(c)) == 1, zip(alone, *rows, strict=False)))
    expected = []
    for row in rows:
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([row])).logits[0].double(), -1)
        values = [float(logprobs[i - 1, row[i]]) for i in range(common, len(row))]
        expected.append(math.fsum(values) / len(values))

    @sgl.function
    def pick(s: Any) -> None:
        s += PROMPT + sgl.select("city", choices=CHOICES)

    state = pick.run(backend=backend)
    found = state.get_meta_info("city")["normalized_prompt_logprobs"]
    assert found == pytest.approx(expected, abs=0.15)  # the engine computes in bfloat16
    assert state["city"] == CHOICES[max(range(len(CHOICES)), key=expected.__getitem__)] == " Paris"


def test_a_batch_keeps_its_order(backend: Any) -> None:
    @sgl.function
    def number(s: Any, i: int) -> None:
        s += f"The number {i}"
        s += sgl.gen("rest", max_tokens=1 + i % 3)

    states = number.run_batch([{"i": i} for i in range(6)], backend=backend, temperature=0)
    assert [state.error() for state in states] == [None] * 6
    assert [state.text().startswith(f"The number {i}") for i, state in enumerate(states)] == [True] * 6
    assert [state.get_meta_info("rest")["completion_tokens"] for state in states] == [1, 2, 3, 1, 2, 3]


def test_constraints_hold(backend: Any) -> None:
    @sgl.function
    def person(s: Any) -> None:
        s += "A person. Age: " + sgl.gen("age", dtype=int, max_tokens=8)
        s += ". Card: " + sgl.gen("card", regex="[A-F]{2}-[0-9]{2}")
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        s += '. A record like {"ok": true}: ' + sgl.gen("record", json_schema=schema, max_tokens=40)

    state = person.run(backend=backend, temperature=0)
    assert isinstance(state.parsed("age"), int)
    assert len(state["card"]) == 5
    assert state.parsed("record").keys() == {"ok"}
