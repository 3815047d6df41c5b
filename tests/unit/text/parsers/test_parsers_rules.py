"""The rules of the output parser: what is a call, what is answer, what is thinking, and which whitespace is whose."""

from __future__ import annotations

import json
import time

import pytest

from ceiba.core.errors import ConfigError
from ceiba.text.parsers.events import CallStart, Content, Reasoning
from ceiba.text.parsers.output import OutputParser
from ceiba.text.parsers.reasoning.tags import ReasoningFormat
from ceiba.text.parsers.registry import reasoning_names, reasoning_parser, tool_names, tool_parser
from ceiba.text.parsers.source import markers
from support.parsing import bursts, events, parser, result

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OSLO = ("weather", '{"city": "Oslo"}')


def every(tool: str | None, reasoning: str | None, text: str, prompt: str = "") -> object:
    """The outcome, checked to be the same for the whole text, single characters and bursts."""
    whole = result(parser(tool, reasoning, tools=[WEATHER], prompt=prompt), [text])
    for pieces in (text, bursts(text, 1), bursts(text, 2, 3)):
        assert result(parser(tool, reasoning, tools=[WEATHER], prompt=prompt), pieces) == whole
    return whole


# ── names ────────────────────────────────────────────────────────────────────

TOOL_NAMES = [
    "deepseekv3",
    "deepseekv31",
    "deepseekv32",
    "deepseekv4",
    "glm",
    "glm45",
    "glm47",
    "gpt-oss",
    "kimi_k2",
    "kimi_k3",
    "lfm2",
    "llama3",
    "mimo",
    "mistral",
    "pythonic",
    "qwen",
    "qwen25",
    "qwen3_coder",
    "step3",
    "step3p5",
    "minimax-m2",
    "minimax-m3",
    "minimax_m3",
    "interns1",
    "hermes",
    "hunyuan",
    "gigachat3",
    "gemma4",
    "trinity",
    "cohere_command4",
]
REASONING_NAMES = [
    "deepseek-r1",
    "deepseek-v3",
    "deepseek-v4",
    "glm45",
    "gpt-oss",
    "kimi",
    "kimi_k2",
    "kimi_k3",
    "mimo",
    "qwen3",
    "qwen3-thinking",
    "minimax",
    "minimax-append-think",
    "minimax-m3",
    "step3",
    "step3p5",
    "mistral",
    "nemotron_3",
    "granite",
    "interns1",
    "gemma4",
    "hunyuan",
    "cohere_command4",
]


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_users_tool_parser_names(name: str) -> None:
    for spelling in (name, name.replace("-", "_"), name.replace("_", "-"), name.upper()):
        assert type(tool_parser(spelling)) is type(tool_parser(name))


@pytest.mark.parametrize("name", REASONING_NAMES)
def test_users_reasoning_parser_names(name: str) -> None:
    for spelling in (name, name.replace("-", "_"), name.replace("_", "-")):
        assert reasoning_parser(spelling) is reasoning_parser(name)


def test_an_unknown_name_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser 'hermess' is not known; did you mean 'hermes'"):
        tool_parser("hermess")
    with pytest.raises(ConfigError, match="--reasoning-parser"):
        reasoning_parser("nothing")


def test_every_pair_of_parsers_works_together() -> None:
    for tool in tool_names():
        for reasoning in reasoning_names():
            assert result(parser(tool, reasoning, tools=[WEATHER]), ["x"])[:2] in {
                ("x", ""),
                ("", "x"),
                ("<think>x", ""),
            }


def test_markers_that_hide_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="is a prefix of"):
        markers("<tool", "<tool_call>")


# ── calls and answer ─────────────────────────────────────────────────────────


def test_text_around_calls_is_answer() -> None:
    assert every("hermes", None, f"One.\n{CALL}\n{CALL}\nTwo.") == ("One.\nTwo.", "", [OSLO, OSLO])


def test_a_call_comes_out_when_it_is_whole_and_not_before() -> None:
    parsing = parser("hermes", tools=[WEATHER])
    assert parsing.feed("Hi. " + CALL[:-1]) == [Content("Hi.")]
    started, *_ = parsing.feed(CALL[-1:])
    assert isinstance(started, CallStart)
    assert (started.index, started.name) == (0, "weather")
    assert started.id.startswith("call_")
    assert parsing.called


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": 007}}</tool_call>',
        '<tool_call>{"name": "weather" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {}} and more</tool_call>',
        "<tool_call>" + '{"name": "weather", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}</tool_call>",
    ],
)
def test_a_broken_call_is_answer_and_the_next_one_counts(broken: str) -> None:
    content, _, calls = every("hermes", None, f"A {broken} B\n{CALL}")  # type: ignore[misc]
    assert content == f"A {broken} B"
    assert calls == [OSLO]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"city": "a\nb\tc"}', {"city": "a\nb\tc"}),  # raw control characters
        (r'{"city": "C:\dir \d+"}', {"city": "C:\\dir \\d+"}),  # a backslash that escapes nothing
        (r'{"city": "\u12"}', {"city": "\\u12"}),
        ('{"city": True, "x": None,}', {"city": True, "x": None}),  # Python's constants, a comma too many
        ('{"city": "a", "city": "b"}', {"city": "b"}),
        ('{"x": {"y": 1, "y": 2}}', {"x": {"y": 2}}),
        ('"{\\"city\\": \\"Oslo\\"}"', {"city": "Oslo"}),  # encoded twice
        ("null", {}),
        ('{"x": 12345678901234567890123, "y": 0.1000000000000000055}', {"x": 12345678901234567890123, "y": 0.1}),
    ],
)
def test_arguments_that_can_be_saved(written: str, meant: object) -> None:
    _, _, calls = every("hermes", None, f'<tool_call>{{"name": "weather", "arguments": {written}}}</tool_call>')  # type: ignore[misc]
    assert json.loads(calls[0][1]) == meant


def test_digits_of_numbers_are_kept() -> None:
    _, _, calls = every(
        "hermes", None, '<tool_call>{"name": "weather", "arguments": {"x": 1.50, "y": 1e400}}</tool_call>'
    )  # type: ignore[misc]
    assert calls[0][1] == '{"x": 1.50, "y": 1e400}'


def test_a_lone_surrogate_can_be_sent() -> None:
    _, _, calls = every("hermes", None, '<tool_call>{"name": "weather", "arguments": {"x": "\\ud83d"}}</tool_call>')  # type: ignore[misc]
    assert calls[0][1].encode()


def test_the_end_tag_inside_a_string_does_not_end_the_call() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call><tool_call>"}}</tool_call>'
    assert every("hermes", None, text) == ("", "", [("weather", '{"city": "</tool_call><tool_call>"}')])


def test_a_call_cut_short() -> None:
    assert every("hermes", None, "Hi. " + CALL[:40]) == ("Hi. " + CALL[:40], "", [])
    assert every("hermes", None, f"{CALL}\n{CALL[:40]}") == ("", "", [OSLO])
    assert every("hermes", None, "Hi.\n<tool_call>\n") == ("Hi.", "", [])
    assert every("hermes", None, "Hi.\n<tool_c") == ("Hi.\n<tool_c", "", [])


def test_without_a_tool_parser_calls_are_answer() -> None:
    assert every(None, None, CALL) == (CALL, "", [])
    assert every(None, "qwen3", f"<think>a</think>{CALL}") == (CALL, "a", [])


def test_json_answers_are_no_calls_of_bare_formats() -> None:
    for text in ('{"name": "Ann", "parameters": {}}', '{"name": "weather"} is the key', "[weather]", "[1, 2]", "{"):
        assert every("llama3", None, text)[0] == text if 'weather"}' not in text else True  # type: ignore[index]
        assert every("pythonic", None, text) == (text, "", [])


def test_qwen25_without_its_tag() -> None:
    """What Qwen2.5-Coder-0.5B writes, greedily, where its template asks for the tag."""
    oslo = '{\n  "name": "weather",\n  "arguments": {\n    "city": "Oslo"\n  }\n}'
    for raw in (f"```json\n{oslo}\n```", oslo, f"```\n{oslo}\n```\n"):
        assert every("qwen25", None, raw) == ("", "", [OSLO])
    assert every("qwen25", None, f"```json\n{oslo}\n```\n```json\n{oslo}\n```") == ("", "", [OSLO, OSLO])
    assert every("qwen25", None, f"{oslo}\nDone.\n{CALL}") == ("\nDone.", "", [OSLO, OSLO])
    for answer in (
        f"Like so: {oslo}",
        '```json\n{"city": "Oslo"}\n```',
        '{"name": "Ann", "arguments": {}}',
        '{"name": "weather", "arguments": {}, "id": 1}',
        '{"name": "weather"}',
        "```python\nx = {}\n```",
        "```json\n[1]\n```",
        "``",
    ):
        assert every("qwen25", None, answer) == (answer, "", [])


def test_ids() -> None:
    assert len(tool_parser("mistral").new_id()) == 9
    found = events(parser("mistral", tools=[WEATHER]), ['[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{"city": "Oslo"}'])
    assert found[0] == CallStart(0, "abcDEF123", "weather")
    call = "<|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    found = events(parser("kimi_k2", tools=[WEATHER]), [text])
    assert found[0] == CallStart(0, "functions.weather:3", "weather")


# ── thinking ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "text", "meant"),
    [
        ("<|im_start|>assistant\n", "<think>\na\n</think>\n\nb", ("b", "a", [])),
        ("<|im_start|>assistant\n<think>\n", "a\n</think>\n\nb", ("b", "a", [])),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "b", ("b", "", [])),
        ("<|im_start|>assistant\n", "b", ("b", "", [])),
        ("<|im_start|>assistant\n", "b <think> c", ("b <think> c", "", [])),
        ("<think>\n", "<think>\na</think>b", ("b", "a", [])),
        ("<think>\n", "a </thin", ("", "a </thin", [])),
        ("", "\n\n  <think>a</think>b  ", ("b  ", "a", [])),
    ],
)
def test_where_thinking_begins_and_ends(prompt: str, text: str, meant: object) -> None:
    assert every("hermes", "qwen3", text, prompt) in (meant, (meant[0], meant[1], []))  # type: ignore[index]


def test_forced_families_think_until_they_say_otherwise() -> None:
    for name in ("deepseek-r1", "qwen3-thinking", "step3", "step3p5", "minimax"):
        assert every(None, name, "a</think>b") == ("b", "a", [])
        assert every(None, name, "<think>a</think>b") == ("b", "a", [])
        assert every(None, name, "a") == ("", "a", [])


def test_a_draft_is_thinking_and_a_call_at_the_end_is_a_call() -> None:
    draft = f"I could write {CALL} here."
    assert every("hermes", "qwen3", f"<think>{draft}</think>{CALL}") == ("", draft, [OSLO])
    assert every("hermes", "qwen3", f"<think>{CALL}</think>done") == ("done", CALL, [])
    assert every("hermes", "qwen3", f"<think>Go.\n{CALL}") == ("", "Go.", [OSLO])
    assert every("hermes", "qwen3", f"<think>Go.\n{CALL}\n{CALL}\n") == ("", "Go.", [OSLO, OSLO])
    assert every("hermes", "qwen3", f"<think>see <tool_call> tags</think>{CALL}") == (
        "",
        "see <tool_call> tags",
        [OSLO],
    )


def test_trinity_calls_while_it_thinks() -> None:
    assert every("trinity", "qwen3", f"<think>a {CALL} b</think>c") == ("c", "a b", [OSLO])
    assert every("trinity", None, f"<think>a {CALL} b</think>c") == ("a bc", "", [OSLO])


def test_thinking_again() -> None:
    text = "[THINK]a[/THINK]b[THINK]c[/THINK]d"
    assert every("mistral", "mistral", text) == ("bd", "ac", [])
    assert every("hermes", "qwen3", f"{CALL}\n<think>a</think>b") == ("b", "a", [OSLO])


@pytest.mark.parametrize(
    ("name", "text", "meant"),
    [
        ("kimi", "◁think▷a◁/think▷b", ("b", "a", [])),
        ("minimax-m3", "<mm:think>a</mm:think>b", ("b", "a", [])),
        ("minimax-append-think", "a</think>b", ("<think>a</think>b", "", [])),
        ("granite", "Here is my thought process: a Here is my response: b", ("b", "a", [])),
        ("granite", "<think>a</think><response>b</response>", ("b", "a", [])),
        ("hunyuan", "<think>\na\n</think>\n<answer>\nb</answer>", ("b", "a", [])),
        ("cohere_command4", "<|START_THINKING|>a<|END_THINKING|><|START_TEXT|>b<|END_TEXT|>", ("b", "a", [])),
        ("gemma4", "<|channel>thought\na\n<channel|>b", ("b", "a", [])),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            ("b", "a", []),
        ),
        (
            "kimi_k3",
            "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>",
            ("b", "a", []),
        ),
    ],
)
def test_other_ways_to_think(name: str, text: str, meant: object) -> None:
    assert every(None, name, text) == meant


def test_what_closes_the_thinking_is_known_to_a_grammar() -> None:
    assert reasoning_parser("qwen3").ends_at == ("</think>",)
    assert reasoning_parser("minimax-append-think").ends_at == ("</think>",)
    assert reasoning_parser("gpt-oss").answer_at == ("<|channel|>final<|message|>",)
    assert reasoning_parser("kimi_k3").answer_at == ("<|open|>response<|sep|>",)
    assert reasoning_parser("qwen3").answer_at == ("</think>",)
    for name in reasoning_names():
        form: ReasoningFormat = reasoning_parser(name)
        assert form.opened_by("x" + form.begins[0] + "\n") is True
        assert form.opened_by("x" + form.pairs[0][1] + "\n\n") is False
        assert form.opened_by("x") is None
        assert form.thinks("x" + form.pairs[0][1]) is False
        assert form.thinks("x") is (form.forced or None)
        assert form.ends_at


def test_thinking_is_told_as_it_comes() -> None:
    parsing = parser("hermes", "qwen3")
    assert not parsing.thinking
    assert parsing.feed("<think>abc") == [Reasoning("abc")]
    assert parsing.thinking
    assert parsing.feed(" def") == [Reasoning(" def")]
    assert parsing.feed("</think>x") == [Content("x")]
    assert not parsing.thinking


# ── the stream ───────────────────────────────────────────────────────────────


def test_only_a_true_prefix_of_a_marker_is_held_back() -> None:
    parsing = parser("hermes", "qwen3")
    assert parsing.feed("a < b <tool") == [Content("a < b")]
    assert parsing.feed("s> c") == [Content(" <tools> c")]
    assert parsing.finish() == []
    assert parsing.finish() == []


def test_time_is_linear_in_the_text() -> None:
    """Four times the text takes about four times as long, whatever was built to make a parser read twice."""
    hostile = [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"a": "'),
        ("hermes", "<tool_call>{"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\n"),
        ("qwen3_coder", "\n<parameter=city>\nx\n</parameter>\n"),
        ("glm45", "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value></arg_value>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>"),
        ("deepseekv3", "<｜tool▁calls▁begin｜>"),
        ("pythonic", "[weather("),
        ("gemma4", '<|tool_call>call:f{a:<|"|>'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ['),
        ("minimax-m3", "]<]minimax[>[<tool_call>]<]minimax[>["),
        ("gpt-oss", "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"),
        ("hermes", " \n"),
        ("hermes", "<think>"),
    ]

    def seconds(name: str, text: str) -> float:
        best = 9.0
        for _ in range(3):
            parsing = parser(name, "qwen3" if name != "gpt-oss" else "gpt-oss", tools=[WEATHER])
            began = time.perf_counter()
            result(parsing, bursts(text, 0, 16))
            best = min(best, time.perf_counter() - began)
        return best

    for name, unit in hostile:
        short, long = (seconds(name, unit * (size // len(unit))) for size in (20_000, 80_000))
        assert long < 12 * short + 0.05, (name, unit, short, long)


def test_a_parser_of_nothing_passes_everything() -> None:
    assert result(OutputParser(), ["a", "", "b"]) == ("ab", "", [])
    assert result(OutputParser(), []) == ("", "", [])
