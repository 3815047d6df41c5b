"""Keys and access levels, route by route; and that no route is left out."""

from __future__ import annotations

import itertools
import re

import httpx
import pytest

from ceiba.server.auth import Access, AccessTable
from support.fake_engine import make_config
from support.front_world import make_world

KEY, ADMIN = "user-key-123", "admin-key-456"
OPEN = {"/health", "/health_generate", "/metrics", "/", "/ui/app.js"}
"""Probes, metrics, and the page with its files, which hold nothing of this server."""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def routes(app) -> list[tuple[str, str]]:
    """(method, concrete path) of every route of the application."""
    found = []
    for route in app.routes:
        path = route.path.replace("{model_id:path}", "fake-model")
        path = path.replace("{name}", "app.js") if path.startswith("/ui/") else path
        path = re.sub(r"\{\w+\}", "x1", path)
        found += [(method, path) for method in sorted(route.methods)]
    return found


async def test_every_route_but_probes_and_the_page_needs_a_key():
    async with make_world(make_config(api_key=KEY)) as world:
        known = routes(world.app)
        assert len(known) > 70
        for method, path in known:
            for headers in ({}, bearer("wrong"), bearer(""), {"Authorization": f"Basic {KEY}"}, {"Authorization": KEY}):
                reply = await world.client.request(method, path, headers=headers)
                assert (reply.status_code == 401) == (path not in OPEN), (method, path, headers)
            assert (await world.client.request(method, path, headers=bearer(KEY))).status_code != 401, path
        assert world.engine.flushes >= 1


@pytest.mark.parametrize("path", ["/flush_cache", "/abort_request", "/pause_generation", "/load_lora_adapter"])
async def test_admin_routes_need_the_admin_key_when_there_is_one(path):
    async with make_world(make_config(api_key=KEY, admin_api_key=ADMIN)) as world:
        assert (await world.client.post(path, headers=bearer(KEY))).status_code == 401
        assert (await world.client.post(path)).status_code == 401
        assert (await world.client.post(path, headers=bearer(ADMIN))).status_code in {200, 400, 501}


async def test_the_admin_key_alone_leaves_inference_open():
    async with make_world(make_config(admin_api_key=ADMIN), client_ip="10.0.0.9") as world:
        assert (await world.client.get("/v1/models")).status_code == 200
        assert (await world.client.post("/flush_cache")).status_code == 401
        assert (await world.client.post("/flush_cache", headers=bearer(ADMIN))).status_code == 200


@pytest.mark.parametrize(
    ("ip", "headers", "allowed"),
    [
        ("127.0.0.1", {}, True),
        ("127.8.9.1", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        ("10.0.0.9", {}, False),
        ("::ffff:10.0.0.9", {}, False),
        ("192.168.1.2", {"x-forwarded-for": "127.0.0.1"}, False),
        ("127.0.0.1", {"x-forwarded-for": "10.0.0.9"}, False),
        ("127.0.0.1", {"forwarded": "for=10.0.0.9"}, False),
        ("127.0.0.1", {"x-real-ip": "10.0.0.9"}, False),
        ("127.0.0.1", {"origin": "https://evil.example"}, False),
        ("127.0.0.1", {"origin": "null"}, False),
        ("127.0.0.1", {"origin": "http://localhost:3000"}, True),
        ("127.0.0.1", {"host": "evil.example:30000"}, False),
        ("127.0.0.1", {"host": "10.0.0.7:30000"}, False),
        ("127.0.0.1", {"host": "[::1"}, False),
        ("127.0.0.1", {"host": "localhost:30000"}, True),
        ("127.0.0.1", {"host": "app.localhost:30000"}, True),
        ("127.0.0.1", {"host": "127.0.0.1:30000"}, True),
        ("127.0.0.1", {"host": "[::1]:30000"}, True),
        ("127.0.0.1", {"host": "[2001:db8::1]:30000"}, False),
        ("127.0.0.1", {"sec-fetch-site": "cross-site"}, False),
        ("127.0.0.1", {"sec-fetch-site": "same-origin"}, True),
        ("testclient", {}, False),
    ],
)
async def test_without_keys_admin_routes_answer_on_loopback_only(ip, headers, allowed):
    async with make_world(client_ip=ip) as world:
        reply = await world.client.post("/flush_cache", headers=headers)
        assert reply.status_code == (200 if allowed else 403), reply.text
        assert world.engine.flushes == int(allowed)
        assert (await world.client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "//flush_cache",
        "/./flush_cache",
        "/flush_cache/",
        "/FLUSH_CACHE",
        "/health/../flush_cache",
        "/v1/models/../../x",
    ],
)
async def test_no_spelling_of_a_path_gets_past_the_key(path):
    for config, ip in ((make_config(), "10.0.0.9"), (make_config(api_key=KEY), "127.0.0.1")):
        async with make_world(config, client_ip=ip) as world:
            request = world.client.build_request("POST", "http://server/")
            request.url = httpx.URL("http://server", raw_path=path.encode())
            reply = await world.client.send(request)
            assert reply.status_code in {401, 403, 404, 405}, (path, reply.status_code)
            assert world.engine.flushes == 0


async def test_the_decision_is_on_the_path_and_not_on_the_host_header():
    async with make_world(make_config(api_key=KEY)) as world:
        reply = await world.client.post("/flush_cache", headers={"host": "server/health"})
        assert reply.status_code == 401


async def test_a_mount_prefix_does_not_open_anything():
    async with make_world(make_config(api_key=KEY), root_path="/llm") as world:
        assert (await world.client.get("/llm/health")).status_code == 200
        for path in ("/llm/flush_cache", "/flush_cache"):
            assert (await world.client.post(path)).status_code == 401
        assert (await world.client.post("/llm/flush_cache", headers=bearer(KEY))).status_code == 200


async def test_keys_compare_in_constant_time_and_are_never_shown():
    async with make_world(make_config(api_key=KEY, admin_api_key=ADMIN)) as world:
        for path in ("/server_info", "/get_server_info", "/model_info", "/openapi.json"):
            reply = await world.client.get(path, headers=bearer(KEY))
            assert reply.status_code == 200
            assert KEY not in reply.text
            assert ADMIN not in reply.text
        reply = await world.client.get("/server_info", headers=bearer(KEY[:-1]))
        assert KEY[:-1] not in reply.text


async def test_x_api_key_works_as_some_clients_send_it():
    async with make_world(make_config(api_key=KEY)) as world:
        assert (await world.client.get("/v1/models", headers={"x-api-key": KEY})).status_code == 200
        assert (await world.client.get("/v1/models", headers={"x-api-key": "x"})).status_code == 401


async def test_keys_of_any_bytes_are_compared_not_parsed():
    async with make_world(make_config(api_key="schlüssel")) as world:
        good = {"Authorization": "Bearer schlüssel".encode()}
        assert (await world.client.get("/v1/models", headers=good)).status_code == 200
        assert (await world.client.get("/v1/models", headers={"Authorization": b"Bearer \xff\xfe"})).status_code == 401


async def test_websockets_are_refused():
    async with make_world() as world:
        sent = []

        async def receive():
            return {"type": "websocket.connect"}

        async def send(message):
            sent.append(message)

        await world.app({"type": "websocket", "path": "/generate", "headers": [], "query_string": b""}, receive, send)
        assert sent[0]["type"] == "websocket.close"


def test_an_undeclared_path_is_an_admin_path():
    table = AccessTable()
    table.declare("/a", Access.OPEN)
    table.declare("/b/{id}", Access.USER)
    table.declare("/b/special", Access.ADMIN)
    expected = {
        "/a": Access.OPEN,
        "/b/1": Access.USER,
        "/b/special": Access.ADMIN,
        "/c": Access.ADMIN,
        "/a/": Access.ADMIN,
    }
    assert {path: table.level(path) for path in expected} == expected
    assert not any(table.known(p) for p in itertools.chain(["/c", "/", ""]))


FOREIGN = "https://evil.example"


@pytest.mark.parametrize(
    ("method", "headers", "allowed"),
    [
        ("POST", {}, True),
        ("POST", {"origin": "http://localhost:8000"}, True),
        ("POST", {"origin": "https://app.example", "sec-fetch-site": "cross-site"}, True),
        ("POST", {"host": "mybox:30000", "origin": "http://mybox:30000"}, True),
        ("POST", {"origin": FOREIGN}, False),
        ("POST", {"origin": "null"}, False),
        ("POST", {"origin": "https://app.example.evil.example"}, False),
        ("POST", {"sec-fetch-site": "cross-site"}, False),
        ("POST", {"host": "evil.example:30000", "origin": "http://evil.example:30000"}, False),
        ("POST", {"host": "evil.example.internal.evil.example"}, False),
        ("POST", {"host": "0.0.0.0:30000", "origin": FOREIGN}, False),
        ("POST", {"host": "0.0.0.0:30000"}, True),
        ("POST", {"host": "localhost.:30000"}, True),
        ("POST", {"host": "a.b.localhost"}, True),
        ("POST", {"host": "host.docker.internal:30000"}, True),
        ("POST", {"host": "app.example", "origin": "https://app.example"}, True),
        ("POST", {"origin": "vscode-webview://1a2b", "sec-fetch-site": "cross-site"}, True),
        ("POST", {"origin": "app://obsidian.md"}, True),
        ("GET", {"origin": FOREIGN}, True),
        ("GET", {"host": "evil.example:30000"}, False),
        ("GET", {"host": "ceiba.example", "x-forwarded-for": "10.0.0.1"}, True),
        ("POST", {"host": "ceiba.example", "forwarded": "for=10.0.0.1", "origin": "https://ceiba.example"}, True),
    ],
)
async def test_pages_of_other_sites_cannot_use_a_server_without_a_key(method, headers, allowed):
    """Neither by a name that resolves to loopback (DNS rebinding: they could read the answers) nor blindly."""
    path, body = ("/v1/models", None) if method == "GET" else ("/v1/completions", {"prompt": "x", "max_tokens": 1})
    async with make_world(make_config(allowed_origins=("https://app.example",))) as world:
        reply = await world.client.request(method, path, json=body, headers=headers)
        assert reply.status_code == (200 if allowed else 403), reply.text
        assert len(world.engine.received) == (1 if allowed and body else 0)
        assert (await world.client.get("/health", headers=headers)).status_code == 200
    key = {"authorization": f"Bearer {KEY}"}
    async with make_world(make_config(api_key=KEY)) as world:
        reply = await world.client.request(method, path, json=body, headers=headers | key)
        assert reply.status_code == 200, "a key says enough"


async def test_where_any_page_may_call_a_name_says_nothing():
    async with make_world(make_config(allowed_origins=("*",))) as world:
        for headers in ({"host": "evil.example", "origin": "http://evil.example"}, {"origin": "null"}):
            reply = await world.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
            assert reply.status_code == 200


async def test_a_server_for_others_asks_no_questions_about_names():
    async with make_world(make_config(host="0.0.0.0")) as world:
        headers = {"host": "ceiba.default.svc"}
        reply = await world.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
        assert reply.status_code == 200
