from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from ceiba.config.records import SchedulerConfig
from ceiba.scheduler.fake import CostModel
from ceiba.scheduler.simulate import simulate
from ceiba.scheduler.simulate_command import main
from ceiba.scheduler.traces import SYNTHETIC, TraceError, TraceRequest, make_trace, read_trace

CONFIG = SchedulerConfig(max_running_requests=64, max_total_tokens=100_000, max_prefill_tokens=32768)


def test_one_request_takes_the_time_the_costs_say():
    cost = CostModel(step=1.0, prefill_token=0.01, decode_row=0.0, context_token=0.0, host=0.0)
    trace = [TraceRequest(5.0, np.arange(100, dtype=np.int32), 11)]
    figures = simulate(trace, CONFIG, cost=cost)
    assert figures["ttft_s"]["p50"] == pytest.approx(2.0)
    assert figures["tpot_s"]["p50"] == pytest.approx(1.0)
    assert figures["forwards"] == 11
    assert figures["output_tokens"] == 11


@pytest.mark.parametrize("kind", sorted(SYNTHETIC))
def test_every_synthetic_trace_ends_balanced_and_repeats(kind):
    first, second = (simulate(make_trace(kind, 25, 20.0, seed=3), CONFIG) for _ in range(2))
    assert first == second
    assert first["requests"] == first["finished"] + first["aborted"] + first["failed"] == 25
    assert first["failed"] == 0
    assert first["ledger"] == "balanced"
    assert make_trace(kind, 20, 8.0, seed=3)[0].at != make_trace(kind, 20, 8.0, seed=4)[0].at


def test_the_hit_rate_is_that_of_the_trace():
    """20 identical prompts one after the other: all but the first hit everything but the last token."""
    ids = np.arange(1000, dtype=np.int32)
    figures = simulate([TraceRequest(10.0 * i, ids, 5) for i in range(20)], CONFIG)
    assert figures["cached_tokens"] == 19 * 999
    off = simulate(
        [TraceRequest(10.0 * i, ids, 5) for i in range(20)],
        SchedulerConfig(max_total_tokens=100_000, disable_radix_cache=True),
    )
    assert off["cached_tokens"] == 0


def test_overlap_hides_the_host():
    trace = [TraceRequest(0.0, np.arange(10, dtype=np.int32), 200)]
    cost = CostModel(step=4e-3, host=3e-3)
    on = simulate(trace, CONFIG, cost=cost)["simulated_s"]
    off = simulate(trace, SchedulerConfig(max_total_tokens=100_000, overlap=False), cost=cost)["simulated_s"]
    assert on < 0.65 * off


def write(path, lines):
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_reads_jsonl_and_shares_prefixes_by_id(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        [
            {"timestamp": 7.0, "input_length": 80, "output_length": 3, "prefix_id": "a", "prefix_length": 60},
            {"timestamp": 6.0, "input_ids": [1, 2, 3], "output_length": 2, "abort_after": 1.5},
            {"timestamp": 8.0, "input_length": 100, "output_length": 3, "prefix_id": "a"},
        ],
    )
    trace = read_trace(path)
    assert [request.at for request in trace] == [0.0, 1.0, 2.0]
    assert trace[0].ids.tolist() == [1, 2, 3]
    assert trace[0].abort_after == 1.5
    assert np.array_equal(trace[1].ids[:60], trace[2].ids[:60])
    assert not np.array_equal(trace[1].ids[60:80], trace[2].ids[60:80])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"timestamp": 1, "input_length": 0, "output_length": 1}, "input_length wants"),
        ({"timestamp": 1, "input_length": 5, "output_length": "x"}, "output_length wants"),
        ({"timestamp": 1, "input_ids": [], "output_length": 1}, "at least one id"),
        ({"timestamp": 1, "input_length": 5, "output_length": 1, "colour": 1}, "fields out of"),
        ({"input_length": 5, "output_length": 1}, "timestamp"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = write(tmp_path / "t.jsonl", [{"timestamp": 0, "input_length": 1, "output_length": 1}, line])
    with pytest.raises(TraceError, match=rf"t.jsonl:2: .*{message}"):
        read_trace(path)


def test_command_prints_figures_or_json(tmp_path, capsys):
    assert main(["--synthetic", "chat", "--requests", "5", "--json", str(tmp_path / "out.json")]) == 0
    assert "cache hit rate" in capsys.readouterr().out
    figures = json.loads((tmp_path / "out.json").read_text())
    assert main(["--synthetic", "chat", "--requests", "5", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == figures
    assert main([str(tmp_path / "missing.jsonl")]) == 2
    assert "missing.jsonl" in capsys.readouterr().err


def test_neither_scheduler_nor_simulation_imports_torch():
    code = (
        "import sys, ceiba.scheduler.simulate_command, ceiba.scheduler.loop\n"
        "print(sorted({'torch', 'zmq', 'fastapi', 'rich', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.slow
def test_ten_thousand_requests_with_bursts_prefixes_and_aborts():
    figures = simulate(make_trace("mixed", 10_000, 8.0, seed=0), CONFIG)
    assert figures["requests"] == figures["finished"] + figures["aborted"] == 10_000
    assert figures["aborted"] > 50
    assert figures["hit_rate"] > 0.5
