"""Stop strings and stop expressions over a stream of text.

Owns the search. The match is the one that ends first in the whole text (the longest of those that end there), so how
the text was cut into pieces changes nothing; and only a suffix that may still become a match is held back. Must never
know tokens or requests. Both engines are automata: time is linear in the text whatever the pattern.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from ceiba.core.byte_vocabulary import ByteVocabulary
from ceiba.core.errors import BadRequest
from ceiba.core.limits import MAX_STOP_CHARS, MAX_STOP_EXPRESSIONS, MAX_STOP_STRINGS

REGEX_WINDOW = 512
"""Bytes held back at most for an expression that may still match: ``"[^"]*"`` must not hold a whole answer."""
STEPS_KEPT = 16_384
STEPS_PER_BYTE = 8
"""Steps of an automaton (1 to 2 us each) that looking for where a match may begin can take: so many saved up, and so
many more for each byte of text. Beyond them nothing is held back, so a match is still found, but its beginning has
been sent."""


class Match(NamedTuple):
    end: int
    """Characters of the fed text up to the end of the match."""
    length: int
    """Characters of the match; may reach back into text fed before."""
    name: str
    """The stop string, or the expression."""


class Automaton:
    """Aho and Corasick (1975): all stop strings at once, one step per character."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.found: list[str] = [""]
        """Longest stop that ends in this state."""
        for stop in stops:
            self._add(stop)
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.children[state].items():
                back = self.fail[state]
                while back and char not in self.children[back]:
                    back = self.fail[back]
                self.fail[child] = self.children[back].get(char, 0)
                if not self.found[child]:
                    self.found[child] = self.found[self.fail[child]]
                queue.append(child)
        self.first = frozenset(self.children[0])

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.children[state].get(char)
            if following is None:
                following = len(self.children)
                self.children[state][char] = following
                self.children.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append("")
            state = following
        self.found[state] = stop

    def scan(self, state: int, text: str) -> tuple[int, Match | None]:
        """(state after, first match). The state's depth is the length of the suffix that may become a match."""
        if not state and self.first.isdisjoint(text):
            return 0, None
        children, fail, found = self.children, self.fail, self.found
        for at, char in enumerate(text):
            while state and char not in children[state]:
                state = fail[state]
            state = children[state].get(char, 0)
            if found[state]:
                return state, Match(at + 1, len(found[state]), found[state])
        return state, None


class Expression:
    """A compiled stop expression: llguidance's lazily built automaton over bytes (no backtracking)."""

    def __init__(self, pattern: str, vocabulary: Any) -> None:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=200_000, step_lexer_fuel=50_000, max_lexer_states=20_000, verbose_errors=False
        )
        self.pattern = pattern
        self.anywhere, self.here = (
            LLMatcher(vocabulary, LLMatcher.grammar_from_regex(p), log_level=0, limits=limits)
            for p in (f"(?s:.*)(?:{pattern})", pattern)
        )
        problem = self.here.get_error() or self.anywhere.get_error()
        if problem:
            line = problem.strip().splitlines()[0][:300]
            raise BadRequest(f"stop_regex {pattern[:80]!r} cannot be used: {line}", param="stop_regex")
        if self.here.is_accepting():
            raise BadRequest(
                f"stop_regex {pattern[:80]!r} matches the empty text and would stop at once; "
                "write it so that it needs a character (+ for *)",
                param="stop_regex",
            )
        self.first = frozenset(b for b in range(256) if self._may_begin(b))

    def _may_begin(self, byte: int) -> bool:
        self.here.reset()
        return bool(self.here.try_consume_tokens([byte]) == 1)


class _ExpressionScanner:
    """One expression over one stream."""

    def __init__(self, expression: Expression) -> None:
        self._name = expression.pattern
        self._first = expression.first
        self._anywhere = expression.anywhere.deep_copy()
        self._here = expression.here.deep_copy()
        self._window = b""
        """From the oldest start that may still become a match; it is what ``_here`` has consumed."""
        self._steps = STEPS_KEPT

    @property
    def held(self) -> int:
        return len(self._window.decode("utf-8", "ignore"))

    def scan(self, text: str) -> Match | None:
        data = text.encode("utf-8", "replace")
        for at, byte in enumerate(data):
            if not self._anywhere.consume_token(byte):
                raise BadRequest(
                    f"stop_regex {self._name[:80]!r} needs more states than the limit; use a simpler expression",
                    param="stop_regex",
                )
            if self._anywhere.is_accepting():
                whole = self._window + data[: at + 1]
                start = self._start_of(whole)
                return Match(
                    len(data[: at + 1].decode("utf-8", "ignore")),
                    len(whole[start:].decode("utf-8", "ignore")),
                    self._name,
                )
        self._follow(data)
        return None

    def _start_of(self, whole: bytes) -> int:
        for start in self._starts(whole, 0):
            if self._consumes(whole[start:]) and self._here.is_accepting():
                return start
        return len(whole) if self._steps <= 0 else 0

    def _follow(self, data: bytes) -> None:
        """Hold what may become a match. A full window lets go of its older half, so that looking for the start of the
        rest, which reads it again, comes once in so many bytes; where that happens depends on the text alone."""
        self._steps = min(STEPS_KEPT, self._steps + STEPS_PER_BYTE * len(data))
        while data:
            room = REGEX_WINDOW - len(self._window)
            part, data = data[:room], data[room:]
            whole = self._window + part
            if self._window and self._here.try_consume_tokens(list(part)) == len(part):
                self._window = whole
            else:
                self._window = self._oldest(whole, 1 if self._window else 0)
            if len(self._window) == REGEX_WINDOW:
                self._window = self._oldest(self._window, REGEX_WINDOW // 2)

    def _oldest(self, whole: bytes, after: int) -> bytes:
        """``whole`` from the first start behind ``after`` that may become a match."""
        for start in self._starts(whole, after):
            if self._consumes(whole[start:]):
                return whole[start:]
        return b""

    def _starts(self, whole: bytes, after: int) -> Iterator[int]:
        for i in range(after, len(whole)):
            if self._steps <= 0:
                return
            if whole[i] in self._first and whole[i] & 0xC0 != 0x80:
                yield i

    def _consumes(self, data: bytes) -> bool:
        self._here.reset()
        done = self._here.try_consume_tokens(list(data))
        self._steps -= done + 1
        return bool(done == len(data))


class StopSet:
    """Compiled stops, shared by the choices that ask for the same ones."""

    def __init__(self, strings: Automaton | None, expressions: tuple[Expression, ...]) -> None:
        self.strings = strings
        self.expressions = expressions


class StopCompiler:
    """Compiles and keeps the stops last used. One per thread."""

    def __init__(self, keep: int = 64) -> None:
        self._keep = keep
        self._sets: OrderedDict[tuple[tuple[str, ...], tuple[str, ...]], StopSet] = OrderedDict()
        self._vocabulary: Any = None

    def compile(self, stops: tuple[str, ...], expressions: tuple[str, ...] = ()) -> StopSet | None:
        """None where there is nothing to look for. Raises BadRequest for an expression that cannot be used."""
        stops = tuple(s for s in stops if s)
        if not stops and not expressions:
            return None
        key = (stops, expressions)
        known = self._sets.get(key)
        if known is not None:
            self._sets.move_to_end(key)
            return known
        _check(stops, "stop")
        _check(expressions, "stop_regex")
        made = StopSet(
            Automaton(stops) if stops else None, tuple(Expression(e, self._bytes_vocabulary()) for e in expressions)
        )
        self._sets[key] = made
        if len(self._sets) > self._keep:
            self._sets.popitem(last=False)
        return made

    def _bytes_vocabulary(self) -> Any:
        if self._vocabulary is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            self._vocabulary = LLTokenizer(TokenizerWrapper(ByteVocabulary()), slices=[])
        return self._vocabulary


def _check(patterns: tuple[str, ...], param: str) -> None:
    most = MAX_STOP_EXPRESSIONS if param == "stop_regex" else MAX_STOP_STRINGS
    if len(patterns) > most:
        raise BadRequest(f"{param} has {len(patterns)} entries, the limit is {most}", param=param)
    for pattern in patterns:
        if len(pattern) > MAX_STOP_CHARS:
            raise BadRequest(
                f"{param} has an entry of {len(pattern)} characters, the limit is {MAX_STOP_CHARS}", param=param
            )


class StopMatcher:
    """Watches one choice. After a match nothing may be fed any more."""

    def __init__(self, stops: StopSet, *, trim: bool = True) -> None:
        self._strings = stops.strings
        self._expressions = [_ExpressionScanner(e) for e in stops.expressions]
        self._trim = trim
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that is certain now, the stop that matched or None). With ``trim`` the match itself is left out."""
        match: Match | None = None
        hold = 0
        if self._strings is not None:
            self._state, match = self._strings.scan(self._state, text)
            hold = self._strings.depth[self._state]
        for scanner in self._expressions:
            other = scanner.scan(text if match is None else text[: match.end])
            if other is not None and (match is None or (other.end, -other.length) < (match.end, -match.length)):
                match = other
            hold = max(hold, scanner.held)
        if not self._held and not hold and match is None:
            return text, None
        known = self._held + text
        if match is None:
            cut = len(known) - hold
            self._held = known[cut:]
            return known[:cut], None
        end = len(self._held) + match.end
        self._held = ""
        return known[: max(0, end - match.length) if self._trim else end], match.name

    def flush(self) -> str:
        """The text held back, once it is certain that no more comes."""
        held, self._held = self._held, ""
        return held
