"""Tokens of a text that a grammar forces, as the tokenizer spells it. Owns the question how many are certain."""

from __future__ import annotations

from collections import OrderedDict

from ceiba.grammar.base import Vocabulary

_PROBES = ("a", "A", "1", " ", " a", "\n", '"', "_", ".", ",", ":", "}", "é")
"""What may follow: each merges with another kind of end."""
_KEPT = 4096


class Speller:
    """``vocabulary`` must bring its tokenizer (``encode``). Used from one thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        assert vocabulary.encode is not None
        self._encode = vocabulary.encode
        self._tokens = vocabulary.tokens
        self._known: OrderedDict[str, list[int]] = OrderedDict()

    def certain(self, text: str) -> list[int]:
        """The first tokens of ``text``, without those that may be others depending on what follows."""
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = self._spelled(text)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return found

    def _spelled(self, text: str) -> list[int]:
        ids = self._encode(text)
        for probe in _PROBES:
            longer = self._encode(text + probe)
            same = next((i for i, (a, b) in enumerate(zip(ids, longer, strict=False)) if a != b), len(longer))
            ids = ids[:same]
        written = b"".join([self._tokens[i] for i in ids])
        # A tokenizer that puts a space in front, or the like, writes another text.
        return ids if text.encode().startswith(written) and all(self._tokens[i] for i in ids) else []
