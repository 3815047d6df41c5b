"""Real-world schemas with marked instances, and generated ones over the whole keyword set."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import pytest

from ceiba.core import limits
from ceiba.grammar.backends import xgrammar
from ceiba.grammar.base import Refusal
from support.grammar_world import EOS, allowed, begin, matches, pair, real_schemas, spellings

PARTS = 8


def accepted_alone(schema: Any) -> bool:
    """Whether llguidance or xgrammar takes the schema as it is, whatever they make of it."""
    from llguidance import LLMatcher

    text = json.dumps(schema)
    if not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text)):
        return True
    try:
        pair("xgrammar")[0]._compiler.compile_json_schema(text, strict_mode=False)
    except Exception:
        return False
    return True


def compiled(schema: Any) -> Any:
    """The state of the default way: xgrammar where it is exact, else llguidance. None for a refusal, which must name
    its place."""
    started = time.monotonic()
    state, refusal = None, None
    try:
        state = begin("llguidance", "json_schema", schema)
    except Refusal as error:
        refusal = error
    assert refusal is None or (refusal.path.startswith("#") and refusal.why)
    assert time.monotonic() - started < limits.GRAMMAR_SECONDS
    return state


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_real_schemas_accept_what_is_valid_and_nothing_else(part):
    wrong, taken, known = [], 0, 0
    for entry in real_schemas()[part::PARTS]:
        schema = entry["schema"]
        known += accepted_alone(schema)
        if compiled(schema) is None:
            continue
        taken += 1
        for test in entry["tests"]:
            fits = any(
                matches(begin("llguidance", "json_schema", schema), text)
                for text in spellings(schema, test["data"], whole=test["valid"])
            )
            if fits != test["valid"]:
                wrong.append((entry["id"], test["valid"], json.dumps(test["data"])[:200]))
    assert not wrong
    assert taken >= 0.9 * known, "each part; the whole is checked below"


@pytest.mark.slow
def test_at_least_95_percent_of_the_real_schemas_are_accepted():
    known = taken = 0
    for entry in real_schemas():
        known += accepted_alone(entry["schema"])
        taken += compiled(entry["schema"]) is not None
    assert taken >= 0.95 * known, f"{taken} of {known}"


@pytest.mark.slow
def test_xgrammar_is_right_about_all_it_takes():
    pair("xgrammar")
    wrong, taken = [], 0
    for entry in real_schemas():
        schema = entry["schema"]
        if not xgrammar.exact(schema):
            continue
        taken += 1
        for test in entry["tests"]:
            texts = spellings(schema, test["data"], whole=test["valid"])
            fits = any(matches(begin("xgrammar", "json_schema", schema), text) for text in texts)
            if fits != test["valid"]:
                wrong.append((entry["id"], test["valid"], json.dumps(test["data"])[:200]))
    assert not wrong
    assert taken > 50


# ── generated schemas ────────────────────────────────────────────────────────

NAMES = ["id", "name", "a.b", "größe", "x-y", "tags"]


class Maker:
    """Random schemas over the whole keyword set of draft 2020-12 (and the older dependencies), a few levels deep."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def schema(self, depth: int = 0) -> Any:
        r = self.random
        kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
        if depth < 3:
            kinds += ["object"] * 4 + ["array"] * 2 + ["anyOf", "oneOf", "allOf", "not", "if", "types", "ref"]
        made = getattr(self, r.choice(kinds))(depth)
        if isinstance(made, dict) and r.random() < 0.2:
            made["description"] = "text"
        return made

    def whole(self) -> Any:
        made = self.object(0) if self.random.random() < 0.7 else self.schema(0)
        return {"$defs": {"leaf": self.string(9), "node": self.node()}, **made}

    def node(self) -> Any:
        return {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["v"], "additionalProperties": False}  # fmt: skip

    def string(self, depth: int) -> Any:
        r = self.random
        made: dict[str, Any] = {"type": "string"}
        pick = r.random()
        if pick < 0.25:
            made["minLength"], made["maxLength"] = r.randint(0, 2), r.randint(2, 8)
        elif pick < 0.45:
            made["pattern"] = r.choice(["^[a-z]+$", "^[A-Z]{2}[0-9]{2,4}$", "^(on|off)$", r"^\d{3}-\d{2}$"])
        elif pick < 0.6:
            made["format"] = r.choice(["date", "date-time", "uuid", "email", "ipv4", "uri", "time", "vendor-format"])
        return made

    def integer(self, depth: int) -> Any:
        r = self.random
        made: dict[str, Any] = {"type": "integer"}
        low = r.randint(-50, 50)
        if r.random() < 0.5:
            made[r.choice(["minimum", "exclusiveMinimum"])] = low
        if r.random() < 0.5:
            made[r.choice(["maximum", "exclusiveMaximum"])] = low + r.choice([2, 10, 10**6, 10**20])
        if r.random() < 0.1:
            made = {"type": "integer", "multipleOf": r.choice([2, 5, 10])}
        return made

    def number(self, depth: int) -> Any:
        made: dict[str, Any] = {"type": "number"}
        if self.random.random() < 0.5:
            made["minimum"], made["maximum"] = -0.5, self.random.choice([0.25, 3, 1e3])
        return made

    def boolean(self, depth: int) -> Any:
        return {"type": "boolean"}

    def null(self, depth: int) -> Any:
        return {"type": "null"}

    def enum(self, depth: int) -> Any:
        return {
            "enum": self.random.sample(["a", "b", "ü\n", 1, 2.5, None, True, [1], {"k": 1}], self.random.randint(1, 4))
        }

    def const(self, depth: int) -> Any:
        return {"const": self.random.choice(["a", 7, None, False, [1, "x"], {"k": [True]}])}

    def types(self, depth: int) -> Any:
        return {"type": self.random.sample(["string", "integer", "null", "boolean"], 2)}

    def ref(self, depth: int) -> Any:
        return {"$ref": self.random.choice(["#/$defs/leaf", "#/$defs/node"])}

    def array(self, depth: int) -> Any:
        r = self.random
        made: dict[str, Any] = {"type": "array", "items": self.schema(depth + 1)}
        if r.random() < 0.5:
            made["minItems"] = r.randint(0, 2)
            made["maxItems"] = r.randint(2, 5)
        if r.random() < 0.15:
            made["prefixItems"] = [self.schema(depth + 2)]
        if r.random() < 0.1:
            made = {"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True, "maxItems": 3}
        if r.random() < 0.1:
            made = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "contains": {"const": 3}}
        return made

    def object(self, depth: int) -> Any:
        r = self.random
        names = r.sample(NAMES, r.randint(1, 4))
        made: dict[str, Any] = {"type": "object", "properties": {n: self.schema(depth + 1) for n in names}}
        if r.random() < 0.7:
            made["required"] = r.sample(names, r.randint(0, len(names)))
        if r.random() < 0.7:
            made["additionalProperties"] = r.choice([False, False, {"type": "integer"}])
        elif r.random() < 0.3:
            made["patternProperties"] = {"^p_": {"type": "boolean"}}
        if r.random() < 0.08 and len(names) > 1:
            made["dependentRequired"] = {names[0]: [names[1]]}
        if r.random() < 0.05:
            made["dependentSchemas"] = {names[0]: {"required": [names[-1]]}}
        if r.random() < 0.05:
            made["propertyNames"] = {"maxLength": 6}
            made.pop("patternProperties", None)
        if r.random() < 0.05:
            made["additionalProperties"] = False
            made["minProperties"] = 1
        return made

    def anyOf(self, depth: int) -> Any:
        return {"anyOf": [self.schema(depth + 1) for _ in range(2)]}

    def oneOf(self, depth: int) -> Any:
        return {"oneOf": [{"type": "object", "properties": {"kind": {"const": kind}, "v": self.schema(depth + 2)},
                           "required": ["kind"]} for kind in ("a", "b")]}  # fmt: skip

    def allOf(self, depth: int) -> Any:
        return {"allOf": [self.object(depth + 1), {"type": "object", "required": ["extra"]}]}

    def if_(self, depth: int) -> Any:
        kind = {"properties": {"k": {"const": "a"}}}
        names = {"k": {"enum": ["a", "b"]}, "n": {"type": "integer"}}
        return {"type": "object", "properties": names, "required": ["k"], "if": kind, "then": {"required": ["n"]}}

    def not_(self, depth: int) -> Any:
        kinds: list[Any] = [{"not": {"type": ["object", "array"]}}, {"type": "object", "not": {"required": ["id"]}}]
        return self.random.choice([*kinds, {"type": "string", "not": {"enum": ["a", "bc"]}}])


setattr(Maker, "if", Maker.if_)
setattr(Maker, "not", Maker.not_)


def sample(state: Any, seed: int, most: int = 4000) -> str | None:
    """A random walk through the masks that prefers to come to an end; None when it grows too long."""
    r = random.Random(seed)
    closing = {ord(c) for c in '"}],'}
    out = bytearray()
    while not state.terminated:
        mask = [token for token in allowed(state) if token < 256 or token == EOS]
        assert mask, f"no token is allowed after {bytes(out)!r}"
        if EOS in mask:
            break
        printable = [t for t in mask if t not in b" \t\n\r"] or mask
        ends = [t for t in printable if t in closing]
        token = r.choice(ends if ends and r.random() < 0.5 else printable)
        assert state.accept(token)
        out.append(token)
        if len(out) > most:
            return None
    return bytes(out).decode()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_generated_schemas_are_accepted_and_every_output_validates(part):
    known = taken = outputs = 0
    for seed in range(part * 50, part * 50 + 50):
        schema = Maker(seed).whole()
        known += accepted_alone(schema)
        if compiled(schema) is None:
            continue
        taken += 1
        validator = jsonschema.Draft202012Validator(schema)
        for k in range(3):
            text = sample(begin("llguidance", "json_schema", schema), seed * 10 + k)
            if text is None:
                continue
            outputs += 1
            value = json.loads(text)
            assert validator.is_valid(value), (json.dumps(schema), text)
    assert taken >= 0.95 * known, f"{taken} of {known}"
    assert outputs > 2 * taken
