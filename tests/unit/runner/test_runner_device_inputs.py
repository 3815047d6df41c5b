"""What a device step reads, on the CPU: packed arrays against the plan they came from, padding, buffers in rotation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ceiba.core.step import FUTURE, StepPlan
from ceiba.runner.device_inputs import DeviceInputs
from ceiba.runner.graphs import decode_sizes, prefill_sizes
from ceiba.runner.staging import DEPTH, Staging

CPU = torch.device("cpu")
PAD_ROW, PAD_SLOT = 99, 5000


def make_plan(lengths: list[int], num_prefill: int, seed: int = 0) -> StepPlan:
    rng = np.random.default_rng(seed)
    count, total = len(lengths), sum(lengths)
    i32 = np.int32
    tokens = rng.integers(0, 1000, total).astype(i32)
    tokens[rng.random(total) < 0.2] = FUTURE
    return StepPlan(
        step=seed,
        rows=rng.permutation(PAD_ROW)[:count].astype(i32),
        starts=rng.integers(0, 300, count).astype(i32),
        lengths=np.array(lengths, i32),
        samples=np.concatenate([rng.random(num_prefill) < 0.7, np.ones(count - num_prefill, bool)]),
        tokens=tokens,
        slots=rng.integers(0, PAD_SLOT, total).astype(i32),
        num_prefill=num_prefill,
    )


def segments(plan: StepPlan) -> list[tuple[int, int]]:
    """(row, position) of every token, segment by segment."""
    spans = zip(plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True)
    return [(row, start + i) for row, start, length in spans for i in range(length)]


def test_every_array_is_aligned() -> None:
    """Else kernels would be compiled again for each combination of alignments."""
    found = inputs()
    for seed, lengths in enumerate(([5], [3, 60, 1], [64, 63])):
        found.fill(make_plan(lengths, len(lengths), seed))
        base = found.tokens.data_ptr()
        for name in ("token_rows", "positions", "slots", "rows", "kv_lens", "offsets", "select", "sample_rows"):
            assert (getattr(found, name).data_ptr() - base) % 16 == 0, name


def inputs() -> DeviceInputs:
    return DeviceInputs(16, 256, PAD_ROW, PAD_SLOT, CPU)


def check_tokens(found: DeviceInputs, plan: StepPlan, size: int) -> None:
    total, pad = plan.num_tokens, size - plan.num_tokens
    assert found.tokens.tolist() == plan.tokens.tolist() + [0] * pad
    assert found.slots.tolist() == plan.slots.tolist() + [PAD_SLOT] * pad
    pairs = list(zip(found.token_rows.tolist(), found.positions.tolist(), strict=True))
    assert pairs[:total] == segments(plan)
    assert pairs[total:] == [(PAD_ROW, 0)] * pad
    last = np.cumsum(plan.lengths) - 1
    assert found.select.tolist() == last[plan.samples].tolist()
    assert found.sample_rows.tolist() == plan.rows[plan.samples].tolist()


@settings(max_examples=40, deadline=None)
@given(prefill=st.lists(st.integers(1, 40), max_size=6), decode=st.integers(0, 12), seed=st.integers(0, 99))
def test_any_step(prefill: list[int], decode: int, seed: int) -> None:
    if not prefill and not decode:
        return
    plan = make_plan([*prefill, *[1] * decode], len(prefill), seed)
    found = inputs()
    found.fill(plan)
    check_tokens(found, plan, plan.num_tokens)
    assert found.rows.tolist() == plan.rows.tolist()
    assert found.kv_lens.tolist() == (plan.starts + plan.lengths).tolist()
    assert found.offsets.tolist() == [0, *np.cumsum(plan.lengths).tolist()]


@pytest.mark.parametrize("count", [1, 3, 12])
def test_padded_decode_keeps_its_addresses(count: int) -> None:
    found = inputs()
    places = []
    for seed in range(5):
        plan = make_plan([1] * count, 0, seed)
        found.fill_decode(plan, 12)
        check_tokens(found, plan, 12)
        assert found.kv_lens.tolist() == (plan.starts + 1).tolist() + [0] * (12 - count)
        assert found.rows.tolist() == plan.rows.tolist() + [PAD_ROW] * (12 - count)
        views = (found.tokens, found.rows, found.positions, found.slots, found.kv_lens)
        places.append([view.data_ptr() for view in views])
    assert all(place == places[0] for place in places)


def test_padded_prefill_keeps_its_addresses() -> None:
    found = inputs()
    places = []
    for seed, lengths in enumerate(([100], [3, 60, 1], [64, 64])):
        plan = make_plan(lengths, len(lengths), seed)
        tiles = np.random.default_rng(seed).integers(1, 9, (7 + seed, 6)).astype(np.int32)
        on_device = found.fill_mixed(plan, 128, 0, tiles, 20)
        check_tokens(found, plan, 128)
        assert on_device.tolist() == [*tiles.tolist(), *[[0] * 6] * (20 - len(tiles))]
        views = (found.tokens, found.token_rows, found.positions, found.slots, on_device)
        places.append([view.data_ptr() for view in views])
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("running", [1, 5, 8])
def test_padded_prefill_behind_decode_segments(running: int) -> None:
    found = inputs()
    plan = make_plan([40, 9, *[1] * running], 2, running)
    tiles = np.ones((3, 6), np.int32)
    found.fill_mixed(plan, 64, 8, tiles, 4)
    total, pairs = 49 + running, list(zip(found.token_rows.tolist(), found.positions.tolist(), strict=True))
    wanted, pad = segments(plan), 64 - 49 - running
    assert pairs == [*wanted[49:], *wanted[:49], *[(PAD_ROW, 0)] * pad]
    for view, values, filler in ((found.tokens, plan.tokens, 0), (found.slots, plan.slots, PAD_SLOT)):
        assert view.tolist() == [*values[49:total], *values[:49], *[filler] * pad]
    assert found.rows.tolist()[:running] == plan.rows[2:].tolist()
    assert found.kv_lens.tolist() == [*(plan.starts[2:] + 1), *[0] * (8 - running)]
    at = [running + 39, running + 48, *range(running)]
    assert found.select.tolist() == [place for place, sampled in zip(at, plan.samples, strict=True) if sampled]
    assert found.sample_rows.tolist() == plan.rows[plan.samples].tolist()


def test_a_host_buffer_is_not_filled_again_at_once() -> None:
    """Copies of the last steps may still read their buffers."""
    staging = Staging(4, CPU)
    hosts = []
    for step in range(2 * DEPTH):
        staging.begin(4)
        host, _ = staging.take(4)
        host[:] = step
        hosts.append(host)
        staging.send()
        assert staging.target[:4].tolist() == [step] * 4
    for step in range(DEPTH, 2 * DEPTH):
        assert hosts[step].tolist() == [step] * 4
    staging.begin(100)
    assert staging.put(np.arange(100, dtype=np.int32)).shape == (100,)
    staging.send()
    assert staging.target[:100].tolist() == list(range(100))


def test_a_buffer_of_captured_steps_never_moves() -> None:
    found = inputs()
    with pytest.raises(RuntimeError, match="captured step"):
        found.fill_decode(make_plan([1] * 90, 0), 4000)
    fixed = Staging(64, CPU, fixed=True)
    place = fixed.target.data_ptr()
    fixed.begin(64)
    assert fixed.target.data_ptr() == place


@pytest.mark.parametrize("most", [1, 8, 32, 48, 160, 256, 512])
def test_decode_sizes(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    for count in range(1, most + 1):
        padded = min(size for size in sizes if size >= count)
        assert padded - count <= max(2, count // 4), "padding costs at most a quarter"


def test_prefill_sizes() -> None:
    assert prefill_sizes(2048) == [64, *range(128, 2049, 128)]
    assert prefill_sizes(63) == []
