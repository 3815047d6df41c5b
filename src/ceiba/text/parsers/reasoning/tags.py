"""Thinking between two markers, which is nearly every family's form.

Owns the declarations: the markers, whether the model thinks when nobody says, and whether it may think again later.
Reading is the business of `output`. Must never know tools.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One family's way to write its thinking."""

    pairs: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    """(begin, end); the first pair is what the family's template writes."""
    forced: bool = False
    """Whether thinking is taken to have begun in the prompt when the prompt is not known."""
    again: bool = False
    """Whether thinking may begin anywhere, not only at the start of the answer or behind a call."""
    trim: bool = True
    """Whether whitespace around the markers belongs to the format."""
    early: tuple[str, ...] = ()
    """Markers that end the thinking and are left for the answer."""
    noise: tuple[str, ...] = ()
    """Markers that are no part of the answer."""
    label: str = ""
    """A word behind the begin marker that is no part of the thinking."""
    passed: bool = False
    """Whether the thinking stays in the answer, markers and all."""
    ends: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    """`ends_at` and `answer_at`, where they are not the end markers."""

    @property
    def begins(self) -> tuple[str, ...]:
        return tuple(b for b, _ in self.pairs)

    @property
    def ends_at(self) -> tuple[str, ...]:
        """The texts that close the thinking: a grammar for calls starts behind the first of them."""
        return self.ends or tuple(e for _, e in self.pairs)

    @property
    def answer_at(self) -> tuple[str, ...]:
        """The texts that the answer's own text stands behind: a grammar for it starts at the first of them."""
        return self.answers or self.ends_at

    def thinks(self, prompt: str) -> bool | None:
        """Whether the output begins with thinking; None if that is the model's choice, by writing a begin marker."""
        opened = self.opened_by(prompt)
        return (self.forced or None) if opened is None else opened

    def end_of(self, begin: str) -> str:
        return dict(self.pairs)[begin]

    def opened_by(self, prompt: str) -> bool | None:
        """Whether the rendered prompt leaves the model thinking (True), done with it (False), or free (None)."""
        tail = prompt.rstrip()
        for begin, end in self.pairs:
            if tail.endswith((begin, begin + self.label)):
                return True
            if tail.endswith(end) or any(tail.endswith(e) for e in self.early):
                return False
        return None


_THINK = (("<think>", "</think>"),)

THINK = ReasoningFormat()
FORCED = ReasoningFormat(forced=True)
KIMI = ReasoningFormat((("◁think▷", "◁/think▷"),))
KIMI_K3 = ReasoningFormat(
    (("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
    trim=False,
    early=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
    noise=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
    answers=("<|open|>response<|sep|>",),
)
MINIMAX_M3 = ReasoningFormat((("<mm:think>", "</mm:think>"),))
MINIMAX_APPEND = ReasoningFormat(passed=True, forced=True)
MISTRAL = ReasoningFormat((("[THINK]", "[/THINK]"), *_THINK), again=True, trim=False)
GRANITE = ReasoningFormat(
    (("Here is my thought process:", "Here is my response:"), *_THINK), noise=("<response>", "</response>")
)
GEMMA4 = ReasoningFormat((("<|channel>", "<channel|>"),), again=True, label="thought")
HUNYUAN = ReasoningFormat((*_THINK, ("<think:opensource>", "</think:opensource>")), noise=("<answer>", "</answer>"))
COHERE = ReasoningFormat(
    (("<|START_THINKING|>", "<|END_THINKING|>"),),
    again=True,
    noise=("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    answers=("<|START_TEXT|>", "<|START_RESPONSE|>"),
)
