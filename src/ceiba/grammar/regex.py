"""What can be said of a regular expression by reading it once: what no linear-time engine has, and how large it is.

Owns the scan; compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from ceiba.core import limits
from ceiba.grammar.base import Refusal

_LOOK = {"(?=": "lookahead", "(?!": "lookahead", "(?<=": "lookbehind", "(?<!": "lookbehind"}


def check_regex(pattern: str, path: str = "", keyword: str = "pattern") -> None:
    """Raise Refusal for an expression that is too large or needs backtracking."""

    def no(why: str) -> Refusal:
        return Refusal(why, path=path, keyword=keyword)

    if len(pattern) > limits.MAX_REGEX_CHARS:
        raise no(f"the expression has {len(pattern)} characters; the limit is {limits.MAX_REGEX_CHARS}")
    size = expanded_size(pattern, no)
    if size > limits.MAX_REGEX_SIZE:
        raise no(
            f"the expression stands for {size} characters once its repetitions are written out; the limit is "
            f"{limits.MAX_REGEX_SIZE}: use smaller bounds, or * and +"
        )


def expanded_size(pattern: str, no: Callable[[str], Refusal]) -> int:
    """Characters after writing out {m,n}: an expression's automaton can be no smaller than what it counts."""
    sizes = [0]
    last = 0
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            follow = pattern[at + 1 : at + 2]
            if follow in set("123456789k"):
                raise no(f"the backreference at character {at} needs backtracking, which is not available")
            last, at = 1, at + 2
        elif char == "[":
            at = _class_end(pattern, at)
            last = 1
        elif char == "(":
            for opening, name in _LOOK.items():
                if pattern.startswith(opening, at):
                    raise no(f"the {name} at character {at} needs backtracking, which is not available")
            sizes.append(0)
            at += 1
            continue
        elif char == ")":
            if len(sizes) == 1:
                raise no(f"the parenthesis at character {at} closes nothing")
            last, at = sizes.pop(), at + 1
        else:
            last, at = 1, at + 1
        count, at = _repetition(pattern, at)
        sizes[-1] = min(sizes[-1] + last * count, 1 << 60)
    if len(sizes) > 1:
        raise no("a parenthesis is not closed")
    return sizes[0]


def _class_end(pattern: str, at: int) -> int:
    at += 1
    if pattern.startswith("^", at):
        at += 1
    if pattern.startswith("]", at):
        at += 1
    depth = 1
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        elif pattern.startswith("[:", at):
            depth += 1
        at += 1
    return at


def _repetition(pattern: str, at: int) -> tuple[int, int]:
    """(largest bound of a counted repetition at ``at``, else 1; where it ends)."""
    if not pattern.startswith("{", at):
        return 1, at
    end = pattern.find("}", at)
    low, _, high = pattern[at + 1 : end].partition(",")
    if end < 0 or not low.isdigit() or (high and not high.isdigit()) or len(low) > 12 or len(high) > 12:
        return 1, at
    return max(int(high) if high else int(low), 1), end + 1


def escape(text: str) -> str:
    """An expression that matches ``text`` and nothing else, in the syntax of Rust's regex crate and of xgrammar."""
    special = set("\\.+*?()|[]{}^$#&-~/")
    names = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return "".join(names.get(c) or (f"\\{c}" if c in special else c) for c in text)


def containing(pattern: str, path: str = "") -> str:
    """An expression, without anchors, for the texts in which ``pattern`` is found somewhere (JSON Schema's meaning).

    Raises Refusal for anchors that do not stand at the ends of the whole or of one of its alternatives.
    """
    return "(" + "|".join(_found(part, path) for part in _alternatives(pattern)) + ")"


def _found(part: str, path: str) -> str:
    begin = end = "(?s:.*)"
    if part.startswith("^"):
        begin, part = "", part[1:]
    stem = trim_anchors(part) if part.endswith("$") else part
    if stem != part:
        end, part = "", stem
    at = 0
    while at < len(part):
        if part[at] == "\\":
            if part[at + 1 : at + 2] in {"b", "B", "A", "z", "Z"}:
                raise Refusal("anchors inside of an expression are not available here", path=path, keyword="pattern")
            at += 2
        elif part[at] == "[":
            at = _class_end(part, at)
        elif part[at] in "^$":
            raise Refusal("anchors inside of an expression are not available here", path=path, keyword="pattern")
        else:
            at += 1
    return f"{begin}({part}){end}"


def _alternatives(pattern: str) -> list[str]:
    """The parts between bars that stand in no parenthesis."""
    parts, depth, at, start = [], 0, 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 2
            continue
        if char == "[":
            at = _class_end(pattern, at)
            continue
        depth += (char == "(") - (char == ")")
        if char == "|" and not depth:
            parts.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*parts, pattern[start:]]


def trim_anchors(pattern: str) -> str:
    """Without ^ and $ at its ends: a constraint always covers the whole answer."""
    if pattern.startswith("^"):
        pattern = pattern[1:]
    if pattern.endswith("$"):
        stem = pattern[:-1]
        if (len(stem) - len(stem.rstrip("\\"))) % 2 == 0:
            pattern = stem
    return pattern
