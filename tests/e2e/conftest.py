"""One real server on the default model, shared by the tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from live_server import LiveServer


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with LiveServer("--enable-metrics") as running:
        yield running


@pytest.fixture
def fresh(server: LiveServer) -> LiveServer:
    """The same server with an empty cache and nothing running."""
    response = server.post("/flush_cache")
    assert response.status_code == 200, response.text
    return server
