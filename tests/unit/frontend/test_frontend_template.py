"""A conversation grown turn by turn is the text that the chat template writes for it, for every built-in template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ceiba.core.errors import BadRequest
from ceiba.frontend.backends.template import SeamFinder
from ceiba.frontend.transcript import Transcript
from ceiba.text.template import ChatTemplate
from ceiba.text.template_builtin import BUILTIN
from ceiba.text.template_pool import TemplatePool

SPACED = ("[/INST]", "ASSISTANT:")
"""Ends of generation prompts after which the model writes the space that the template writes in history."""
CONVERSATIONS = [
    [("user", "one"), ("assistant", "two")],
    [("system", "be brief"), ("user", "one"), ("assistant", "two")],
    [("system", "be brief"), ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")],
]


class Finder:
    def __init__(self, render: Any) -> None:
        self.calls = 0
        self._render = render
        self.seams = SeamFinder(self._count)

    def _count(self, messages: list[dict[str, str]], generate: bool) -> str:
        self.calls += 1
        return self._render(messages, generate)

    def seam(self, roles: tuple[str, ...]) -> str:
        return self.seams.seam(roles)


@pytest.fixture(scope="module")
def pool() -> Iterator[TemplatePool]:
    made = TemplatePool()
    yield made
    made.close()


def _finder(name: str, pool: TemplatePool) -> tuple[Finder, ChatTemplate]:
    template = ChatTemplate(BUILTIN[name], special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, pool=pool)
    return Finder(lambda messages, generate: template.render(messages, add_generation_prompt=generate)), template


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=len)
@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_the_grown_text_is_the_templates(name: str, conversation: list[tuple[str, str]], pool: TemplatePool) -> None:
    finder, template = _finder(name, pool)
    grown = Transcript()
    before = ""
    said: list[dict[str, str]] = []
    for role, content in conversation:
        grown.begin(role)
        if role == "assistant":
            text = grown.text(finder)
            assert text.startswith(before)
            assert text == template.render(said, add_generation_prompt=True)
            grown.add(" " + content if text.endswith(SPACED) else content)
        else:
            grown.add(content)
        grown.end(role)
        said.append({"role": role, "content": content})
        before = grown.text(finder)
    whole = template.render(said, add_generation_prompt=False)
    assert whole.startswith(before)
    assert grown.messages()[-1]["content"].strip() == conversation[-1][1]


def test_each_seam_is_asked_for_once(pool: TemplatePool) -> None:
    finder, _ = _finder("chatml", pool)
    for _ in range(3):
        grown = Transcript()
        for role in ("system", "user", "assistant", "user", "assistant"):
            grown.begin(role)
            grown.add("x")
            grown.end(role)
        grown.text(finder)
    assert finder.calls == 5


def test_a_template_that_needs_a_user_still_shows_the_systems_place() -> None:
    def render(messages: list[dict[str, str]], generate: bool) -> str:
        if all(message["role"] != "user" for message in messages):
            raise BadRequest("no user query")
        return "".join(f"[{m['role']}]{m['content']}" for m in messages)

    assert SeamFinder(render).seam(("system",)) == "[system]"


def test_a_template_that_repeats_the_system_later_keeps_it_where_it_was() -> None:
    def render(messages: list[dict[str, str]], generate: bool) -> str:
        system = messages[0]["content"] + "|" if messages[0]["role"] == "system" else ""
        turns = [m for m in messages if m["role"] != "system"]
        users = [i for i, m in enumerate(turns) if m["role"] == "user"]
        parts = []
        for i, message in enumerate(turns):
            if message["role"] == "user":
                parts.append(f"[I]{system if users and i == users[-1] else ''}{message['content']}[/I]")
            else:
                parts.append(message["content"] + "</s>")
        return "<s>" + "".join(parts)

    seams = SeamFinder(render)
    roles = ("system", "user", "assistant", "user", "assistant")
    assert seams.seam(("system",)) == "<s>[I]"
    assert seams.seam(roles[:2]) == "|"
    assert seams.seam(roles[:3]) == "[/I]"
    assert seams.seam(roles[:4]) == "</s>[I]"
    assert seams.seam(roles) == "[/I]"


def test_a_template_that_drops_a_turn_is_refused() -> None:
    with pytest.raises(BadRequest, match="leaves out"):
        SeamFinder(lambda messages, generate: "hello").seam(("user",))


def test_turns_must_nest() -> None:
    grown = Transcript()
    grown.begin("user")
    with pytest.raises(BadRequest, match="inside the turn of user"):
        grown.begin("assistant")
    with pytest.raises(BadRequest, match="user is open"):
        grown.end("assistant")
