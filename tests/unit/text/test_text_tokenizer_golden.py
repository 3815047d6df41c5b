"""Ids that the models' own tokenizers gave for 47 texts each, over the public vocabularies."""

from __future__ import annotations

import pytest

from ceiba.checkpoint.gguf_config import Metadata, tokenizer_source
from ceiba.checkpoint.gguf_header import read_header
from ceiba.checkpoint.mapping import MappedFile
from ceiba.text.tokenizer import load_tokenizer
from support import golden_sdist

BYTE_LEVEL = [
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "mpt", "qwen2", "qwen35"),
    *("refact", "starcoder"),
]
SENTENCEPIECE = ["llama-spm", "phi-3", "gemma-4"]
WITHOUT_IDS = ["aquila", "baichuan", "gpt-neox", "nomic-bert-moe"]

pytestmark = [pytest.mark.network, pytest.mark.slow]


def _load(name: str):
    path = golden_sdist.folder() / f"ggml-vocab-{name}.gguf"
    file = MappedFile(str(path))
    try:
        source = tokenizer_source(Metadata(str(path), {**read_header(file).metadata, "general.architecture": "llama"}))
    finally:
        file.close()
    return path, load_tokenizer(source)


@pytest.mark.parametrize("name", [*BYTE_LEVEL, *SENTENCEPIECE, "bert-bge"])
def test_ids_are_the_models_own(name: str) -> None:
    path, tokenizer = _load(name)
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    assert len(texts) >= 46
    for text, line in zip(texts, lines, strict=False):
        expected = [int(i) for i in line.split()]
        assert tokenizer.encode(text, add_special=False, parse_special=False).tolist() == expected, text
        if name != "bert-bge":
            assert tokenizer.decode(expected, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", WITHOUT_IDS)
def test_vocabularies_without_published_ids_round_trip(name: str) -> None:
    _, tokenizer = _load(name)
    text = "Hello world, this is 2024. Über die 日本 и так далее"
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text
