"""HiCache on the running server with the real model: a pool that holds a tenth of the prefixes, host memory and files.

Answers are compared with those of the first, cold run by token ids; the counter of computed prompt tokens proves that
a restore did not compute again.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ceiba.memory.storage.pages import unframe
from live_server import SAME_BITS, LiveServer

LENGTH = 320
POOL = 352
PAGE = 64


def ids(seed: int) -> list[int]:
    rng = random.Random(1000 + seed)
    return [rng.randrange(1000, 49000) for _ in range(LENGTH)]


def flags(*more: str) -> list[str]:
    """A device pool for one prompt, and a host tier. Cold, prompts are computed whole, later their last token alone."""
    size = ["--max-total-tokens", str(POOL), "--context-length", "344", "--hicache-ratio", "16"]
    return ["--enable-hierarchical-cache", *SAME_BITS, *size, *more]


def on_files(folder: Path) -> list[str]:
    extra = json.dumps({"path": str(folder)})
    return ["--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", extra]


def generate(server: LiveServer, prompt: list[int], tokens: int = 8) -> tuple[list[int], dict[str, int]]:
    """(output ids, cached tokens by tier)."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answer = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling}).json()
    return answer["output_ids"], answer["meta_info"]["cached_tokens_details"]


def computed(server: LiveServer) -> float:
    """Prompt tokens computed since the server started."""
    return server.get("/server_info").json()["internal_states"][0]["prefill_tokens"]


def storage(server: LiveServer) -> dict:
    return server.get("/hicache/storage-backend").json()


def until_stored(server: LiveServer, pages: int) -> None:
    deadline = time.monotonic() + 120
    while storage(server)["detail"].get("pages", 0) < pages or storage(server)["backlog_bytes"]:
        assert time.monotonic() < deadline, storage(server)
        time.sleep(0.05)


def until_restored(server: LiveServer, tokens: int) -> str:
    """The metrics, once they say so: the scheduler's counters come with its next heartbeat."""
    deadline = time.monotonic() + 30
    while True:
        metrics = server.get("/metrics").text
        restored = float(re.search(r"sglang:load_back_tokens_total\{[^}]*\} (\S+)", metrics).group(1))
        if restored >= tokens:
            return metrics
        assert time.monotonic() < deadline, f"{restored} of {tokens} tokens"
        time.sleep(0.05)


def stop_hard(server: LiveServer) -> None:
    for process in server.family():
        process.send_signal(signal.SIGKILL)
    server.stop()


def test_host_memory_serves_what_the_device_lost(tmp_path):
    server = LiveServer(*flags("--enable-metrics"))
    server.start()
    try:
        cold = [generate(server, ids(i))[0] for i in range(3)]
        before = computed(server)
        for i in range(3):
            answer, tiers = generate(server, ids(i))
            assert answer == cold[i]
            assert sum(tiers.values()) == LENGTH - 1
            assert tiers["host"] >= LENGTH - 1 - 64
        assert computed(server) - before == 3
        body = {"model": "m", "prompt": ids(0), "max_tokens": 1, "temperature": 0}
        usage = server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]
        assert usage["cached_tokens"] == LENGTH - 1
        assert usage["cached_tokens_by_tier"]["host"] > 0
        metrics = until_restored(server, 3 * (LENGTH - 65))
        assert re.search(r'sglang:cached_tokens_total\{cache_source="host",[^}]*\} [1-9]', metrics)
        nodes = server.get("/cache/tree").json()["namespaces"][0]["children"]
        assert {tier for node in nodes for tier in node["tiers"]} >= {"device", "host"}
        put = {
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config_json": json.dumps({"path": str(tmp_path)}),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        attached = server.request("PUT", "/hicache/storage-backend", put)
        assert attached.status_code == 200, attached.text
        until_stored(server, 3 * (LENGTH // PAGE))  # what was on the host went there
        assert server.post("/hicache/storage-backend/clear").json()["deleted_pages"] >= 15
        assert server.request("DELETE", "/hicache/storage-backend").status_code == 200
        refused = server.request("DELETE", "/hicache/storage-backend")
        assert refused.status_code == 400
        assert "no storage is attached" in refused.json()["error"]["message"]
    finally:
        server.stop()


@pytest.mark.slow
def test_a_tenth_of_the_prefixes_fits_and_files_outlive_restart_kill_and_flipped_bytes(tmp_path):
    count = 10
    first = LiveServer(*flags(*on_files(tmp_path)))
    first.start()
    try:
        generate(first, [*ids(0)[:PAGE], 1])
        until_stored(first, 1)
        (damaged,) = tmp_path.rglob("*.kv")  # the first page of the first prompt
        cold = [generate(first, ids(i))[0] for i in range(count)]
        before = computed(first)
        warm = [generate(first, ids(i)) for i in range(count)]
        assert [answer for answer, _ in warm] == cold
        assert all(sum(tiers.values()) == LENGTH - 1 for _, tiers in warm)
        assert computed(first) - before == count
        until_stored(first, count * (LENGTH // PAGE))
    finally:
        stop_hard(first)  # no goodbye

    pages = list(tmp_path.rglob("*.kv"))
    assert len(pages) >= count * (LENGTH // PAGE)
    for page in pages:
        unframe(page.stem, page.read_bytes())
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 4
    damaged.write_bytes(data)

    second = LiveServer(*flags(*on_files(tmp_path)))
    second.start()
    try:
        before = computed(second)  # the warm-up's
        served = [generate(second, ids(i)) for i in range(count)]
        assert [answer for answer, _ in served] == cold
        stored = [tiers.get("storage", 0) for _, tiers in served]
        usable = (LENGTH - 1) // PAGE * PAGE
        assert sorted(stored)[1:] == [usable] * (count - 1)
        assert min(stored) < usable  # the damaged page was noticed and computed
        assert computed(second) - before == count * LENGTH - sum(stored)
        assert storage(second)["detail"]["corrupt_pages"] == 1
        assert second.post("/flush_cache").status_code == 200
        again, tiers = generate(second, ids(stored.index(min(stored))))
        assert again == cold[stored.index(min(stored))]
        assert tiers.get("storage", 0) == usable  # it was written anew
    finally:
        second.stop()


@pytest.mark.slow
def test_a_server_killed_while_it_writes_leaves_whole_pages_and_the_next_one_is_right(tmp_path):
    server = LiveServer(*flags(*on_files(tmp_path)))
    server.start()
    try:
        cold = [generate(server, ids(i))[0] for i in range(2)]
    finally:
        stop_hard(server)
    for page in tmp_path.rglob("*.kv"):
        unframe(page.stem, page.read_bytes())
    again = LiveServer(*flags(*on_files(tmp_path)))
    again.start()
    try:
        assert [generate(again, ids(i))[0] for i in range(2)] == cold
        assert not list(tmp_path.rglob("*.tmp"))
    finally:
        again.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("--hicache-write-policy", "write_back", "--hicache-io-backend", "direct"),
        ("--hicache-write-policy", "write_through_selective", "--hicache-mem-layout", "layer_first"),
        ("--page-size", "16", "--hicache-mem-layout", "page_first_direct"),
    ],
)
def test_every_policy_and_layout_gives_the_same_answers(more):
    server = LiveServer(*flags(*more))
    server.start()
    try:
        cold = [generate(server, ids(i))[0] for i in range(3)]
        for _ in range(2):
            assert [generate(server, ids(i))[0] for i in range(3)] == cold
        hit, tiers = generate(server, ids(2))
        assert (hit, "device" in tiers) == (cold[2], True)
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.skipif(not SAME_BITS, reason="the compiled CPU kernels are not built")
def test_deterministic_inference_gives_the_same_bits_cold_and_from_every_tier(tmp_path):
    """Log-probabilities are compared as they are, not within a tolerance."""
    server = LiveServer(*flags(*on_files(tmp_path)))
    server.start()

    def ask(prompt: list[int]) -> tuple[object, dict[str, int]]:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        meta = server.post("/generate", body).json()["meta_info"]
        return meta["output_token_logprobs"], meta["cached_tokens_details"]

    try:
        cold = ask(ids(0))[0]
        ask(ids(1))
        until_stored(server, 2 * (LENGTH // PAGE))
        host, tiers = ask(ids(0))
        assert tiers["host"] > 0
        server.post("/flush_cache")
        stored, tiers = ask(ids(0))
        assert tiers["storage"] == (LENGTH - 1) // PAGE * PAGE
        assert cold == host == stored
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.skipif(not SAME_BITS, reason="the compiled CPU kernels are not built")
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_many_at_once_get_what_each_gets_alone(policy):
    """Restores, backups and evictions while others compute: with a fixed order of summation the ids must be equal."""
    server = LiveServer(*flags("--hicache-write-policy", policy))
    server.start()
    try:
        prompts = [ids(i)[:100] for i in range(10)]
        cold = [generate(server, prompt)[0] for prompt in prompts]
        with ThreadPoolExecutor(10) as pool:
            restored = 0
            for _ in range(12):  # two are enough, but where a busy machine made restores look slow
                served = list(pool.map(lambda prompt: generate(server, prompt), prompts))
                assert [answer for answer, _ in served] == cold
                restored += sum(tiers.get("host", 0) for _, tiers in served)
                if restored > 600:
                    break
            assert restored > 600
        assert server.post("/flush_cache").status_code == 200
    finally:
        server.stop()
