"""/tokenize shows the template's text, and /generate takes text that has its special tokens already."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ceiba.core.messages import Generate, bytes_to_ids
from support.fake_engine import ByteTokenizer
from support.front_world import World

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


@pytest.mark.parametrize(
    ("generate", "text"), [(True, "<system>s\n<user>u\n<assistant>"), (False, "<system>s\n<user>u\n")]
)
async def test_the_rendered_text(world: World, generate: bool, text: str) -> None:
    body = {"messages": MESSAGES, "add_generation_prompt": generate, "return_text": True}
    answer = (await world.client.post("/v1/tokenize", json=body)).json()
    assert answer["text"] == text
    assert answer["tokens"] == list(text.encode())


async def test_only_when_asked_and_variables_are_checked(world: World) -> None:
    assert "text" not in (await world.client.post("/tokenize", json={"messages": MESSAGES})).json()
    body: dict[str, Any] = {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}
    answer = await world.client.post("/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs.messages")


async def test_special_tokens_can_be_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ByteTokenizer.encode

    def marked(self: ByteTokenizer, text: str, *, add_special: bool = True) -> np.ndarray:
        return plain(self, ("^" if add_special else "") + text)

    monkeypatch.setattr(ByteTokenizer, "encode", marked)
    for add, expected in ((None, b"^hi"), (True, b"^hi"), (False, b"hi")):
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 1}}
        await world.client.post("/generate", json=body | ({} if add is None else {"add_special_tokens": add}))
        sent = [m for m in world.engine.received if isinstance(m, Generate)][-1]
        assert bytes(bytes_to_ids(sent.input_ids).tolist()) == expected
