"""What a request says about the shape of its answer, in each protocol's words, as fields of ``SamplingParams``.

Owns the reading of response_format and its relatives and their quick refusal. Must never know how a grammar is
compiled.
"""

from __future__ import annotations

from typing import Any

from ceiba.core.errors import BadRequest
from ceiba.grammar import fields
from ceiba.grammar.base import Constraint, Kind
from ceiba.server.front import Front

_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag", "choice", "response_format", "text.format")
FORMATS = "text, json_object, json_schema, structural_tag"


def sampling_fields(body: Any, front: Front) -> dict[str, str]:
    """At most one of json_schema, regex, ebnf and structural_tag, from the fields of ``body`` (those it has).

    Raises BadRequest for more than one constraint, for one that no backend can serve, and where there is no backend.
    """
    found: list[tuple[str, Constraint]] = []
    for name in _FIELDS:
        value = getattr(body, name, None)
        if value is None:
            continue
        read = _constraint(name, value)
        if read is not None:
            found.append(read)
    if not found:
        return {}
    if len(found) > 1:
        names = " and ".join(name.partition(".")[0] for name, _ in found)
        raise BadRequest(f"{names} exclude each other: send one of them.", param=found[1][0])
    param, constraint = found[0]
    backend = front.config.grammar.backend
    if backend == "none" or (backend == "outlines" and constraint.kind in {"ebnf", "structural_tag"}):
        raise BadRequest(
            f"{param}: not available with --grammar-backend {backend}; start the server with llguidance or xgrammar.",
            param=param,
            code="not_available",
        )
    fields.check(constraint, param)
    return {constraint.kind: constraint.text}


def names(body: Any) -> dict[str, str]:
    """What ``body`` calls the constraint that it has: native field -> the place in the body, for errors that come
    when the grammar is compiled."""
    for name in _FIELDS:
        value = getattr(body, name, None)
        read = None if value is None else _constraint(name, value)
        if read is not None:
            return {read[1].kind: read[0]}
    return {}


def _constraint(name: str, value: Any) -> tuple[str, Constraint] | None:
    if name in {"response_format", "text.format"}:
        return _response_format(value, name)
    if name == "choice":
        return name, Constraint("regex", fields.choice_regex(value))
    if name in {"json_schema", "structural_tag"}:
        kind: Kind = "json_schema" if name == "json_schema" else "structural_tag"
        return name, Constraint(kind, fields.as_text(value, name))
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a text.", param=name)
    return name, Constraint("regex" if name == "regex" else "ebnf", value)


def _response_format(value: Any, param: str) -> tuple[str, Constraint] | None:
    """OpenAI's field, and that of its responses, which holds the schema itself. ``strict`` changes nothing: a schema is
    always kept."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return param, Constraint("json_schema", fields.ANY_OBJECT)
    if kind == "structural_tag":
        return param, Constraint("structural_tag", fields.as_text(value, param))
    if kind != "json_schema":
        raise BadRequest(f"{param}.type must be one of {FORMATS}.", param=f"{param}.type")
    place = param if param == "text.format" else f"{param}.json_schema"
    given = value if param == "text.format" else value.get("json_schema")
    if not isinstance(given, dict):
        raise BadRequest(f"{place} must be an object with a name and a schema.", param=place)
    where = f"{place}.schema"
    schema = given.get("schema", given.get("schema_"))
    if schema is None:
        raise BadRequest(f"{where} is missing.", param=where)
    return where, Constraint("json_schema", fields.as_text(schema, where))
