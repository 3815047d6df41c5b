"""The load client against a small server that misbehaves on request; the traffic's fingerprints; the figures."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math

import pytest
from aiohttp import web

from ceiba.bench import datasets, workloads
from ceiba.bench.client import Job, Outcome, Target
from ceiba.bench.drive import Run, drive
from ceiba.bench.report import quantile, summary, workload_line
from ceiba.bench.serve import main
from ceiba.core.errors import ConfigError

FINGERPRINTS = {
    "warm": "f8fc09874b3814a1",
    "single": "aa84acc8efc5ad7a",
    "burst": "2abdfae76e0515d4",
    "prefix": "e80fe8018131d06f",
    "prefill": "ac32b32e4273c636",
    "long": "581b19b6ef0a990c",
    "online": "cb0bef2df35c498d",
}
"""sha256 of [[ids, output], …] as the neutral client that other engines were measured with sends them."""


@pytest.mark.parametrize("name", workloads.NAMES)
def test_traffic_is_that_of_the_neutral_client(name):
    sizes = workloads.Sizes(
        vocab=30000, scale=0.0625, len_scale=0.25, burst_concurrency=16, prefix_concurrency=8, rate=4.0
    )
    load = workloads.build(name, sizes)
    data = json.dumps([[job.prompt, job.max_tokens] for job in load.jobs]).encode()
    assert hashlib.sha256(data).hexdigest()[:16] == FINGERPRINTS[name]
    expected = {"single": 1, "prefill": 1, "burst": 16, "prefix": 8, "long": 32}.get(name)
    assert load.concurrency == expected
    assert load.rate == (4.0 if name == "online" else None)


class Server:
    """Streams completions in OpenAI's form; prompts whose first id is below 10 ask for a particular fault."""

    def __init__(self) -> None:
        self.in_flight = self.most = self.requests = 0
        self.bodies: list[dict] = []

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.requests += 1
        fault = body["prompt"][0]
        if fault == 1:
            return web.json_response({"error": {"message": "no such thing"}}, status=400)
        if fault == 6 and self.requests == 1:
            request.transport.close()
            return web.Response()
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(data: dict) -> None:
            await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")

        count = body["max_tokens"] - (1 if fault == 2 else 0)
        for i in range(count):
            if fault == 5 and i == 1:
                await event({"error": {"message": "lost a process"}})
                break
            await asyncio.sleep(0.02)
            await event({"choices": [{"text": "x", "finish_reason": None}]})
        await event({"choices": [{"text": "", "finish_reason": "length"}]})
        usage = {
            "prompt_tokens": len(body["prompt"]) + (fault == 3),
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        if fault != 4:
            await event({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self.in_flight -= 1
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "the-model"}]})


@pytest.fixture
async def server():
    made = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", made.completions)
    app.router.add_get("/v1/models", made.models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield made
    await runner.cleanup()


async def test_a_good_request_is_timed_event_by_event(server):
    for _ in range(8):  # one that was held up in the middle has a long gap and a short one
        run = await drive(Target(server.url, "m"), [Job([100, 101, 102], 5)])
        (outcome,) = run.outcomes
        assert outcome.error == ""
        if all(0.015 < gap < 0.5 for gap in outcome.gaps):
            break
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens, outcome.events) == (3, 5, 2, 5)
    assert len(outcome.gaps) == 4
    assert all(0.015 < gap < 0.5 for gap in outcome.gaps)
    assert outcome.ttft >= 0.015
    assert outcome.latency == pytest.approx(outcome.ttft + sum(outcome.gaps))
    body = server.bodies[0]
    assert body == {
        "model": "m",
        "prompt": [100, 101, 102],
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (1, "no such thing"),
        (2, "completion_tokens 3 of 4"),
        (3, "prompt_tokens 3 for 2 ids"),
        (4, "no usage event"),
        (5, "lost a process"),
    ],
)
async def test_a_request_that_lacks_anything_counts_as_failed(server, fault, words):
    run = await drive(Target(server.url, "m"), [Job([fault, 100], 4)])
    assert words in run.outcomes[0].error
    line = workload_line("x", run)
    assert (line["ok"], line["err"]) == (0, 1)
    assert words in line["first_err"]


async def test_a_connection_closed_before_the_first_byte_is_tried_once_more(server):
    run = await drive(Target(server.url, "m"), [Job([6, 100], 2)])
    assert run.outcomes[0].error == ""
    assert server.requests == 2


async def test_concurrency_and_rate_are_kept(server):
    jobs = [Job([100, i], 3) for i in range(12)]
    await drive(Target(server.url, "m"), jobs, concurrency=4)
    assert server.most == 4
    server.most = 0
    run = await drive(Target(server.url, "m"), jobs, rate=40.0)
    assert 0.1 < run.seconds < 3.0  # 12 gaps of 25 ms on average
    assert server.most < 12


async def test_no_server_is_an_error_of_one_outcome():
    run = await drive(Target("http://127.0.0.1:9", "m"), [Job([100], 1)])
    assert "ClientConnectorError" in run.outcomes[0].error


def test_quantile_takes_the_value_at_the_rank():
    assert quantile([3, 1, 2, 4], 0.5) == 3
    assert quantile([1, 2], 0.99) == 2
    assert quantile([5], 0.0) == 5
    assert math.isnan(quantile([], 0.5))


def test_figures_of_a_known_run():
    outcomes = [
        Outcome(prompt_tokens=10, output_tokens=3, cached_tokens=4, ttft=0.1, latency=0.5, gaps=[0.1, 0.3], events=3),
        Outcome(prompt_tokens=20, output_tokens=5, cached_tokens=0, ttft=0.3, latency=1.1, gaps=[0.4, 0.4], events=3),
        Outcome(error="boom"),
    ]
    line = workload_line("burst", Run(outcomes, 2.0))
    assert line == {
        "workload": "burst",
        "ok": 2,
        "err": 1,
        "s": 2.0,
        "req/s": 1.0,
        "out_tok/s": 4.0,
        "total_tok/s": 19.0,
        "ttft_ms": {"p50": 300.0, "p99": 300.0},
        "itl_ms": {"p50": 400.0, "p99": 400.0},
        "events_per_token": 0.75,
        "tpot_ms_p50": 200.0,
        "first_err": "boom",
    }
    record = summary(Run(outcomes, 2.0))
    assert record["mean_ttft_ms"] == pytest.approx(200)
    assert record["median_tpot_ms"] == pytest.approx(200)
    assert record["total_cached_tokens"] == 4
    assert record["concurrency"] == pytest.approx(0.8)


async def test_the_command_prints_json_lines_and_appends_a_record(server, capsys, tmp_path):
    file = tmp_path / "out.jsonl"
    flags = ["--base-url", server.url, "--output-file", str(file), "--no-progress"]
    small = ["--scale", "0.001", "--len-scale", "0.01"]
    assert await asyncio.to_thread(main, [*flags, "--workload", "single,prefix", *small]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["workload"], line["ok"], line["err"]) for line in lines] == [("single", 2, 0), ("prefix", 1, 0)]

    drawn = ["--random-input", "12", "--random-output", "3", "--random-range-ratio", "0.5", "--output-details"]
    assert await asyncio.to_thread(main, [*flags, "--num-prompts", "4", "--max-concurrency", "2", *drawn]) == 0
    record = json.loads(file.read_text().splitlines()[-1])
    assert record["completed"] == 4
    assert record["model"] == "the-model"
    assert all(6 <= n <= 12 for n in record["input_lens"])
    assert "completed" in capsys.readouterr().out

    assert await asyncio.to_thread(main, [*flags, "--workload", "nonsense"]) == 2


def test_generated_shared_prefixes_share_exactly_their_prefix():
    options = datasets.DatasetOptions(groups=3, prompts_per_group=4, system_prompt_len=50, question_len=7, output_len=9)
    jobs = datasets.load("generated-shared-prefix", options, seed=5)
    assert len(jobs) == 12
    systems = {tuple(job.prompt[:50]) for job in jobs}
    assert len(systems) == 3
    assert len({tuple(job.prompt) for job in jobs}) == 12
    assert [job.prompt for job in jobs] == [
        job.prompt for job in datasets.load("generated-shared-prefix", options, seed=5)
    ]


def test_conversations_from_a_file(tmp_path):
    file = tmp_path / "sharegpt.json"
    talk = [{"from": "human", "value": "A question of some length?"}, {"from": "gpt", "value": "word " * 20}]
    file.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}]))
    jobs = datasets.load("sharegpt", datasets.DatasetOptions(num_prompts=3, path=str(file)), seed=1)
    assert jobs == [Job("A question of some length?", 25)] * 3
    with pytest.raises(ConfigError, match="--dataset-path"):
        datasets.load("sharegpt", datasets.DatasetOptions(), seed=1)
    lines = tmp_path / "speed.jsonl"
    lines.write_text('{"turns": ["first turn", "second"], "max_tokens": 7}\n')
    assert datasets.load("speed_bench", datasets.DatasetOptions(num_prompts=1, path=str(lines)), seed=1) == [
        Job("first turn", 7)
    ]
