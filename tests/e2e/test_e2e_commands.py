"""The commands that measure and talk, against the real model: bench serve, offline, one-batch, chat."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def ceiba(*words: str, stdin: str = "", timeout: float = 200) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ceiba", *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)


def test_bench_serve_named_workloads(server):
    small = ["--scale", "0.01", "--len-scale", "0.03", "--conc", "4", "--pconc", "4", "--rate", "20"]
    done = ceiba("bench", "serve", "--port", str(server.port), "--workload", "single,burst,prefix,long,online", *small)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["workload"] for line in lines] == ["single", "burst", "prefix", "long", "online"]
    assert all(line["err"] == 0 and line["ok"] > 0 for line in lines)


@pytest.mark.parametrize("backend", ["ceiba", "sglang"])
def test_bench_serve_datasets(server, tmp_path, backend):
    file = tmp_path / "out.jsonl"
    sizes = ["--random-input", "24", "--random-output", "6", "--num-prompts", "6", "--max-concurrency", "3"]
    where = ["--port", str(server.port), "--backend", backend, "--output-file", str(file)]
    done = ceiba("bench", "serve", *where, *sizes)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert (record["completed"], record["failed"]) == (6, 0)
    assert record["median_ttft_ms"] > 0


def test_bench_offline(tmp_path):
    file = tmp_path / "out.jsonl"
    sizes = ["--num-prompts", "6", "--random-input", "16", "--random-output", "5", "--max-total-tokens", "4096"]
    done = ceiba("bench", "offline", *sizes, "--output-file", str(file))
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert record["total_input_tokens"] == 6 * 16
    assert record["total_output_tokens"] == 6 * 5


def test_bench_one_batch(tmp_path):
    file = tmp_path / "out.jsonl"
    sizes = ["--batch-size", "1", "3", "--input-len", "12", "--output-len", "4", "--repeat", "1"]
    done = ceiba("bench", "one-batch", *sizes, "--max-total-tokens", "4096", "--output-file", str(file))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["batch_size"] for record in records] == [1, 3]
    assert all(record["decode_ms"] > 0 for record in records)
    refused = ceiba("bench", "one-batch", "--batch-size", "64", "--max-total-tokens", "512")
    assert refused.returncode == 2
    assert "--max-total-tokens" in refused.stderr


def test_chat_through_a_pipe(server):
    done = ceiba("chat", "--url", server.url, "--temperature", "0", stdin="What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_chat_starts_a_model_itself():
    flags = ["--temperature", "0", "--each-line", "--max-total-tokens", "4096"]
    done = ceiba("chat", *flags, stdin="What is the capital of France?\nAnd of Italy?\n/stats\n")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "2 answers" in done.stdout
