"""Public models' templates, rendered as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ceiba.core.errors import BadRequest
from ceiba.text.template import ChatTemplate, normalize
from ceiba.text.template_pool import TemplatePool
from support import golden_sdist

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Größe"}, "unit": {"type": "string", "enum": ["C", "F"]}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city — now", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
ARGUMENTS = json.dumps({"city": "Köln", "n": [1, 2.5, None, True]}, ensure_ascii=False)
CALL = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": 'Hello <b> & "you"\n 日本 🦙  '}
REPLY = {"role": "assistant", "content": "  Hi there!\n"}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": "12 °C"}
CASES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "user": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "turns": ([SYSTEM, USER, REPLY, USER, REPLY], None),
    "tools": ([SYSTEM, USER], TOOLS),
    "call": ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT], TOOLS),
    "call_null": ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT], TOOLS),
}

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def pool() -> Iterator[TemplatePool]:
    pool = TemplatePool(1)
    yield pool
    pool.close()


@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers(case: str, pool: TemplatePool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    paths = sorted((golden_sdist.folder() / "templates").glob("*.jinja"))
    assert len(paths) >= 70
    messages, tools = CASES[case]
    rendered = 0
    for path in paths:
        source = path.read_text("utf-8")
        ours = ChatTemplate(source, SPECIAL, pool=pool)
        # transformers passes messages on as they are, so it is given the form this template reads.
        theirs = [normalize(m, ours.capabilities()) for m in messages]
        for prompt in (True, False):
            try:
                made, _ = render_jinja_template(
                    [theirs], tools=tools, chat_template=source, add_generation_prompt=prompt, **SPECIAL
                )
            except Exception:
                with pytest.raises(BadRequest):
                    ours.render(messages, tools, add_generation_prompt=prompt)
                continue
            assert ours.render(messages, tools, add_generation_prompt=prompt) == made[0], path.name
            rendered += 1
    assert rendered >= 120
