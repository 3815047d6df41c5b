"""Tool calls in the page, on the real HTTP front over the fake engine that says what the test wants said."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ceiba.core.messages import Generate, bytes_to_ids
from ceiba.server.front import Front
from support import chrome
from support.fake_engine import ByteTokenizer, FakeEngine, PlainTemplate, make_config
from support.http_server import serving

EXECUTABLE = chrome.find()
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium: apt-get install chromium"),
]


@pytest.fixture
def world() -> Iterator[tuple[str, FakeEngine]]:
    def make() -> tuple[Front, FakeEngine]:
        engine = FakeEngine()
        config = make_config(context=4096, tool_call_parser="hermes", reasoning_parser="deepseek-r1")
        return Front(config, ByteTokenizer(), PlainTemplate(), engine), engine

    with serving(make) as (url, engine):
        yield url, engine


def test_a_call_is_shown_and_its_result_goes_back(world: tuple[str, FakeEngine]) -> None:
    url, engine = world
    engine.speak = f"<think>I should look</think>{CALL}"
    assert EXECUTABLE is not None
    with chrome.browser(EXECUTABLE) as page:
        page.size(1280, 800)
        page.open(url + "/")
        page.click("#tools-on")
        page.type("#input", "The weather in Rome?")
        page.press_enter()
        page.wait("document.querySelector('.call')")
        assert page.run("document.querySelector('.call strong').textContent") == "get_weather"
        assert json.loads(page.run("document.querySelector('.call pre').textContent")) == {"city": "Rome"}
        assert page.run("document.querySelector('.thought div').textContent") == "I should look"
        assert "calls tools" in page.run("document.querySelector('.facts').textContent")
        engine.speak = "<think></think>It is sunny."
        page.type(".call input", "sunny, 25 degrees")
        page.press_enter()
        page.wait("document.querySelectorAll('.turn.assistant:not(.waiting)').length === 2")
        assert page.run("[...document.querySelectorAll('.turn.assistant .body')].at(-1).textContent") == "It is sunny."
        assert page.errors == []
    sent = [bytes(bytes_to_ids(m.input_ids).tolist()).decode() for m in engine.received if isinstance(m, Generate)]
    assert "<tool>sunny, 25 degrees" in sent[-1]
