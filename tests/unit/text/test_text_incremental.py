from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ceiba.text.incremental import TextStream
from support import text_vocab

NAMES = ["byte_level", "spm"]
CHUNKS = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def split(ids: list[int], sizes: list[int]) -> list[list[int]]:
    out, at, turn = [], 0, 0
    while at < len(ids):
        out.append(ids[at : at + sizes[turn % len(sizes)]])
        at += sizes[turn % len(sizes)]
        turn += 1
    return out


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(max_size=40), sizes=CHUNKS, skip=st.booleans())
@settings(deadline=None, max_examples=200)
def test_any_split_gives_the_text(name: str, text: str, sizes: list[int], skip: bool) -> None:
    tokenizer = getattr(text_vocab, name)()
    ids = tokenizer.encode(text, add_special=False, parse_special=False).tolist()
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    pieces = [stream.push_many(part) for part in split(ids, sizes)]
    # SentencePiece writes a space as this character, and cannot tell them apart afterwards.
    wanted = text.replace("\u2581", " ") if name == "spm" else text
    assert "".join(pieces) + stream.flush() == wanted
    assert all("\ufffd" not in p for p in pieces) or "\ufffd" in text


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_any_ids_give_the_offline_text_less_an_unfinished_character(name: str, data: st.DataObject) -> None:
    tokenizer = getattr(text_vocab, name)()
    ids = data.draw(st.lists(st.integers(-2, tokenizer.vocab_size + 2), max_size=30))
    skip = data.draw(st.booleans())
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    got = "".join(stream.push(i) for i in ids) + stream.flush()
    offline = tokenizer.decode(ids, skip_special_tokens=skip)
    assert offline in (got, got + "\ufffd")


def test_a_space_is_taken_off_only_where_encoding_put_it() -> None:
    tokenizer = text_vocab.spm()
    ids = tokenizer.encode("the quick", add_special=False).tolist()
    for tail, expected in (([], "the quick"), ([1], "the quick"), (ids, " the quick")):
        stream = TextStream(tokenizer, prompt_tail=tail)
        assert stream.push_many(ids) + stream.flush() == expected


def test_a_character_begun_by_the_prompt_is_completed() -> None:
    tokenizer = text_vocab.spm()
    ids = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "鬱".encode()]
    stream = TextStream(tokenizer, prompt_tail=ids[:1])
    assert [stream.push(i) for i in ids[1:]] == ["", "鬱"]


def test_wordpiece_streams_with_its_spaces() -> None:
    tokenizer = text_vocab.wordpiece()
    ids = tokenizer.encode("hello unaffable world!").tolist()
    stream = TextStream(tokenizer)
    assert "".join(stream.push(i) for i in ids) + stream.flush() == "hello unaffable world!"


def test_special_tokens_are_kept_on_request() -> None:
    tokenizer = text_vocab.byte_level()
    ids = tokenizer.encode("a<|end|>b").tolist()
    assert TextStream(tokenizer).push_many(ids) == "ab"
    assert TextStream(tokenizer, skip_special_tokens=False).push_many(ids) == "a<|end|>b"
