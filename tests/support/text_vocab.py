"""Small but real vocabularies, as GGUF header arrays, trained here on a few sentences in several scripts."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from ceiba.checkpoint.base import TokenizerSource
from ceiba.text.tokenizer import Tokenizer, load_tokenizer
from support.naive_tokenizers import byte_alphabet

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it's 12345 times faster than the other one.",
    "Größe, Äpfel, naïve café; straße und Füße über 3,14 Meter.",
    "日本語の文章です。中国的文字和日本的文字。",
    "Быстрая лиса прыгает через ленивую собаку 77 раз.",
    "🦙🦙 llamas 👩‍💻 code    with\n\n\ttabs and   spaces   \n",
    "def f(x):\n    return x + 1  # a comment\n",
] * 4
CONTROL = ["<|end|>", "<|start|>", "<|user|>"]


@cache
def byte_level_header(pre: str = "smollm") -> dict[str, Any]:
    """Byte-level BPE of about 450 tokens; ids 0..2 are control tokens, the last is user-defined."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=450, initial_alphabet=sorted(byte_alphabet().values()), show_progress=False, special_tokens=CONTROL
    )
    backend.train_from_iterator(CORPUS, trainer)
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=lambda t: vocab[t])
    types = [3 if t in CONTROL else 1 for t in tokens]
    letters = sorted(byte_alphabet().values(), key=len)
    merges = [m for m in _merges(backend) if all(p in vocab for p in m.split(" "))]
    assert set(letters) <= set(tokens)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, "<tool>"],
        "token_type": [*types, 4],
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "add_bos_token": False,
    }


def _merges(backend: Backend) -> list[str]:
    import json

    found = json.loads(backend.to_str())["model"]["merges"]
    return [m if isinstance(m, str) else " ".join(m) for m in found]


@cache
def spm_header() -> dict[str, Any]:
    """SentencePiece BPE with byte fallback: <unk>, <s>, </s>, 256 bytes, then pieces with falling scores."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.train_from_iterator(CORPUS[:4], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    vocab = backend.get_vocab()
    pieces = sorted(vocab, key=lambda t: vocab[t])
    letters = [p for p in pieces if len(p) == 1]
    longer = [p for p in pieces if len(p) > 1]
    head = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    return {
        "model": "llama",
        "tokens": [*head, *longer, *letters],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "scores": [*[0.0] * len(head), *(-float(i) for i in range(len(pieces)))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


@cache
def wordpiece_header() -> dict[str, Any]:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁hello", "▁world", "▁un", "aff", "able", "▁,", "▁!"]
    return {
        "model": "bert",
        "tokens": tokens,
        "token_type": [3] * 5 + [1] * (len(tokens) - 5),
        "padding_token_id": 0,
        "unknown_token_id": 1,
        "cls_token_id": 2,
        "seperator_token_id": 3,
        "mask_token_id": 4,
    }


@cache
def byte_level() -> Tokenizer:
    return load_tokenizer(TokenizerSource(gguf=byte_level_header()))


@cache
def spm() -> Tokenizer:
    return load_tokenizer(TokenizerSource(gguf=spm_header()))


@cache
def wordpiece() -> Tokenizer:
    return load_tokenizer(TokenizerSource(gguf=wordpiece_header()))
