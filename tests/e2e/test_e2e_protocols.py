"""Every protocol on the real model, through the clients' own SDKs; and a real encoder behind the real server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import anthropic
import numpy as np
import ollama
import openai
import pytest
import tokenizers
import torch
import transformers

from ceiba.core import limits
from live_server import LiveServer

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def protocols(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("storage")
    with LiveServer("--enable-response-store", "--file-storage-path", str(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def client(protocols: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{protocols.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def greedy(client: openai.OpenAI) -> str:
    """What chat completions say: every protocol must say the same."""
    answer = client.chat.completions.create(model="m", messages=QUESTION, temperature=0, max_tokens=12)
    assert "Paris" in answer.choices[0].message.content
    return answer.choices[0].message.content


@pytest.mark.parametrize("penalty", [limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY])
@pytest.mark.parametrize("temperature", [0, 1e-30, 1])
def test_what_divides_logits_leaves_them_finite(protocols: LiveServer, penalty: float, temperature: float) -> None:
    body = {"model": "m", "prompt": "one two one two one", "max_tokens": 8, "ignore_eos": True, "logprobs": 1}
    found = protocols.post(
        "/v1/completions", {**body, "repetition_penalty": penalty, "presence_penalty": -2, "temperature": temperature}
    )
    assert found.status_code == 200, found.text
    assert found.json()["usage"]["completion_tokens"] == 8


def test_anthropic(protocols: LiveServer, greedy: str) -> None:
    with anthropic.Anthropic(base_url=protocols.url, api_key="none", max_retries=0) as made:
        fields = {"model": "m", "max_tokens": 12, "messages": QUESTION, "extra_body": {"temperature": 0}}
        whole = made.messages.create(**fields)
        assert whole.content[0].text == greedy
        with made.messages.stream(**fields) as stream:
            assert "".join(stream.text_stream) == greedy
            assert stream.get_final_message().stop_reason == whole.stop_reason
        counted = made.messages.count_tokens(model="m", messages=QUESTION).input_tokens
        assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_ollama(protocols: LiveServer, greedy: str) -> None:
    made = ollama.Client(host=protocols.url)
    options = {"temperature": 0, "num_predict": 12}
    assert made.chat("m", QUESTION, options=options).message.content == greedy
    lines = list(made.chat("m", QUESTION, options=options, stream=True))
    assert "".join(line.message.content for line in lines) == greedy
    assert made.generate("m", QUESTION[0]["content"], options=options).response == greedy
    assert len(made.list().models) == 1


def test_responses(client: openai.OpenAI, greedy: str) -> None:
    fields = {"model": "m", "input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**fields)
    assert whole.output_text == greedy
    with client.responses.stream(**fields) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == greedy
    following = client.responses.create(
        model="m", input="And of Italy?", previous_response_id=whole.id, max_output_tokens=12
    )
    assert following.usage.input_tokens > whole.usage.input_tokens
    assert following.usage.input_tokens_details.cached_tokens > 0
    started = client.responses.create(background=True, **fields)
    deadline = time.monotonic() + 30
    while client.responses.retrieve(started.id).status in {"queued", "in_progress"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert client.responses.retrieve(started.id).output_text == greedy


def test_a_batch(client: openai.OpenAI, greedy: str) -> None:
    body = {"model": "m", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    lines = [
        json.dumps({"custom_id": f"{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        for i in range(5)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 60
    while (state := client.batches.retrieve(batch.id)).status not in {"completed", "failed"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    answers = [json.loads(x) for x in client.files.content(state.output_file_id).text.splitlines()]
    assert [a["response"]["body"]["choices"][0]["message"]["content"] for a in answers] == [greedy] * 5


def test_scores_and_decisions(protocols: LiveServer, client: openai.OpenAI) -> None:
    ids = protocols.post("/tokenize", json={"prompt": [" Paris", " banana"]}).json()["tokens"]
    assert all(len(i) == 1 for i in ids)
    body = {
        "query": "The capital of France is",
        "items": ["", " a fruit. I like to eat a"],
        "label_token_ids": [ids[0][0], ids[1][0]],
        "apply_softmax": True,
    }
    scores = protocols.post("/v1/score", json=body).json()["scores"]
    assert scores[0][0] > 0.9
    assert scores[1][1] > 0.5
    for row in scores:
        assert sum(row) == pytest.approx(1, abs=1e-5)
    question = {"type": "predicate", "instructions": "Is this about food?"}
    decision = client.decisions.create(model="m", input="I love cheese and bread.", questions=[question])
    assert 0 < decision.answers[0].probability < 1
    state = protocols.get("/server_info").json()["internal_states"][0]
    assert state["running"] == 0


# ── an encoder ───────────────────────────────────────────────────────────────

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "sat", "ran", "##s", "on", "a", "mat", "."]


def encoder_folder(folder: Path) -> transformers.BertModel:
    """A tiny random BERT with its tokenizer, as a hub folder."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]"}))
    return model


def test_an_encoder_gives_the_vectors_of_transformers(tmp_path: Path) -> None:
    model = encoder_folder(tmp_path)
    texts = ["the cat sat on a mat.", "dogs ran", "the"]
    ids = [[2, 5, 6, 8, 11, 12, 13, 14, 3], [2, 7, 10, 9, 3], [2, 5, 3]]
    with torch.inference_mode():
        hidden = [model(torch.tensor([i])).last_hidden_state[0].mean(0).numpy() for i in ids]
    expected = [h / np.linalg.norm(h) for h in hidden]
    with LiveServer(str(tmp_path)) as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.embeddings.create(model="m", input=texts)
        np.testing.assert_allclose([e.embedding for e in answer.data], expected, atol=1e-5)
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert running.get("/health_generate").json()["status"] == "ok"
        assert running.get("/model_info").json()["is_generation"] is False
        assert running.stop() == 0
