"""The runner on a tiny model: log-probabilities against torch, seeds in any company, faults, rows that come and go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ceiba.checkpoint.opening import open_checkpoint
from ceiba.core.errors import ConfigError
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.core.step import StepPlan
from ceiba.runner.worker import ModelRunner
from plan_driver import Driver, Request, make_config
from tiny_models import logits_of, reference

VOCAB = 320


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return reference("llama")


@pytest.fixture(scope="module")
def path(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("m")
    model.save_pretrained(where)
    return str(where)


@pytest.fixture
def driver(path: str) -> Driver:
    return Driver(ModelRunner(make_config(path), open_checkpoint(path)))


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_info(driver: Driver) -> None:
    info = driver.runner.info
    assert (info.num_slots, info.max_rows, info.vocab_size, info.context_len) == (4096, 32, VOCAB, 256)
    assert info.device == "cpu"
    assert info.eos_ids == (2,)
    assert info.available_memory > 0


def test_output_logprobs_are_the_models_own(driver: Driver, model: PreTrainedModel) -> None:
    """Whatever temperature, penalty or bias chose the token."""
    odd = SamplingParams(temperature=2.0, logit_bias={5: 30.0}, presence_penalty=1.0)
    spec = LogprobSpec(output=True, top=4, token_ids=(7, 300, 5))
    wanting = Request(prompt(1, 20), odd, seed=3, logprob=spec)
    few = Request(prompt(2, 11), logprob=LogprobSpec(output=True, top=2))
    plain = Request(prompt(3, 15))
    driver.run([plain, wanting, few], 5)
    for request, top in ((wanting, 4), (few, 2)):
        wanted = logits_of(model, request.tokens[:-1])[len(request.prompt) - 1 :].log_softmax(-1)
        for index, output in enumerate(request.steps):
            place = [0, 1, 2][[plain, wanting, few].index(request)]
            assert output.logprobs is not None
            assert output.top_ids is not None
            assert output.top_values is not None
            token = request.output[index]
            assert output.logprobs[place] == pytest.approx(float(wanted[index, token]), abs=2e-4)
            best = wanted[index].topk(top)
            assert output.top_ids[place, :top].tolist() == best.indices.tolist()
            np.testing.assert_allclose(output.top_values[place, :top], best.values.numpy(), atol=2e-4)
            assert np.isnan(output.logprobs[0])
    fixed = wanting.steps[2].fixed_values[wanting.row]
    at = logits_of(model, wanting.tokens[:-1])[len(wanting.prompt) + 1].log_softmax(-1)
    np.testing.assert_allclose(fixed, at[[7, 300, 5]].numpy()[None], atol=2e-4)
    assert few.row not in wanting.steps[2].fixed_values


@pytest.mark.parametrize("chunk", [1000, 17, 1])
@pytest.mark.parametrize("start", [0, 1, 13])
def test_prompt_logprobs(driver: Driver, model: PreTrainedModel, chunk: int, start: int) -> None:
    driver.runner._prompt_block = 5
    spec = LogprobSpec(prompt_start=start, top=3, token_ids=(9, 8))
    request = Request(prompt(4, 36), logprob=spec)
    other = Request(prompt(5, 30))
    driver.run([other, request], 2, chunk=chunk)
    pieces = [step.prompt_logprobs[request.row] for step in request.steps if request.row in step.prompt_logprobs]
    assert all(other.row not in step.prompt_logprobs for step in request.steps)
    at = start
    for piece in pieces:
        assert piece.start == at
        at += len(piece.values)
    assert at == len(request.prompt), "every prompt position once, none of the output"
    values = np.concatenate([piece.values for piece in pieces])
    wanted = logits_of(model, request.prompt).log_softmax(-1)
    targets = torch.tensor(request.prompt)
    first = max(start, 1)
    expected = wanted[first - 1 : -1].gather(1, targets[first:, None])[:, 0].numpy()
    np.testing.assert_allclose(values[first - start :], expected, atol=2e-4)
    assert start > 0 or np.isnan(values[0])
    top_ids = np.concatenate([piece.top_ids for piece in pieces if piece.top_ids is not None])
    fixed = np.concatenate([piece.fixed_values for piece in pieces if piece.fixed_values is not None])
    assert top_ids[first - start :].tolist() == wanted[first - 1 : -1].topk(3).indices.tolist()
    np.testing.assert_allclose(fixed[first - start :], wanted[first - 1 : -1][:, [9, 8]].numpy(), atol=2e-4)


def test_prompt_logprobs_after_a_cached_prefix(driver: Driver, model: PreTrainedModel) -> None:
    first = Request(prompt(6, 30))
    driver.run([first], 1)
    second = Request(first.prompt, logprob=LogprobSpec(prompt_start=20), prefix_slots=first.slots[:19])
    driver.run([second], 1)
    piece = second.steps[0].prompt_logprobs[second.row]
    wanted = logits_of(model, first.prompt).log_softmax(-1)
    expected = [float(wanted[p - 1, first.prompt[p]]) for p in range(20, 30)]
    assert piece.start == 20
    np.testing.assert_allclose(piece.values, expected, atol=2e-4)


def test_a_seed_gives_the_same_text_in_any_company(driver: Driver) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95)

    def mine() -> Request:
        return Request(prompt(7, 25), params, seed=77)

    alone, crowded, chunked, retracted = mine(), mine(), mine(), mine()
    driver.run([alone], 12)
    crowd = [Request(prompt(8 + i, 5 + i), SamplingParams(temperature=1.0, top_k=9), seed=i) for i in range(9)]
    driver.run([*crowd[:4], crowded, *crowd[4:]], 12)
    driver.run([chunked], 12, chunk=7)
    driver.run([retracted], 5)
    driver.retract(retracted)
    driver.step([(retracted, 1000)])
    for _ in range(6):
        driver.step([], [retracted])
    assert alone.output == crowded.output == chunked.output == retracted.output
    assert len({tuple(r.output) for r in crowd}) == 9


def test_a_row_with_broken_keys_fails_alone(driver: Driver) -> None:
    requests = [Request(prompt(20 + i, 12)) for i in range(4)]
    driver.run(requests, 2)
    healthy = [Request(r.prompt) for r in requests]
    driver.run(healthy, 6)
    driver.runner.pool.k[1][requests[2].slots[3]] = float("nan")
    outputs = [driver.step([], requests) for _ in range(4)]
    for output in outputs:
        assert list(output.faults) == [requests[2].row]
        assert "finite" in output.faults[requests[2].row]
    for index in (0, 1, 3):
        assert requests[index].output == healthy[index].output


def test_masks_hold_their_row_only(driver: Driver) -> None:
    one, two = Request(prompt(30, 9)), Request(prompt(30, 9))
    driver.step([(one, 99), (two, 99)], masks={two: [3, 200, 319]})
    assert two.output[0] in (3, 200, 319)
    assert two.output[0] == max((3, 200, 319), key=lambda t: float(two.logits[0][t]))
    assert one.output[0] == int(one.logits[0].argmax())
    output = driver.step([], [one, two], masks={two: []})
    assert list(output.faults) == [two.row]


def test_a_row_is_reused_without_a_trace(driver: Driver) -> None:
    heavy = SamplingParams(temperature=0.0, repetition_penalty=5.0, logit_bias={1: 90.0}, min_new_tokens=50)
    fresh = Request(prompt(31, 10))
    driver.run([fresh], 5)
    driver.close(fresh)
    row = driver.free_rows[-1]
    first = Request(prompt(32, 60), heavy, eos_ids=(1,), logprob=LogprobSpec(output=True, prompt_start=0))
    driver.run([first], 5)
    assert first.row == row
    driver.close(first)
    again = Request(fresh.prompt)
    driver.run([again], 5)
    assert again.row == row
    assert again.output == fresh.output
    assert again.steps[-1].logprobs is None
    assert not any(step.prompt_logprobs for step in again.steps)


def test_a_step_that_samples_nothing(driver: Driver) -> None:
    request = Request(prompt(33, 20))
    output = driver.step([(request, 7)])
    assert output.tokens.shape == (0,)
    assert output.rows.shape == (0,)
    assert not request.output


def test_steps_beyond_the_buffers(path: str) -> None:
    """Buffers grow when a step is larger than any before."""
    config = make_config(path, chunked_prefill_size=-1, max_running_requests=4)
    driver = Driver(ModelRunner(config, open_checkpoint(path)))
    long = Request(prompt(34, 200))
    short = Request(prompt(34, 200)[:30])
    driver.run([short], 3)
    driver.run([long], 3)
    again = Request(short.prompt)
    driver.run([again], 3)
    assert again.output == short.output
    whole = Driver(ModelRunner(make_config(path), open_checkpoint(path)))
    other = Request(long.prompt)
    whole.run([other], 3, chunk=64)
    assert other.output == long.output


def test_stats_count_forwards(driver: Driver) -> None:
    requests = [Request(prompt(40 + i, 10)) for i in range(16)]
    driver.run(requests, 8)
    stats = driver.runner.stats()
    assert stats["forwards"] == 8
    assert stats["decode_forwards"] == 7
    assert stats["tokens"] == 16 * 10 + 16 * 7
    assert stats["sampled_tokens"] == 16 * 8


def test_three_positions_per_token_are_refused(driver: Driver) -> None:
    one = np.array([0], np.int32)
    plan = StepPlan(0, one, one, one + 1, np.array([True]), one, one, 1, positions=np.zeros((3, 1), np.int32))
    with pytest.raises(ValueError, match="mrope"):
        driver.runner.forward(plan)


def test_refusals(path: str) -> None:
    checkpoint = open_checkpoint(path)
    with pytest.raises(ConfigError, match=r"kv-cache-dtype 'nvfp4'.*fp8_e4m3"):
        ModelRunner(make_config(path, kv_cache_dtype="nvfp4"), checkpoint)
    with pytest.raises(ConfigError, match="attention backend"):
        ModelRunner(make_config(path, attention_backend="fa3"), checkpoint)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            ModelRunner(make_config(path, device="cuda"), checkpoint)


def test_results_wait_once(driver: Driver) -> None:
    request = Request(prompt(50, 8))
    opened = driver._open(request)
    slots = np.array([driver.free.pop() for _ in range(8)], np.int32)
    i32 = np.int32
    plan = StepPlan(
        9,
        np.array([request.row], i32),
        np.array([0], i32),
        np.array([8], i32),
        np.array([True]),
        np.array(request.prompt, i32),
        slots,
        1,
        opened=[opened],
    )
    result = driver.runner.sample(driver.runner.forward(plan), None)
    assert result.ready()
    assert result.wait() is result.wait()
    assert result.wait().step == 9
    assert result.wait().counts.tolist() == [1]
