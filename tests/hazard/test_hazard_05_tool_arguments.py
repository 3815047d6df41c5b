"""HAZARDS 5 (and 1, 2, 6, 11 where they touch parsers), at the parser: any chunking gives the same calls, joined
arguments always parse, the first event of a call carries id and name."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ceiba.text.parsers.events import Arguments, CallEnd, CallStart, join
from ceiba.text.parsers.registry import reasoning_names, reasoning_parser, tool_names
from support.call_writers import WRITERS
from support.parsing import bursts, by_bytes, events, outcome, parser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": "integer"}},
            },
        },
    }
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("write_file", {"path": "a/b.py", "content": 'def f(x):\n    return {"é": [x, "日本"]}  # 🦙\n', "mode": 420}),
    ("write_file", {"path": "c", "content": "", "mode": 0}),
]


def written(name: str) -> str:
    raw = WRITERS[name](CALLS[:1] if name == "gigachat3" else CALLS)
    return raw if name in {"llama3", "pythonic", "gpt-oss"} else "Writing the files." + raw


@pytest.mark.parametrize("name", tool_names())
def test_any_chunking_gives_the_calls_of_the_whole_text(name: str) -> None:
    raw = written(name)
    whole = outcome(join(events(parser(name, tools=TOOLS), [raw])))
    assert [json.loads(a) for _, a in whole[2]] == [a for _, a in CALLS][: len(whole[2])]
    assert whole[2]
    for size in (*range(1, 12), 16, 64, 256):
        pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
        assert outcome(join(events(parser(name, tools=TOOLS), pieces))) == whole, size
    assert outcome(join(events(parser(name, tools=TOOLS), by_bytes(raw)))) == whole
    for seed in range(8):
        assert outcome(join(events(parser(name, tools=TOOLS), bursts(raw, seed, 1 + 4 * seed)))) == whole, seed


@pytest.mark.parametrize("name", tool_names())
def test_the_first_event_of_a_call_carries_id_and_name(name: str) -> None:
    opened: set[int] = set()
    ids: set[str] = set()
    for event in events(parser(name, tools=TOOLS), bursts(written(name), 5)):
        if isinstance(event, CallStart):
            assert event.name == "write_file"
            assert event.id
            assert event.id not in ids
            assert event.index == len(opened)
            opened.add(event.index)
            ids.add(event.id)
        elif isinstance(event, Arguments | CallEnd):
            assert event.index in opened


@pytest.mark.parametrize("name", tool_names())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_joined_arguments_always_parse_whatever_the_model_writes(name: str, data: st.DataObject) -> None:
    """Real output with parts cut out, doubled, swapped and made up: never an exception, never arguments that are no
    object, never another answer for another chunking."""
    raw = written(name)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 4))):
        a, b = sorted(rng.sample(range(len(raw) + 1), 2))
        made_up = data.draw(st.text('<>{}[]"|/=\\ \nab:,', max_size=5))
        raw = raw[:a] + rng.choice(["", made_up, raw[a:b] * 2, raw[a:b][::-1], made_up + raw[a:b]]) + raw[b:]
    reasoning = "gpt-oss" if name == "gpt-oss" else data.draw(st.sampled_from([None, "qwen3", "mistral"]))
    whole = outcome(join(events(parser(name, reasoning, tools=TOOLS), [raw])))
    for _, arguments in whole[2]:
        assert isinstance(json.loads(arguments), dict)
    assert outcome(join(events(parser(name, reasoning, tools=TOOLS), raw))) == whole
    assert outcome(join(events(parser(name, reasoning, tools=TOOLS), bursts(raw, rng.randint(0, 99))))) == whole


def test_the_last_flush_goes_through_the_parsers() -> None:
    """HAZARDS 1: text held back until the end (here: a marker that never came whole) is parsed, not pasted."""
    parsing = parser("hermes", "qwen3", tools=TOOLS)
    assert parsing.feed("<think>a</thi") != []
    assert outcome(join(parsing.finish())) == ("", "</thi", [])
    parsing = parser("hermes", tools=TOOLS)
    found = parsing.feed('x<tool_call>{"name": "write_file", "arguments": {}}</tool_call')
    found += parsing.feed(">")
    assert outcome(join(found + parsing.finish())) == ("x", "", [("write_file", "{}")])


def test_called_is_what_the_finish_reason_needs() -> None:
    """HAZARDS 2: ``tool_calls`` when a tool was called, and only then."""
    parsing = parser("hermes", tools=TOOLS)
    events(parsing, ["text <tool_call>{"])
    assert not parsing.called
    parsing = parser("hermes", tools=TOOLS)
    events(parsing, [WRITERS["hermes"](CALLS)])
    assert parsing.called


def test_a_character_split_over_pieces_never_shows_a_replacement() -> None:
    """HAZARDS 6."""
    text = "日本語 🦙👩‍💻 naïve"
    content, reasoning, _ = outcome(join(events(parser("hermes", "qwen3"), by_bytes(f"<think>{text}</think>{text}"))))
    assert (content, reasoning) == (text, text)


@pytest.mark.parametrize("name", reasoning_names())
def test_constraints_know_where_thinking_ends(name: str) -> None:
    """HAZARDS 11: behind the text that `answer_at` names there is answer, and before it there is none."""
    form = reasoning_parser(name)
    begin, end = form.pairs[0]
    thought = f"{begin}{form.label}thought {{}}{end}"
    between = "<|start|>assistant" if name == "gpt-oss" else ""
    output = thought + between + ("" if form.answer_at[0] == end else form.answer_at[0]) + '{"a": 1}'
    at = min(output.find(t) + len(t) for t in form.answer_at if t in output)
    assert output[at:] == '{"a": 1}'
    content, reasoning, _ = outcome(join(events(parser(None, name), bursts(output, 1))))
    assert content.endswith('{"a": 1}')
    if not form.passed:
        assert (content, reasoning.strip()) == ('{"a": 1}', "thought {}")
