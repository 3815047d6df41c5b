"""The text that has come so far, as format generators read it.

Owns the unread tail, what is kept for a rollback, and the waiting: a generator yields when it needs more text and goes
on where it stopped. Every character is looked at a bounded number of times, however the stream is cut. Must never know
a format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A generator that yields when it needs more text and returns a T."""

_LOOK_AHEAD = 256
"""Whitespace characters after which a look-ahead gives up: a bound on what is read twice."""


class Malformed(Exception):
    """The text is not of the format."""


class Cut(Malformed):
    """The stream ended inside something that was of the format so far."""


class Markers:
    """A set of strings to look for, none of them a prefix of another."""

    __slots__ = ("_firsts", "_longest", "_search", "texts")

    def __init__(self, texts: tuple[str, ...]) -> None:
        for a in texts:
            for b in texts:
                if a != b and b.startswith(a):
                    raise ValueError(f"marker {a!r} is a prefix of marker {b!r}; only one of them can be looked for")
        self.texts = texts
        self._search = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._firsts = re.compile("[" + "".join(re.escape(t[0]) for t in texts) + "]" if texts else r"(?!)")
        self._longest = max(map(len, texts), default=0)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._search.search(text, start)

    def may_begin(self, text: str, start: int) -> bool:
        """Whether ``text[start:]`` holds any marker's first character."""
        return self._firsts.search(text, start) is not None

    def undecided(self, text: str, start: int) -> int:
        """Where the longest end of ``text[start:]`` that a marker could still begin with starts; len(text) if none."""
        for match in self._firsts.finditer(text, max(start, len(text) - self._longest + 1)):
            tail = text[match.start() :]
            if any(m.startswith(tail) for m in self.texts):
                return match.start()
        return len(text)


@lru_cache(maxsize=512)
def markers(*texts: str) -> Markers:
    return Markers(tuple(dict.fromkeys(texts)))


class Source:
    """One choice's text. ``push`` and ``end`` belong to the driver, the rest to format generators."""

    __slots__ = ("_kept", "_start", "data", "ended", "pos")

    def __init__(self) -> None:
        self.data = ""
        self.pos = 0
        self.ended = False
        self._kept: list[str] | None = None
        self._start = 0

    def push(self, text: str) -> None:
        if self._kept is not None:
            self._kept.append(self.data[self._start : self.pos])
            self._start = 0
        self.data = self.data[self.pos :] + text
        self.pos = 0

    def end(self) -> None:
        self.ended = True

    # ── keeping for a rollback ──────────────────────────────────────────────

    def mark(self, back: int = 0) -> None:
        """Keep everything read from ``back`` characters before the present position on."""
        self._kept = []
        self._start = self.pos - back

    def since(self) -> str:
        """The text read since ``mark``."""
        return "".join(self._kept or ()) + self.data[self._start : self.pos]

    def rest(self) -> str:
        """The text read since ``mark`` and all that is still unread, now read."""
        self.pos = len(self.data)
        return self.since()

    def release(self) -> None:
        self._kept = None

    @property
    def left(self) -> str:
        """All that is unread, and what was read since ``mark`` where that holds; reads nothing."""
        return (self.since() if self._kept is not None else "") + self.data[self.pos :]

    # ── reading ─────────────────────────────────────────────────────────────

    def more(self) -> Wait[bool]:
        """Wait for more text; False when there will be none."""
        if self.ended:
            return False
        yield
        return True

    def need(self) -> Wait[None]:
        """Wait for more text; `Cut` when there will be none."""
        if not (yield from self.more()):
            raise Cut

    def until(self, wanted: Markers, sink: Callable[[str], object]) -> Wait[str | None]:
        """Give ``sink`` the text up to the first marker, which is read too and returned; None at the end."""
        while True:
            if not wanted.may_begin(self.data, self.pos):
                # Most pieces of most answers.
                if self.pos < len(self.data):
                    sink(self.data[self.pos :] if self.pos else self.data)
                    self.pos = len(self.data)
                if not (yield from self.more()):
                    return None
                continue
            found = wanted.find(self.data, self.pos)
            if found:
                if found.start() > self.pos:
                    sink(self.data[self.pos : found.start()])
                self.pos = found.end()
                return found.group()
            safe = len(self.data) if self.ended else wanted.undecided(self.data, self.pos)
            if safe > self.pos:
                sink(self.data[self.pos : safe])
                self.pos = safe
            if not (yield from self.more()):
                return None

    def at(self, options: Sequence[str]) -> Wait[str | None]:
        """The longest option that the text goes on with, read; None if none (then nothing is read)."""
        while True:
            rest = self.data[self.pos : self.pos + max(map(len, options), default=0)]
            if not self.ended and any(len(o) > len(rest) and o.startswith(rest) for o in options):
                yield
                continue
            hits = [o for o in options if rest.startswith(o)]
            if not hits:
                return None
            best = max(hits, key=len)
            self.pos += len(best)
            return best

    def ahead(self, options: Sequence[str]) -> Wait[str | None]:
        """Which option stands next, behind any whitespace; "" for the end of the stream. Reads nothing."""
        longest = max(map(len, options), default=0)
        skip = 0
        while True:
            while self.pos + skip < len(self.data) and skip <= _LOOK_AHEAD and self.data[self.pos + skip].isspace():
                skip += 1
            if skip > _LOOK_AHEAD:
                return None
            rest = self.data[self.pos + skip : self.pos + skip + longest]
            if not rest:
                if self.ended:
                    return ""
                yield
                continue
            if not self.ended and any(len(o) > len(rest) and o.startswith(rest) for o in options):
                yield
                continue
            return max((o for o in options if rest.startswith(o)), key=len, default=None)

    def peek(self) -> Wait[str]:
        """The next character, not read; "" at the end."""
        while self.pos >= len(self.data):
            if not (yield from self.more()):
                return ""
        return self.data[self.pos]

    def space(self) -> Wait[None]:
        """Read whitespace."""
        while True:
            while self.pos < len(self.data) and self.data[self.pos].isspace():
                self.pos += 1
            if self.pos < len(self.data) or not (yield from self.more()):
                return

    def run(self, pattern: re.Pattern[str]) -> Wait[str]:
        """The longest run of characters of a class, given as a pattern that matches any run of them (and "")."""
        parts: list[str] = []
        while True:
            match = pattern.match(self.data, self.pos)
            assert match is not None
            if match.end() > self.pos:
                parts.append(match.group())
                self.pos = match.end()
            if self.pos < len(self.data) or not (yield from self.more()):
                return "".join(parts)

    def expect(self, *options: str) -> Wait[str]:
        """Read whitespace and then one of ``options``, or raise."""
        yield from self.space()
        found = yield from self.at(options)
        if found is None:
            raise Cut if self.cut_within(options) else Malformed
        return found

    def cut_within(self, options: Sequence[str]) -> bool:
        """Whether the stream ended, and what is left is the beginning of an option (or nothing)."""
        rest = self.data[self.pos :].lstrip() if self.ended else " "
        return any(o.startswith(rest) for o in options)
