"""The words of the language: gen, select, roles, images. Each makes an expression that a state takes with ``+=``.

Owns their arguments. Names and defaults are SGLang's; what is left out is the server's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ceiba.client.content import image_url, schema_of
from ceiba.core.errors import BadRequest
from ceiba.frontend.choices import Method, token_length_normalized
from ceiba.frontend.expr import Expr, Gen, Image, RoleBegin, RoleEnd, Select, Sequel, as_expr

_PATTERNS: dict[type, str] = {
    int: r"[-+]?[0-9]{1,18}",
    float: r"[-+]?[0-9]{1,18}(\.[0-9]{1,18})?",
    bool: r"(true|false|True|False)",
    str: r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"',
}
"""What a typed generation may look like."""


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    ignore_eos: bool | None = None,
    seed: int | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: Method | None = None,
    regex: str | None = None,
    json_schema: Any = None,
) -> Expr:
    """Let the model write until a stop, its end token or ``max_tokens``; the text becomes variable ``name``.

    ``regex``, ``json_schema`` (a schema, its JSON text, or a Pydantic model) and ``dtype`` (int, float, bool, or str
    for a quoted string) constrain the text; ``choices`` makes it a ``select``. Variables are text in every case;
    ``state.parsed(name)`` gives the value. Raises BadRequest for more than one constraint.
    """
    given = {"dtype": dtype, "choices": choices, "regex": regex, "json_schema": json_schema}
    constraints = [key for key, value in given.items() if value is not None]
    if len(constraints) > 1:
        raise BadRequest(f"gen: give one of {' and '.join(constraints)}.", param=constraints[1])
    if choices is not None:
        return select(name, choices, choices_method=choices_method)
    if choices_method is not None:
        raise BadRequest("gen: choices_method needs choices.", param="choices_method")
    value_type: Any = None
    if dtype is not None:
        value_type = _type_of(dtype)
        regex = _PATTERNS[value_type]
    schema: str | None = None
    if json_schema is not None:
        schema = json_schema if isinstance(json_schema, str) else msgspec.json.encode(schema_of(json_schema)).decode()
        value_type = "json"
    sampling = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min_tokens,
        "stop": _listed(stop),
        "stop_token_ids": None if stop_token_ids is None else list(stop_token_ids),
        "stop_regex": _listed(stop_regex),
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty,
        "ignore_eos": ignore_eos,
        "sampling_seed": seed,
        "regex": regex,
        "json_schema": schema,
    }
    fields = {
        "return_logprob": return_logprob,
        "logprob_start_len": logprob_start_len,
        "top_logprobs_num": top_logprobs_num,
        "return_text_in_logprobs": return_text_in_logprobs,
    }
    return Gen(name, _given(sampling), _given(fields), value_type)


def gen_int(name: str | None = None, **options: Any) -> Expr:
    """``gen`` that writes an integer."""
    return gen(name, dtype=int, **options)


def gen_string(name: str | None = None, **options: Any) -> Expr:
    """``gen`` that writes a string in double quotes."""
    return gen(name, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: Method | None = None,
) -> Expr:
    """The likeliest of ``choices`` as a continuation, by ``choices_method`` (default: token_length_normalized).

    Nothing is sampled, so ``temperature`` may only be 0.
    """
    if choices is None:
        raise BadRequest("select needs choices.", param="choices")
    if temperature > 1e-5:
        raise BadRequest("select takes the likeliest choice: temperature must be 0. To sample, use gen with regex.")
    return Select(name, tuple(choices), choices_method or token_length_normalized)


def image(source: str | bytes | Path) -> Expr:
    """A picture: a path, an http(s) or data: URL, base64, or the file's bytes."""
    if isinstance(source, Path) or (isinstance(source, str) and "://" not in source and _is_file(source)):
        source = Path(source).read_bytes()
    return Image(image_url(source))


def _is_file(text: str) -> bool:
    try:
        return len(text) < 4096 and Path(text).is_file()
    except (OSError, ValueError):
        return False


def _turn(role: str, content: Any) -> Expr:
    parts: list[Expr] = [RoleBegin(role)]
    if content is not None:
        parts.append(as_expr(content))
    return Sequel([*parts, RoleEnd(role)])


def system(content: Expr | str | None = None) -> Expr:
    """A whole turn of the system."""
    return _turn("system", content)


def user(content: Expr | str | None = None) -> Expr:
    """A whole turn of the user."""
    return _turn("user", content)


def assistant(content: Expr | str | None = None) -> Expr:
    """A whole turn of the assistant, usually with a ``gen`` in it."""
    return _turn("assistant", content)


def system_begin() -> Expr:
    return RoleBegin("system")


def system_end() -> Expr:
    return RoleEnd("system")


def user_begin() -> Expr:
    return RoleBegin("user")


def user_end() -> Expr:
    return RoleEnd("user")


def assistant_begin() -> Expr:
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    return RoleEnd("assistant")


def _type_of(dtype: type | str) -> type:
    names = {kind.__name__: kind for kind in _PATTERNS}
    found = names.get(dtype) if isinstance(dtype, str) else dtype
    if found not in _PATTERNS:
        raise BadRequest(f"gen: dtype {dtype!r} is unknown; known: {', '.join(names)}.", param="dtype")
    return found


def _listed(value: str | Sequence[str] | None) -> list[str] | None:
    return None if value is None else [value] if isinstance(value, str) else list(value)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
