"""Logits and greedy tokens against transformers in float32, tiny random models of every family, however work is cut.

Slots are handed out in random order throughout, so nothing here can pass by reading the pool in order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.step import PrefixGroup, StepPlan
from ceiba.kernels import cpu
from ceiba.models import fused
from ceiba.models.fused import FusedDecoder
from ceiba.runner.worker import ForwardHandle, ModelRunner
from plan_driver import PACKED_ERROR, Driver, Request, make_config, recorded, relative_error
from tiny_models import CASES, logits_of, reference, write_gguf

TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}
MARGIN = 1e-3
CONTEXT = 96


KERNELS = pytest.mark.skipif(not cpu.available, reason="the compiled CPU kernels are not built")
PATHS = [pytest.param(False, id="torch"), pytest.param(True, id="kernels", marks=KERNELS)]
"""The pure torch reference, and the compiled kernels where there are some."""


@pytest.fixture(scope="module", params=list(CASES))
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, PreTrainedModel, Path]:
    model = reference(request.param)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return request.param, model, path


@pytest.fixture(scope="module", params=PATHS)
def pair(request: pytest.FixtureRequest, saved: tuple[str, PreTrainedModel, Path]) -> tuple[PreTrainedModel, Driver]:
    case, model, path = saved
    # Dynamic scaling depends on the longest text, so there the context is what the reference will see.
    context = CONTEXT if "dynamic" not in case else 128
    config = make_config(str(path), context_len=context, cpu_kernels=request.param)
    runner = ModelRunner(config, open_checkpoint(str(path)))
    return model, Driver(runner)


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 320, length).tolist() for length in lengths]


def check(model: PreTrainedModel, requests: list[Request], packed: bool = False) -> None:
    """Each output token was chosen from the reference's logits for the tokens before it, and is the reference's choice:
    by induction the whole output is the reference's greedy continuation."""
    for request in requests:
        wanted = logits_of(model, request.tokens[:-1])[len(request.prompt) - 1 :]
        found = torch.stack(request.logits)
        if packed:
            assert relative_error(found, wanted) < PACKED_ERROR
        else:
            torch.testing.assert_close(found, wanted, **TOLERANCE)
        top, margin = wanted.topk(2), PACKED_ERROR * float(wanted.abs().max()) if packed else MARGIN
        for token, best, values in zip(request.output, top.indices.tolist(), top.values.tolist(), strict=True):
            assert token == best[0] or values[0] - values[1] < margin


def test_all_positions_of_a_whole_prefill(pair: tuple[PreTrainedModel, Driver]) -> None:
    model, driver = pair
    (prompt,) = prompts(1, [70])
    request = Request(prompt)
    seen = {}
    original = driver.runner.forward

    def spy(plan: StepPlan) -> ForwardHandle:
        handle = original(plan)
        assert handle.hidden is not None
        seen["hidden"] = handle.hidden.clone()
        return handle

    driver.runner.forward = spy  # type: ignore[method-assign]
    try:
        driver.step([(request, 1000)])
    finally:
        del driver.runner.forward
    with torch.inference_mode():
        got = driver.runner.model.logits(seen["hidden"])
    torch.testing.assert_close(got.clone(), logits_of(model, prompt), **TOLERANCE)
    driver.close(request)


def test_generation_whole_and_chunked(pair: tuple[PreTrainedModel, Driver]) -> None:
    model, driver = pair
    whole, chunked = (Request(prompt) for prompt in prompts(2, [61, 61]))
    chunked.prompt = list(whole.prompt)
    driver.run([whole], 8)
    driver.run([chunked], 8, chunk=17)
    check(model, [whole, chunked])
    assert whole.output == chunked.output
    for request in (whole, chunked):
        driver.close(request)


def test_cached_prefixes(pair: tuple[PreTrainedModel, Driver]) -> None:
    model, driver = pair
    shared, tail, other = prompts(3, [40, 9, 13])
    first = Request(shared + tail)
    driver.run([first], 3)
    branches = [
        Request(shared + other, prefix_slots=first.slots[:40]),
        Request(shared[:25] + other, prefix_slots=first.slots[:25]),
        Request(first.prompt, prefix_slots=first.slots[: len(first.prompt) - 1]),
    ]
    driver.run(branches, 5)
    check(model, [first, *branches])
    for request in (first, *branches):
        driver.close(request)


@pytest.mark.parametrize("chunk", [17, 1000])
def test_ragged_batches_of_prefill_and_decode(pair: tuple[PreTrainedModel, Driver], chunk: int) -> None:
    model, driver = pair
    requests = [Request(prompt) for prompt in prompts(4, [1, 2, 3, 7, 16, 17, 33, 50, 64, 80])]
    driver.run(requests, 6, chunk=chunk, mixed=True)
    check(model, requests)
    for request in requests:
        driver.close(request)


def test_shared_prefixes_nested(pair: tuple[PreTrainedModel, Driver]) -> None:
    """Groups of 20, 33 and 45 tokens, beside a request that shares nothing. The compiled kernels read them for each."""
    model, driver = pair
    root, lone = prompts(10, [45, 12])
    first, alone = Request(root), Request(lone)
    driver.run([first, alone], 1)
    depths = [20, 33, 45]
    branches = [Request([*root[: depths[i % 3]], 3 + i], prefix_slots=first.slots[: depths[i % 3]]) for i in range(9)]
    driver.run(branches, 1)

    def grouping(requests: list[Request]) -> list[PrefixGroup]:
        where = {depth: [i for i, r in enumerate(requests) if len(r.prefix_slots) >= depth] for depth in depths}
        return [PrefixGroup(depth, np.array(segments, np.int32)) for depth, segments in where.items()]

    driver.grouping = grouping
    try:
        for _ in range(5):
            driver.step([], [alone, *branches])
    finally:
        driver.grouping = None
    check(model, [alone, *branches])
    for request in (first, alone, *branches):
        driver.close(request)


@KERNELS
def test_shared_prefixes_that_the_compiled_kernels_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested ones, of one and two spans; grouping changes no bit."""
    model, span = reference("llama"), cpu._cpu.ATTENTION_SPAN
    model.save_pretrained(tmp_path)
    config = make_config(str(tmp_path), context_len=3 * span, chunked_prefill_size=3 * span)
    runner = ModelRunner(config, open_checkpoint(str(tmp_path)))
    assert isinstance(runner.model, FusedDecoder)
    spy, read = recorded(fused.host_groups)
    monkeypatch.setattr(fused, "host_groups", spy)
    driver = Driver(runner)
    depths = [span + 20, 2 * span + 30]
    root = Request(prompts(11, [depths[1]])[0])
    driver.run([root], 1)
    groups = [PrefixGroup(depth, np.arange(i, 5, i + 1, dtype=np.int32)) for i, depth in enumerate(depths)]
    answers = []
    for grouped in (False, True):
        branches = [
            Request([*root.prompt[: depths[i % 2]], i], prefix_slots=root.slots[: depths[i % 2]]) for i in range(5)
        ]
        driver.run(branches, 1)
        driver.grouping = (lambda _: groups) if grouped else None
        for _ in range(3):
            driver.step([], branches)
        assert len(read) == (3 if grouped else 0)
        driver.grouping = None
        assert None not in read
        check(model, branches)
        answers.append(torch.stack([row for request in branches for row in request.logits]))
        for request in branches:
            driver.close(request)
    assert torch.equal(*answers)


def test_retraction_changes_nothing(pair: tuple[PreTrainedModel, Driver]) -> None:
    model, driver = pair
    requests = [Request(prompt) for prompt in prompts(5, [12, 30, 21])]
    driver.run(requests, 4)
    driver.retract(requests[1])
    driver.step([(requests[1], 1000)], [requests[0], requests[2]])
    driver.step([], requests)
    check(model, requests)
    for request in requests:
        driver.close(request)


@pytest.mark.parametrize("kernels", PATHS)
@pytest.mark.parametrize("case", ["llama", "llama-tied-biased", "qwen2", "qwen3"])
def test_gguf_gives_the_same_logits(case: str, kernels: bool, tmp_path: Path) -> None:
    model = reference(case)
    path = tmp_path / "m.gguf"
    write_gguf(model, path)
    runner = ModelRunner(make_config(str(path), cpu_kernels=kernels), open_checkpoint(str(path)))
    driver = Driver(runner)
    requests = [Request(prompt) for prompt in prompts(6, [5, 40])]
    driver.run(requests, 6)
    check(model, requests)


@pytest.mark.parametrize("kernels", PATHS)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0"])
def test_quantized_gguf_equals_its_own_dequantized_weights(kind: str, kernels: bool, tmp_path: Path) -> None:
    """The blocks, dequantized by the gguf package into the reference model, give the same logits."""
    import gguf

    model = reference("llama")
    path = tmp_path / "m.gguf"
    write_gguf(model, path, kind)
    quant = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 2:
                packed = gguf.quants.quantize(value.numpy(), quant)
                value.copy_(torch.from_numpy(gguf.quants.dequantize(packed, quant)))
    runner = ModelRunner(make_config(str(path), cpu_kernels=kernels), open_checkpoint(str(path)))
    request = Request(prompts(7, [33])[0])
    Driver(runner).run([request], 5)
    check(model, [request], packed=kernels)


@pytest.mark.parametrize("kernels", PATHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(dtype: str, kernels: bool, tmp_path: Path) -> None:
    model = reference("qwen2")
    model.save_pretrained(tmp_path)
    runner = ModelRunner(make_config(str(tmp_path), dtype=dtype, cpu_kernels=kernels), open_checkpoint(str(tmp_path)))
    requests = [Request(prompt) for prompt in prompts(8, [20, 45, 3])]
    Driver(runner).run(requests, 1)
    for request in requests:
        wanted = logits_of(model, request.prompt)[-1]
        error = (request.logits[0] - wanted).norm() / wanted.norm()
        # The kernels keep all half-width values as bfloat16.
        assert error < (0.05 if dtype == "bfloat16" or kernels else 0.01)
        assert runner.pool.k[0].dtype == getattr(torch, dtype)


def test_fp8_cache_stays_close(tmp_path: Path) -> None:
    model = reference("llama")
    model.save_pretrained(tmp_path)
    config = make_config(str(tmp_path), kv_cache_dtype="fp8_e4m3")
    runner = ModelRunner(config, open_checkpoint(str(tmp_path)))
    request = Request(prompts(9, [40])[0])
    Driver(runner).run([request], 4, chunk=17)
    wanted = logits_of(model, request.tokens[:-1])[len(request.prompt) - 1 :]
    assert (torch.stack(request.logits) - wanted).norm() / wanted.norm() < 0.2
