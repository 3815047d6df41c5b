"""All fixtures of canitoolcall: the right answer, and the same answer at every cut of the stream."""

from __future__ import annotations

import functools
import re

import pytest
from canitoolcall import checks
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ceiba.text.parsers.output import OutputParser
from support.parsing import Outcome, bursts, by_bytes, names_for, parser, result

FIXTURES = load_fixtures()
LONG = 1200
"""Characters above which a fixture is not cut at every place, but at every eleventh and around its markers."""

MISSES = {
    # It asks for the space before the call to be dropped; gemma4/sglang-text-before-call, of the same format, asks
    # for it to be kept. See docs/parsers.md.
    "gemma4/vllm-text-before-call": "soft_pass",
}

families = functools.cache(load_families)


def fresh(fixture: Fixture) -> OutputParser:
    tool, reasoning = names_for(fixture.family, fixture.reference_model)
    prompt = fixture.generation_prompt
    if prompt is None:
        reference = families()[fixture.family].reference_for(fixture.reference_model)
        prompt = (reference.default_generation_prompt if reference else None) or ""
    return parser(tool, reasoning, tools=fixture.tools, prompt=prompt)


def judge(fixture: Fixture, got: Outcome) -> str:
    content, reasoning, calls = got
    parsed = ParseResult(
        content=content or None,
        reasoning_content=reasoning or None,
        tool_calls=tuple(ParsedToolCall(*c) for c in calls),
    )
    rows = checks.run_checks(fixture, families()[fixture.family], Observation(nonstream=parsed, streams={}))
    return checks.case_status(rows).value


def test_the_corpus_is_whole() -> None:
    assert len(FIXTURES) == 469


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda f: f.id)
def test_answer(fixture: Fixture) -> None:
    got = result(fresh(fixture), [fixture.raw_output])
    assert judge(fixture, got) == MISSES.get(fixture.id, "pass"), got


@pytest.mark.parametrize("family", sorted(families()))
def test_bytes_and_bursts(family: str) -> None:
    for fixture in FIXTURES:
        if fixture.family != family:
            continue
        whole = result(fresh(fixture), [fixture.raw_output])
        assert result(fresh(fixture), by_bytes(fixture.raw_output)) == whole, fixture.id
        for seed in range(3):
            assert result(fresh(fixture), bursts(fixture.raw_output, seed)) == whole, (fixture.id, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(families()))
def test_cut_in_two_at_every_place(family: str) -> None:
    for fixture in FIXTURES:
        if fixture.family != family:
            continue
        text = fixture.raw_output
        whole = result(fresh(fixture), [text])
        places = range(1, len(text)) if len(text) < LONG else [*range(1, 200), *range(200, len(text) - 200, 11)]
        for at in places:
            assert result(fresh(fixture), [text[:at], text[at:]]) == whole, (fixture.id, at)


# ── the same fixtures with other words in them ───────────────────────────────

_WORD = re.compile(r"[A-Za-z]{4,}")
_WORDS = re.compile(r"\w+(?:-\w+)*")
_LETTERS = "abcxyzABCÄößñéλжя中文日本語にほ한글עבआ😀🦙👩"
words = st.text(st.sampled_from(_LETTERS), min_size=1, max_size=9)
identifiers = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True)


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for v in value.values() for s in _strings(v)]
    return [s for v in value for s in _strings(v)] if isinstance(value, list) else []


def _renamed(value: object, change: dict[str, str]) -> object:
    """``value`` with every word replaced: whole words only, so that markers that hold one stay as they are."""
    if isinstance(value, str):
        return _WORDS.sub(lambda m: change.get(m[0], m[0]), value)
    if isinstance(value, dict):
        return {_renamed(k, change): _renamed(v, change) for k, v in value.items()}
    return [_renamed(v, change) for v in value] if isinstance(value, list) else value


def _replaceable(fixture: Fixture) -> tuple[list[str], list[str]]:
    """(tool names, words of values and text) that stand in the output only as such."""
    assert fixture.expected is not None
    reserved = set(_WORDS.findall(" ".join(families()[fixture.family].markers)))
    reserved |= {"name", "arguments", "parameters", "function", "functions", "type", "string", "json", "true", "false"}
    reserved |= {"null", "None", "True", "False", "analysis", "commentary", "final", "assistant", "message", "thought"}
    reserved |= {"call", "calls", "tool", "invoke", "parameter", "argument", "think", "number", "object", "array"}
    reserved |= {"boolean", "response", "tools", "city", "unit", "path", "content", "query", "text"}
    names = {c.name for c in fixture.expected.tool_calls}
    keys = set(_WORDS.findall(" ".join(_keys([dict(t) for t in fixture.tools]))))
    said = _strings([dict(c.arguments) for c in fixture.expected.tool_calls])
    said += [fixture.expected.content or "", fixture.expected.reasoning_content or ""]
    found = {w for s in said for w in _WORDS.findall(s) if _WORD.fullmatch(w)}
    names = {n for n in names - reserved if _WORDS.fullmatch(n)}
    raw = fixture.raw_output
    alone = _WORDS.findall(raw)
    # A word that also stands inside another one (behind an escape: "\\tline") cannot be replaced in step.
    found = {w for w in found - reserved - names - keys if 0 < raw.count(w) == alone.count(w)}
    return sorted(names), sorted(found)


def _keys(value: object) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(k for v in value.values() for k in _keys(v))]
    return [k for v in value for k in _keys(v)] if isinstance(value, list) else []


@pytest.mark.parametrize("family", sorted(families()))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_other_names_values_and_scripts(family: str, data: st.DataObject) -> None:
    usable = [f for f in FIXTURES if f.family == family and f.expected is not None and f.id not in MISSES]
    fixture = data.draw(st.sampled_from(usable))
    names, values = _replaceable(fixture)
    change = {n: data.draw(identifiers.filter(lambda s: s not in values)) + str(i) for i, n in enumerate(names)}
    change |= {w: data.draw(words) for w in values[:6]}
    record = fixture.to_dict()
    parts = _renamed({k: record[k] for k in ("raw_output", "tools", "expected")}, change)
    if isinstance(parts, dict):
        parts["expected"] = dict(zip(record["expected"], parts["expected"].values(), strict=True))
    other = Fixture.from_dict(record | parts)
    got = result(fresh(other), [other.raw_output])
    assert judge(other, got) == "pass", (change, other.raw_output, got)
    assert result(fresh(other), other.raw_output) == got
    assert result(fresh(other), bursts(other.raw_output, data.draw(st.integers(0, 9)))) == got
