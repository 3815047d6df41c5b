"""Log lines: one format for all processes, request lines by level, nothing secret."""

from __future__ import annotations

import json
import logging

import pytest

from ceiba.config.records import ObsConfig
from ceiba.obs import logs
from support.fake_engine import make_config
from support.front_world import make_world


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def test_lines_are_plain_and_setup_twice_does_not_double_them(capsys):
    logs.setup(ObsConfig(), "scheduler")
    logs.setup(ObsConfig(), "scheduler")
    logging.getLogger("ceiba.x").info("ready: %d", 7)
    logging.getLogger("ceiba.x").warning("careful")
    logging.getLogger("ceiba.x").debug("hidden")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(" scheduler] ready: 7")
    assert second.endswith(" scheduler] warning: careful")


def test_http_lines_have_a_level_of_their_own(capsys):
    logs.setup(ObsConfig(log_level_http="warning"))
    logging.getLogger("uvicorn.access").info("GET /health 200")
    logging.getLogger("ceiba").info("shown")
    assert capsys.readouterr().err.count("\n") == 1


async def lines(caplog, **options) -> list[str]:
    caplog.set_level(logging.INFO, "ceiba.requests")
    config = make_config(obs=ObsConfig(log_requests=True, **options))
    async with make_world(config) as world:
        for stream in (False, True):
            await world.client.post(
                "/v1/completions", json={"prompt": "secret prompt", "max_tokens": 4, "rid": "r1", "stream": stream}
            )
        await world.client.get("/health_generate")
    return [r.getMessage() for r in caplog.records if r.name == "ceiba.requests"]


@pytest.mark.parametrize(
    ("level", "shows"), [(0, ()), (1, ("max_new_tokens",)), (2, ("max_new_tokens", "secret prompt"))]
)
async def test_levels(caplog, level, shows):
    got = await lines(caplog, log_requests_level=level)
    assert len(got) == 4
    assert all("r1" in line for line in got)
    for word in ("max_new_tokens", "secret prompt"):
        assert (word in got[0]) == (word in shows)
    assert "completion_tokens" in got[1]
    assert ("output" in got[1]) == ("output" in got[3]) == (level >= 2)


async def test_json_lines_parse(caplog):
    got = [json.loads(line) for line in await lines(caplog, log_requests_format="json", log_requests_level=3)]
    assert [g["event"] for g in got] == ["request received", "request finished"] * 2
    assert got[0]["input"] == ["secret prompt"]
    assert got[1]["completion_tokens"] == got[3]["completion_tokens"] == 4
    assert len(got[1]["output"]) == len(got[3]["output"]) == 4
