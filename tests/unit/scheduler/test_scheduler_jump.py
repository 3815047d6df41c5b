"""Jump-forward: tokens that a grammar forces are computed together, and nothing else about an answer changes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ceiba.config.records import GrammarConfig
from ceiba.core.sampling import LogprobSpec
from ceiba.grammar.base import Vocabulary
from ceiba.grammar.provider import Provider
from support.scheduler_world import EOS, VOCAB, World, make_world, prompt, settle

LETTERS = {token: bytes([97 + token - 10]) for token in range(10, 36)}
"""The fake model's tokens 10..35 are the letters a to z."""
THINK_END = 7
FORCED = "(abcdefghijkl|mnopqrstuvwx){3}[a-d]{2}(yzyzyz|zyzyzy)"
"""Choices of one letter with long forced tails."""


@pytest.fixture(scope="module")
def provider():
    tokens = [LETTERS.get(token, b"") for token in range(VOCAB)]
    words = Vocabulary(tokens, EOS, {"</think>": THINK_END, "<eos>": EOS[0]}, None)
    made = Provider(GrammarConfig(backend="llguidance"), lambda: words)
    yield made
    made.close()


def text_of(tokens: list[int]) -> str:
    return b"".join(LETTERS.get(token, b"?") for token in tokens if token not in EOS).decode()


SHAPES = {
    "waits": {},
    "eager": {"eager": True},
    "no overlap": {"overlap": False},
    "pages": {"page": 4},
    "mixed": {"enable_mixed_chunk": True, "chunked_prefill_size": 16},
    "short of room": {"pool": 130, "rows": 6, "conservativeness": 0.05},
    "short of room, eager": {"pool": 130, "rows": 6, "conservativeness": 0.05, "eager": True},
    "small steps": {"chunked_prefill_size": 13},
    "fair": {"fair_share": "routing-key"},
}
ASKED: list[dict] = [
    {"max_new_tokens": 60, "regex": FORCED},
    {"max_new_tokens": 60, "regex": FORCED, "stream": True},
    {"max_new_tokens": 17, "regex": FORCED},
    {"max_new_tokens": 60, "regex": FORCED, "min_new_tokens": 50},
    {"max_new_tokens": 60, "regex": FORCED, "stop_token_ids": (15,)},
    {"max_new_tokens": 60, "regex": FORCED, "stop_token_ids": (15,), "min_new_tokens": 20},
    {"max_new_tokens": 60, "regex": FORCED, "ignore_eos": True},
    {"max_new_tokens": 60, "regex": "abcdefg"},
    {"max_new_tokens": 60, "regex": FORCED, "think_end_ids": (THINK_END,)},
    {"max_new_tokens": 25},
]


def answers(provider: Provider, shape: dict, *, jump: bool) -> tuple[World, list]:
    world = make_world(grammar=provider, jump_forward=jump, **shape)
    for i, fields in enumerate(ASKED):
        world.ask(f"r{i}", prompt(i, 11), seed=i, **fields)
    settle(world)
    found = [world.answer(f"r{i}") for i in range(len(ASKED))]
    return world, found


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_the_same_with_and_without(provider, shape):
    world, jumped = answers(provider, SHAPES[shape], jump=True)
    plain_world, plain = answers(provider, SHAPES[shape], jump=False)
    for mine, other, fields in zip(jumped, plain, ASKED, strict=True):
        assert mine.tokens == other.tokens, fields
        assert mine.finish == other.finish, fields
        assert mine.usages[-1].completion_tokens == len(mine.tokens)
        if (
            fields.get("regex") == FORCED
            and mine.finish.kind == "stop"
            and not {"stop_token_ids", "think_end_ids"} & set(fields)
        ):
            assert re.fullmatch(FORCED, text_of(mine.tokens))
    counters, before = world.scheduler.counters, plain_world.scheduler.counters
    assert counters.jumped_tokens > 0 == before.jumped_tokens
    assert counters.generation_tokens == before.generation_tokens == sum(len(a.tokens) for a in jumped)
    if "room" not in shape:  # otherwise recomputation decides
        assert counters.forwards < before.forwards
    if "room" in shape:
        assert counters.retractions > 0


@pytest.mark.parametrize("eager", [True, False])
def test_fewer_steps_than_tokens(provider, eager):
    world = make_world(grammar=provider, eager=eager)
    world.ask("g", prompt(1, 10), max_new_tokens=100, regex=FORCED, ignore_eos=True)
    settle(world)
    tokens = world.answer("g").tokens
    assert len(tokens) == 44
    # A step for the prompt, one per choice, and one more per choice where its result comes a step late.
    most = 1 + 6 if eager else 2 + 2 * 6
    assert world.scheduler.counters.forwards <= most
    assert world.runner.stats()["tokens"] < 10 + 44 + 1


def test_streams_hear_all_tokens_once_and_in_order(provider):
    world = make_world(grammar=provider, eager=True)
    world.ask("g", prompt(1, 10), max_new_tokens=100, regex=FORCED, stream=True)
    settle(world)
    answer = world.answer("g")
    assert answer.opened == 1
    assert re.fullmatch(FORCED, text_of(answer.tokens))


def test_log_probabilities_are_sampled_token_by_token(provider):
    world = make_world(grammar=provider, eager=True)
    world.ask("g", prompt(1, 10), max_new_tokens=100, regex=FORCED, logprob=LogprobSpec(output=True))
    world.ask("p", prompt(1, 10), max_new_tokens=100, regex=FORCED)
    settle(world)
    assert world.answer("g").tokens == world.answer("p").tokens
    values = np.concatenate([np.frombuffer(part.values, "<f4") for part in world.answer("g").logprobs])
    assert len(values) == len(world.answer("g").tokens)
    assert np.isfinite(values).all()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("after", range(1, 9))
def test_an_abort_at_any_time_gives_all_room_back(provider, eager, after):
    world = make_world(grammar=provider, eager=eager)
    world.ask("warm", prompt(2, 10), max_new_tokens=3, regex=FORCED)
    settle(world)
    world.ask("g", prompt(1, 10), max_new_tokens=100, regex=FORCED)
    world.ask("other", prompt(3, 10), max_new_tokens=100, regex=FORCED)
    world.step(after)
    world.abort("g")
    settle(world)
    assert world.answer("g").finish.kind in {"abort", "stop"}
    assert re.fullmatch(FORCED, text_of(world.answer("other").tokens))


def test_what_was_jumped_is_found_in_the_cache(provider):
    world = make_world(grammar=provider, eager=True)
    world.ask("first", prompt(1, 10), max_new_tokens=100, regex=FORCED, ignore_eos=True)
    settle(world)
    tokens = world.answer("first").tokens
    world.ask("again", prompt(1, 10) + tokens, max_new_tokens=5)
    settle(world)
    world.check("again")
    assert world.answer("again").usages[-1].cached_tokens >= 10 + len(tokens) - 8
