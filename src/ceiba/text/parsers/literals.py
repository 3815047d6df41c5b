"""Values as models write them (JSON, Python literals, Gemma's notation), read piece by piece into JSON text.

Owns the three dialects and their repair: what comes out is always valid JSON, numbers keep their digits, and a value
that cannot be one raises at its first wrong character. Must never know tool calls.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from ceiba.text.parsers.source import Cut, Malformed, Source, T, Wait, markers

MAX_DEPTH = 200
"""Nesting of arguments after which a value counts as malformed: a bound on recursion, ours and the client's."""

_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_WORD = re.compile(r"[\w.+\-]*")
_BARE = re.compile(r"[^,\]}]*")
_ESCAPE = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})")
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_PYTHON_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_LOOSE_NUMBER = re.compile(r"\+?(-?)([0-9]*)\.?([0-9]*)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a family writes values. ``quotes`` open and close strings; ``bare``: keys and strings may stand unquoted."""

    quotes: tuple[str, ...]
    python: bool = False
    bare: bool = False


JSON = Dialect(('"',))
PYTHON = Dialect(('"', "'"), python=True)
GEMMA = Dialect(('<|"|>',), bare=True)


def quote(text: str) -> str:
    """A JSON string. Lone surrogates, which no client can encode, stay escaped."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


def begun_string(text: str) -> str:
    """A JSON string that has only begun. Half of a pair of surrogates waits for the other one."""
    return quote(text[:-1] if text[-1:] and "\ud800" <= text[-1] <= "\udbff" else text)[:-1]


def without_begun(text: str, mark: str) -> str:
    """``text`` without the beginning of ``mark`` that it may end with."""
    size = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - size]


def number(text: str) -> str | None:
    """A number as JSON text (``+5``, ``.5`` and ``5.`` are repaired), or None if it is none."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    loose = _LOOSE_NUMBER.fullmatch(text)
    if loose is None or not (loose[2] or loose[3]):
        return None
    made = f"{loose[1]}{loose[2] or '0'}" + (f".{loose[3]}" if loose[3] else "") + (loose[4] or "")
    return made if _JSON_NUMBER.fullmatch(made) else None


def load(text: str) -> object:
    """A value of JSON text that came out of this module; duplicate keys keep the last. Raises Malformed."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise Malformed from error


def parse(text: str, dialect: Dialect = JSON) -> str | None:
    """The whole of ``text`` as JSON text, or None if it is no single value of the dialect."""
    source = ended(text)
    try:
        made = run(Literals(source, dialect).value())
        run(source.space())
    except Malformed:
        return None
    return made if source.pos == len(source.data) else None


def begun(text: str) -> tuple[str, int | None]:
    """The JSON value that ``text`` begins with, as JSON text, and where it ends in ``text``. Where the text ends first,
    what was read of the value, and None. Raises Malformed."""
    source = ended(text)
    literals, out = Literals(source, JSON), list[str]()
    try:
        run(literals.into(out))
    except Cut:
        return "".join(out) + literals.tail, None
    return "".join(out), source.pos


def ended(text: str) -> Source:
    """A source that holds all there will ever be."""
    source = Source()
    source.push(text)
    source.end()
    return source


def run(waiting: Wait[T]) -> T:
    """What a generator over an ended source returns: it never waits."""
    try:
        next(waiting)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("an ended source never waits")


class Literals:
    """Reads values off a source, each returned as JSON text."""

    __slots__ = ("dialect", "member", "source", "tail")

    def __init__(self, source: Source, dialect: Dialect) -> None:
        self.source = source
        self.dialect = dialect
        self.member: list[str] = []
        """After a Cut inside of `members`: the key and what was whole of the member that the text ended in."""
        self.tail = ""
        """After a Cut: the beginning of the string that the text ended in, as JSON text."""

    def value(self) -> Wait[str]:
        out: list[str] = []
        yield from self.into(out)
        return "".join(out)

    def into(self, out: list[str]) -> Wait[None]:
        """A value, its text in pieces: they are there after a Cut too."""
        yield from self._value(out, 0)

    def members(
        self, close: str = "}", assign: str = ":", pairs: list[tuple[str | None, str]] | None = None
    ) -> Wait[list[tuple[str | None, str]]]:
        """(key, JSON text) pairs up to ``close``, put into ``pairs``; the opening bracket is already read.

        With ``assign`` "=" they are the arguments of a Python call: a key is None for a positional one.
        """
        pairs = [] if pairs is None else pairs
        source = self.source
        while True:
            self.member = []
            yield from source.space()
            head = yield from source.peek()
            if head == close:
                source.pos += 1
                return pairs
            if pairs:
                yield from self._comma()
                yield from source.space()
                if (yield from source.peek()) == close:
                    continue
            if assign == "=":
                pairs.append((yield from self._argument()))
            else:
                key = yield from self._key()
                yield from source.expect(assign)
                yield from source.space()
                pairs.append((key, (yield from self._of(key))))

    def _of(self, key: str) -> Wait[str]:
        self.member = [quote(key) + ": "]
        yield from self.into(self.member)
        return "".join(self.member[1:])

    def string(self, delimiter: str) -> Wait[str]:
        """The rest of a string whose opening ``delimiter`` is read, decoded."""
        parts: list[str] = []
        if self.dialect.bare:
            if (yield from self.source.until(markers(delimiter), parts.append)) is None:
                self.tail = begun_string(without_begun("".join(parts), delimiter))
                raise Cut
            return "".join(parts)
        stop = markers(delimiter, "\\")
        while True:
            found = yield from self.source.until(stop, parts.append)
            if found is None:
                self.tail = begun_string(self._decoded(_whole_escapes(parts)))
                raise Cut
            if found == delimiter:
                return self._decoded(parts)
            if not (yield from self.source.peek()):
                self.tail = begun_string(self._decoded(parts))
                raise Cut
            parts.append("\\" + self.source.data[self.source.pos])
            self.source.pos += 1

    def _decoded(self, parts: list[str]) -> str:
        return _decode_python(parts) if self.dialect.python else _decode_json(parts)

    def _value(self, out: list[str], depth: int) -> Wait[None]:
        if depth > MAX_DEPTH:
            raise Malformed
        source, dialect = self.source, self.dialect
        yield from source.space()
        head = yield from source.peek()
        if not head:
            raise Cut
        if head == "{":
            source.pos += 1
            yield from self._object(out, depth)
        elif head == "[" or (head == "(" and dialect.python):
            source.pos += 1
            yield from self._array(out, depth, "]" if head == "[" else ")")
        elif head in (q[0] for q in dialect.quotes):
            found = yield from source.at(dialect.quotes)
            if found is None:
                raise Cut if source.ended else Malformed
            out.append(quote((yield from self.string(found))))
        else:
            out.append((yield from self._scalar()))

    def _scalar(self) -> Wait[str]:
        source = self.source
        text = (yield from source.run(_BARE if self.dialect.bare else _WORD)).strip()
        if not text:
            raise Malformed
        made = _CONSTANTS.get(text) or number(text)
        if made is None:
            if source.ended and source.pos == len(source.data):
                raise Cut
            if not self.dialect.bare:
                raise Malformed
            made = quote(text)
        return made

    def _key(self) -> Wait[str]:
        source, dialect = self.source, self.dialect
        found = yield from source.at(dialect.quotes)
        if found is not None:
            return (yield from self.string(found))
        if not dialect.bare:
            raise Cut if source.ended and source.pos == len(source.data) else Malformed
        parts: list[str] = []
        if (yield from source.until(markers(":", "<tool_call|>"), parts.append)) != ":":
            raise Cut if source.ended else Malformed
        source.pos -= 1
        return "".join(parts).strip()

    def _object(self, out: list[str], depth: int) -> Wait[None]:
        source = self.source
        start = len(out)
        seen: set[str] = set()
        again = False
        out.append("{")
        while True:
            yield from source.space()
            if (yield from source.peek()) == "}":
                source.pos += 1
                out.append("}")
                break
            if seen:
                yield from self._comma()
                yield from source.space()
                if (yield from source.peek()) == "}":
                    continue
                out.append(", ")
            key = yield from self._key()
            again = again or key in seen
            seen.add(key)
            out.append(quote(key) + ": ")
            yield from source.expect(":")
            yield from self._value(out, depth + 1)
        if again:
            # Clients differ in which of two equal keys they keep: leave one.
            out[start:] = [json.dumps(load("".join(out[start:])), ensure_ascii=False)]

    def _array(self, out: list[str], depth: int, close: str) -> Wait[None]:
        source = self.source
        out.append("[")
        first = True
        while True:
            yield from source.space()
            if (yield from source.peek()) == close:
                source.pos += 1
                out.append("]")
                return
            if not first:
                yield from self._comma()
                yield from source.space()
                if (yield from source.peek()) == close:
                    continue
                out.append(", ")
            first = False
            yield from self._value(out, depth + 1)

    def _comma(self) -> Wait[None]:
        head = yield from self.source.peek()
        if head != ",":
            raise Malformed if head else Cut
        self.source.pos += 1

    def _argument(self) -> Wait[tuple[str | None, str]]:
        """``key=value`` or a value alone."""
        source = self.source
        head = yield from source.peek()
        if not (head.isalpha() or head == "_"):
            return None, (yield from self.value())
        word = yield from source.run(_WORD)
        yield from source.space()
        if (yield from source.peek()) == "=":
            source.pos += 1
            return word, (yield from self._of(word))
        made = _CONSTANTS.get(word)
        if made is None:
            raise Cut if source.ended and source.pos == len(source.data) else Malformed
        return None, made


def _whole_escapes(parts: list[str]) -> list[str]:
    """``parts`` of a string that was cut, without an escape whose digits are not all there."""
    for back in (1, 2):
        sizes = {"\\u": 4, "\\x": 2, "\\U": 8}
        if len(parts) >= back and len("".join(parts[len(parts) - back + 1 :])) < sizes.get(parts[-back], 0):
            return parts[:-back]
    return parts


def _decode_json(parts: list[str]) -> str:
    """A JSON string's text. Raw control characters are taken as they are, a stray backslash as a backslash."""
    fixed = [p if p[0] != "\\" or len(p) < 2 or p[1] in '"\\/bfnrtu' else "\\" + p for p in parts if p]
    raw = "".join(fixed)
    try:
        return json.loads(f'"{raw}"', strict=False)
    except ValueError:
        at = 0
        safe: list[str] = []
        for match in _ESCAPE.finditer(raw):
            safe += [raw[at : match.start()].replace("\\", "\\\\"), match.group()]
            at = match.end()
        safe.append(raw[at:].replace("\\", "\\\\"))
        return json.loads('"' + "".join(safe) + '"', strict=False)


def _decode_python(parts: list[str]) -> str:
    return _PYTHON_ESCAPE.sub(_unescape, "".join(parts))


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    if len(code) > 1:
        point = int(code[1:], 16)
        return chr(point) if point < 0x110000 else match.group()
    return _PYTHON_ESCAPES.get(code, code if code in "\\'\"" else match.group())
