"""Comparing policies, reading published traces, and the drawing."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from ceiba.config.records import SchedulerConfig
from ceiba.scheduler import simulate_report
from ceiba.scheduler.simulate import simulate
from ceiba.scheduler.simulate_command import VariantError, main, variant
from ceiba.scheduler.traces import TraceError, make_trace, read_trace

BASE = SchedulerConfig(max_running_requests=16, max_total_tokens=30_000, max_prefill_tokens=32768)
SVG = "{http://www.w3.org/2000/svg}"


def test_lpm_beats_fcfs_where_prefixes_are_shared_and_the_pool_is_small():
    trace = make_trace("fewshot", 120, 40.0, seed=1)
    fcfs, lpm = (simulate(trace, variant(name, BASE)) for name in ("fcfs", "lpm"))
    assert lpm["hit_rate"] > fcfs["hit_rate"] + 0.03
    assert lpm["ttft_s"]["mean"] < 0.7 * fcfs["ttft_s"]["mean"]
    assert lpm["output_tokens_per_s"] > fcfs["output_tokens_per_s"]


def test_priorities_and_fair_share_serve_whom_they_are_for():
    trace = make_trace("priorities", 120, 14.0, seed=1)
    plain, ranked = (simulate(trace, variant(name, BASE)) for name in ("fcfs", "fcfs+priority"))
    assert ranked["by_tenant"]["interactive"]["p99"] < 0.5 * plain["by_tenant"]["interactive"]["p99"]
    assert ranked["preemptions"] > 0
    trace = make_trace("tenants", 120, 3.0, seed=1)
    plain, fair = (simulate(trace, variant(name, BASE)) for name in ("fcfs", "fcfs+fair"))
    assert fair["by_tenant"]["light"]["p99"] < 0.5 * plain["by_tenant"]["light"]["p99"]


def test_variants():
    found = variant("lpm+mixed@slru", BASE)
    assert (found.policy, found.enable_mixed_chunk, found.radix_eviction_policy) == ("lpm", True, "slru")
    assert variant("priority", BASE).enable_priority_scheduling
    assert variant("fcfs+nocache+fair", BASE).fair_share == "routing-key"
    for text, part in (("nope", "no schedule policy"), ("fcfs+x", "none of"), ("lpm+priority", "fcfs and lof only")):
        with pytest.raises(VariantError, match=part):
            variant(text, BASE)


def test_the_timeline_holds_what_happened():
    trace = make_trace("fewshot", 60, 20.0, seed=2)
    figures = simulate(trace, BASE, detail=True)
    line = figures["timeline"]
    assert len({len(column) for column in line.values()}) == 1
    assert line["t"] == sorted(line["t"])
    assert max(v for v in line["queue"] if v is not None) <= figures["queue_length"]["max"]
    assert all(0 <= v <= 1 for v in line["hit_rate"] if v is not None)
    assert max(v for v in line["ttft_p99"] if v is not None) >= figures["ttft_s"]["p50"]
    assert len(figures["queue_times"]) == 60


def test_the_drawing_is_whole_and_every_point_lies_inside():
    trace = make_trace("mixed", 40, 20.0, seed=2)
    runs = {name: simulate(trace, variant(name, BASE), detail=True) for name in ("fcfs", "lpm", "fcfs+nocache")}
    root = ElementTree.fromstring(simulate_report.svg(runs, "a <title> & more"))
    assert root.find(f"{SVG}title").text == "a <title> & more"
    lines = root.findall(f"{SVG}polyline")
    assert len(lines) == len(runs) * len(simulate_report.CHARTS)
    height = float(root.get("height"))
    for line in lines:
        points = np.array([[float(v) for v in point.split(",")] for point in line.get("points").split()])
        assert (points >= 0).all()
        assert (points[:, 0] <= simulate_report.WIDTH).all()
        assert (points[:, 1] <= height).all()
        assert (np.diff(points[:, 0]) > 0).all()
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert {"fcfs", "lpm", "fcfs+nocache", "Waiting requests"} <= set(texts)
    page = simulate_report.page(runs, "t", "s")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_command_compares_and_draws(tmp_path, capsys):
    out = tmp_path / "out.html"
    args = ["--synthetic", "fewshot", "--requests", "20", "--compare", "fcfs,lpm"]
    assert main([*args, "--report", str(out)]) == 0
    assert "hit rate %" in capsys.readouterr().out
    assert out.read_text().count("<polyline") == 10
    assert main([*args, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("|  | hit rate % |")
    assert main([*args, "--json", "-"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"fcfs", "lpm"}
    assert main(["--synthetic", "chat", "--compare", "fcfs,nope"]) == 2
    assert "no schedule policy" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*args, "--report", "x.pdf"])


def write(path, *lines):
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_published_traces_with_block_hashes(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [46, 47, 9]},
        {"timestamp": 5500, "input_length": 600, "output_length": 7, "hash_ids": [46, 48]},
    )
    first, second = read_trace(path)
    assert (first.at, second.at) == (0.0, 2.5)
    assert (len(first.ids), len(second.ids)) == (1100, 600)
    assert np.array_equal(first.ids[:512], second.ids[:512])
    assert not np.array_equal(first.ids[512:600], second.ids[512:600])
    bad = write(tmp_path / "b.jsonl", {"timestamp": 1, "input_length": 900, "output_length": 1, "hash_ids": [1]})
    with pytest.raises(TraceError, match="stand for 512 tokens, input_length is 900"):
        read_trace(bad)


def test_lines_with_tenants_priorities_and_deadlines(tmp_path):
    line = {"timestamp": 1, "input_length": 5, "output_length": 1, "routing_key": "a", "priority": -3}
    (request,) = read_trace(write(tmp_path / "t.jsonl", {**line, "queue_timeout": 2.5}))
    assert (request.tenant, request.priority, request.queue_timeout) == ("a", -3, 2.5)
