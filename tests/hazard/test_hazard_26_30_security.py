"""HAZARDS 26 and 30 at the front: nothing received is ever executed or unpickled; every route asks for its key.

Hazard 30's table of routes, keys, spellings and addresses is ``tests/unit/server/test_server_auth.py``.
"""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

import ceiba
from support.fake_engine import make_config
from support.front_world import make_world

SOURCES = sorted(Path(ceiba.__file__).parent.rglob("*.py"))
BANNED_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
BANNED_CALLS = {"eval", "exec"}


def test_there_are_sources_to_check():
    assert len(SOURCES) > 50


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(Path(ceiba.__file__).parent)))
def test_no_module_can_unpickle_or_evaluate(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module.split(".")[0]]
        assert not BANNED_MODULES & set(names), f"{path}:{node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in BANNED_CALLS, f"{path}:{node.lineno}"


class Trap:
    fired = False

    def __reduce__(self):
        return (setattr, (Trap, "fired", True))


async def test_pickled_bodies_are_bad_json():
    data = pickle.dumps(Trap())
    async with make_world(make_config()) as world:
        for path in (
            "/generate",
            "/v1/completions",
            "/v1/chat/completions",
            "/tokenize",
            "/detokenize",
            "/abort_request",
        ):
            for kind in ("application/json", "application/octet-stream", "application/x-pickle"):
                reply = await world.client.post(path, content=data, headers={"content-type": kind})
                assert reply.status_code == 400, path
        assert not Trap.fired
        good = await world.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert good.status_code == 200


async def test_code_in_a_request_is_refused_by_name():
    async with make_world() as world:
        for body in (
            {"prompt": "x", "custom_logit_processor": "lambda: 1"},
            {"prompt": "x", "custom_params": {"a": 1}},
        ):
            reply = await world.client.post("/v1/completions", json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] in body


async def test_a_key_is_asked_for_on_every_route_that_changes_state():
    async with make_world(make_config(admin_api_key="admin"), client_ip="10.0.0.1") as world:
        for path in ("/flush_cache", "/abort_request", "/update_weights_from_disk", "/pause_generation"):
            assert (await world.client.post(path, json={})).status_code == 401
    async with make_world(client_ip="10.0.0.1") as world:
        for path in ("/flush_cache", "/abort_request", "/update_weights_from_disk", "/pause_generation"):
            assert (await world.client.post(path, json={})).status_code == 403
