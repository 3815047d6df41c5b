"""The command line of the server to ``Flags``. It owns the grammar (``--flag value``, ``--flag=value``, ``--no-flag``,
lists, JSON) and nothing else: which flags there are is ``flags``, what they do is ``resolve``.
"""

from __future__ import annotations

from typing import Any

from ceiba.config.flags import Flag, Flags, lookup, make_flags, names
from ceiba.core.errors import ConfigError


def parse_args(argv: list[str]) -> Flags:
    """Parse the arguments after ``ceiba serve``. One bare word is the model.

    Raises ConfigError: unknown flag (with the closest names), bad value, missing value, or a flag that is refused.
    """
    given: list[tuple[str, Any]] = []
    models: list[str] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if not word.startswith("-") or word == "-":
            models.append(word)
            continue
        if not word.startswith("--"):
            raise ConfigError(f"{word}: flags of the server begin with two dashes.", param=word)
        name, equals, inline = word.partition("=")
        flag, negated = _find(name)
        if negated:
            if equals:
                raise ConfigError(f"{word}: {name} takes no value.", param=name)
            given.append((flag.name, False))
            continue
        value, at = _value(flag, name, inline if equals else None, argv, at)
        if flag.name == "--model-path":
            models += value if isinstance(value, list) else [value]
        else:
            given.append((name, value))
    return make_flags([*given, *_model(models)])


def _find(name: str) -> tuple[Flag, bool]:
    """The flag and whether it was negated: ``--no-x`` is ``--x=false`` for any switch ``--x``."""
    if name not in names() and name.startswith("--no-"):
        positive = names().get("--" + name[5:])
        if positive is not None and positive.type == "bool":
            return positive, True
    return lookup(name), False


def _value(flag: Flag, name: str, inline: str | None, argv: list[str], at: int) -> tuple[Any, int]:
    """The value of one flag and where the next word is."""
    if inline is not None:
        return flag.parse(inline), at
    if flag.type == "bool":
        if at < len(argv) and argv[at].lower() in {"true", "false"}:
            return flag.parse(argv[at]), at + 1
        return True, at
    end = at
    many = flag.is_list or flag.name == "--model-path"
    while end < len(argv) and not argv[end].startswith("--") and (many or end == at):
        end += 1
    if end == at:
        raise ConfigError(f"{name} needs a value: {name} {flag.type.upper()}.", param=name)
    words = argv[at:end]
    if flag.name == "--model-path":
        return words, end
    return flag.parse(words if flag.is_list else words[0]), end


def _model(models: list[str]) -> list[tuple[str, Any]]:
    distinct = list(dict.fromkeys(models))
    if len(distinct) > 1:
        raise ConfigError(
            f"{len(distinct)} models ({', '.join(distinct)}): several models behind one port are not available yet. "
            "Instead: start one server per model.",
            param="--model-path",
        )
    return [("--model-path", distinct[0])] if distinct else []
