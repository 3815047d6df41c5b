"""Fixtures: the front over the fake engine, and the HTTP application over that front."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from ceiba.config.records import Config
from support.front_world import World, make_world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with make_world() as made:
        yield made


@pytest.fixture
async def worlds() -> AsyncIterator[Callable[..., Awaitable[World]]]:
    """Worlds with a configuration of the test's own."""
    async with AsyncExitStack() as stack:

        async def make(config: Config | None = None, **options: Any) -> World:
            return await stack.enter_async_context(make_world(config, **options))

        yield make
