"""HAZARDS 2, 4, 5 and 11 at the routes: one finish reason, input counters at both ends, calls whole however they are
cut, and no route on which a grammar would come before the thinking's end."""

from __future__ import annotations

import json

import pytest

from support.fake_engine import ThinkingTemplate, make_config
from support.front_world import events, make_world

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
VALUE = {"code": 'if a < b:\n  print("}</tool_call>\\n")', "list": [1, {"x": None}], "ü": "\u2028"}
CALL = f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': VALUE}, ensure_ascii=True)}\n</tool_call>"
SAID = f"<think>\nI could <tool_call> here\n</think>\n\nWell.\n{CALL}\n{CALL}"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def world():
    config = make_config(context=4096, reasoning_parser="auto")
    async with make_world(config, template=ThinkingTemplate()) as made:
        yield made
        await made.idle()
        good = await made.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert good.status_code == 200


@pytest.mark.parametrize("burst", [1, 2, 3, 5, 8, 13, 400])
@pytest.mark.parametrize("n", [1, 3])
async def test_streamed_calls_are_whole_and_each_choice_ends_once(world, burst, n):
    world.engine.speak, world.engine.burst = SAID, burst
    body = {"messages": MESSAGES, "tools": [TOOL], "n": n, "stream": True}
    reply = await world.client.post("/v1/chat/completions", json=body)
    finishes: dict[int, list[str]] = {}
    calls: dict[tuple[int, int], list] = {}
    for event in events(reply.text)[:-1]:
        for choice in json.loads(event)["choices"]:
            if choice["finish_reason"] is not None:
                finishes.setdefault(choice["index"], []).append(choice["finish_reason"])
            for part in choice["delta"].get("tool_calls", []):
                assert choice["index"] not in finishes, "a call after its choice's end"
                key = (choice["index"], part["index"])
                if key not in calls:
                    assert part["id"]
                    assert part["function"]["name"] == "f"
                    calls[key] = [part["id"], ""]
                else:
                    assert "id" not in part
                calls[key][1] += part["function"]["arguments"]
    assert finishes == {i: ["tool_calls"] for i in range(n)}
    assert sorted(calls) == [(i, k) for i in range(n) for k in range(2)]
    assert [json.loads(arguments) for _, arguments in calls.values()] == [VALUE] * 2 * n
    assert len({call_id for call_id, _ in calls.values()}) == 2 * n


async def test_anthropic_counts_the_input_at_both_ends(world):
    world.engine.speak = SAID
    body = {"model": "m", "max_tokens": 2000, "messages": MESSAGES, "stream": True}
    for _ in range(2):
        text = (await world.client.post("/v1/messages", json=body)).text
    data = [json.loads(block.partition("data: ")[2]) for block in text.strip().split("\n\n")]
    start, delta = data[0]["message"]["usage"], next(d["usage"] for d in data if d["type"] == "message_delta")
    for usage in (start, delta):
        assert usage["input_tokens"] == 1
        assert usage["cache_read_input_tokens"] > 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/responses", {"input": "hello", "text": {"format": {"type": "json_object"}}}),
        (
            "/v1/messages",
            {
                "model": "m",
                "max_tokens": 50,
                "messages": MESSAGES,
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
        ),
        ("/api/chat", {"messages": MESSAGES, "format": "json", "stream": False}),
    ],
)
async def test_on_every_route_a_grammar_waits_for_the_thinkings_end(world, path, body):
    world.engine.speak = "hm</think>{}"
    assert (await world.client.post(path, json=body)).status_code == 200
    sent = world.engine.received[-1]
    assert sent.sampling.constrained
    assert bytes(sent.sampling.think_end_ids) == b"</think>"
    assert bytes(sent.input_ids[::4]).endswith(b"<think>\n")
