"""The page at / in headless Chromium, on a real server with a key: chat, schema, tools, live view, small screens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from live_server import LiveServer
from support import chrome

EXECUTABLE = chrome.find()
IMAGES = Path(__file__).parents[2] / "docs" / "images"
KEY = "page-test-key"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.timeout(600),
]
WAIT = 180.0


def picture(page: chrome.Browser, name: str, scratch: Path) -> None:
    """Into docs/images where that picture is missing (delete it to have it taken anew), else into ``scratch``."""
    kept = IMAGES / name
    kept.parent.mkdir(exist_ok=True)
    page.screenshot(scratch / name if kept.exists() else kept)


@pytest.fixture(scope="module")
def keyed() -> Iterator[LiveServer]:
    with LiveServer("--api-key", KEY, "--max-total-tokens", "16384") as running:
        yield running


@pytest.fixture(scope="module")
def page(keyed: LiveServer) -> Iterator[chrome.Browser]:
    """The page, with the key typed in."""
    assert EXECUTABLE is not None
    with chrome.browser(EXECUTABLE) as browser:
        browser.size(1280, 800)
        browser.open(keyed.url + "/")
        browser.wait("document.querySelector('#model').textContent === 'needs an API key'")
        browser.click("#key-button")
        browser.type("#key", KEY)
        browser.press_enter()
        browser.wait("document.querySelector('#model').textContent.startsWith('SmolLM2')")
        browser.errors.clear()  # the refused first call is in the console, as it should be
        yield browser


def ask(page: chrome.Browser, text: str, **settings: object) -> None:
    for name, value in settings.items():
        page.run(
            f"(() => {{ const e = document.querySelector('#{name}'); e.value = {json.dumps(str(value))};"
            "e.dispatchEvent(new Event('input')); })()"
        )
    page.type("#input", text)
    page.press_enter()


def answered(page: chrome.Browser, count: int) -> None:
    page.wait(f"document.querySelectorAll('.turn.assistant:not(.waiting)').length === {count}", WAIT)


def last(page: chrome.Browser, selector: str) -> str:
    script = f"[...document.querySelectorAll('{selector}')].at(-1).textContent"
    found = page.run(script)
    assert isinstance(found, str)
    return found


def new_chat(page: chrome.Browser) -> None:
    page.click("#clear")
    page.wait("document.querySelectorAll('.turn').length === 0")


def test_a_conversation_streams_and_its_second_turn_is_cached(page: chrome.Browser, tmp_path: Path) -> None:
    ask(page, "What is the capital of France?", temperature=0, max_tokens=24)
    answered(page, 1)
    assert "Paris" in last(page, ".turn.assistant .body")
    ask(page, "And of Italy?")
    answered(page, 2)
    facts = page.run("[...document.querySelectorAll('[data-cached]')].map(e => [+e.dataset.cached, +e.dataset.prompt])")
    assert facts[1][0] >= facts[0][1]  # the whole first prompt, at least
    assert "tokens/s" in last(page, ".facts")
    assert page.errors == []
    page.run("document.querySelector('#log').scrollTop = 0")
    picture(page, "ui.png", tmp_path)


def test_stop_ends_the_request_on_the_server(page: chrome.Browser, keyed: LiveServer) -> None:
    new_chat(page)
    ask(page, "Count from one to a thousand.", max_tokens=2000)
    page.wait("document.querySelector('.turn.assistant .body')?.textContent.length > 3", WAIT)
    page.click("#send")
    answered(page, 1)
    assert "stopped here" in last(page, ".facts")
    headers = {"authorization": f"Bearer {KEY}"}
    deadline = time.monotonic() + 20
    while keyed.get("/v1/loads", headers=headers).json()[0]["running"]:
        assert time.monotonic() < deadline, "the stopped request still runs"
        time.sleep(0.1)


def test_a_schema_shapes_the_answer(page: chrome.Browser) -> None:
    new_chat(page)
    page.click("#schema-on")
    schema = {
        "type": "object",
        "properties": {"country": {"type": "string", "maxLength": 12}, "rank": {"type": "integer", "maximum": 9}},
        "required": ["country", "rank"],
        "additionalProperties": False,
    }
    ask(page, "Name a country and a rank.", schema=json.dumps(schema), max_tokens=80)
    answered(page, 1)
    value = json.loads(last(page, ".turn.assistant .body"))
    assert value.keys() == {"country", "rank"}
    page.click("#schema-on")


def test_unreadable_tools_are_said_and_nothing_is_sent(page: chrome.Browser) -> None:
    new_chat(page)
    page.click("#tools-on")
    sent = len([url for url in page.requests if url.endswith("/v1/chat/completions")])
    ask(page, "Hello", tools="[{")
    answered(page, 1)
    assert "JSON" in last(page, "#tools-problem")
    assert last(page, ".failure").startswith("Tools:")
    page.run("1")
    assert len([url for url in page.requests if url.endswith("/v1/chat/completions")]) == sent
    page.click("#tools-on")


def test_the_servers_refusal_is_shown_in_its_own_words(page: chrome.Browser) -> None:
    new_chat(page)
    ask(page, "Hello", max_tokens=999999)
    answered(page, 1)
    assert "999999" in last(page, ".failure")
    page.errors.clear()


def test_what_a_model_writes_never_becomes_markup(page: chrome.Browser) -> None:
    text = "<img src=x onerror=alert(1)> **bold** `a<b>`\n\n```html\n<script>1</script>\n```\n\n1. one\n2. two"
    found = page.run(
        "import('./ui/markdown.js').then(m => { const d = document.createElement('div');"
        f"d.append(m.render({json.dumps(text)}));"
        "return [d.querySelectorAll('img,script').length, d.querySelector('strong').textContent,"
        "d.querySelector('pre').textContent, d.querySelectorAll('li').length, d.querySelector('p').textContent]; })"
    )
    assert found == [0, "bold", "<script>1</script>", 2, "<img src=x onerror=alert(1)> bold a<b>"]


def test_the_live_view_shows_the_tree_and_flushes_it(page: chrome.Browser, keyed: LiveServer, tmp_path: Path) -> None:
    page.size(1280, 960)
    new_chat(page)
    for turn, question in enumerate(("Name a tree.", "Name a river."), start=1):
        ask(page, question, temperature=0, max_tokens=8, schema="", tools="")
        answered(page, turn)
    page.click("#tab-engine")
    page.wait("document.querySelectorAll('#tree rect').length >= 2")
    state = keyed.get("/server_info", headers={"authorization": f"Bearer {KEY}"}).json()["internal_states"][0]
    assert f"{state['tokens_evictable']:,.0f} more cached" in page.run("document.querySelector('#tiles').textContent")
    assert "tokens in" in page.run("document.querySelector('#tree-note').textContent")
    page.wait("document.querySelectorAll('#throughput polyline').length === 1")
    picture(page, "ui-engine.png", tmp_path)
    page.click("#flush")
    page.wait("document.querySelector('#tree').textContent.includes('Nothing is cached')")
    page.click("#tab-chat")
    assert page.errors == []


@pytest.mark.parametrize("view", ["chat", "engine"])
def test_narrow_screens_scroll_in_one_direction_only(page: chrome.Browser, view: str) -> None:
    page.size(360, 740, dark=True)
    page.click("#tab-engine")
    page.wait("document.querySelector('.tile')")
    page.click(f"#tab-{view}")
    widths = page.run("[document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]")
    assert max(widths[:2]) <= widths[2]
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    page.click("#tab-chat")


def test_nothing_is_asked_of_anybody_else(page: chrome.Browser, keyed: LiveServer) -> None:
    assert page.requests
    assert {url for url in page.requests if not url.startswith((keyed.url + "/", "about:", "data:"))} == set()
