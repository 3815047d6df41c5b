"""How ``select`` decides: from the log-probabilities of each choice's tokens to one of them.

Owns the scoring rules. A choice's tokens are those by which it differs from the shared beginning of all candidates, so
a token that spans the end of the prompt and the start of a choice counts with the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Likelihood:
    """One choice, token by token: natural log-probabilities after the prompt, and (if asked for) after nothing."""

    conditional: tuple[float, ...]
    unconditional: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Method:
    """``pick`` returns the index of the winner and the score of each; ties go to the first."""

    name: str
    pick: Callable[[Sequence[Likelihood]], tuple[int, list[float]]]
    unconditional: bool = False
    """Needs the likelihood of each choice without the prompt."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _best(scores: list[float]) -> tuple[int, list[float]]:
    return max(range(len(scores)), key=scores.__getitem__), scores


def _by_mean(entries: Sequence[Likelihood]) -> tuple[int, list[float]]:
    return _best([_mean(entry.conditional) for entry in entries])


def _by_gain(entries: Sequence[Likelihood]) -> tuple[int, list[float]]:
    return _best([_mean(entry.conditional) - _mean(entry.unconditional) for entry in entries])


def _greedy(entries: Sequence[Likelihood]) -> tuple[int, list[float]]:
    """Position by position only the likeliest stay; a choice that has ended goes on with its own mean."""
    alive = list(range(len(entries)))
    means = [_mean(entry.conditional) for entry in entries]
    for position in range(max(len(entry.conditional) for entry in entries)):
        at = {
            i: entries[i].conditional[position] if position < len(entries[i].conditional) else means[i] for i in alive
        }
        best = max(at.values())
        alive = [i for i in alive if at[i] == best]
        if len(alive) == 1:
            break
    scores = [1.0 if i == alive[0] else 0.0 for i in range(len(entries))]
    return alive[0], scores


token_length_normalized = Method("token_length_normalized", _by_mean)
"""The highest mean log-probability per token: long choices are not punished for their length. The default."""
greedy_token_selection = Method("greedy_token_selection", _greedy)
"""The choice that greedy decoding runs into first: the likeliest first token, among equals the second, and so on."""
unconditional_likelihood_normalized = Method("unconditional_likelihood_normalized", _by_gain, unconditional=True)
"""The highest mean gain of log-probability through the prompt: likely words are not preferred for being common."""
