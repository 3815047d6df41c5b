"""Schemathesis over the OpenAPI document against the real server, for a minute: no 5xx, every answer has the form that
the document promises, and afterwards the server is idle, green and its ledger balances (HAZARDS 7).

By hand, for as long as you like: ``schemathesis run URL/openapi.json --max-time 1200`` with the checks below.
"""

from __future__ import annotations

import os
import re
import time

import pytest

from live_server import LiveServer
from support.client_env import environment, run
from support.tiny_model_dir import write_tiny_model

CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,response_headers_conformance"
FLAGS = ["--load-format", "dummy", "--enable-metrics", "--enable-response-store", "--tool-call-parser", "qwen25"]
HOOKS = """
import schemathesis

@schemathesis.hook
def map_body(context, body):
    # a request that may not wait a moment is answered 504, as it asks
    if isinstance(body, dict) and isinstance(body.get("queue_timeout"), (int, float)) and body["queue_timeout"] < 60:
        body = {name: value for name, value in body.items() if name != "queue_timeout"}
    return body
"""
pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(1200)]


def test_no_generated_request_breaks_the_server_or_the_document(tmp_path):
    python = environment("clients", tmp_path / "venv")
    write_tiny_model(tmp_path / "model", context=128)
    flags = ["--model-path", str(tmp_path / "model"), *FLAGS, "--file-storage-path", str(tmp_path / "files")]
    with LiveServer(*flags) as server:
        words = ["run", f"{server.url}/openapi.json", "--max-time", "60", "--checks", CHECKS, "--no-color"]
        words += ["--suppress-health-check", "all", "--continue-on-failure", "--request-timeout", "60"]
        (tmp_path / "hooks.py").write_text(HOOKS)
        environ = {**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(tmp_path)}
        done = run(python.parent / "schemathesis", *words, cwd=tmp_path, env=environ)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert re.search(r"\b[1-9]\d* generated", done.stdout), done.stdout[-2000:]
        assert re.search(r"Tested: [1-9]", done.stdout), done.stdout[-2000:]
        assert server.get("/health").json()["status"] == "ok"
        deadline = time.monotonic() + 60
        while True:
            state = server.info()["internal_states"][0]
            if state["running"] == state["waiting"] == 0:
                break
            assert time.monotonic() < deadline, state
            time.sleep(0.2)
        held = state["tokens_free"] + state["tokens_evictable"] + state["tokens_locked"]
        assert held == state["tokens_total"]
        assert state["tokens_in_flight"] == 0
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 4})
        assert answer.status_code == 200
