"""From texts to numbers, all the way: tiny random encoders of transformers, with their own tokenizers, as the reference
for ``Engine.encode``, ``Engine.rerank`` and the routes of vectors, classes and rankings."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import ceiba
from ceiba.core.errors import BadRequest
from live_server import LiveServer

WORDS = """the a capital of france is paris rome what who where cat dog sat on mat in city
##s ##ing play good bad ."""
TEXTS = ["the cat sat on the mat .", "Paris", "what is the capital of France", "dogs playing in rome , who ?"]
QUERY, DOCUMENTS = "what is the capital of france", ["paris is the capital of france .", "the cat", "rome is a city"]


def wordpiece(begin, middle, end):
    special = ["[PAD]", "<pad>", "[UNK]", begin, end]
    vocab = {w: i for i, w in enumerate(dict.fromkeys([*special, *WORDS.split()]))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    kind = 1 if begin == "[CLS]" else 0
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {' '.join([end] * middle)} $B:{kind} {end}:{kind}",
        special_tokens=[(begin, vocab[begin]), (end, vocab[end])],
    )
    return tokenizer


def write(folder, family, head, **more):
    """(model, tokenizer) as saved in ``folder``."""
    torch.manual_seed(3)
    bert = family == "Bert"
    tokenizer = wordpiece("[CLS]", 1, "[SEP]") if bert else wordpiece("<s>", 2, "</s>")
    sizes = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
        "pad_token_id": 0 if bert else 1,
        "type_vocab_size": 2 if bert else 1,
    }
    config = getattr(transformers, f"{family}Config")(**sizes, **more)
    model = getattr(transformers, f"{family}{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 38}))
    return model, tokenizer


def logits(model, tokenizer, *texts):
    made = tokenizer.encode(*texts)
    given = {"input_ids": torch.tensor([made.ids])}
    if model.config.type_vocab_size > 1:
        given["token_type_ids"] = torch.tensor([made.type_ids])
    with torch.inference_mode():
        return model(**given), made.ids


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Bert", "XLMRoberta"])
def test_vectors(tmp_path, family):
    model, tokenizer = write(tmp_path, family, "Model")
    with ceiba.Engine(str(tmp_path), dtype="float32") as engine:
        answers = engine.encode(TEXTS)
        for text, answer in zip(TEXTS, answers, strict=True):
            out, ids = logits(model, tokenizer, text)
            wanted = out.last_hidden_state[0].mean(0)
            assert answer["embedding"] == pytest.approx(wanted.tolist(), abs=2e-5)
            assert answer["meta_info"]["prompt_tokens"] == len(ids)
        one = engine.encode(TEXTS[0])
        assert one["embedding"] == pytest.approx(answers[0]["embedding"], abs=1e-6)
        by_ids = engine.encode(input_ids=np.array(tokenizer.encode(TEXTS[0]).ids))
        assert by_ids["embedding"] == pytest.approx(one["embedding"], abs=1e-6)
        with pytest.raises(BadRequest, match="exactly one"):
            engine.encode()
        with pytest.raises(BadRequest, match="generates no text"):
            engine.generate("x")
        with pytest.raises(BadRequest, match="reranker"):
            engine.rerank(QUERY, DOCUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Bert", "XLMRoberta"])
def test_ranks_of_pairs(tmp_path, family):
    model, tokenizer = write(tmp_path, family, "ForSequenceClassification", num_labels=1)
    wanted = [torch.sigmoid(logits(model, tokenizer, QUERY, d)[0].logits[0, 0]).item() for d in DOCUMENTS]
    assert max(wanted) - min(wanted) > 1e-3
    with ceiba.Engine(str(tmp_path), dtype="float32") as engine:
        ranked = engine.rerank(QUERY, DOCUMENTS)
    assert [r["index"] for r in ranked] == sorted(range(len(wanted)), key=lambda i: -wanted[i])
    for entry in ranked:
        assert entry["score"] == pytest.approx(wanted[entry["index"]], abs=1e-5)
        assert entry["document"] == DOCUMENTS[entry["index"]]


@pytest.mark.slow
def test_classes_by_their_names_over_http(tmp_path):
    names = {0: "sad", 1: "glad", 2: "mad"}
    model, tokenizer = write(tmp_path, "Bert", "ForSequenceClassification", num_labels=3, id2label=names)
    with LiveServer("--model-path", str(tmp_path), "--dtype", "float32") as server:
        answer = server.post("/v1/classify", {"input": TEXTS}).json()
        for text, entry in zip(TEXTS, answer["data"], strict=True):
            probs = torch.softmax(logits(model, tokenizer, text)[0].logits[0], -1)
            assert entry["probs"] == pytest.approx(probs.tolist(), abs=1e-5)
            assert entry["label"] == names[int(probs.argmax())]
        native = server.post("/encode", {"text": TEXTS[1]}).json()
        assert native["embedding"] == pytest.approx(logits(model, tokenizer, TEXTS[1])[0].logits[0].tolist(), abs=2e-5)
        refused = httpx.post(server.url + "/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS})
        assert refused.status_code == 400
        assert "reranker" in refused.json()["error"]["message"]
