"""``suffix``: the gap is filled as the model's authors describe it, and refused where the vocabulary has no marks.

The orders are those of the papers and cards of Qwen2.5-Coder, StarCoder, DeepSeek-Coder, Code Llama and Codestral.
"""

from __future__ import annotations

import pytest

from ceiba.core.messages import bytes_to_ids
from ceiba.text.infill import find_infill
from support.fake_engine import ByteTokenizer
from support.front_world import make_world

QWEN = {"<|fim_prefix|>": 201, "<|fim_suffix|>": 202, "<|fim_middle|>": 203, "<|endoftext|>": 204}
WAYS = [
    (QWEN, "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>"),
    ({"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}, "<fim_prefix>A<fim_suffix>B<fim_middle>"),
    ({"<｜fim▁begin｜>": 1, "<｜fim▁hole｜>": 2, "<｜fim▁end｜>": 3}, "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>"),
    ({"▁<PRE>": 1, "▁<SUF>": 2, "▁<MID>": 3}, "▁<PRE>A▁<SUF>B▁<MID>"),
    ({"[PREFIX]": 1, "[SUFFIX]": 2}, "[SUFFIX]B[PREFIX]A"),
]


@pytest.mark.parametrize(("vocabulary", "text"), WAYS)
def test_each_family_sees_the_gap_in_its_own_order(vocabulary, text):
    found = find_infill(vocabulary.get)
    assert found.prompt("A", "B") == text
    assert set(found.stop_ids(vocabulary.get)) == set(vocabulary.values())


@pytest.mark.parametrize("vocabulary", [{}, {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2}, {"[PREFIX]": 1}])
def test_half_a_set_of_marks_is_none(vocabulary):
    assert find_infill(vocabulary.get) is None


@pytest.fixture
def marked(monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "token_to_id", lambda self, token: QWEN.get(token))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "def f(", "suffix": "return x", "max_tokens": 3, "stop_token_ids": [7]}),
        ("/api/generate", {"prompt": "def f(", "suffix": "return x", "options": {"num_predict": 3}, "stream": False}),
    ],
)
async def test_the_prompt_ends_at_the_gap(marked, path, body):
    async with make_world() as world:
        reply = await world.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        (message,) = world.engine.received
        text = bytes(bytes_to_ids(message.input_ids).tolist()).decode()
        assert text == "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>"
        assert {201, 202, 203, 204} <= set(message.sampling.stop_token_ids)
        assert (7 in message.sampling.stop_token_ids) == ("stop_token_ids" in body)


async def test_every_prompt_of_a_list_has_its_gap(marked):
    async with make_world() as world:
        body = {"prompt": ["a", "b"], "suffix": "z", "max_tokens": 1}
        assert (await world.client.post("/v1/completions", json=body)).status_code == 200
        texts = [bytes(bytes_to_ids(m.input_ids).tolist()).decode() for m in world.engine.received]
        assert texts == [f"<|fim_prefix|>{p}<|fim_suffix|>z<|fim_middle|>" for p in "ab"]


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/completions", {"prompt": [1, 2], "suffix": "z"}, "token ids"),
        ("/v1/completions", {"prompt": "a", "suffix": "z", "echo": True}, "echo"),
        ("/api/generate", {"prompt": "a", "suffix": "z", "system": "s"}, "system"),
    ],
)
async def test_what_goes_with_no_gap_is_refused(marked, path, body, names):
    async with make_world() as world:
        reply = await world.client.post(path, json=body)
        assert reply.status_code == 400
        assert names in reply.text


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
async def test_a_vocabulary_without_marks_says_so(path):
    async with make_world() as world:
        reply = await world.client.post(path, json={"prompt": "a", "suffix": "z"})
        assert reply.status_code == 400
        assert "fill-in-the-middle" in reply.text
        empty = {"prompt": "a", "suffix": "", "max_tokens": 1} if path.startswith("/v1") else None
        assert empty is None or (await world.client.post(path, json=empty)).status_code == 200
