"""Trees of structural tags and EBNF in the dialect of Lark that llguidance reads.

Owns the writing of that language; runs nothing. A control token in a literal is written as the token itself: its
spelling as plain characters would be another text to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from ceiba.grammar import tags
from ceiba.grammar.base import Refusal
from ceiba.grammar.regex import escape, trim_anchors
from ceiba.grammar.schema import Schema

_ANY = "(?s:.*)"
_TEXT = f"/{_ANY}/"


class Writer:
    """``json_rule``: the text that stands behind ``%json`` for a schema. ``special``: spelling -> id."""

    def __init__(self, special: Mapping[str, int], json_rule: Callable[[Schema], str]) -> None:
        self._special = special
        names = sorted((name for name in special if name), key=len, reverse=True)
        self._splits = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._json_rule = json_rule
        self._rules: list[str] = []
        self._side: list[dict[str, str]] = []
        self._made: dict[int, str] = {}
        """id of a node -> its name: parts that a tree uses often are written once."""

    def grammar(self, node: tags.Node) -> str:
        """The whole grammar, in the JSON form that holds side grammars."""
        start = self._node(node)
        main = "\n".join(["%llguidance {}", f"start: {start}", f"TEXT: {_TEXT}", *self._rules])
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *self._side]})

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def _node(self, node: tags.Node) -> str:
        if isinstance(node, tags.Text):
            return self.literal(node.value) or '""'
        made = self._made.get(id(node))
        if made is None:
            made = self._made[id(node)] = self._new(node)
        return made

    def _new(self, node: tags.Node) -> str:
        match node:
            case tags.Json(schema):
                return self._rule(f"%json {self._json_rule(schema)}")
            case tags.Regex(pattern):
                return self._rule(f"/{_slashes(trim_anchors(pattern))}/")
            case tags.Ebnf(grammar):
                name = f"side{len(self._side)}"
                self._side.append({"name": name, "lark_grammar": from_ebnf(grammar)})
                return self._rule(f"@{name}")
            case tags.AnyText():
                return "TEXT"
            case tags.Sequence(parts):
                return self._rule(self._sequence(list(parts)))
            case tags.Either(parts):
                return self._rule(" | ".join(self._node(part) for part in parts))
            case tags.Tag(begin, content, end):
                return self._rule(f"{self.literal(begin)} {self._body(content, end)}")
            case tags.TagList():
                return self._list(node)
            case tags.Triggered():
                return self._triggered(node)
            case tags.Until():
                return self._bounded(node)
            case tags.Repeat(part, least, most):
                return self._rule(f"({self._node(part)}){{{least},{'' if most is None else most}}}")
        raise AssertionError(node)

    def _sequence(self, parts: list[tags.Node]) -> str:
        """Free text before a literal ends where the literal first comes."""
        words = []
        while parts:
            part = parts.pop(0)
            if isinstance(part, tags.AnyText) and parts and isinstance(parts[0], tags.Text):
                words.append(self._until(parts.pop(0).value))  # type: ignore[union-attr]
            else:
                words.append(self._node(part))
        return " ".join(words)

    def _body(self, content: tags.Node, end: str) -> str:
        if isinstance(content, tags.AnyText) and end:
            return self._until(end)
        return f"{self._node(content)} {self.literal(end)}"

    def _until(self, end: str, text: str = "TEXT") -> str:
        """Any text (or one that fits the terminal ``text``) up to the first ``end``, and that."""
        pieces = self._pieces(end)
        if pieces and isinstance(pieces[0], str):
            words = f"{text or 'TEXT'} {json.dumps(pieces[0], ensure_ascii=False)}"
            if text not in {"", "TEXT"}:
                words = self._terminal(words)  # an intersection cannot be joined in place
            head = self._rule(words, "[lazy]")
            return " ".join([head, *(self._piece(p) for p in pieces[1:])])
        return f"{text or 'TEXT'} {self.literal(end)}"

    def _bounded(self, node: tags.Until) -> str:
        pieces = self._pieces(node.end)
        first = pieces[0] if pieces and isinstance(pieces[0], str) else ""
        rest = pieces[1:] if first else pieces
        text = " & ".join(f"/({_slashes(p)}){_slashes(escape(first))}/" for p in node.patterns or (_ANY,))
        stop, *others = (_slashes(escape(mark)) for mark in node.stops)
        text += "".join(f" & ~/{_ANY}{mark}{_ANY}/" for mark in others)
        if rest:  # a control token ends the text, and the mark may not be spelled out in it
            words = self._terminal(f"{text} & ~/{_ANY}{stop}{_ANY}/")
            return self._rule(" ".join([words, *(self._piece(p) for p in rest)]))
        behind = len(first) - first.index(node.stops[0]) - len(node.stops[0])
        words = self._terminal(f"{text} & ~/{_ANY}{stop}(?s:.{{{behind + 1},}})/")
        return self._rule(words, "[lazy]")

    def _terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _list(self, node: tags.TagList) -> str:
        one = self._rule(" | ".join(self._node(tag) for tag in node.tags))
        if node.stop_after_first:
            return one if node.at_least_one else f"({one})?"
        separator = self.literal(node.separator)
        more = f"({separator} {one})*" if separator else f"({one})*"
        whole = self._rule(f"{one} {more}")
        return whole if node.at_least_one else f"({whole})?"

    def _triggered(self, node: tags.Triggered) -> str:
        options, first = [], []
        text = self._terminal(f"{_TEXT} & ~/({_slashes(node.never)}){_ANY}/") if node.never else ""
        for trigger in node.triggers:
            bodies = [
                f"{self.literal(tag.begin.removeprefix(trigger))} {self._body(tag.content, tag.end)}"
                for tag in node.tags
                if tag.begin.startswith(trigger)
            ]
            if bodies:
                body = self._rule(" | ".join(bodies))
                options.append(f"{self._until(trigger)} {body}")
                first.append(f"{self._until(trigger, text)} {body}")
        tag = self._rule(" | ".join(options))
        if text:
            once, more = self._rule(" | ".join(first)), "" if node.stop_after_first else f" ({tag})* TEXT"
            return self._rule(f"{once}{more}" if node.at_least_one else f"{once}{more} | {text}")
        if node.stop_after_first:
            return self._rule(tag if node.at_least_one else f"{tag} | TEXT")
        return self._rule(f"{tag} ({tag})* TEXT" if node.at_least_one else f"({tag})* TEXT")

    # ── literals ─────────────────────────────────────────────────────────────

    def literal(self, text: str) -> str:
        return " ".join(self._piece(piece) for piece in self._pieces(text))

    def _pieces(self, text: str) -> list[str | int]:
        if self._splits is None:
            return [text] if text else []
        return [self._special.get(part, part) for part in self._splits.split(text) if part]

    @staticmethod
    def _piece(piece: str | int) -> str:
        return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)


def from_ebnf(text: str) -> str:
    """EBNF as llama.cpp and xgrammar read it (``root ::= …``), or Lark (``start: …``), as Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises plain exceptions of many kinds for text it cannot read
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise Refusal(f"the grammar cannot be read: {line}") from None


def _slashes(pattern: str) -> str:
    """With every bare slash escaped: it would end the expression."""
    return re.sub(r"\\.|/", lambda m: m[0] if m[0] != "/" else r"\/", pattern, flags=re.DOTALL)
