"""Who gets what at ``/``, and that the page's files are complete, closed and public."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from ceiba import ui
from support.fake_engine import make_config
from support.front_world import World, make_world

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
STATIC = files("ceiba.ui").joinpath("static")
NAMES = sorted(entry.name for entry in STATIC.iterdir())


@pytest.mark.parametrize(
    ("accept", "page"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML;q=0.3", True),
        ("*/*", False),
        ("", False),
        ("application/json", False),
        ("text/plain, text/html;q=0", False),
        ("text/html; q=0.0, */*", False),
    ],
)
async def test_browsers_get_the_page_and_probes_ollamas_text(world: World, accept: str, page: bool) -> None:
    answer = await world.client.get("/", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["vary"] == "accept"
    if page:
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "<title>Ceiba</title>" in answer.text
    else:
        assert (answer.text, answer.headers["content-type"]) == ("Ollama is running", "text/plain; charset=utf-8")
    head = await world.client.head("/", headers={"accept": accept})
    assert (head.status_code, head.content) == (200, b"")


async def test_the_page_needs_no_key_and_its_data_does() -> None:
    async with make_world(make_config(api_key="secret")) as world:
        for path in ("/", *(f"/ui/{name}" for name in NAMES)):
            assert (await world.client.get(path, headers={"accept": BROWSER})).status_code == 200, path
        for path in ("/server_info", "/v1/models", "/v1/loads"):
            assert (await world.client.get(path)).status_code == 401, path


async def test_it_can_be_turned_off() -> None:
    async with make_world(make_config(disable_ui=True)) as world:
        assert (await world.client.get("/", headers={"accept": BROWSER})).text == "Ollama is running"
        assert (await world.client.get("/ui/app.js")).status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/ui/../auth.py", "/ui/%2e%2e/%2e%2e/server/auth.py", "/ui/static/app.js", "/ui/", "/ui/x.js", "/ui/__init__.py"],
)
async def test_only_the_files_of_the_page_exist(world: World, path: str) -> None:
    assert (await world.client.get(path)).status_code in {403, 404}


async def test_files_are_typed_and_not_sent_twice(world: World) -> None:
    kinds = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
    for name in NAMES:
        first = await world.client.get(f"/ui/{name}")
        assert first.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
        assert first.headers["x-content-type-options"] == "nosniff"
        again = await world.client.get(f"/ui/{name}", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_the_policy_lets_nothing_in_from_elsewhere(world: World) -> None:
    policy = (await world.client.get("/", headers={"accept": BROWSER})).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?:", policy)


def test_no_file_names_another_host_or_slips_past_the_policy() -> None:
    for name in NAMES:
        text = STATIC.joinpath(name).read_text()
        addresses = set(re.findall(r"https?://[^\s\"'`<>)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, (name, addresses)
        assert "innerHTML" not in text
        assert "eval(" not in text


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.files: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.append(given["id"] or "")
        source = given.get("src") or (given.get("href") if tag == "link" else None)
        if source:
            self.files.append(source)
        self.inline += [name for name in given if name.startswith("on") or name == "style"]


def test_the_page_and_its_scripts_agree() -> None:
    page = _Page()
    page.feed(STATIC.joinpath("index.html").read_text())
    assert len(page.ids) == len(set(page.ids))
    assert not page.inline
    wanted = {name.removeprefix("ui/") for name in page.files}
    for name in NAMES:
        if name.endswith(".js"):
            text = STATIC.joinpath(name).read_text()
            wanted |= set(re.findall(r'from "\./([\w.]+)"', text))
            used = set(re.findall(r'\$\("([\w-]+)"\)', text))
            assert used <= set(page.ids), (name, used - set(page.ids))
    assert wanted | {"index.html"} == set(NAMES)
    assert all(ui.asset(name) is not None for name in NAMES)
