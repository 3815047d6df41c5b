"""The sampler against distributions computed in numpy, and the properties that seeds, masks and faults promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.core.step import RowOpen, TokenMasks
from ceiba.kernels import cpu
from ceiba.runner.host_sampler import HostSampler
from ceiba.runner.noise import LARGEST, SMALLEST, exponential, row_keys
from ceiba.runner.rows import Rows
from ceiba.runner.sampler import Sampled, draw, sample

VOCAB = 40
PROMPT = [3, 3, 5, 7]
OUTPUT = [5, 9, 9, 9]


def chi_square_fits(observed: np.ndarray, wanted: np.ndarray) -> bool:
    """Pearson's test at about p = 1e-4, by the Wilson-Hilferty approximation of the chi-square distribution."""
    freedom = len(wanted) - 1
    if freedom == 0:
        return True
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 3.72


def exponential_fits(noise: np.ndarray) -> bool:
    """The Kolmogorov-Smirnov test against the standard exponential distribution at about p = 1e-4."""
    ordered = np.sort(noise.astype(np.float64))
    steps = np.arange(1, len(ordered) + 1) / len(ordered)
    distance = np.abs(-np.expm1(-ordered) - steps).max()
    return distance * math.sqrt(len(ordered)) < 2.23


def open_rows(
    rows: Rows, params: list[SamplingParams], seeds: list[int] | None = None, output: list[int] = OUTPUT, eos: Any = ()
) -> np.ndarray:
    rows.open(
        [
            RowOpen(
                row=row,
                tokens=np.array(PROMPT + output, np.int32),
                prompt_len=len(PROMPT),
                prefix_slots=np.empty(0, np.int32),
                sampling=sampling,
                seed=row if seeds is None else seeds[row],
                eos_ids=eos,
            )
            for row, sampling in enumerate(params)
        ]
    )
    return np.arange(len(params), dtype=np.int32)


def new_rows(count: int, vocab: int = VOCAB) -> Rows:
    return Rows(count, 16, vocab, torch.device("cpu"))


COMPILED = pytest.param(
    "compiled", marks=pytest.mark.skipif(not cpu.available, reason="installed without a C++ compiler")
)


class Samplers:
    """Which sampler ``choose`` asks: the reference, or the compiled kernels that must do the same."""

    current: Callable[..., Sampled] = staticmethod(sample)


@pytest.fixture(autouse=True, params=["reference", COMPILED])
def each_sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "compiled":
        monkeypatch.setattr(Samplers, "current", staticmethod(HostSampler(cpu._cpu.Context(2)).sample))


def choose(rows: Rows, index: np.ndarray, logits: torch.Tensor, masks: TokenMasks | None = None) -> Sampled:
    batch = rows.batch(index)
    chosen = Samplers.current(logits.clone(), batch, rows, masks)
    rows.sampled(batch, chosen.tokens)
    return chosen


def expected(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The distribution that the documented order gives, one step at a time, in float64."""
    x = logits.astype(np.float64).copy()
    for token in range(VOCAB):
        count = OUTPUT.count(token)
        x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        if token in PROMPT or token in OUTPUT:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        x[token] += p.logit_bias.get(token, 0.0)
    x /= p.temperature
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    kept, mass = [], 0.0
    for rank, token in enumerate(order):
        if p.top_k > 0 and rank >= p.top_k:
            break
        if mass >= p.top_p:
            break
        mass += probs[token]
        if probs[token] >= p.min_p * probs.max():
            kept.append(token)
    final = np.zeros(VOCAB)
    final[kept] = probs[kept]
    return final / final.sum()


CASES = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.6),
    "min_p": SamplingParams(min_p=0.2),
    "all": SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.05),
    "frequency": SamplingParams(frequency_penalty=0.8),
    "presence": SamplingParams(presence_penalty=-1.5),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "penalties": SamplingParams(
        frequency_penalty=0.4, presence_penalty=0.3, repetition_penalty=1.2, temperature=0.9, top_p=0.95
    ),
    "bias": SamplingParams(logit_bias={2: 2.5, 9: -100.0}, top_k=8),
}


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_distribution(case: str, in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import ceiba.runner.sampler as module

    monkeypatch.setattr(module, "draw", lambda x, draws, rows: draw(x, draws, rows, in_order))
    count = 4000
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 1.7, VOCAB).astype(np.float32))
    rows = new_rows(count)
    index = open_rows(rows, [CASES[case]] * count)
    # Random 64-bit seeds as well as the small consecutive ones that clients send.
    rows._seed[count // 2 :] = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, len(rows._seed) - count // 2)
    tokens = choose(rows, index, logits.expand(count, -1)).tokens.numpy()
    want = expected(logits.numpy(), CASES[case])
    got = np.bincount(tokens, minlength=VOCAB)
    assert not got[want == 0].any(), "a token outside the allowed set was chosen"
    common = want * count >= 5
    observed = np.append(got[common], got[~common].sum())
    wanted = np.append(want[common], want[~common].sum()) * count
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert chi_square_fits(observed, wanted)


def test_noise_of_one_seed_is_independent_from_position_to_position() -> None:
    count = 20000
    noise = exponential(row_keys(torch.full((count,), 42), torch.arange(count)), 4).numpy()
    assert noise.min() >= SMALLEST
    assert noise.max() <= LARGEST
    for column in range(4):
        assert exponential_fits(noise[:, column])
    correlation = np.corrcoef(np.concatenate((noise, np.roll(noise, 1, axis=0)), axis=1).T) - np.eye(8)
    assert np.abs(correlation).max() < 5 / math.sqrt(count)


def test_noise_of_one_position_is_independent_from_token_to_token() -> None:
    noise = exponential(row_keys(torch.tensor([7]), torch.tensor([0])), 50000)[0].numpy()
    assert exponential_fits(noise)
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 5 / math.sqrt(len(noise))
    assert len(np.unique(noise)) > 49000


def test_noise_is_fixed_for_ever() -> None:
    """The 64-bit key and the 32-bit hash computed with Python integers: what a seed means may never change."""
    seed, position, token = 2**63 + 12345, 17, 31415
    m64, m32 = 2**64 - 1, 2**32 - 1
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & m64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & m64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & m64
    key = x ^ (x >> 31)
    h = (token * 0x9E3779B1 + (key & m32)) & m32
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & m32
    h = ((h ^ (h >> 13)) + (key >> 32)) & m32
    h = (h * 0xC2B2AE35) & m32
    h = ((h ^ (h >> 15)) * 0x85EBCA6B) & m32
    h = (h ^ (h >> 16)) >> 1
    keys = row_keys(torch.tensor([seed - 2**64]), torch.tensor([position]))
    got = float(exponential(keys, 40000)[0, token])
    assert got == pytest.approx(-math.log1p(-(h + 0.5) / 2**31), rel=1e-5)


def test_the_same_seed_chooses_the_same_whatever_shares_its_batch() -> None:
    torch.manual_seed(0)
    steps = [torch.randn(VOCAB) * 2 for _ in range(30)]
    mine = SamplingParams(temperature=1.1, top_p=0.95)
    others = [SamplingParams(temperature=0.0), SamplingParams(top_k=3), SamplingParams(frequency_penalty=1.0)]

    def run(params: list[SamplingParams], seeds: list[int], place: int) -> list[int]:
        rows = new_rows(len(params))
        index = open_rows(rows, params, seeds, output=[])
        tokens = []
        for logits in steps:
            batch = torch.randn(len(params), VOCAB)
            batch[place] = logits
            tokens.append(int(choose(rows, index, batch).tokens[place]))
        return tokens

    alone = run([mine], [123], 0)
    assert run([*others, mine], [1, 2, 3, 123], 3) == alone
    assert run([mine] * 3, [5, 123, 6], 1) == alone
    assert run([mine], [124], 0) != alone


def test_reopened_after_retraction_a_row_goes_on_where_it_was() -> None:
    torch.manual_seed(1)
    steps = [torch.randn(1, VOCAB) for _ in range(12)]
    params = SamplingParams(temperature=1.5, frequency_penalty=0.5, repetition_penalty=1.3)
    rows = new_rows(1)
    index = open_rows(rows, [params], [9], output=[])
    whole = [int(choose(rows, index, logits).tokens) for logits in steps]
    rows = new_rows(3)
    index = open_rows(rows, [params], [9], output=[])
    first = [int(choose(rows, index, logits).tokens) for logits in steps[:5]]
    rows.close([0])
    index = open_rows(rows, [params], [9], output=first)
    assert first + [int(choose(rows, index, logits).tokens) for logits in steps[5:]] == whole


def test_sorting_and_the_histogram_choose_the_same() -> None:
    torch.manual_seed(2)
    vocab, count = 5000, 40
    rng = np.random.default_rng(3)
    params = [
        SamplingParams(
            temperature=float(rng.uniform(0.1, 4)),
            top_k=int(rng.choice([-1, 2, 50, 4999])),
            top_p=float(rng.choice([1.0, 0.3, 0.9, 0.999])),
            min_p=float(rng.choice([0.0, 0.1])),
        )
        for _ in range(count)
    ]
    rows = new_rows(count, vocab)
    batch = rows.batch(open_rows(rows, params))
    assert batch.draws is not None
    for _ in range(5):
        logits = torch.randn(count, vocab) * 4
        x = (logits - logits.max(1, keepdim=True).values) / batch.draws.temperature
        assert torch.equal(draw(x.clone(), batch.draws, rows, False), draw(x.clone(), batch.draws, rows, True))
        rows.sampled(batch, torch.zeros(count, dtype=torch.int64))


def any_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.2, 1.0, 3.0])),
        top_k=int(rng.choice([-1, 1, 2, 50, vocab - 1])),
        top_p=float(rng.choice([1.0, 0.05, 0.3, 0.9, 0.999])),
        min_p=float(rng.choice([0.0, 0.0, 0.1])),
        frequency_penalty=float(rng.choice([0.0, 0.0, 0.7, -0.5])),
        presence_penalty=float(rng.choice([0.0, 0.0, 0.3])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.3])),
        logit_bias={} if rng.random() < 0.6 else {5: 3.0, 17: -100.0},
    )


@pytest.mark.skipif(not cpu.available, reason="installed without a C++ compiler")
@pytest.mark.parametrize("isa", ["generic", *(cpu._cpu.instruction_sets() if cpu.available else [])])
def test_compiled_and_reference_choose_the_same(isa: str) -> None:
    """On every instruction set, for vocabularies that no vector divides, with ties, plateaus and far outliers."""
    rng, compiled = np.random.default_rng(8), HostSampler(cpu._cpu.Context(2, isa)).sample
    for vocab in (9, 37, 5003):
        count = 60
        rows, others = new_rows(count, vocab), new_rows(count, vocab)
        params = [any_params(rng, vocab) for _ in range(count)]
        seeds = [int(seed) for seed in rng.integers(-(2**63), 2**63 - 1, count)]
        output = [1, 0, 1]
        index = open_rows(rows, params, seeds, output)
        open_rows(others, params, seeds, output)
        for step in range(4):
            logits = torch.from_numpy((rng.normal(size=(count, vocab)) * rng.uniform(0.1, 12)).astype(np.float32))
            if step == 1:
                logits = logits.round()
            if step == 2:
                logits[:, rng.integers(0, vocab)] += 60
            masks = None
            if step == 3:
                bits = rng.integers(-(2**31), 2**31 - 1, (count, -(-vocab // 32))).astype(np.int32)
                masks = TokenMasks(rng.permutation(count).astype(np.int32)[: count // 2], bits[: count // 2])
            wanted = sample(logits.clone(), rows.batch(index), rows, masks)
            got = compiled(logits.clone(), others.batch(index), others, masks)
            assert got.faults.tolist() == wanted.faults.tolist()
            assert got.tokens.tolist() == wanted.tokens.tolist(), (vocab, step)
            rows.sampled(rows.batch(index), wanted.tokens)
            others.sampled(others.batch(index), wanted.tokens)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [7, 11, 30]] = 2.5
    rows = new_rows(3)
    params = [SamplingParams(temperature=0.0), SamplingParams(top_k=1), SamplingParams(temperature=0.0)]
    assert choose(rows, open_rows(rows, params), logits).tokens.tolist() == [7, 7, 7]
    mixed = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(top_k=1)]
    chosen = choose(rows, open_rows(rows, mixed), logits).tokens.tolist()
    assert (chosen[0], chosen[2]) == (7, 7)


def test_top_k_keeps_exactly_k_of_equals() -> None:
    count = 400
    logits = torch.zeros(count, VOCAB)
    rows = new_rows(count)
    tokens = choose(rows, open_rows(rows, [SamplingParams(top_k=3)] * count), logits).tokens
    assert sorted(tokens.unique().tolist()) == [0, 1, 2]


def test_a_tiny_temperature_is_greedy_and_overflows_nothing() -> None:
    torch.manual_seed(4)
    logits = torch.randn(6, VOCAB) * 50
    rows = new_rows(6)
    chosen = choose(rows, open_rows(rows, [SamplingParams(temperature=1e-30, top_p=0.9)] * 6), logits)
    assert chosen.tokens.tolist() == logits.argmax(1).tolist()
    assert not chosen.faults.any()


def test_end_tokens_are_held_back_until_the_minimum() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 4] = 10.0
    logits[:, 6] = 9.0
    logits[:, 8] = 1.0
    rows = new_rows(2)
    params = [SamplingParams(temperature=0.0, min_new_tokens=3), SamplingParams(temperature=0.0)]
    index = open_rows(rows, params, output=[], eos=(4, 6))
    seen = [choose(rows, index, logits).tokens.tolist() for _ in range(5)]
    assert [step[0] for step in seen] == [8, 8, 8, 4, 4]
    assert [step[1] for step in seen] == [4] * 5
    index = open_rows(rows, params, output=[1, 1], eos=(4, 6))
    seen = [choose(rows, index, logits).tokens.tolist() for _ in range(2)]
    assert [step[0] for step in seen] == [8, 4]


def test_counts_grow_as_tokens_are_sampled() -> None:
    """A frequency penalty of 1 on equal logits gives each token its turn, lowest id first."""
    rows = new_rows(2)
    params = [SamplingParams(temperature=0.0, frequency_penalty=1.0), SamplingParams(temperature=0.0)]
    index = open_rows(rows, params, output=[])
    got = [choose(rows, index, torch.zeros(2, VOCAB)).tokens.tolist() for _ in range(VOCAB + 2)]
    assert [step[0] for step in got] == [*range(VOCAB), 0, 1]
    assert {step[1] for step in got} == {0}


def test_count_tables_are_given_back_and_grow() -> None:
    rows = new_rows(20)
    penalized = SamplingParams(presence_penalty=1.0)
    for _ in range(3):
        open_rows(rows, [penalized] * 20)
        rows.close(range(20))
    assert len(rows.counts.output) <= 32
    assert not rows.counts.line
    open_rows(rows, [SamplingParams()] * 20)
    assert not rows.counts.line


def masks_for(rows: list[int], allowed: list[list[int]]) -> TokenMasks:
    bits = np.zeros((len(rows), 2), np.uint32)
    for line, tokens in enumerate(allowed):
        for token in tokens:
            bits[line, token // 32] |= np.uint32(1 << (token % 32))
    return TokenMasks(np.array(rows, np.int32), bits.view(np.int32))


def test_masks_apply_to_their_rows_alone() -> None:
    torch.manual_seed(5)
    logits = torch.randn(4, VOCAB)
    rows = new_rows(4)
    params = [SamplingParams(temperature=0.0)] * 3 + [SamplingParams(temperature=1.0)]
    index = open_rows(rows, params)
    masks = masks_for([3, 1], [[31], [0, 33, 39]])
    for _ in range(5):
        tokens = choose(rows, index, logits, masks).tokens.tolist()
        assert tokens[0] == int(logits[0].argmax())
        assert tokens[1] == max((0, 33, 39), key=lambda token: float(logits[1, token]))
        assert tokens[3] == 31


def test_faults_stay_with_their_row() -> None:
    torch.manual_seed(6)
    clean = torch.randn(6, VOCAB)
    params = [SamplingParams(temperature=1.0, top_p=0.9)] * 6
    rows = new_rows(6)
    wanted = choose(rows, open_rows(rows, params), clean).tokens.tolist()
    broken = clean.clone()
    broken[1, 5] = float("nan")
    broken[2, :] = float("nan")
    broken[3, 0] = float("inf")
    rows = new_rows(6)
    chosen = choose(rows, open_rows(rows, params), broken, masks_for([4], [[]]))
    assert chosen.faults.tolist() == [0, 1, 1, 1, 2, 0]
    assert [chosen.tokens.tolist()[i] for i in (0, 5)] == [wanted[0], wanted[5]]
    assert all(0 <= token < VOCAB for token in chosen.tokens.tolist())
    rows = new_rows(6)
    greedy = choose(rows, open_rows(rows, [SamplingParams(temperature=0.0)] * 6), broken)
    assert greedy.faults.tolist() == [0, 1, 1, 1, 0, 0]


def test_a_batch_is_kept_while_its_rows_stay() -> None:
    rows = new_rows(4)
    index = open_rows(rows, [SamplingParams()] * 4)
    first = rows.batch(index)
    assert rows.batch(index.copy()) is first
    assert rows.batch(index[:3]) is not first
    again = rows.batch(index)
    open_rows(rows, [SamplingParams(temperature=0.0)])
    changed = rows.batch(index)
    assert changed is not again
    assert changed.draws is not None
    assert changed.draws.segments is not None
    assert changed.draws.segments.tolist() == [1, 2, 3]


def test_raw_logits_are_kept_only_where_asked() -> None:
    rows = new_rows(1)
    index = open_rows(rows, [SamplingParams(logit_bias={1: 50.0})])
    assert choose(rows, index, torch.zeros(1, VOCAB)).raw is None
    rows._logprob[0] = LogprobSpec(output=True)
    rows._batch = None
    kept = choose(rows, index, torch.zeros(1, VOCAB))
    assert kept.raw is not None
    assert not kept.raw.any()
    assert kept.tokens.tolist() == [1]
