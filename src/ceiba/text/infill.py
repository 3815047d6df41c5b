"""Filling in the middle: how models that were trained for it want to see what stands before and behind the gap.

Owns the known orders of marks, told apart by the vocabulary. Must never know requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_ENDS = ("<|endoftext|>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>", "<file_sep>", "<EOT>", "▁<EOT>", "<|EOT|>")
"""What may follow a filled gap besides the model's own end tokens."""


@dataclass(frozen=True, slots=True)
class Infill:
    """Marks in the order in which they stand; ``suffix_first``: what follows the gap is shown before what precedes."""

    before: str
    behind: str
    gap: str
    suffix_first: bool = False

    def prompt(self, prefix: str, suffix: str) -> str:
        """The text that ends where the gap is to be filled."""
        if self.suffix_first:
            return f"{self.behind}{suffix}{self.before}{prefix}{self.gap}"
        return f"{self.before}{prefix}{self.behind}{suffix}{self.gap}"

    def stop_ids(self, token_to_id: Callable[[str], int | None]) -> tuple[int, ...]:
        """Tokens that end the filling."""
        marks = [mark for mark in (self.before, self.behind, self.gap, *_ENDS) if mark]
        return tuple(dict.fromkeys(i for i in map(token_to_id, marks) if i is not None))


_KNOWN = (
    Infill("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Infill("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    Infill("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Infill("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    Infill("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Infill("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)


def find_infill(token_to_id: Callable[[str], int | None]) -> Infill | None:
    """The way whose marks are all tokens of this vocabulary; None where there is none."""
    for known in _KNOWN:
        if all(token_to_id(mark) is not None for mark in (known.before, known.behind, known.gap) if mark):
            return known
    return None
