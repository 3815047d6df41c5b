"""--speculative-algorithm NGRAM on the real server and model: every answer is that of a server without it, and a text
that repeats itself takes fewer steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from live_server import SAME_BITS, LiveServer

FOX = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. "
CODE = 'def add(a, b):\n    """Add two numbers."""\n    result = a + b\n    return result\n\n'
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 3,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"first_name": {"enum": ["Ann", "Bob", "Cleo"]}, "age": {"type": "integer"}},
                "required": ["first_name", "age"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 20}, "content": {"type": "string", "maxLength": 60}},
            "required": ["path", "content"],
            "additionalProperties": False,
        },
    },
}

FLAGS = ("--tool-call-parser", "hermes", *SAME_BITS)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveServer]:
    with LiveServer(*FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def guessing() -> Iterator[LiveServer]:
    with LiveServer(*FLAGS, "--speculative-algorithm", "NGRAM", "--enable-metrics") as running:
        yield running


def chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 80, **fields}


def generate(text: str, sampling: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"text": text, "sampling_params": {"max_new_tokens": 60, **sampling}, **fields}


REPEATS = f"Repeat this text three times: {FOX}"
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": chat(REPEATS, temperature=0),
    "seeded": chat(REPEATS, temperature=0.8, seed=11),
    "several": chat(REPEATS, temperature=0.7, seed=3, n=3),
    "log-probabilities": chat(REPEATS, temperature=0, logprobs=True, top_logprobs=3),
    "raw": generate(FOX * 3 + "The quick", {"temperature": 0, "ignore_eos": True}),
    "raw, log-probabilities": generate(
        FOX * 3 + "The", {"temperature": 0}, return_logprob=True, top_logprobs_num=2, token_ids_logprob=[5, 9]
    ),
    "penalties": generate(CODE * 3, {"temperature": 0, "frequency_penalty": 0.3, "repetition_penalty": 1.1}),
    "bias and minimum": generate(
        CODE * 2, {"temperature": 0.6, "sampling_seed": 5, "logit_bias": {"28": -2.0}, "min_new_tokens": 30}
    ),
    "stop string": generate(FOX * 2, {"temperature": 0, "stop": ["lazy", "liquor"]}),
    "stop string kept": generate(FOX * 2, {"temperature": 0, "stop": [" box with"], "no_stop_trim": True}),
    "stop token": generate(FOX * 2, {"temperature": 0, "stop_token_ids": [30]}),
    "regex": generate("Ten numbers: ", {"temperature": 0.8, "sampling_seed": 1, "regex": "(one|two), (one, ){6}!"}),
    "schema": chat(
        "Describe three people as JSON.",
        temperature=0,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA, "strict": True}},
    ),
    "tool": chat(
        f"Write this to a.txt: {FOX}", temperature=0, max_tokens=150, tools=[TOOL], tool_choice="required"
    ),
}  # fmt: skip


def essence(reply: dict[str, Any]) -> Any:
    """All of an answer but its names and times; without the compiled kernels its log-probabilities have other bits."""
    if "choices" in reply:
        usage = {name: reply["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        choices = json.loads(json.dumps(reply["choices"]))
        for choice in choices:
            if not SAME_BITS:
                choice.pop("logprobs")
            for call in choice["message"].get("tool_calls") or []:
                call.pop("id")
        return choices, usage
    meta = reply["meta_info"]
    wanted = ("logprobs", "finish_reason", "completion_tokens") if SAME_BITS else ("finish_reason", "completion_tokens")
    kept = {name: meta[name] for name in meta if name.endswith(wanted)}
    return reply["text"], reply["output_ids"], kept


def ask(server: LiveServer, asked: tuple[str, dict[str, Any]]) -> Any:
    reply = server.post(*asked)
    assert reply.status_code == 200, reply.text
    return essence(reply.json())


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_is_that_of_a_server_without_guesses(plain: LiveServer, guessing: LiveServer, name: str) -> None:
    assert ask(guessing, ASKED[name]) == ask(plain, ASKED[name])


def test_all_at_once_too(plain: LiveServer, guessing: LiveServer) -> None:
    with ThreadPoolExecutor(len(ASKED)) as pool:
        together = list(pool.map(lambda asked: ask(guessing, asked), ASKED.values()))
    for name, found in zip(ASKED, together, strict=True):
        assert found == ask(plain, ASKED[name]), name


def streamed(server: LiveServer, asked: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    path, body = asked
    events = []
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=120) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line[6:]))
    return events


@pytest.mark.parametrize("name", ["greedy", "schema"])
def test_a_stream_of_bursts_is_the_same_text(plain: LiveServer, guessing: LiveServer, name: str) -> None:
    deltas = [event["choices"][0]["delta"] for event in streamed(guessing, ASKED[name]) if event["choices"]]
    whole = ask(plain, ASKED[name])[0][0]["message"]["content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole


def test_tool_arguments_of_a_stream_of_bursts_are_those_of_the_whole(plain: LiveServer, guessing: LiveServer) -> None:
    """HAZARDS 5: the joined arguments parse and are those without stream and guesses; the first delta has the name."""
    calls: dict[int, dict[str, str]] = {}
    for event in streamed(guessing, ASKED["tool"]):
        for delta in (event["choices"][0]["delta"].get("tool_calls") or []) if event["choices"] else []:
            function = delta["function"]
            if delta["index"] not in calls:
                assert delta["id"]
                calls[delta["index"]] = {"name": function["name"], "arguments": ""}
            calls[delta["index"]]["arguments"] += function.get("arguments") or ""
    whole = ask(plain, ASKED["tool"])[0][0]["message"]["tool_calls"]
    assert list(calls.values()) == [call["function"] for call in whole]
    assert json.loads(calls[0]["arguments"])


def test_a_text_that_repeats_itself_takes_fewer_steps(guessing: LiveServer) -> None:
    def counted() -> dict[str, float]:
        stats = guessing.info()["internal_states"][0]
        return {name: stats[name] for name in ("decode_rows", "generation_tokens", "spec_accepted_tokens")}

    before = counted()
    ask(guessing, generate(FOX * 6 + "The", {"temperature": 0, "ignore_eos": True}))
    gained = {name: value - before[name] for name, value in counted().items()}
    assert gained["generation_tokens"] == 60
    assert gained["generation_tokens"] / gained["decode_rows"] > 1.5, gained
    stats = guessing.info()["internal_states"][0]
    assert stats["spec_accept_length"] > 1
    assert 0 < stats["spec_accept_rate"] <= 1
    metrics = guessing.get("/metrics").text
    for name in ("spec_accept_length", "spec_accept_rate", "spec_num_draft_tokens", "spec_verify_calls_total"):
        assert f"sglang:{name}{{" in metrics
