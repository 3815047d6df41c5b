from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from ceiba.checkpoint.base import TokenizerSource
from ceiba.core.errors import BadRequest, CheckpointError
from ceiba.text.gguf_vocab import build_gguf
from ceiba.text.pretokenize import PRE_TOKENIZERS
from ceiba.text.tokenizer import Tokenizer, load_tokenizer
from support import text_vocab
from support.naive_tokenizers import GPT2_SPLIT, byte_bpe, spm_bpe

TEXT = st.text(
    alphabet=st.one_of(st.sampled_from("the quick 12 \n\t'sÄé日本🦙<|>"), st.characters(codec="utf-8")), max_size=40
)
GOLDEN = json.loads((Path(__file__).parent / "smollm_golden.json").read_text("utf-8"))


def make(header: dict, **changes: object) -> Tokenizer:
    return load_tokenizer(TokenizerSource(gguf={**header, **changes}))


# ── against the plain algorithm ──────────────────────────────────────────────


@given(TEXT)
@settings(deadline=None, max_examples=300)
def test_byte_level_is_the_published_algorithm(text: str) -> None:
    header = text_vocab.byte_level_header()
    vocab = {t: i for i, t in enumerate(header["tokens"])}
    expected = byte_bpe(text, vocab, header["merges"], [r"\p{N}", GPT2_SPLIT])
    tokenizer = text_vocab.byte_level()
    if "<tool>" not in text:
        assert tokenizer.encode(text, add_special=False, parse_special=False).tolist() == expected


@given(TEXT)
@settings(deadline=None, max_examples=300)
def test_sentencepiece_is_the_published_algorithm(text: str) -> None:
    header = text_vocab.spm_header()
    vocab = {t: i for i, t in enumerate(header["tokens"]) if header["token_type"][i] in (1, 6)}
    expected = spm_bpe(text, vocab, header["scores"])
    assert text_vocab.spm().encode(text, add_special=False, parse_special=False).tolist() == expected


@pytest.mark.parametrize("name", ["byte_level", "spm"])
@given(text=TEXT)
@settings(deadline=None, max_examples=200)
def test_text_survives_the_round_trip(name: str, text: str) -> None:
    tokenizer = getattr(text_vocab, name)()
    ids = tokenizer.encode(text, add_special=False)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    joined = b"".join(tokenizer.token_bytes(int(i)) for i in ids)
    assert joined.removeprefix(b" " if tokenizer.space_prefix else b"") == text.encode() or not text.encode()


def test_wordpiece_splits_greedily_and_frames_the_text() -> None:
    tokenizer = text_vocab.wordpiece()
    tokens = [tokenizer.id_to_token(int(i)) for i in tokenizer.encode("Hello, unaffable WORLD! xyz")]
    assert tokens == ["[CLS]", "hello", ",", "un", "##aff", "##able", "world", "!", "[UNK]", "[SEP]"]
    assert tokenizer.decode(tokenizer.encode("hello unaffable world!")) == "hello unaffable world!"


def test_spaces_between_special_tokens_matter_where_the_decoder_makes_spaces() -> None:
    tokenizer = text_vocab.wordpiece()
    ids = [2, 3, 5, 6]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[CLS] [SEP] hello world"
    assert tokenizer.decode(ids, False, spaces_between_special_tokens=False) == "[CLS][SEP] hello world"


def test_unigram_takes_the_likeliest_segmentation() -> None:
    header = {
        "model": "t5",
        "tokens": ["<unk>", "</s>", "▁", "▁ab", "a", "b", "c", "bc", "▁a"],
        "token_type": [2, 3, 1, 1, 1, 1, 1, 1, 1],
        "scores": [0.0, 0.0, -1.0, -5.0, -3.0, -3.0, -3.0, -2.0, -2.5],
        "unknown_token_id": 0,
        "eos_token_id": 1,
    }
    tokenizer = make(header)
    # "▁abc": ▁ab+c = -8, ▁a+bc = -4.5, ▁+a+bc = -6
    assert [tokenizer.id_to_token(int(i)) for i in tokenizer.encode("abc")] == ["▁a", "bc", "</s>"]
    assert tokenizer.decode(tokenizer.encode("abc ab")) == "abc ab"


# ── special tokens ───────────────────────────────────────────────────────────


def test_control_tokens_are_tokens_only_when_parsed() -> None:
    tokenizer = text_vocab.byte_level()
    text = "a<|end|>b"
    parsed = tokenizer.encode(text)
    assert 0 in parsed
    assert tokenizer.is_control(0)
    literal = tokenizer.encode(text, parse_special=False)
    assert not set(literal.tolist()) & tokenizer.control_ids
    assert tokenizer.decode(literal) == text
    assert tokenizer.decode(parsed) == "ab"
    assert tokenizer.decode(parsed, skip_special_tokens=False) == text


def test_user_defined_tokens_are_whole_either_way_and_are_text() -> None:
    tokenizer = text_vocab.byte_level()
    tool = tokenizer.token_to_id("<tool>")
    for parse in (True, False):
        assert tool in tokenizer.encode("x<tool>y", parse_special=parse)
    assert tokenizer.decode([tool]) == "<tool>"
    assert not tokenizer.is_control(tool)


def test_sentencepiece_control_tokens_cannot_be_merged_from_text() -> None:
    tokenizer = text_vocab.spm()
    assert not set(tokenizer.encode("<s></s><unk>", parse_special=False, add_special=False).tolist()) & {0, 1, 2}


def test_parsing_and_not_parsing_in_many_threads_do_not_mix() -> None:
    tokenizer = make(text_vocab.byte_level_header())
    wrong: list[bool] = []

    def work(parse: bool) -> None:
        for _ in range(300):
            wrong.append((0 in tokenizer.encode("a<|end|>b", parse_special=parse)) != parse)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 1200
    assert not any(wrong)


def test_phi3_control_tokens_swallow_the_space_after_them() -> None:
    header = text_vocab.spm_header()
    more = ["<|placeholder1|>", "<|assistant|>", "<|end|>"]
    tokenizer = make(
        header,
        tokens=header["tokens"] + more,
        token_type=header["token_type"] + [3] * 3,
        scores=header["scores"] + [0.0] * 3,
    )
    assert tokenizer.decode(tokenizer.encode("<|end|>\n  <|assistant|>\n"), skip_special_tokens=False).count("\n") == 0


# ── ends ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"add_bos_token": True}, [1]),
        ({"add_bos_token": False}, []),
        ({"add_bos_token": True, "add_eos_token": True}, [1]),
    ],
)
def test_bos_is_never_doubled(changes: dict, expected: list[int]) -> None:
    tokenizer = make(text_vocab.byte_level_header(), **changes)
    ids = tokenizer.encode("<|start|>hi" if expected else "hi").tolist()
    assert ids[: len(expected)] == expected
    assert ids.count(1) == len(expected)
    if changes.get("add_eos_token"):
        assert tokenizer.encode("hi<|end|>").tolist().count(0) == 1
        assert tokenizer.encode("hi").tolist()[-1] == 0


def test_ends_follow_the_header_else_the_kind_of_vocabulary() -> None:
    plain = {k: v for k, v in text_vocab.byte_level_header().items() if k != "add_bos_token"}
    assert make(plain).prefix_ids == ()
    assert make(plain, pre="llama-bpe").prefix_ids == (1,)
    assert text_vocab.spm().prefix_ids == (1,)
    assert make(text_vocab.spm_header(), add_bos_token=False).prefix_ids == ()
    assert text_vocab.spm().encode("", add_special=True).tolist() == [1]


def test_encode_batch_is_encode() -> None:
    tokenizer = text_vocab.spm()
    texts = ["", "a", "the quick", "日本 <s> x"]
    for special in (True, False):
        batch = tokenizer.encode_batch(texts, add_special=special)
        assert [b.tolist() for b in batch] == [tokenizer.encode(t, add_special=special).tolist() for t in texts]


# ── tokenizer.json ───────────────────────────────────────────────────────────


def _write_json(path: Path, header: dict, *, template: bool) -> str:
    backend: Backend = build_gguf(header).backend
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", pair="<|start|> $A $B", special_tokens=[("<|start|>", 1)]
        )
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(path))
    return str(path)


def test_tokenizer_json_gives_the_same_ids_and_bytes(tmp_path: Path) -> None:
    for name in ("byte_level", "spm"):
        ours = getattr(text_vocab, name)()
        header = getattr(text_vocab, f"{name}_header")()
        path = _write_json(tmp_path / f"{name}.json", header, template=False)
        theirs = load_tokenizer(TokenizerSource(tokenizer_json=path))
        text = "\n".join(text_vocab.CORPUS[:6])
        assert theirs.encode(text, add_special=False).tolist() == ours.encode(text, add_special=False).tolist()
        assert theirs.kind == ours.kind
        assert theirs.vocab_size == ours.vocab_size
        assert [theirs.token_bytes(i) for i in range(ours.vocab_size)] == [
            ours.token_bytes(i) for i in range(ours.vocab_size)
        ]
        assert theirs.decode(theirs.encode(text)) == Backend.from_file(path).decode(
            ours.encode(text, add_special=False)
        )


def test_the_post_processor_decides_the_ends_unless_the_config_says(tmp_path: Path) -> None:
    path = _write_json(tmp_path / "tokenizer.json", text_vocab.byte_level_header(), template=True)
    names = {"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"}
    plain = load_tokenizer(TokenizerSource(tokenizer_json=path, tokenizer_config=names))
    assert plain.encode("hello there world")[0] == 1
    assert len(plain.encode("hello there world")) > 4
    assert plain.encode("<|start|>hi").tolist().count(1) == 1
    assert plain.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    off = load_tokenizer(TokenizerSource(tokenizer_json=path, tokenizer_config={**names, "add_bos_token": False}))
    assert 1 not in off.encode("hi")
    eos = load_tokenizer(TokenizerSource(tokenizer_json=path, tokenizer_config={**names, "add_eos_token": True}))
    assert eos.encode("hi").tolist()[-1] == 0


# ── limits and damage ────────────────────────────────────────────────────────


def test_ids_outside_the_vocabulary_are_nothing() -> None:
    for tokenizer in (text_vocab.byte_level(), text_vocab.spm(), text_vocab.wordpiece()):
        for bad in (-1, tokenizer.vocab_size, 2**31 - 1):
            assert tokenizer.token_bytes(bad) == b""
            assert tokenizer.id_to_token(bad) is None
            assert tokenizer.decode([bad]) == ""


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(BadRequest, match="lone surrogate at character 2"):
        text_vocab.byte_level().encode("ab\ud800")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "no-such-rule"}, "no-such-rule"),
        ({"model": "rwkv"}, "rwkv"),
        ({"tokens": []}, "no vocabulary"),
        ({"token_type": [1, 2]}, "token_type has 2 entries"),
        ({"merges": None}, "merges is missing"),
        ({"merges": 7}, "merges is not an array"),
    ],
)
def test_damaged_headers_are_refused_by_name(changes: dict, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        make(text_vocab.byte_level_header(), **changes)


def test_merges_that_cannot_apply_are_left_out() -> None:
    header = text_vocab.byte_level_header()
    odd = make(header, merges=["", " ", "x", "nope nope", "t h e", *header["merges"]])
    assert odd.encode("the quick").tolist() == text_vocab.byte_level().encode("the quick").tolist()


def test_no_tokenizer_says_what_to_do() -> None:
    with pytest.raises(CheckpointError, match="--tokenizer-path"):
        load_tokenizer(TokenizerSource())
    with pytest.raises(CheckpointError, match=r"cannot read .*/absent\.json"):
        load_tokenizer(TokenizerSource(tokenizer_json="/absent.json"))


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_rule_compiles_and_loses_no_text(pre: str) -> None:
    tokenizer = make(text_vocab.byte_level_header(), pre=pre)
    text = "Hello, it's 1234567 über\n\n  日本語 ½ 🦙\r\n\t x=y+1;  "
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


# ── the embedded model ───────────────────────────────────────────────────────


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: repr(c["text"])[:30])
def test_smollm_golden(case: dict, smollm: Tokenizer) -> None:
    assert smollm.encode(case["text"]).tolist() == case["ids"]
    assert smollm.decode(case["ids"], skip_special_tokens=False) == case["text"]
