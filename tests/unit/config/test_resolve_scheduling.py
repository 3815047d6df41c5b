"""Rules between the flags of scheduling and cache."""

from __future__ import annotations

import pytest
from machine_facts import gpu
from test_resolve_rules import build

from ceiba.cache import eviction
from ceiba.config import available
from ceiba.core.errors import ConfigError
from ceiba.core.tenants import key_digest
from ceiba.scheduler import policy, retract


def test_the_names_in_the_flag_table_are_those_that_exist():
    assert set(available.POLICIES) == set(policy.POLICIES)
    assert set(available.CACHE_AWARE_POLICIES) == set(policy.CACHE_AWARE)
    assert set(available.EVICTION_POLICIES) == set(eviction.POLICIES)
    assert available.EVICTION_OPTIONS == eviction.OPTIONS
    assert set(available.RETRACTION_POLICIES) == set(retract.POLICIES)


@pytest.mark.parametrize("name", available.POLICIES)
def test_every_policy_resolves(name):
    found = build({"--schedule-policy": name}).scheduler
    assert found.policy == ("fcfs" if name == "priority" else name)
    assert found.enable_priority_scheduling == (name == "priority")


@pytest.mark.parametrize("name", ["lpm", "hrrn", "dfs-weight", "routing-key", "random", "shortest-prefill-first"])
def test_priorities_go_with_fcfs_and_lof_only(name):
    with pytest.raises(ConfigError, match=f"--schedule-policy {name}: priorities go with fcfs and lof only"):
        build({"--schedule-policy": name, "--enable-priority-scheduling": True})
    assert build({"--schedule-policy": "lof", "--enable-priority-scheduling": True}).scheduler.policy == "lof"


@pytest.mark.parametrize("name", ["lpm", "hrrn", "dfs-weight"])
def test_without_a_cache_the_cache_aware_policies_are_fcfs(name):
    found = build({"--schedule-policy": name, "--disable-radix-cache": True})
    assert found.scheduler.policy == "fcfs"
    assert any(f"{name} looks into the prefix cache" in note for note in found.notes)


def test_without_a_cache_shortest_prefill_first_and_pins_are_refused():
    for flags in ({"--schedule-policy": "shortest-prefill-first"}, {"--cache-pin-budget": 5}):
        with pytest.raises(ConfigError, match="needs the prefix cache"):
            build({**flags, "--disable-radix-cache": True})
    assert build({"--disable-radix-cache": True}).scheduler.cache_pin_budget == 0


def test_priority_flags():
    found = build({"--enable-priority-scheduling": True, "--default-priority-value": 3}).scheduler
    assert (found.default_priority, found.preemption_threshold, found.low_priority_first) == (3, 10, False)
    off = build({"--enable-priority-scheduling": True, "--disable-priority-preemption": True}).scheduler
    assert off.preemption_threshold is None
    for flag, value in (
        ("--default-priority-value", 3),
        ("--schedule-low-priority-values-first", True),
        ("--disable-priority-preemption", True),
        ("--priority-scheduling-preemption-threshold", 2),
    ):
        with pytest.raises(ConfigError, match=f"{flag} changes nothing without priorities"):
            build({flag: value})
    assert build({"--retraction-policy": "priority", "--default-priority-value": 3}).scheduler.default_priority == 3


def test_fair_share():
    found = build({"--fair-share": "routing-key", "--fair-share-weights": {"a": 2}}).scheduler
    assert (found.fair_share, found.fair_share_weights) == ("routing-key", {"a": 2.0})
    keys = build({"--fair-share": "api-key", "--fair-share-weights": {"sk-1": 0.5}}).scheduler
    assert keys.fair_share_weights == {key_digest("sk-1"): 0.5}
    assert "sk-1" not in str(keys)
    for flags, message in (
        ({"--fair-share-weights": {"a": 2}}, "changes nothing without --fair-share"),
        ({"--fair-share": "api-key", "--fair-share-weights": {"a": 0}}, "is no number from"),
        ({"--fair-share": "api-key", "--schedule-policy": "priority"}, "with priorities"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(flags)


def test_eviction_options_are_checked():
    flag = "--radix-eviction-policy-config"
    found = build({"--radix-eviction-policy": "tlru", flag: {"threshold": 64}}).scheduler
    assert found.eviction_options == {"threshold": 64}
    for name, options, message in (
        ("lru", {"threshold": 64}, "lru has no option 'threshold'; it has none"),
        ("slru", {"x": 1}, "it has protected_hits and protected_percent"),
        ("slru", {"protected_hits": -1}, "whole number"),
        ("slru", [1], "expected a JSON object"),
    ):
        with pytest.raises(ConfigError, match=message):
            build({"--radix-eviction-policy": name, flag: options})


def test_mixed_chunks_are_cut_to_a_time_on_a_gpu():
    assert build({"--enable-mixed-chunk": True}).scheduler.mixed_chunk_target == 0
    assert build({"--enable-mixed-chunk": True}, device=gpu(80)).scheduler.mixed_chunk_target == 0.027
    for given, seconds in ((0, 0.0), (40, 0.04)):
        flags = {"--enable-mixed-chunk": True, "--mixed-chunk-target-ms": given}
        assert build(flags, device=gpu(80)).scheduler.mixed_chunk_target == seconds
    with pytest.raises(ConfigError, match="changes nothing without mixed steps"):
        build({"--mixed-chunk-target-ms": 30})
    for flag in ({"--disable-mixed-chunk": True}, {"--prefill-decode-interval": 4}):
        with pytest.raises(ConfigError, match="changes nothing without mixed steps"):
            build({"--mixed-chunk-target-ms": 30, **flag}, device=gpu(80))


def test_steps_are_mixed_on_a_gpu_unless_told_otherwise():
    def mixes(flags, device=None):
        config = build(flags) if device is None else build(flags, device=device)
        assert config.runner.mixed_steps == config.scheduler.enable_mixed_chunk
        return config.scheduler.enable_mixed_chunk

    assert not mixes({})
    assert mixes({"--enable-mixed-chunk": True})
    assert mixes({}, gpu(80))
    assert build({}, device=gpu(80)).scheduler.mixed_chunk_target == 0.027
    assert not mixes({"--disable-mixed-chunk": True}, gpu(80))
    assert not mixes({"--prefill-decode-interval": 4}, gpu(80))
    with pytest.raises(ConfigError, match="exclude each other"):
        build({"--disable-mixed-chunk": True, "--enable-mixed-chunk": True})


def test_planning_waits_for_the_device_unless_told_otherwise():
    assert build({}).scheduler.late_planning
    assert not build({"--disable-late-planning": True}).scheduler.late_planning


def test_pairs_that_cancel_each_other():
    with pytest.raises(ConfigError, match="mixed steps decode beside every prefill"):
        build({"--prefill-decode-interval": 4, "--enable-mixed-chunk": True})
    with pytest.raises(ConfigError, match="changes nothing without --prefill-decode-interval"):
        build({"--prefill-decode-interval-min-bs": 4})
    found = build({"--max-num-batched-tokens": 16, "--max-running-requests": 40})
    assert found.scheduler.max_running_requests == 16


def test_pin_budget():
    found = build({}).scheduler
    assert found.cache_pin_budget == found.max_total_tokens // 4
    with pytest.raises(ConfigError, match="the KV pool holds"):
        build({"--cache-pin-budget": 2**31 - 1})
