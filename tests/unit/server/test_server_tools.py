"""Tools and thinking in chat completions: what is asked of the model, and what a client hears, streamed or not."""

from __future__ import annotations

import asyncio
import json

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ceiba.config.records import GrammarConfig
from ceiba.core.errors import ConfigError
from ceiba.server import answers
from support.fake_engine import ThinkingTemplate, make_config
from support.front_world import events, make_world

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TWO = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "hello"}]


def body(**fields):
    return {"messages": MESSAGES, "tools": [WEATHER, TIME], **fields}


@pytest.fixture
async def thinking(worlds):
    """A world whose model thinks and calls tools."""
    return await worlds(make_config(context=4096, reasoning_parser="auto"), template=ThinkingTemplate())


async def whole(world, text, **fields):
    world.engine.speak = text
    reply = await world.client.post("/v1/chat/completions", json=body(**fields))
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=answers.ChatCompletion)


async def streamed(world, text, **fields):
    world.engine.speak = text
    reply = await world.client.post("/v1/chat/completions", json=body(stream=True, **fields))
    assert reply.status_code == 200, reply.text
    got = events(reply.text)
    assert got[-1] == "[DONE]"
    return [msgspec.json.decode(e, type=answers.ChatCompletionChunk) for e in got[:-1]]


def joined(chunks):
    """(content, reasoning, calls, finish reasons) as a strict client puts deltas together."""
    content, reasoning, calls, reasons = "", "", {}, []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += choice.delta.reasoning_content or ""
            for part in choice.delta.tool_calls or ():
                if part.index not in calls:
                    assert part.id
                    assert part.type == "function"
                    assert part.function.name
                    calls[part.index] = [part.id, part.function.name, ""]
                else:
                    assert part.id is None
                    assert part.function.name is None
                calls[part.index][2] += part.function.arguments
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    return content, reasoning, [calls[i] for i in sorted(calls)], reasons


async def test_calls_are_told_apart_and_end_with_tool_calls(thinking):
    answer = await whole(thinking, TWO)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls
    assert [c.function.name for c in calls] == ["weather", "time"]
    assert [json.loads(c.function.arguments) for c in calls] == [{"city": "Zürich"}, {}]
    assert len({c.id for c in calls}) == 2
    assert all(c.type == "function" for c in calls)


async def test_an_answer_of_calls_alone_has_null_content(thinking):
    assert (await whole(thinking, CALL)).choices[0].message.content is None


@pytest.mark.parametrize("burst", [1, 2, 3, 7, 100])
async def test_streamed_calls_are_those_of_no_stream(thinking, burst):
    thinking.engine.burst = burst
    expected = (await whole(thinking, f"<think>\nhm\n</think>\n\n{TWO}")).choices[0].message
    content, reasoning, calls, reasons = joined(await streamed(thinking, f"<think>\nhm\n</think>\n\n{TWO}"))
    assert reasons == ["tool_calls"]
    assert (content, reasoning) == (expected.content, expected.reasoning_content) == ("Let me see.", "hm")
    assert [c[1:] for c in calls] == [[c.function.name, c.function.arguments] for c in expected.tool_calls]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.text(max_size=12),
    cut=st.integers(0, 200),
    burst=st.integers(1, 9),
)
def test_any_value_and_any_cut_gives_parsable_calls(value, cut, burst):
    """A call is whole or none: also when the length limit cuts it, and however tokens gather."""
    text = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'city': value}}, ensure_ascii=False)}\n"
    text += "</tool_call>"
    limit = max(1, min(cut, 400))

    async def run():
        async with make_world(make_config(context=2048), template=ThinkingTemplate()) as world:
            world.engine.burst = burst
            said = text.encode("ascii", "ignore").decode()
            plain = (await whole(world, said, max_tokens=limit)).choices[0]
            content, _, calls, reasons = joined(await streamed(world, said, max_tokens=limit))
            assert reasons == [plain.finish_reason]
            assert content == (plain.message.content or "")
            assert [c[1:] for c in calls] == [
                [c.function.name, c.function.arguments] for c in plain.message.tool_calls or ()
            ]
            for call in calls:
                assert isinstance(json.loads(call[2]), dict)
            assert len(calls) == 1 or plain.finish_reason == "length"

    asyncio.run(run())


async def test_one_call_when_calls_may_not_be_parallel(thinking):
    message = (await whole(thinking, TWO, parallel_tool_calls=False)).choices[0].message
    assert [c.function.name for c in message.tool_calls] == ["weather"]
    _, _, calls, _ = joined(await streamed(thinking, TWO, parallel_tool_calls=False))
    assert [c[1] for c in calls] == ["weather"]


async def test_tool_choice_none_shows_no_tools_and_parses_none(thinking):
    choice = (await whole(thinking, CALL, tool_choice="none")).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == CALL
    assert thinking.front.template.calls[-1]["tools"] is None


async def test_tools_reach_the_template(thinking):
    await whole(thinking, "hi")
    assert thinking.front.template.calls[-1]["tools"] == [WEATHER, TIME]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 257}}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].parameters"),
        ({"tools": [WEATHER] * 1025}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "gigantic"}, "reasoning_effort"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * 1025}]}, "messages[0].tool_calls"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(thinking, fields, param):
    reply = await thinking.client.post("/v1/chat/completions", json=body(**fields))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert not thinking.engine.received


async def test_tools_without_a_format_are_refused_with_the_way_out(world):
    reply = await world.client.post("/v1/chat/completions", json=body())
    assert reply.status_code == 400
    assert "--tool-call-parser" in reply.json()["error"]["message"]
    reply = await world.client.post("/v1/chat/completions", json=body(tool_choice="none", max_tokens=1))
    assert reply.status_code == 200


async def test_a_tool_conversation_reaches_the_template_whole(thinking):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    await whole(thinking, "It is sunny.", messages=messages)
    given_messages = thinking.front.template.calls[-1]["messages"]
    assert given_messages[1]["tool_calls"] == [call]
    assert given_messages[1]["reasoning_content"] == "r"
    assert given_messages[2] == messages[2]


# ── thinking ─────────────────────────────────────────────────────────────────


async def test_thinking_goes_to_reasoning_content_and_is_counted(thinking):
    text = "<think>\nfirst\n</think>\n\nSecond."
    answer = await whole(thinking, text, tools=[])
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("first", "Second.")
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("<think>\nfirst\n</think>")
    assert answer.usage.completion_tokens == len(text) + 1
    content, reasoning, _, reasons = joined(await streamed(thinking, text, tools=[]))
    assert (content, reasoning, reasons) == ("Second.", "first", ["stop"])


async def test_thinking_may_stay_in_the_answer(thinking):
    text = "<think>\nfirst\n</think>\n\nSecond."
    message = (await whole(thinking, text, tools=[], separate_reasoning=False)).choices[0].message
    assert message.content == text
    assert message.reasoning_content is None


async def test_thinking_may_come_in_one_piece(thinking):
    chunks = await streamed(thinking, "<think>\nfirst\n</think>\n\nSecond.", tools=[], stream_reasoning=False)
    pieces = [c.choices[0].delta.reasoning_content for c in chunks if c.choices[0].delta.reasoning_content]
    assert pieces == ["first"]
    assert joined(chunks)[0] == "Second."


async def test_a_prompt_that_begins_the_thinking_is_known(worlds):
    world = await worlds(make_config(reasoning_parser="qwen3"), template=ThinkingTemplate(opened=True))
    message = (await whole(world, "hm\n</think>\n\nyes", tools=[])).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "yes")


async def test_effort_and_enable_thinking_reach_the_template(thinking):
    await whole(thinking, "x", tools=[], reasoning_effort="none")
    assert thinking.front.template.calls[-1]["enable_thinking"] is False
    await whole(thinking, "x", tools=[], chat_template_kwargs={"enable_thinking": True}, reasoning_effort="none")
    assert thinking.front.template.calls[-1]["enable_thinking"] is True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opened", [False, True])
async def test_a_budget_is_kept_to_the_token_and_the_answer_follows(worlds, opened, stream):
    world = await worlds(make_config(context=4096, reasoning_parser="qwen3"), template=ThinkingTemplate(opened=opened))
    thought = ("" if opened else "<think>\n") + "abc " * 100
    closing = "\n</think>\n\n"

    def speak(prompt):
        return "The answer is 42, surely." if prompt.endswith(closing.encode()) else thought

    fields = {"tools": [], "thinking_budget": 40, "max_tokens": 60, "n": 2, "logprobs": True}
    if stream:
        chunks = await streamed(world, speak, **fields)
        assert {c.choices[0].index for c in chunks} == {0, 1}
        heard = []
        for index in range(2):
            mine = [c for c in chunks if c.choices[0].index == index]
            content, reasoning, _, reasons = joined(mine)
            assert reasons == ["length"]
            assert sum(len(c.choices[0].logprobs.content) for c in mine if c.choices[0].logprobs) == 60
            heard.append((reasoning, content))
    else:
        answer = await whole(world, speak, **fields)
        heard = []
        for choice in answer.choices:
            assert choice.finish_reason == "length"
            assert len(choice.logprobs.content) == 60
            heard.append((choice.message.reasoning_content, choice.message.content))
        usage = answer.usage
        assert usage.completion_tokens == 120
        assert usage.completion_tokens_details.reasoning_tokens == 2 * (40 + len("\n</think>"))
    room = 60 - 40 - len(closing)
    assert heard == [(thought[:40].removeprefix("<think>\n").strip(), "The answer is 42, surely."[:room])] * 2
    second = [m for m in world.engine.received if getattr(m, "rid", "").endswith("~t")]
    assert len(second) == 2
    assert second[0].sampling.max_new_tokens == room
    assert bytes(np_ids(second[0].input_ids)).endswith(thought[:40].encode() + closing.encode())
    await world.idle()
    assert not world.front._bounded


def np_ids(data):
    return np.frombuffer(data, "<i4").tolist()


async def test_thinking_that_ends_by_itself_goes_on_to_the_answer(worlds):
    world = await worlds(make_config(context=4096, reasoning_parser="qwen3"), template=ThinkingTemplate(opened=True))
    answer = await whole(world, "short</think>", tools=[], thinking_budget=40, max_tokens=60)
    choice = answer.choices[0]
    assert choice.message.reasoning_content == "short"
    second = next(m for m in world.engine.received if getattr(m, "rid", "").endswith("~t"))
    assert bytes(np_ids(second.input_ids)).endswith(b"<think>\nshort</think>")
    assert answer.usage.prompt_tokens == len(b"<user>hello\n<assistant><think>\n")


async def test_an_abort_between_the_parts_ends_the_choice(worlds):
    world = await worlds(
        make_config(context=4096, reasoning_parser="qwen3"), template=ThinkingTemplate(opened=True), step_seconds=0.002
    )
    world.engine.speak = "x" * 3000
    call = asyncio.create_task(
        world.client.post("/v1/chat/completions", json=body(tools=[], thinking_budget=5, max_tokens=2000, rid="mine"))
    )
    while not any(getattr(m, "rid", "").endswith("~t") for m in world.engine.received):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert world.front.abort("mine") == 1
    reply = await call
    assert reply.json()["choices"][0]["finish_reason"] == "abort"
    await world.idle()
    assert not world.front._bounded


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"tool_call_parser": "hermez"}, "did you mean 'hermes'"),
        ({"reasoning_parser": "qwen33"}, "did you mean 'qwen3'"),
    ],
)
async def test_unknown_parsers_are_refused_at_start(flags, match):
    with pytest.raises(ConfigError, match=match):
        async with make_world(make_config(**flags)):
            pass


async def test_auto_that_means_nothing_is_refused_at_start():
    with pytest.raises(ConfigError, match="auto cannot choose"):
        async with make_world(make_config(tool_call_parser="auto")):
            pass


# ── grammars ─────────────────────────────────────────────────────────────────


def tag_sent(world):
    return json.loads(world.engine.received[-1].sampling.structural_tag)


async def test_required_and_named_calls_are_forced_by_a_grammar(thinking):
    choice = (await whole(thinking, CALL, tool_choice="required")).choices[0]
    assert choice.finish_reason == "tool_calls"
    sent = tag_sent(thinking)
    assert sent["required"] is True
    assert sent["parallel"] is True
    assert [t["name"] for t in sent["tags"]] == ["weather", "time"]
    assert sent["tags"][0]["content"]["schema"] == WEATHER["function"]["parameters"]
    await whole(thinking, CALL, tool_choice={"type": "function", "function": {"name": "weather"}})
    sent = tag_sent(thinking)
    assert [t["name"] for t in sent["tags"]] == ["weather"]
    assert sent["parallel"] is False
    await whole(thinking, CALL, tool_choice="required", parallel_tool_calls=False)
    assert tag_sent(thinking)["parallel"] is False


async def test_strict_tools_hold_arguments_and_leave_the_answer_free(thinking):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    await whole(thinking, CALL, tools=[strict, TIME])
    sent = tag_sent(thinking)
    assert sent["required"] is False
    assert sent["triggers"] == ["<tool_call>"]
    await whole(thinking, CALL)
    assert thinking.engine.received[-1].sampling.structural_tag is None


async def test_a_response_format_beside_tools_means_either(thinking):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = (await whole(thinking, CALL, response_format=shape)).choices[0]
    assert choice.finish_reason == "tool_calls"
    either = tag_sent(thinking)["format"]
    assert either["type"] == "or"
    assert either["elements"][0] == {"type": "json_schema", "json_schema": schema}
    reply = await thinking.client.post("/v1/chat/completions", json=body(response_format=shape, tool_choice="required"))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tool_choice"


async def test_without_a_grammar_backend_forced_calls_are_refused(worlds):
    config = msgspec.structs.replace(make_config(), grammar=GrammarConfig(backend="none"))
    world = await worlds(config, template=ThinkingTemplate())
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": WEATHER["function"] | {"strict": True}}]}, "tools"),
    ):
        reply = await world.client.post("/v1/chat/completions", json=body(**fields))
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
        assert "--grammar-backend" in reply.json()["error"]["message"]


@pytest.mark.parametrize("opened", [True, False])
async def test_a_grammar_begins_behind_the_thinking(worlds, opened):
    """HAZARD 11: the prompt always begins the thinking where a grammar waits for its end."""
    world = await worlds(make_config(reasoning_parser="qwen3"), template=ThinkingTemplate(opened=opened))
    await whole(world, "hm</think>{}", tools=[], response_format={"type": "json_object"})
    sent = world.engine.received[-1]
    assert bytes(np_ids(sent.input_ids)).endswith(b"<assistant><think>\n")
    assert bytes(sent.sampling.think_end_ids) == b"</think>"
    await whole(world, "{}", tools=[], response_format={"type": "json_object"}, reasoning_effort="none")
    sent = world.engine.received[-1]
    assert sent.sampling.think_end_ids == ()
    assert not bytes(np_ids(sent.input_ids)).rstrip().endswith(b"<think>")


# ── forced calls that the length limit cuts ──────────────────────────────────

FORCED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zurich, on the lake"}}\n</tool_call>'
CUT = FORCED.index(", on")
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture
async def calling(worlds):
    """A world whose model calls tools and does not think."""
    return await worlds(make_config(context=4096), template=ThinkingTemplate())


@pytest.mark.parametrize("burst", [1, 9, 1000])
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_call_that_max_tokens_cuts_is_the_beginning_of_a_call(calling, choice, burst):
    calling.engine.burst = burst
    plain = (await whole(calling, FORCED, tool_choice=choice, max_tokens=CUT)).choices[0]
    assert plain.finish_reason == "length"
    assert plain.message.content is None
    assert [(c.function.name, c.function.arguments) for c in plain.message.tool_calls] == [
        ("weather", '{"city": "Zurich')
    ]
    content, _, calls, reasons = joined(await streamed(calling, FORCED, tool_choice=choice, max_tokens=CUT))
    assert (content, reasons) == ("", ["length"])
    assert [c[1:] for c in calls] == [["weather", '{"city": "Zurich']]


async def test_the_frame_of_a_forced_call_is_no_answer(calling):
    """The name is known before it is written only where one tool can be called."""
    for limit in (5, FORCED.index("weather")):
        message = (await whole(calling, FORCED, tool_choice="required", max_tokens=limit)).choices[0].message
        assert (message.content, message.tool_calls) == ("", None)
        named = (await whole(calling, FORCED, tool_choice=NAMED, max_tokens=limit)).choices[0].message
        assert [(c.function.name, c.function.arguments) for c in named.tool_calls] == [("weather", "")]
        assert named.content is None


async def test_a_call_before_the_cut_one_is_whole(calling):
    text = f'{FORCED}\n<tool_call>\n{{"name": "time", "arguments": {{"zone": "C'
    calls = (await whole(calling, text, tool_choice="required", max_tokens=len(text))).choices[0].message.tool_calls
    assert [c.function.arguments for c in calls] == ['{"city": "Zurich, on the lake"}', '{"zone": "C']


async def test_what_a_stop_string_or_no_grammar_cuts_is_no_call(calling):
    for fields in ({"tool_choice": "auto", "max_tokens": CUT}, {"tool_choice": "required", "stop": ", on"}):
        message = (await whole(calling, FORCED, **fields)).choices[0].message
        assert message.tool_calls is None
        assert message.content == FORCED[:CUT]


async def test_thinking_before_a_cut_forced_call_is_thinking(thinking):
    text = f"hm\n</think>\n\n{FORCED}"
    message = (await whole(thinking, text, tool_choice="required", max_tokens=text.index(", on"))).choices[0].message
    assert (message.content, message.reasoning_content) == (None, "hm")
    assert [c.function.arguments for c in message.tool_calls] == ['{"city": "Zurich']
    message = (await whole(thinking, text, tool_choice=NAMED, max_tokens=2)).choices[0].message
    assert (message.content, message.reasoning_content, message.tool_calls) == ("", "hm", None)
