"""Markers that are control tokens, told from the same characters spelled out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceiba.checkpoint.gguf_config import Metadata, tokenizer_source
from ceiba.checkpoint.gguf_header import read_header
from ceiba.checkpoint.mapping import MappedFile
from ceiba.text.incremental import TextStream
from ceiba.text.parsers.events import Event, join
from ceiba.text.parsers.special import BREAK
from ceiba.text.tokenizer import Tokenizer, load_tokenizer
from support import golden_sdist
from support.parsing import Outcome, names_for, outcome, parser, result

pytest.importorskip("canitoolcall")
from canitoolcall.fixtures import load_families, load_fixtures

TOOLS = [{"type": "function", "function": {"name": "f"}}]


class TinyVocabulary:
    """Ids 0.. are the given control tokens, then one id for each byte."""

    def __init__(self, control: Sequence[str]) -> None:
        self.control = list(control)

    def token_to_id(self, token: str) -> int | None:
        return self.control.index(token) if token in self.control else None

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < len(self.control):
            return self.control[token_id].encode()
        return bytes([token_id - len(self.control)])

    def ids(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Token ids of (text, is a control token) parts."""
        out: list[int] = []
        for text, real in parts:
            out += [self.control.index(text)] if real else [b + len(self.control) for b in text.encode()]
        return out


def run(
    vocabulary: TinyVocabulary, ids: Sequence[int], sizes: Sequence[int], tool: str, reasoning: str | None = None
) -> Outcome:
    """Feeds ids in groups, with the text that a detokenizer gives out for them."""
    parsing = parser(tool, reasoning, tools=TOOLS, vocabulary=vocabulary)
    found: list[Event] = []
    pending = b""
    at = 0
    turn = 0
    while at < len(ids):
        group = ids[at : at + sizes[turn % len(sizes)]]
        at += len(group)
        turn += 1
        pending += b"".join(vocabulary.token_bytes(i) for i in group)
        whole = len(pending)
        while whole:
            try:
                text = pending[:whole].decode()
                break
            except UnicodeDecodeError:
                whole -= 1
        else:
            text = ""
        pending = pending[whole:]
        found += parsing.feed(text, group)
    found += parsing.finish()
    return outcome(join(found))


CONTROL = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
sizes = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@given(sizes)
def test_a_spelled_out_call_is_answer(sizes: list[int]) -> None:
    vocabulary = TinyVocabulary(CONTROL)
    call = '\n{"name": "f", "arguments": {}}\n'
    spelled = f"Write <tool_call>{call}</tool_call> é to call. "
    ids = vocabulary.ids([(spelled, False), ("<tool_call>", True), (call, False), ("</tool_call>", True)])
    assert run(vocabulary, ids, sizes, "hermes") == (spelled.rstrip(), "", [("f", "{}")])


@given(sizes)
def test_a_spelled_out_end_of_thinking_is_thinking(sizes: list[int]) -> None:
    vocabulary = TinyVocabulary(CONTROL)
    thought = "the tag </think> ends it"
    ids = vocabulary.ids([("<think>", True), (thought, False), ("</think>", True), ("<think> b", False)])
    assert run(vocabulary, ids, sizes, "hermes", "qwen3") == ("<think> b", thought, [])


@given(sizes)
def test_spelled_out_markers_in_values_stay(sizes: list[int]) -> None:
    control = ["<|open|>", "<|close|>", "<|sep|>"]
    vocabulary = TinyVocabulary(control)
    value = "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>日"
    open_, close, sep = (("<|open|>", True), ("<|close|>", True), ("<|sep|>", True))
    parts = [open_, ("tools", False), sep, open_, ('call tool="f" index="1"', False), sep]
    parts += [open_, ('argument key="k" type="string"', False), sep, (value, False), close, ("argument", False), sep]
    parts += [close, ("call", False), sep, close, ("tools", False), sep]
    got = run(vocabulary, vocabulary.ids(parts), sizes, "kimi_k3", "kimi_k3")
    assert got == ("", "", [("f", f'{{"k": "{value}"}}')])


def test_a_marker_that_is_no_single_token_needs_no_id() -> None:
    vocabulary = TinyVocabulary(["</think>"])
    ids = vocabulary.ids([('<tool_call>{"name": "f"}</tool_call>', False)])
    assert run(vocabulary, ids, [3], "hermes")[2] == [("f", "{}")]


def test_no_break_is_ever_seen() -> None:
    vocabulary = TinyVocabulary(CONTROL)
    text = f"a {BREAK} <tool_call> b"
    assert run(vocabulary, vocabulary.ids([(text, False)]), [4], "hermes") == ("a \ufffd <tool_call> b", "", [])


def test_a_break_in_the_text_is_replaced_without_a_vocabulary_too() -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {{"k": "{BREAK}"}}}}</tool_call>'
    assert result(parser("hermes"), [f"a{BREAK} ", call]) == ("a\ufffd", "", [("f", '{"k": "\ufffd"}')])


def test_a_stop_token_that_was_trimmed_does_not_disturb() -> None:
    vocabulary = TinyVocabulary([*CONTROL, "<|im_end|>"])
    parsing = parser("hermes", tools=TOOLS, vocabulary=vocabulary)
    call = '<tool_call>{"name": "f"}</tool_call>'
    ids = vocabulary.ids(
        [("<tool_call>", True), ('{"name": "f"}', False), ("</tool_call>", True), ("<|im_end|>", True)]
    )
    assert outcome(join([*parsing.feed(call, ids), *parsing.finish()]))[2] == [("f", "{}")]


# ── real vocabularies ────────────────────────────────────────────────────────


def _tokenizer(name: str) -> Tokenizer:
    path = golden_sdist.folder() / f"ggml-vocab-{name}.gguf"
    file = MappedFile(str(path))
    try:
        return load_tokenizer(
            tokenizer_source(Metadata(str(path), {**read_header(file).metadata, "general.architecture": "llama"}))
        )
    finally:
        file.close()


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize(
    ("repo", "vocabulary", "count"), [("google/gemma-4", "gemma-4", 48), ("unsloth/Llama-3.3", "llama-bpe", 20)]
)
def test_fixtures_as_tokens_in_random_bursts(repo: str, vocabulary: str, count: int) -> None:
    """The fixtures' own token ids through the detokenizer, where the model's vocabulary is public."""
    tokenizer = _tokenizer(vocabulary)
    families = load_families()
    seen = 0
    for fixture in load_fixtures():
        if not (fixture.tokenizer and fixture.tokenizer.repo.startswith(repo) and fixture.output_token_ids):
            continue
        ids = list(fixture.output_token_ids)
        if tokenizer.decode(ids, skip_special_tokens=False) != fixture.raw_output:
            continue
        seen += 1
        tool, reasoning = names_for(fixture.family, fixture.reference_model)
        reference = families[fixture.family].reference_for(fixture.reference_model)
        prompt = fixture.generation_prompt or (reference.default_generation_prompt if reference else "") or ""
        whole = result(parser(tool, reasoning, tools=fixture.tools, prompt=prompt), [fixture.raw_output])
        for seed in range(6):
            rng = random.Random(seed)
            stream = TextStream(tokenizer, skip_special_tokens=False)
            parsing = parser(tool, reasoning, tools=fixture.tools, prompt=prompt, vocabulary=tokenizer)
            found: list[Event] = []
            at = 0
            while at < len(ids):
                group = ids[at : at + (rng.randint(1, 8) if seed else 1)]
                at += len(group)
                found += parsing.feed(stream.push_many(group), group)
            found += parsing.feed(stream.flush(), ())
            found += parsing.finish()
            assert outcome(join(found)) == whole, (fixture.id, seed)
    assert seen >= count
