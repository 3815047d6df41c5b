"""HAZARDS 2 and 3: one finish reason per choice, exactly once; one last chunk with usage and no choices."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from support.front_world import events, make_world

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"prompt": ["one", "two"]})


@pytest.mark.parametrize(("url", "body"), [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("ending", [{"max_tokens": 5}, {"stop": "e", "max_tokens": 60}, {"speak": "ok"}, {"burst": 3}])
async def test_each_choice_finishes_exactly_once(url, body, n, ending):
    async with make_world() as world:
        fields = dict(ending)
        world.engine.speak = fields.pop("speak", None)
        world.engine.burst = fields.pop("burst", 1)
        fields.setdefault("max_tokens", 8)
        reply = await world.client.post(url, json={**body, **fields, "n": n, "stream": True})
        finished: Counter[int] = Counter()
        for data in events(reply.text)[:-1]:
            (choice,) = json.loads(data)["choices"]
            assert choice["index"] not in finished, "an event after the end of its choice"
            if choice["finish_reason"] is not None:
                finished[choice["index"]] += 1
        choices = n * (2 if "prompt" in body else 1)
        assert finished == Counter(dict.fromkeys(range(choices), 1))
        await world.idle()


@pytest.mark.parametrize(("url", "body"), [CHAT, TEXT])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
async def test_usage_comes_once_at_the_end_without_choices(url, body, options):
    async with make_world() as world:
        fields = {**body, "n": 2, "max_tokens": 4, "stream": True}
        if options is not None:
            fields["stream_options"] = options
        data = events((await world.client.post(url, json=fields)).text)
        assert data[-1] == "[DONE]"
        chunks = [json.loads(d) for d in data[:-1]]
        if not (options or {}).get("include_usage"):
            assert all("usage" not in c and c["choices"] for c in chunks)
            return
        assert [c["choices"] == [] for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert all(c["usage"] is None for c in chunks[:-1])
        usage = chunks[-1]["usage"]
        choices = 2 * (2 if "prompt" in body else 1)
        assert usage["completion_tokens"] == 4 * choices
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        whole = (await world.client.post(url, json={**body, "n": 2, "max_tokens": 4})).json()["usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == whole[name]


@pytest.mark.parametrize(("url", "body"), [CHAT, TEXT])
async def test_continuous_usage_grows_to_the_total(url, body):
    async with make_world() as world:
        options = {"include_usage": True, "continuous_usage_stats": True}
        fields = {**body, "max_tokens": 4, "stream": True, "stream_options": options}
        chunks = [json.loads(d) for d in events((await world.client.post(url, json=fields)).text)[:-1]]
        counts = [c["usage"]["completion_tokens"] for c in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 4 * (2 if "prompt" in body else 1)
