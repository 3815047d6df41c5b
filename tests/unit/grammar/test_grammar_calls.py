"""Forced and strict calls in every family's own notation: whatever the masks let through, the family's parser reads as
calls whose arguments satisfy the tool's schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from ceiba.grammar import tags
from ceiba.grammar.backends import guidance
from ceiba.grammar.base import Constraint, Refusal, Spacing, State, Vocabulary
from ceiba.text.parsers.events import join
from ceiba.text.parsers.registry import tool_names, tool_parser
from support.parsing import bursts, parser, result

EOS = 256
TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "book": {
        "type": "object",
        "properties": {
            "name": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 6}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "day": {"type": "string", "format": "date"},
            "guests": {"type": "array", "items": {"$ref": "#/$defs/guest"}, "minItems": 1, "maxItems": 2},
            "price": {"type": ["number", "null"]},
        },
        "required": ["name", "code", "guests"],
        "additionalProperties": False,
        "$defs": {
            "guest": {
                "type": "object",
                "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "tag": {"type": "string"}},
                "required": ["age"],
                "additionalProperties": False,
            }
        },
    },
    "clock": {"type": "object", "properties": {}, "additionalProperties": False},
    "note": {"type": "object", "properties": {"text": {"type": "string"}, "any": {}}},
}


def offered(names: list[str], *, strict: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": n, "parameters": TOOLS[n], **({"strict": True} if strict else {})}}
        for n in names
    ]


def words(special: tuple[str, ...]) -> Vocabulary:
    """Single bytes, an end, and ``special`` as control tokens."""
    tokens = [*(bytes([b]) for b in range(256)), *[b""] * (1 + len(special))]
    ids = {name: 257 + i for i, name in enumerate(special)}
    return Vocabulary(tokens, (EOS,), {"<end>": EOS, **ids}, None)


def marks(form: Any) -> tuple[str, ...]:
    """Markers of a family that its vocabulary has as single tokens."""
    found = [*form.openers, *form.inner, form.section[1]]
    return tuple(dict.fromkeys(m for m in found if m.startswith("<") and m.endswith(">") and " " not in m))


class Walk:
    """A random way through the masks that likes to close what it opened, and to write what might confuse a parser."""

    def __init__(self, state: State, vocabulary: Vocabulary, tree: tags.Node, seed: int) -> None:
        self.state, self.random = state, random.Random(seed)
        self.texts = {token: bytes([token]) for token in range(256)}
        self.texts |= {token: name.encode() for name, token in vocabulary.special.items() if token != EOS}
        self.ids = {name: token for name, token in vocabulary.special.items() if token != EOS}
        self.bits_len = vocabulary.words
        ends = [n.end for n in tags.nodes(tree) if isinstance(n, tags.Until)]
        self.ends = list(dict.fromkeys([*ends, *tags.texts(tree), '"', "}", "]", ",", "\n"])) or ["}"]
        self.out = bytearray()

    def allowed(self) -> list[int]:
        import numpy as np

        from ceiba.grammar.masks import members

        bits = np.zeros(self.bits_len, np.int32)
        self.state.fill(bits)
        return members(bits).tolist()

    def write(self, text: str) -> bool:
        """All of ``text``, control tokens as such, or nothing."""
        tokens: list[int] = []
        while text:
            name = next((n for n in sorted(self.ids, key=len, reverse=True) if text.startswith(n)), None)
            tokens += [self.ids[name]] if name else list(text[0].encode())
            text = text[len(name) if name else 1 :]
        for taken, token in enumerate(tokens):
            if self.state.terminated or not self.state.accept(token):
                self.state.rollback(taken)
                return False
        self.out += b"".join(self.texts[t] for t in tokens)
        return True

    def run(self, most: int = 3000) -> str | None:
        """The answer; None where it found no end in time."""
        r = self.random
        while not self.state.terminated and len(self.out) < most:
            if r.random() < 0.35 and self.write(r.choice(self.ends)):
                continue
            mask = self.allowed()
            assert mask, f"nothing is allowed after {bytes(self.out)!r}"
            if EOS in mask and r.random() < 0.5:
                return self.out.decode()
            plain = [t for t in mask if 33 <= t < 127 or t > EOS] or [t for t in mask if t != EOS]
            if not plain:
                return self.out.decode()
            token = r.choice(plain)
            assert self.state.accept(token)
            self.out += self.texts[token]
        return self.out.decode() if self.state.terminated else None


def compiled(found: dict[str, Any], special: tuple[str, ...] = ()) -> tuple[Any, Vocabulary, tags.Node]:
    vocabulary = words(special)
    text = json.dumps(found)
    compiler, engine = guidance.Compiler(vocabulary, Spacing(most=2)), guidance.Engine(vocabulary)
    return engine.prepare(compiler.compile(Constraint("structural_tag", text))), vocabulary, tags.parse(text)


def check(name: str, offered_tools: list[dict[str, Any]], text: str, *, content: str | None = "") -> int:
    said, _, calls = result(parser(name, tools=offered_tools), [text])
    assert calls or content is None, text
    if content is not None:
        assert said == content, text
    for tool, arguments in calls:
        value = json.loads(arguments)
        try:
            jsonschema.validate(value, TOOLS[tool])
        except jsonschema.ValidationError as error:
            raise AssertionError(f"{error.message}\n{text}") from None
    return len(calls)


def check_cuts(name: str, offered_tools: list[dict[str, Any]], text: str, seed: int, most: int = 20) -> int:
    """Wherever the length limit cuts ``text``, what comes out is the beginning of the same calls, and no answer.
    Returns how many cuts fell into arguments."""
    rng = random.Random(seed)
    names = [tool["function"]["name"] for tool in offered_tools]
    _, _, wanted = result(parser(name, tools=offered_tools), [text])
    inside = 0
    for cut in rng.sample(range(1, len(text)), min(most, len(text) - 1)):
        parsing = parser(name, tools=offered_tools, forced=names)
        found = [e for piece in bursts(text[:cut], cut) for e in parsing.feed(piece)] + parsing.finish(cut=True)
        answer = join(found)
        assert answer.content.strip() == "", (text[:cut], answer)
        for (tool, arguments), call in zip(wanted, answer.calls, strict=False):
            assert call.name == tool, text[:cut]
            assert arguments.startswith(call.arguments), (text[:cut], arguments, call.arguments)
            if call.whole:
                assert call.arguments == arguments
            else:
                assert call is answer.calls[-1]
                assert call.arguments != arguments, text[:cut]
                inside += call.arguments != ""
        assert len(answer.calls) <= len(wanted), (text, cut, answer)
    return inside


def walk_calls(name: str, spelled: bool, walks: int) -> None:
    tools = offered(list(TOOLS))
    form = tool_parser(name, tools)
    found = form.constraint("required")
    assert found is not None
    prepared, vocabulary, tree = compiled(found, () if spelled else marks(form))
    ended = calls = inside = 0
    for seed in range(walks):
        text = Walk(prepared.state(), vocabulary, tree, seed).run()
        if text is not None:
            ended += 1
            calls += check(name, tools, text)
            inside += check_cuts(name, tools, text, seed)
    assert ended >= walks // 3
    assert inside
    assert calls >= ended


@pytest.mark.parametrize("name", tool_names())
def test_forced_calls_are_read_back_and_fit(name: str) -> None:
    walk_calls(name, True, 3)


@pytest.mark.slow
@pytest.mark.parametrize("spelled", [True, False])
@pytest.mark.parametrize("name", tool_names())
def test_many_forced_calls_are_read_back_and_fit(name: str, spelled: bool) -> None:
    """Markers in plain characters, or as control tokens."""
    walk_calls(name, spelled, 25)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "pythonic", "gemma4", "minimax-m3", "hermes", "kimi_k2"])
def test_strict_calls_among_free_text(name: str) -> None:
    tools = offered(["weather", "book"], strict=True)
    found = tool_parser(name, tools).constraint("auto")
    assert found is not None
    prepared, vocabulary, tree = compiled(found)
    read = 0
    for seed in range(8):
        walk = Walk(prepared.state(), vocabulary, tree, seed)
        before = found["begin"] or found["tags"][0]["begin"]
        assert name == "pythonic" or walk.write("Let me see. ")
        assert walk.write(before), "a call may begin anywhere"
        text = walk.run()
        if text is not None:
            read += check(name, tools, text, content=None)
    assert read


@pytest.mark.parametrize("name", ["kimi_k2", "kimi_k3"])
def test_calls_are_numbered(name: str) -> None:
    tools = offered(["clock"])
    found = tool_parser(name, tools).constraint("required")
    assert found is not None
    prepared, vocabulary, tree = compiled(found)
    for seed in range(6):
        text = Walk(prepared.state(), vocabulary, tree, seed).run() or ""
        calls = check(name, tools, text)
        wanted = [f'index="{i + 1}"' if name == "kimi_k3" else f"functions.clock:{i}<" for i in range(calls)]
        places = [text.index(part) for part in wanted]
        assert places == sorted(places)
        assert "{index" not in text


LOOP = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}
ONE = {"type": "function", "function": {"name": "f", "strict": True}}


def content(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    form = tool_parser(name, [{"type": "function", "function": {**ONE["function"], "parameters": schema}}])  # type: ignore[dict-item]
    found = form.constraint("required")
    assert found is not None
    found["tags"][0]["content"].update(more)
    return found


@pytest.mark.parametrize(
    ("name", "schema", "place"),
    [
        ("qwen3_coder", {"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "#/properties/a: not"),
        ("qwen3_coder", {"properties": {"a>": {"type": "integer"}}}, "#/properties/a>"),
        ("glm", {"properties": {"a": {"type": "string", "pattern": "a$b"}}}, "#/properties/a: pattern"),
        ("qwen3_coder", {"type": "object", "minProperties": 1}, "#: minProperties"),
        ("gemma4", {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": LOOP}}, "nested"),
    ],
)
def test_what_a_notation_cannot_hold_is_refused_for_strict_tools_only(name: str, schema: dict, place: str) -> None:
    with pytest.raises(Refusal) as caught:
        tags.parse(json.dumps(content(name, schema, tool="f")))
    assert place in str(caught.value)
    assert "f" in caught.value.why
    tree = tags.parse(json.dumps(content(name, schema, loose=True)))
    assert any(isinstance(node, tags.AnyText) for node in tags.nodes(tree))


TEXT = {"type": "string"}


def test_unions_and_references_at_the_top() -> None:
    schema = {
        "anyOf": [
            {"type": "object", "properties": {"path": TEXT, "line": {"type": "integer"}}, "required": ["path"]},
            {"type": "object", "properties": {"url": {"type": "string", "format": "uri"}}, "required": ["url"]},
        ]
    }  # fmt: skip
    TOOLS["open"] = schema
    try:
        for name in ("qwen3_coder", "gemma4", "pythonic", "minimax-m3"):
            prepared, vocabulary, tree = compiled(tool_parser(name, offered(["open"])).constraint("required") or {})
            for seed in range(6):
                text = Walk(prepared.state(), vocabulary, tree, seed).run()
                assert text is None or check(name, offered(["open"]), text)
    finally:
        del TOOLS["open"]


BARE = [
    ("qwen25", '{"name": "weather", "arguments": {"city": "', '{"name": "weather", "arguments": {"town'),
    ("qwen25", '```json\n{\n  "name": "weather",\n  "arguments": {\n "city": "', '```json\n{"name": "wet'),
    ("llama3", '{"name": "weather", "parameters": {"city": "', '{"type": "function", "function": {"name": "weather'),
    ("pythonic", '[weather(city="', "[weather(town="),
    ("lfm2", '[weather(city="', "[ weather(town="),
]


@pytest.mark.parametrize(("name", "good", "bad"), BARE)
def test_a_strict_tool_called_bare_is_held_too(name: str, good: str, bad: str) -> None:
    """Some families' calls may stand at the start of an answer without a marker: a grammar must know them as well."""
    tools = offered(["weather"], strict=True)
    found = tool_parser(name, tools).constraint("auto")
    assert found is not None
    prepared, vocabulary, tree = compiled(found)
    assert not Walk(prepared.state(), vocabulary, tree, 0).write(bad)
    read = 0
    for seed in range(6):
        walk = Walk(prepared.state(), vocabulary, tree, seed)
        assert walk.write(good)
        text = walk.run()
        if text is not None:
            read += check(name, tools, text, content=None)
    assert read
    for answer in (
        '{"answer": [1, 2]}',
        "[1, 2] is a list",
        "It rains: [weather] in {Oslo}.",
        "```python\nx = {}\n```",
    ):
        assert Walk(prepared.state(), vocabulary, tree, 0).write(answer)
