"""One choice's output, from text pieces to events.

Owns the order of things (thinking, then answer and calls), what whitespace belongs to the format, and what becomes of
a call that is none: its text is answer, so nothing is lost. Must never know a family's format or a protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ceiba.text.parsers import forced, harmony
from ceiba.text.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from ceiba.text.parsers.reasoning.tags import ReasoningFormat
from ceiba.text.parsers.source import Cut, Malformed, Source, Wait, markers
from ceiba.text.parsers.special import BREAK, SpelledOut, Vocabulary
from ceiba.text.parsers.tools.base import ToolFormat


class Emitter:
    """Collects events; neighbouring pieces of the same kind become one."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.calls = 0
        self._new_id = new_id
        self._events: list[Event] = []
        self._parts: list[str] = []
        self._kind: type[Content] | type[Reasoning] = Content

    def content(self, text: str) -> None:
        self._text(Content, text)

    def reasoning(self, text: str) -> None:
        self._text(Reasoning, text)

    def _text(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if kind is not self._kind:
            self._settle()
            self._kind = kind
        self._parts.append(text)

    def _settle(self) -> None:
        if self._parts:
            text = "".join(self._parts).replace(BREAK, "")
            self._parts.clear()
            if text:
                self._events.append(self._kind(text))

    def add(self, name: str, arguments: str, call_id: str | None = None) -> None:
        self.begin(name, arguments.replace(BREAK, ""), call_id)
        self._events.append(CallEnd(self.calls - 1))

    def begin(self, name: str, arguments: str, call_id: str | None = None) -> None:
        """A call of which there is no more than this."""
        self._settle()
        index = self.calls
        self.calls += 1
        self._events.append(CallStart(index, call_id or self._new_id(), name.replace(BREAK, "")))
        if arguments:
            self._events.append(Arguments(index, arguments))

    def drain(self) -> list[Event]:
        self._settle()
        events, self._events = self._events, []
        return events


class Text:
    """Passes text on, except whitespace that may turn out to be the format's."""

    def __init__(self, out: Callable[[str], None], *, hold: bool) -> None:
        self._out = out
        self._held: list[str] = []
        self.hold = hold
        """Whether whitespace waits for what comes behind it."""
        self.lead = False
        """Whether whitespace is dropped until other text comes."""
        self.fresh = True
        """Whether no other text came since the start or the last call."""

    def emit(self, text: str) -> None:
        if self.lead:
            text = text.lstrip()
            if not text:
                return
            self.lead = False
        kept = text.rstrip() if self.hold else text
        if kept:
            self.flush()
            self._out(kept)
            self.fresh = self.fresh and not kept.strip()
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def flush(self) -> None:
        if self._held:
            self._out("".join(self._held))
            self._held.clear()

    def drop(self) -> None:
        self._held.clear()


class _Aside:
    """Calls read inside the thinking, which count only once it is clear that they are no draft."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, str | None]] = []

    def add(self, name: str, arguments: str, call_id: str | None = None) -> None:
        self.found.append((name, arguments, call_id))


class _Direct:
    """Calls of the answer: emitted at once; what fails behind one does not take it back."""

    def __init__(self, source: Source, emitter: Emitter, text: Text, trim: bool) -> None:
        self._source = source
        self._emitter = emitter
        self._text = text
        self._trim = trim

    def add(self, name: str, arguments: str, call_id: str | None = None) -> None:
        text = self._text
        if self._trim or text.fresh:
            text.drop()
        else:
            text.flush()
        self._emitter.add(name, arguments, call_id)
        text.hold = text.fresh = True
        self._source.mark()


class OutputParser:
    """The parser of one choice, for streaming and not: the whole answer is the joined events.

    ``reasoning`` and ``tool`` come from `registry`; either may be None. ``prompt`` is the rendered prompt or its end,
    which tells whether the model is already thinking. With ``vocabulary`` (a tokenizer) and the token ids given to
    `feed`, markers that the model only spelled out are no markers. ``forced``: a grammar lets the answer be calls
    alone, of these tools. Not safe to share among threads; memory is what one unfinished call takes, time linear in
    the text.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        tool: ToolFormat | None = None,
        *,
        prompt: str = "",
        vocabulary: Vocabulary | None = None,
        forced: Sequence[str] = (),
    ) -> None:
        self._forced = forced
        self._before = 0
        """Calls that came before the section that is being read."""
        self._cut = False
        """Whether the text is over because of the length limit, inside an answer of forced calls."""
        self._reasoning = reasoning
        self._tool = tool
        self._prompt = prompt
        self._source = Source()
        self._emitter = Emitter(tool.new_id if tool else str)
        self._content = Text(self._emitter.content, hold=bool(tool and tool.trim))
        self._thought = Text(self._emitter.reasoning, hold=bool(reasoning and reasoning.trim))
        self._calls = _Direct(self._source, self._emitter, self._content, bool(tool and tool.trim))
        self._special: SpelledOut | None = None
        if vocabulary is not None:
            special = SpelledOut(self.markers, vocabulary)
            self._special = special if special.useful else None
        self._waiting: Wait[None] | None = self._main()
        self.thinking = False
        """Whether the text now coming is thinking."""
        self._step()

    @property
    def called(self) -> bool:
        """Whether a tool was called: the finish reason is then ``tool_calls``."""
        return self._emitter.calls > 0

    @property
    def markers(self) -> frozenset[str]:
        """All markers: where they are special tokens, the text must be decoded with special tokens kept."""
        found: set[str] = set()
        if self._reasoning:
            found.update(*self._reasoning.pairs, self._reasoning.early, self._reasoning.noise)
        if self._tool:
            found.update(self._tool.openers, self._tool.inner, self._tool.noise)
        if self._channels:
            found.update(harmony.MARKERS)
        return frozenset(found)

    @property
    def _channels(self) -> bool:
        return self._reasoning is harmony.CHANNELS or isinstance(self._tool, harmony.HarmonyCalls)

    def feed(self, text: str, token_ids: Iterable[int] | None = None) -> list[Event]:
        """Take in the next piece of text, and the ids of the tokens that came with it, if they are known.

        Ids may run ahead of their text (a character or a stop string that is undecided), never behind it.
        """
        text = text.replace(BREAK, "\ufffd")
        if self._special is not None and token_ids is not None:
            text = self._special.feed(text, token_ids)
        if text:
            self._source.push(text)
            self._step()
        return self._emitter.drain()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The text is over. What was held back comes out; a call that was cut short is none. ``cut``: the model had
        not ended it (the length limit, an abort); a forced call, which cannot be anything else, then comes out as far
        as it was written."""
        if self._waiting is None:
            return []
        if self._special is not None:
            self._source.push(self._special.flush())
        self._cut = cut and bool(self._forced)
        if self._cut and not self.thinking and self._begun(self._source.left.lstrip()):
            self._waiting = None
            return self._emitter.drain()
        self._source.end()
        self._step()
        assert self._waiting is None
        return self._emitter.drain()

    def _step(self) -> None:
        if self._waiting is not None:
            try:
                next(self._waiting)
            except StopIteration:
                self._waiting = None

    # ── the order of things ─────────────────────────────────────────────────

    def _main(self) -> Wait[None]:
        reasoning = self._reasoning
        if self._channels:
            calls = self._emitter if self._tool else None
            yield from harmony.read(self._source, self._answered, self._thought_of, calls, self._cut_call)
            return
        if reasoning is not None and reasoning.passed:
            self._content.emit(reasoning.begins[0])
        elif reasoning is not None:
            yield from self._start(reasoning)
        yield from self._answer()
        if self._emitter.calls:
            self._content.drop()
            self._thought.drop()
        self._content.flush()
        self._thought.flush()

    def _answered(self, text: str) -> None:
        self.thinking = False
        if not self._cut:  # then it is the header of a call
            self._content.emit(text)

    def _thought_of(self, text: str) -> None:
        self.thinking = True
        self._thought.emit(text)

    def _start(self, reasoning: ReasoningFormat) -> Wait[None]:
        """The thinking at the start, if there is any."""
        opened = reasoning.thinks(self._prompt)
        if opened is False:
            self._content.lead = reasoning.trim
        begin = yield from self._source.ahead(reasoning.begins)
        if begin:
            yield from self._source.space()
            yield from self._source.at((begin,))
        elif opened:
            begin = reasoning.begins[0]
            if self._prompt:
                begin = next((b for b in reasoning.begins if self._prompt.rstrip().endswith(b)), begin)
        if begin:
            yield from self._think(reasoning, begin)

    def _think(self, reasoning: ReasoningFormat, begin: str) -> Wait[None]:
        """The thinking behind ``begin``, up to its end marker."""
        source, thought, tool = self._source, self._thought, self._tool
        self.thinking = True
        end = reasoning.end_of(begin)
        if reasoning.label:
            yield from source.at((reasoning.label + "\n", reasoning.label))
        thought.lead = reasoning.trim
        openers = tool.openers if tool else ()
        stop = markers(end, *reasoning.early, *(o for o in openers if o not in reasoning.early))
        while True:
            found = yield from source.until(stop, thought.emit)
            if found is None:
                return
            if found == end:
                break
            if found in reasoning.early:
                source.pos -= len(found)
                break
            assert tool is not None
            source.mark(len(found))
            raw = yield from self._drafted(tool, found)
            source.release()
            if raw:
                thought.emit(raw)
        thought.drop()
        self.thinking = False
        self._content.lead = reasoning.trim

    def _drafted(self, tool: ToolFormat, opener: str) -> Wait[str]:
        """A call inside the thinking: real if the family does that, or if the output ends with it (then the model
        forgot to end the thinking); else a draft, whose text is returned."""
        source, aside = self._source, _Aside()
        try:
            while True:
                yield from tool.region(source, opener, aside)
                if tool.in_reasoning:
                    break
                next_opener = yield from source.ahead(tool.openers)
                if next_opener is None:
                    return source.since()
                if not next_opener:
                    break
                opener = yield from source.expect(next_opener)
        except Cut:
            raw = source.rest()
            if not aside.found:
                return raw
        except Malformed:
            return source.since()
        self._thought.drop()
        for call in aside.found:
            self._emitter.add(*call)
        return ""

    def _answer(self) -> Wait[None]:
        source, content, tool, reasoning = self._source, self._content, self._tool, self._reasoning
        openers = tool.openers if tool else ()
        begins = reasoning.begins if reasoning and not reasoning.passed else ()
        noise = (*(tool.noise if tool else ()), *(reasoning.noise if reasoning else ()))
        stop = markers(*openers, *begins, *noise)
        if tool is not None and (yield from tool.bare(source)):
            yield from self._call(tool, "")
        while True:
            found = yield from source.until(stop, content.emit)
            if found is None:
                return
            if tool is not None and found in openers:
                yield from self._call(tool, found)
            elif reasoning is not None and found in begins and (reasoning.again or content.fresh):
                if content.fresh:
                    content.drop()
                content.flush()
                yield from self._think(reasoning, found)
            elif found not in noise:
                content.emit(found)

    def _call(self, tool: ToolFormat, opener: str) -> Wait[None]:
        """A call, or a section of calls; what of it is none becomes answer."""
        source = self._source
        source.mark(len(opener))
        before = self._before = self._emitter.calls
        try:
            yield from tool.region(source, opener, self._calls)
        except Cut:
            # Cut off by the length limit. Behind a whole call, or as a mere marker, the rest says nothing to a reader.
            raw = source.rest()
            if not self._emitter.calls and raw.strip() not in tool.openers:
                self._content.emit(raw)
            elif tool.trim:
                self._content.drop()
        except Malformed:
            self._content.emit(source.since())
        source.release()
        if self._emitter.calls > before:
            self._content.hold = True

    # ── forced calls that were cut ──────────────────────────────────────────

    def _begun(self, raw: str) -> bool:
        """The calls of ``raw``, which the text ends with; whether it is what forced calls may be. Formats are not asked
        whether a call is over: they take the end of the text for a sign of it."""
        assert self._tool is not None
        try:
            calls = forced.read(self._tool, self._forced, raw, self._emitter.calls - self._before)
        except Malformed:
            return False
        for call in calls:
            (self._emitter.add if call.whole else self._emitter.begin)(call.name, call.arguments, call.id)
        return True

    def _cut_call(self, name: str, body: str) -> None:
        """A call in a channel of its own."""
        if not self._cut or self._tool is None:
            return
        try:
            arguments, end = self._tool.begun(name, body)
        except Malformed:
            return
        (self._emitter.begin if end is None else self._emitter.add)(name, arguments)
