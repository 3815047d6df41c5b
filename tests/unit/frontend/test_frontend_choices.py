"""The scoring rules of select, on numbers worked out by hand."""

from __future__ import annotations

from ceiba.frontend.choices import (
    Likelihood,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)


def test_the_mean_does_not_punish_length() -> None:
    short, long = Likelihood((-1.5,)), Likelihood((-1.0, -1.0, -1.0))
    assert token_length_normalized.pick([short, long]) == (1, [-1.5, -1.0])
    assert token_length_normalized.pick([long, long])[0] == 0


def test_greedy_takes_the_likeliest_first_token_then_the_next() -> None:
    a, b, c = Likelihood((-0.1, -9.0)), Likelihood((-0.1, -2.0)), Likelihood((-0.2, -0.1))
    assert greedy_token_selection.pick([a, b, c]) == (1, [0.0, 1.0, 0.0])
    assert greedy_token_selection.pick([c, a])[0] == 1


def test_greedy_goes_on_after_the_end_of_a_choice_with_its_mean() -> None:
    ended, longer = Likelihood((-0.5,)), Likelihood((-0.5, -0.4))
    assert greedy_token_selection.pick([ended, longer])[0] == 1
    assert greedy_token_selection.pick([ended, Likelihood((-0.5, -0.6))])[0] == 0


def test_the_gain_through_the_prompt() -> None:
    common = Likelihood((-1.0, -1.0), (-1.0, -1.0))
    rare = Likelihood((-2.0,), (-8.0,))
    assert unconditional_likelihood_normalized.pick([common, rare]) == (1, [0.0, 6.0])
    assert token_length_normalized.pick([common, rare])[0] == 0
