"""The OpenAI backend through the real SDK against our own server over the fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ceiba as sgl
from ceiba.core.errors import BadRequest
from ceiba.server.front import Front
from support.fake_engine import ByteTokenizer, FakeEngine, PlainTemplate, make_config, text_for
from support.http_server import serving


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    def make() -> tuple[Front, FakeEngine]:
        engine = FakeEngine()
        return Front(make_config(context=4096), ByteTokenizer(), PlainTemplate(), engine), engine

    with serving(make) as (address, _):
        yield address + "/v1"


@sgl.function
def talk(s: Any) -> None:
    s += sgl.system("be brief")
    s += sgl.user("why")
    s += sgl.assistant(sgl.gen("first", max_tokens=4, seed=0))
    s += sgl.user("and")
    s += sgl.assistant("It " + sgl.gen("second", max_tokens=3, seed=0, temperature=0.5, stop=["zz"]))


@pytest.mark.parametrize("stream", [False, True])
def test_chat(url: str, stream: bool) -> None:
    backend = sgl.OpenAI("m", base_url=url, api_key="x")
    state = talk.run(backend=backend, stream=stream)
    first_prompt = "<system>be brief\n<user>why\n<assistant>"
    assert state["first"] == text_for(list(first_prompt.encode()), 0)[:4]
    second_prompt = f"{first_prompt}{state['first']}\n<user>and\n<assistant>It "
    assert state["second"] == text_for(list(second_prompt.encode()), 0)[:3]
    meta = state.get_meta_info("second")
    assert (meta["completion_tokens"], meta["finish_reason"]) == (3, {"type": "length"})
    assert state.text().startswith("system: be brief\nuser: why\nassistant: ")


def test_chat_apis_cannot_select(url: str) -> None:
    @sgl.function
    def pick(s: Any) -> None:
        s += sgl.user("q")
        s += sgl.assistant(sgl.select("x", choices=["a", "b"]))

    with pytest.raises(BadRequest, match="likelihood"):
        pick.run(backend=sgl.OpenAI("m", base_url=url, api_key="x"))


def test_completions_and_their_select_agree_with_the_native_route(url: str) -> None:
    @sgl.function
    def plain(s: Any) -> None:
        s += "ab" + sgl.select("x", choices=["c", "de"])
        s += sgl.gen("y", max_tokens=2, seed=0)

    there = plain.run(backend=sgl.OpenAI("m", is_chat_model=False, base_url=url, api_key="x"))
    native = plain.run(backend=sgl.RuntimeEndpoint(url))
    assert there.text() == native.text()
    scores = [state.get_meta_info("x")["normalized_prompt_logprobs"] for state in (there, native)]
    assert scores[0] == pytest.approx(scores[1])
    with pytest.raises(BadRequest, match="no chat template"):
        talk.run(backend=sgl.OpenAI("m", is_chat_model=False, base_url=url, api_key="x"))
