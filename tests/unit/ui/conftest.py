"""The HTTP application over the fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.front_world import World, make_world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with make_world() as made:
        yield made
