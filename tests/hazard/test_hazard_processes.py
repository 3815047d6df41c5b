"""Hazards 20–22: whatever kills a part, clients hear of it at once, nothing hangs, nothing is left, a restart works."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time

import httpx
import psutil
import pytest

from live_server import LiveServer, alive, free_port

LONG = {"prompt": [1000] * 8, "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


async def one(client: httpx.AsyncClient, stream: bool, started: asyncio.Event, result: dict) -> None:
    """Sends a long request and notes when and how it ended."""
    try:
        if stream:
            async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                async for line in response.aiter_lines():
                    started.set()
                    if '"error"' in line:
                        result["error"] = line
        else:
            response = await client.post("/v1/completions", json=LONG)
            result["status"] = response.status_code
            result["error"] = response.json().get("error")
    except httpx.HTTPError as error:
        result["error"] = repr(error)
    result["at"] = time.monotonic()


async def under_load(server: LiveServer, strike) -> list[dict]:
    """Six long requests, streaming and not; ``strike`` when tokens flow. Returns how each ended, times from then."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        started = asyncio.Event()
        results: list[dict] = [{} for _ in range(6)]
        tasks = [asyncio.create_task(one(client, i % 2 == 0, started, r)) for i, r in enumerate(results)]
        await asyncio.wait_for(started.wait(), 30)
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        strike()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
    for result in results:
        result["after"] = result["at"] - begun
    return results


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT], ids=["SIGKILL", "SIGABRT"])
@pytest.mark.parametrize(
    ("victim", "detokenizer"), [("scheduler", "process"), ("detokenizer", "process"), ("scheduler", "thread")]
)
def test_a_killed_child_is_noticed_in_two_seconds_and_nothing_is_left(victim, detokenizer, number):
    server = LiveServer("--detokenizer", detokenizer).start()
    try:
        family = server.family()
        roles = {"scheduler", "detokenizer"} if detokenizer == "process" else {"scheduler"}
        assert server.children().keys() == roles
        child = server.children()[victim]
        results = asyncio.run(under_load(server, lambda: child.send_signal(number)))
        for result in results:
            assert result["error"], result
            assert result["after"] < 2.0
        assert server.wait_exit(30) == 1
        psutil.wait_procs(family, 30)
        assert [p for p in family if alive(p)] == []
        assert f"the {victim} process died" in server.output
        again = LiveServer("--detokenizer", detokenizer, port=server.port).start()  # at once, on the same port
        try:
            assert again.post("/v1/completions", {**LONG, "max_tokens": 2}).status_code == 200
        finally:
            again.stop()
    finally:
        server.stop()


def test_children_end_when_the_main_process_is_killed_and_the_port_is_free_at_once():
    server = LiveServer().start()
    try:
        family = server.family()

        def strike() -> None:
            os.kill(server.pid, signal.SIGKILL)

        results = asyncio.run(under_load(server, strike))
        assert all(r.get("error") or "status" not in r for r in results)
        _, left = psutil.wait_procs(family[1:], 30)
        assert [p for p in left if alive(p)] == []
        server.process.wait()
        again = LiveServer(port=server.port).start()
        try:
            assert again.get("/health").status_code == 200
        finally:
            again.stop()
    finally:
        server.stop()


def test_health_is_red_once_a_part_is_gone():
    """With restarts on, the server lives on: red or silent while a part is missing, green again, and it answers."""
    server = LiveServer("--restart-on-failure").start()
    try:
        assert server.get("/health").status_code == 200
        first = server.children()["scheduler"]
        first.kill()
        deadline = time.monotonic() + 20
        seen_red = False
        while time.monotonic() < deadline and not seen_red:
            try:
                seen_red = server.get("/health").status_code == 503
            except httpx.HTTPError:
                seen_red = True
        assert seen_red
        deadline = time.monotonic() + 60
        answer = None
        while time.monotonic() < deadline:
            try:
                answer = server.post("/v1/completions", {**LONG, "max_tokens": 3}, timeout=30)
                if answer.status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        assert answer is not None
        assert answer.status_code == 200
        assert server.children()["scheduler"].pid != first.pid
        assert server.process.poll() is None
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_stopped_child_turns_health_red_and_probes_do_not_pile_up(victim):
    server = LiveServer("--watchdog-timeout", "6", "--detokenizer", "process").start()
    try:
        child = server.children()[victim]
        child.suspend()
        deadline = time.monotonic() + 25
        statuses = []
        while time.monotonic() < deadline:
            begun = time.monotonic()
            try:
                statuses.append(server.get("/health").status_code)
            except httpx.HTTPError:
                break
            assert time.monotonic() - begun < 4.0  # health looks, it never asks: a stopped child would not answer
            if statuses[-1] == 503:
                break
            time.sleep(0.2)
        assert statuses[0] == 200
        # The watchdog ends a server whose child does not move.
        assert server.wait_exit(60) == 1
        assert "no progress" in server.output
        assert not alive(child)
    finally:
        server.stop()


def test_health_stays_green_during_a_long_prefill():
    server = LiveServer("--chunked-prefill-size", "-1").start()
    try:

        async def run() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                prompt = [1000 + i % 40000 for i in range(3000)]
                work = asyncio.create_task(client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}))
                statuses = []
                while not work.done():
                    statuses.append((await client.get("/health")).status_code)
                    await asyncio.sleep(0.05)
                assert work.result().status_code == 200
                return statuses

        assert set(asyncio.run(run())) == {200}
    finally:
        server.stop()


def test_sigterm_lets_requests_end_and_a_second_signal_does_not_wait():
    server = LiveServer().start()
    try:

        async def polite() -> tuple[list[str], int]:
            request = {**LONG, "max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                async with client.stream("POST", "/v1/completions", json=request) as response:
                    lines = response.aiter_lines()
                    got = [await anext(lines)]
                    server.process.send_signal(signal.SIGTERM)
                    while True:  # the signal is on its way; the first request keeps the server for a second or two
                        refused = await client.post("/v1/completions", json={**LONG, "max_tokens": 1})
                        if refused.status_code != 200:
                            break
                    got += [line async for line in lines if line]
                return got, refused.status_code

        events, refused = asyncio.run(polite())
        assert refused == 503
        assert events[-1] == "data: [DONE]"
        assert '"completion_tokens":100' in events[-2]
        assert server.wait_exit(30) == 0
    finally:
        server.stop()

    server = LiveServer().start()
    try:
        family = server.family()

        def strike() -> None:
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            server.process.send_signal(signal.SIGINT)

        results = asyncio.run(under_load(server, strike))
        assert all(r["after"] < 5 for r in results)
        server.wait_exit(30)
        psutil.wait_procs(family, 30)
        assert [p for p in family if alive(p)] == []
    finally:
        server.stop()


def test_a_taken_port_is_known_at_once_with_a_way_out():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        server = LiveServer(port=port)
        begun = time.monotonic()
        server.start(wait=False)
        try:
            assert server.wait_exit(60) == 2
            assert time.monotonic() - begun < 10
            assert f"port {port} on 127.0.0.1 is in use" in server.output
            assert "--port" in server.output
            assert "Traceback" not in server.output
        finally:
            server.stop()


def test_a_model_that_cannot_be_loaded_is_one_message(tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 4096)
    server = LiveServer(str(bad))
    server.start(wait=False)
    try:
        assert server.wait_exit(60) == 2
        assert "Traceback" not in server.output
        assert "bad.gguf" in server.output
    finally:
        server.stop()
