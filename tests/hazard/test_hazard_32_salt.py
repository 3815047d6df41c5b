"""HAZARD 32: a tenant's cache salt keeps its prefixes to itself, on every route, and the API documents it."""

from __future__ import annotations

import pytest

from support.front_world import make_world

ROUTES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a long shared prefix"}], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a long shared prefix", "max_tokens": 1}),
    ("/generate", {"text": "a long shared prefix", "sampling_params": {"max_new_tokens": 1}}),
]


def cached(reply) -> int:
    assert reply.status_code == 200, reply.text
    body = reply.json()
    if "meta_info" in body:
        return body["meta_info"]["cached_tokens"]
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(("url", "body"), ROUTES)
async def test_only_the_same_salt_shares(url, body):
    async with make_world() as world:

        async def ask(**fields) -> int:
            return cached(await world.client.post(url, json={**body, **fields}))

        assert await ask(cache_salt="tenant-a") == 0
        assert await ask(cache_salt="tenant-b") == 0
        assert await ask() == 0
        assert await ask(extra_key="tenant-a") == 0
        assert await ask(cache_salt="tenant-a", extra_key="tenant-a") == 0
        assert await ask(cache_salt="tenant-a") > 0
        assert await ask(cache_salt="tenant-b") > 0
        assert await ask() > 0


async def test_the_salt_is_documented():
    async with make_world() as world:
        schemas = (await world.client.get("/openapi.json")).json()["components"]["schemas"]
        for name in ("ChatRequest", "CompletionRequest", "GenerateRequest"):
            assert "tenant" in schemas[name]["properties"]["cache_salt"]["description"]
