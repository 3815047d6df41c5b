"""Scores, decisions and the parsers' own routes."""

from __future__ import annotations

import math

import openai
import pytest

from ceiba.server.front import Front
from support.fake_engine import ByteTokenizer, FakeEngine, PlainTemplate, ThinkingTemplate, logprob_of, make_config
from support.http_server import serving

YES, NO = ord("y"), ord("n")
QUESTIONS = [
    {"type": "predicate", "name": "angry", "instructions": "Is the customer angry?"},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Which team?"}],
        "choices": [{"value": "billing", "description": "money"}, {"value": True}, {"value": "true"}],
    },
    {"type": "score", "name": "how", "instructions": "How bad?", "levels": [{"label": "low"}, {"label": "high"}]},
]


def softmax(values):
    weights = [math.exp(v) for v in values]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("item_first", [False, True])
async def test_scores_are_the_probabilities_of_labels(world, item_first):
    body = {"query": "Is it? ", "items": ["a", "bc"], "label_token_ids": [YES, NO], "item_first": item_first}
    reply = await world.client.post("/v1/score", json=body)
    assert reply.status_code == 200, reply.text
    expected = [math.exp(logprob_of(YES)), math.exp(logprob_of(NO))]
    assert reply.json()["scores"] == [pytest.approx(expected)] * 2
    assert reply.json()["object"] == "scoring"
    assert reply.json()["usage"]["prompt_tokens"] == 2 * len("Is it? ") + 3
    prompts = [bytes(m.input_ids[::4]) for m in world.engine.received]
    assert prompts == ([b"aIs it? ", b"bcIs it? "] if item_first else [b"Is it? a", b"Is it? bc"])
    soft = await world.client.post("/v1/score", json=body | {"apply_softmax": True})
    assert soft.json()["scores"] == [pytest.approx(softmax([logprob_of(YES), logprob_of(NO)]))] * 2


async def test_scores_of_ids(world):
    body = {"query": [1, 2], "items": [[3], [4, 5]], "label_token_ids": [YES]}
    assert (await world.client.post("/v1/score", json=body)).status_code == 200
    assert [bytes(m.input_ids[::4]) for m in world.engine.received] == [b"\1\2\3", b"\1\2\4\5"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": []}, "items"),
        ({"items": ["x"] * 4097}, "items"),
        ({"items": [[1]]}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [999]}, "label_token_ids"),
        ({"label_token_ids": [1] * 1025}, "token_ids_logprob"),
        ({"query": [999], "items": [[1]]}, "items"),
    ],
)
async def test_scores_that_cannot_be(world, fields, param):
    body = {"query": "q", "items": ["a"], "label_token_ids": [YES], **fields}
    reply = await world.client.post("/v1/score", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.fixture(scope="module")
def client():
    def make():
        engine = FakeEngine()
        return Front(make_config(context=4096), ByteTokenizer(), PlainTemplate(), engine), engine

    with serving(make) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_decisions_through_the_sdk(client):
    decision = client.decisions.create(model="m", input="You charged me twice!", questions=QUESTIONS)
    a, b, c = (logprob_of(ord(x)) for x in "ABC")
    predicate, choice, score = decision.answers
    assert (predicate.type, predicate.name) == ("predicate", "angry")
    assert predicate.probability == pytest.approx(softmax([a, b])[0])
    expected = softmax([a, b, c])
    assert [p.probability for p in choice.probabilities] == pytest.approx(expected)
    assert [p.value for p in choice.probabilities] == ["billing", True, "true"]
    assert choice.choice == ["billing", True, "true"][expected.index(max(expected))]
    assert choice.confidence == pytest.approx(max(expected))
    assert score.score == pytest.approx(softmax([a, b])[1])
    assert [(p.value, p.label) for p in score.probabilities] == [(0, "low"), (1, "high")]
    assert decision.usage.output_tokens == 0
    assert decision.usage.input_tokens_details.cached_tokens > 0


async def test_a_decision_shows_what_was_read_and_never_thinks(worlds):
    world = await worlds(make_config(context=2048), template=ThinkingTemplate(opened=True))
    body = {"input": "x", "questions": QUESTIONS[:1], "return_prompt_token_ids": True}
    reply = await world.client.post("/v1/decisions", json=body)
    text = bytes(reply.json()["answers"][0]["prompt_token_ids"]).decode()
    assert text.startswith("<user>x\n<user>Is the customer angry?\n\nOptions:\nA. Yes: it is true\nB. No")
    assert text.endswith("<assistant><think>\n\n</think>\n\n")
    assert world.front.template.calls[-1]["enable_thinking"] is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": QUESTIONS[:1] * 401}, "questions"),
        ({"questions": [{"type": "guess", "instructions": "x"}]}, "questions[0].type"),
        ({"questions": [{"type": "choice", "instructions": "x", "choices": [{"value": "a"}]}]}, "questions[0].choices"),
        ({"questions": [{"type": "score", "instructions": "x"}]}, "questions[0].levels"),
        (
            {"questions": [{"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions[0].choices",
        ),
        (
            {"questions": [{"type": "score", "instructions": "x", "levels": [{"label": str(i)} for i in range(100)]}]},
            "questions",
        ),
        ({"input": [{"type": "strange"}]}, "input[0].type"),
        ({"input": []}, None),
    ],
)
async def test_decisions_that_cannot_be(world, fields, param):
    reply = await world.client.post("/v1/decisions", json={"input": "x", "questions": QUESTIONS[:1], **fields})
    if param is None:
        assert reply.status_code == 200
        return
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


async def test_calls_of_a_text(world):
    text = 'So: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {"text": text, "tools": [tool], "tool_call_parser": "qwen25"}
    reply = await world.client.post("/parse_function_call", json=body)
    assert reply.json() == {
        "normal_text": "So:",
        "calls": [{"tool_index": 0, "name": "f", "parameters": '{"a": 1}'}],
    }
    reply = await world.client.post("/parse_function_call", json=body | {"tool_call_parser": "nope"})
    assert reply.status_code == 400
    assert (await world.client.post("/parse_function_call", json={"text": text})).status_code == 400


async def test_reasoning_of_a_text(world):
    body = {"text": "<think>hm</think>yes", "reasoning_parser": "deepseek-r1"}
    reply = await world.client.post("/separate_reasoning", json=body)
    assert reply.json() == {"reasoning_text": "hm", "text": "yes"}
    assert (await world.client.post("/separate_reasoning", json={"text": "x"})).status_code == 400
