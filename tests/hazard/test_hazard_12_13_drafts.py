"""HAZARDS 12 and 13 with drafts: grammars are rolled back, ends come before masks, drafts die with a retraction, an
empty mask fails one request, and the tree gets accepted tokens only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ceiba.cache.ledger import assert_ledger
from ceiba.config.records import GrammarConfig
from ceiba.grammar.base import Vocabulary
from ceiba.grammar.provider import Provider
from ceiba.scheduler.fake import PlanError
from ceiba.spec.fake import FakeDrafter
from support.replay import replay
from support.scheduler_world import EOS, VOCAB, World, continued, make_world, prompt, settle

THINK_END = 7
LETTERS = {token: bytes([97 + token - 10]) for token in range(10, 36)}
"""The fake model's tokens 10..35 are the letters a to z."""
SHAPE = "((ab|cd|e[f-k])[l-z]){8}(abcdefgh|ijklmnop)"
ASKED: list[dict] = [
    {"max_new_tokens": 60, "regex": SHAPE},
    {"max_new_tokens": 17, "regex": SHAPE},
    {"max_new_tokens": 60, "regex": SHAPE, "min_new_tokens": 50},
    {"max_new_tokens": 60, "regex": SHAPE, "stop_token_ids": (15,)},
    {"max_new_tokens": 60, "regex": SHAPE, "ignore_eos": True},
    {"max_new_tokens": 60, "regex": "abcdefg"},
    {"max_new_tokens": 60, "regex": SHAPE, "think_end_ids": (THINK_END,)},
    {"max_new_tokens": 60, "ignore_eos": True},
]


@pytest.fixture(
    scope="module",
    params=[
        "llguidance",
        pytest.param("xgrammar", marks=pytest.mark.slow),
        pytest.param("outlines", marks=pytest.mark.slow),
    ],
)
def provider(request):
    if request.param != "llguidance":
        pytest.importorskip({"xgrammar": "xgrammar", "outlines": "outlines_core"}[request.param])
    tokens = [LETTERS.get(token, b"") for token in range(VOCAB)]
    words = Vocabulary(tokens, EOS, {"</think>": THINK_END, "<eos>": EOS[0]}, None)
    made = Provider(GrammarConfig(backend=request.param), lambda: words)
    yield made
    made.close()


def serve(
    provider: Provider, asked: list[dict], watch: Callable[[World], None] = lambda world: None, **config
) -> World:
    world = make_world(grammar=provider, **config)
    watch(world)
    for i, fields in enumerate(asked):
        world.ask(str(i), prompt(i, 11), **fields)
    settle(world)
    return world


def outcomes(world: World) -> list[tuple[list[int], str, object]]:
    answers = [world.answer(rid) for rid in world.asked]
    return [(a.tokens, a.finish.kind, a.finish.matched) for a in answers]


@pytest.mark.parametrize("jump", [True, False])
@pytest.mark.parametrize("right", [0.5, 0.9, 1.0])
def test_a_grammar_with_drafts_gives_the_answer_without(provider: Provider, right: float, jump: bool) -> None:
    plain = serve(provider, ASKED, jump_forward=jump)
    known = [(prompt(i, 11), plain.answer(str(i)).tokens) for i in range(len(ASKED))]
    drafter = replay(known, right, VOCAB)
    drafted = serve(provider, ASKED, drafter=drafter, num_draft_tokens=9, jump_forward=jump)
    assert outcomes(drafted) == outcomes(plain)
    assert drafted.scheduler.counters.spec_accepted_tokens > 10
    assert drafted.scheduler.counters.forwards < plain.scheduler.counters.forwards


def test_drafts_die_with_a_retraction(provider: Provider) -> None:
    asked = [{"max_new_tokens": 40, "regex": "(ab|cd|ef){12}", "ignore_eos": True}] * 6
    plain = serve(provider, asked)
    known = [(prompt(i, 11), plain.answer(str(i)).tokens) for i in range(6)]
    drafter = replay(known, 0.8, VOCAB)
    short = {"pool": 150, "rows": 6, "conservativeness": 0.05, "jump_forward": False}
    drafted = serve(provider, asked, drafter=drafter, num_draft_tokens=5, **short)
    assert outcomes(drafted) == outcomes(plain)
    assert drafted.scheduler.counters.retractions
    assert drafted.scheduler.counters.spec_accepted_tokens


class Dead:
    """Anything for so many tokens, and then nothing is allowed."""

    terminated = False
    problem = ""
    LIFE = 5

    def __init__(self) -> None:
        self.accepted = 0

    def fill(self, bits: np.ndarray) -> bool:
        bits[:] = -1 if self.accepted < self.LIFE else 0
        return self.accepted < self.LIFE

    def accept(self, token: int) -> bool:
        self.accepted += 1
        return True

    def rollback(self, count: int) -> None:
        self.accepted -= count

    def forced_tokens(self) -> list[int]:
        return []


class Grown(Dead):
    """Meets a limit when it is asked what follows its fifth token, and cannot go back then, as llguidance."""

    def fill(self, bits: np.ndarray) -> bool:
        self.problem = self.problem or "too many items" * (self.accepted >= self.LIFE)
        return super().fill(bits) and not self.problem

    def accept(self, token: int) -> bool:
        return not self.problem and super().accept(token)

    def rollback(self, count: int) -> None:
        if self.problem:
            raise ValueError(self.problem)
        super().rollback(count)


class DeadTicket:
    def __init__(self, kind: type[Dead]) -> None:
        self.kind = kind

    def ready(self) -> bool:
        return True

    def state(self) -> Dead:
        return self.kind()

    def cancel(self) -> None:
        pass


class Grammars:
    def create(self, sampling):
        return DeadTicket(Grown if sampling.regex == "grown" else Dead)

    def fill(self, states, bits):
        return np.array([state.fill(row) for state, row in zip(states, bits, strict=True)])


@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_allowed_behind_a_draft_fails_one_request_when_it_gets_there(overlap: bool) -> None:
    world = make_world(
        grammar=Grammars(), drafter=FakeDrafter(continued, 1.0, VOCAB), num_draft_tokens=4, overlap=overlap
    )
    world.ask("dead", prompt(1, 10), max_new_tokens=20, ignore_eos=True, regex="dead")
    world.ask("grown", prompt(2, 10), max_new_tokens=20, ignore_eos=True, regex="grown")
    world.ask("free", prompt(3, 10), max_new_tokens=40)
    settle(world)
    grown = world.answer("grown").finish
    assert (grown.status, grown.code) == (400, "grammar_too_complex")
    assert world.answer("dead").finish.kind == "error"
    assert "no next token" in world.answer("dead").finish.message
    assert world.answer("dead").tokens == continued(np.array(prompt(1, 10)), Dead.LIFE).tolist()
    world.check("free")
    assert world.scheduler.counters.spec_accepted_tokens


def test_only_accepted_tokens_are_committed_to_the_tree() -> None:
    """Looked at after every step: each path in the tree begins some request's prompt and answer."""
    world = make_world(drafter=FakeDrafter(continued, 0.6, VOCAB), num_draft_tokens=7, pool=400)
    for i in range(12):
        world.ask(str(i), prompt(i % 8, 8 + i), max_new_tokens=30, ignore_eos=i % 2 == 0)
    for turn in range(5000):
        world.step()
        if turn % 7 == 0 and turn < 100:  # aborted while drafts are in flight
            alive = [rid for rid in world.scheduler._requests if int(rid) >= 10]
            world.abort(*alive[:1])
        texts = [[*world.asked[rid][0], *answer.tokens] for rid, answer in world.port.answers.items()]
        for request in world.scheduler.rows.live():
            texts.append(world.scheduler.rows.key(request.row).tokens.tolist())
        for node in world.scheduler.leases.cache.nodes():
            path: list[int] = []
            at = node
            while at.parent is not None:
                path[:0] = at.tokens.tolist()
                at = at.parent
            assert any(text[: len(path)] == path for text in texts), path
        if world.scheduler.idle and not world.port.inbox:
            break
    counters = world.scheduler.counters
    assert counters.spec_draft_tokens > counters.spec_accepted_tokens > 0
    assert_ledger(world.scheduler.leases, idle=True)
    for i in range(10):
        world.check(str(i))


def test_a_draft_that_is_not_taken_back_shows_at_once() -> None:
    """Guards the tests of drafts: the strict runner notices positions that are computed and were never there."""
    world = make_world(drafter=FakeDrafter(continued, 0.3, VOCAB), num_draft_tokens=7)
    world.scheduler.leases.take_back = lambda rows, lengths: None
    world.ask("a", prompt(1, 10), max_new_tokens=40, ignore_eos=True)
    with pytest.raises(PlanError):
        world.finish()
