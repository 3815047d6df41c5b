"""Chat templates: a conversation to the one text its model was trained to continue.

Owns the choice of the template, what a given template can take (lists of content parts, a developer role, arguments as
objects), the translation of OpenAI messages into that, and which variables a request may set. Rendering itself happens
in a process of its own (``template_pool``). Must never know tokenizers' ids, HTTP or the engine.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ceiba.core.errors import BadRequest, ConfigError
from ceiba.core.limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_PROMPT_CHARS, MAX_TOOLS
from ceiba.text.template_builtin import BUILTIN
from ceiba.text.template_pool import TemplatePool, TemplateTimeout

RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "return_dict", "raise_exception", "strftime_now"),
    }
)
"""Variables that are ours: a request's ``chat_template_kwargs`` may not carry them."""

_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
    "video": "video",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
}
_PROBE = "pr0be-w0rd"
_PROBE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a template can take, found by rendering small conversations with it."""

    text_content: bool
    """Content as a string."""
    part_content: bool
    """Content as a list of ``{"type": "text", "text": …}``."""
    developer_role: bool
    object_arguments: bool
    """Tool-call arguments as an object (else as JSON text)."""
    null_content: bool
    """Content may be null beside tool calls (else it must be the empty string)."""
    empty_content: bool
    """Content may be the empty string beside tool calls (else it must be null, or the calls would not show)."""


class ChatTemplate:
    """A compiled template with its variables. Safe to share among threads; ``render`` blocks, keep it off event loops.

    ``sources``: name -> Jinja source; ``tool_use`` is taken when a request has tools, else ``default``.
    ``special_tokens``: ``bos_token`` and its like (``Tokenizer.special_tokens``). ``defaults``: variables that every
    rendering gets unless the request sets them. Raises ConfigError for a template that does not compile.
    """

    def __init__(
        self,
        sources: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        defaults: Mapping[str, object] | None = None,
        pool: TemplatePool | None = None,
    ) -> None:
        named = {"default": sources} if isinstance(sources, str) else dict(sources)
        if "default" not in named:
            raise ConfigError(
                f"this model has chat templates ({', '.join(sorted(named)) or 'none'}) but none called 'default'; "
                "name one with --chat-template"
            )
        self.sources = named
        self._special = dict(special_tokens or {})
        self._defaults = dict(defaults or {})
        self._refuse_reserved(self._defaults, "default_chat_template_kwargs")
        self._pool = pool if pool is not None else TemplatePool()
        self._own_pool = pool is None
        try:
            self._numbers = {name: self._pool.load(source) for name, source in named.items()}
            self._capabilities = {name: self._probe(name) for name in named}
        except BadRequest as error:
            self.close()
            raise ConfigError(error.message) from error

    def close(self) -> None:
        """End the rendering processes, if they are this template's own."""
        if self._own_pool:
            self._pool.close()

    def capabilities(self, *, tools: bool = False) -> Capabilities:
        return self._capabilities[self._name(tools)]

    def source(self, *, tools: bool = False) -> str:
        return self.sources[self._name(tools)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> str:
        """The prompt text.

        ``continue_final_message``: the text ends where the last message ends, so that the model goes on with it;
        excludes ``add_generation_prompt``. ``kwargs`` (``enable_thinking=False``) are variables of the template and
        reach nothing else. Raises BadRequest where the template refuses, fails, or takes longer than it may.
        """
        self._refuse_reserved(kwargs, "chat_template_kwargs")
        if not messages:
            raise BadRequest("messages is empty; send at least one", param="messages")
        if len(messages) > MAX_MESSAGES:
            raise BadRequest(f"{len(messages)} messages are more than the limit of {MAX_MESSAGES}", param="messages")
        if tools and len(tools) > MAX_TOOLS:
            raise BadRequest(f"{len(tools)} tools are more than the limit of {MAX_TOOLS}", param="tools")
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                param="continue_final_message",
            )
        name = self._name(bool(tools))
        able = self._capabilities[name]
        prepared = [normalize(m, able, f"messages[{i}]") for i, m in enumerate(messages)]
        mark = ""
        if continue_final_message:
            mark = f"<end-{secrets.token_hex(8)}>"
            _append(prepared[-1], mark, able)
        text = self._render(name, prepared, list(tools) if tools else None, add_generation_prompt, kwargs)
        return self._cut(text, mark) if mark else text

    def _cut(self, text: str, mark: str) -> str:
        at = text.rfind(mark)
        if at < 0:
            raise BadRequest(
                "this chat template leaves out or changes the last message, so it cannot be continued; "
                "set continue_final_message to false",
                param="continue_final_message",
            )
        return text[:at]

    def _name(self, tools: bool) -> str:
        return "tool_use" if tools and "tool_use" in self.sources else "default"

    def _render(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, object],
        seconds: float | None = None,
    ) -> str:
        variables: dict[str, Any] = {
            **self._defaults,
            **kwargs,
            **self._special,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        number = self._numbers[name]
        if seconds is None:
            return self._pool.render(number, variables, MAX_PROMPT_CHARS)
        return self._pool.render(number, variables, MAX_PROMPT_CHARS, seconds)

    def _refuse_reserved(self, kwargs: Mapping[str, object], param: str) -> None:
        taken = sorted(k for k in kwargs if k in RESERVED or k in self._special)
        if taken:
            raise BadRequest(
                f"{param} may not set {', '.join(taken)}: these come from the request itself or from the model",
                param=param,
            )

    # ── what the template can take ───────────────────────────────────────────

    def _probe(self, name: str) -> Capabilities:
        def shows(word: str, *messages: dict[str, Any]) -> str | None:
            """The rendering if it has ``word`` in it, None otherwise."""
            try:
                text = self._render(name, messages, None, False, {}, _PROBE_SECONDS)
            except TemplateTimeout:
                raise
            except BadRequest:
                return None
            return text if word in text else None

        user = {"role": "user", "content": _PROBE}
        listed = shows(_PROBE, {"role": "user", "content": [{"type": "text", "text": _PROBE}]})
        part_content = listed is not None and not any(q in listed for q in ("'type'", '"type"', "'text':", '"text":'))
        text_content = shows(_PROBE, user) is not None or not part_content
        asked = user if text_content else {"role": "user", "content": [{"type": "text", "text": _PROBE}]}

        calls = self._probe_calls(shows, asked)
        return Capabilities(
            text_content=text_content,
            part_content=part_content,
            developer_role="developer" in self.sources[name],
            object_arguments=calls[0],
            null_content=calls[1],
            empty_content=calls[2],
        )

    @staticmethod
    def _probe_calls(shows: Callable[..., str | None], asked: dict[str, Any]) -> tuple[bool, bool, bool]:
        """(arguments as an object, null beside calls, empty text beside calls): the first way that shows the calls."""
        value = _PROBE + "v"
        result = {"role": "tool", "tool_call_id": "call00001", "name": "probe_f", "content": "1"}

        def works(as_object: bool, content: object, after: tuple[dict[str, Any], ...]) -> bool:
            arguments: object = {"probe_k": value} if as_object else json.dumps({"probe_k": value})
            call = {"id": "call00001", "type": "function", "function": {"name": "probe_f", "arguments": arguments}}
            message = {"role": "assistant", "content": content, "tool_calls": [call]}
            text = shows(value, asked, message, *after)
            # An object printed as Python, or null as a word, is not what the model was trained on.
            return text is not None and "{'probe_k'" not in text and "None" not in text

        whole = (result, {"role": "assistant", "content": "ok"}, asked)
        for after in (whole, ()):  # a template without tool results may still show calls
            for as_object in (True, False):
                null, empty = works(as_object, None, after), works(as_object, "", after)
                if null or empty:
                    return as_object, null, empty
        return True, False, True


def normalize(message: Mapping[str, Any], able: Capabilities, where: str = "message") -> dict[str, Any]:
    """An OpenAI message as this template takes it; a new dict. Raises BadRequest naming the part at fault."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{where}.role is missing or not a string", param="messages")
    made = dict(message)
    if role == "developer" and not able.developer_role:
        made["role"] = "system"
    calls = message.get("tool_calls")
    if calls:
        made["tool_calls"] = [_call(c, able.object_arguments, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    elif "tool_calls" in made:
        del made["tool_calls"]  # many templates test for presence only
    content = message.get("content")
    if calls and content == "" and able.null_content and not able.empty_content:
        content = None
    made["content"] = _content(content, able, where)
    return made


def _content(content: Any, able: Capabilities, where: str) -> Any:
    if content is None:
        return None if able.null_content else ""
    if isinstance(content, str):
        return content if able.text_content else [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise BadRequest(f"{where}.content must be a string or a list of parts", param="messages")
    if len(content) > MAX_CONTENT_PARTS:
        raise BadRequest(
            f"{where}.content has {len(content)} parts, the limit is {MAX_CONTENT_PARTS}", param="messages"
        )
    parts = [_part(p, f"{where}.content[{i}]") for i, p in enumerate(content)]
    if able.part_content:
        return parts
    media = next((p["type"] for p in parts if p["type"] != "text"), None)
    if media is not None:
        raise BadRequest(
            f"{where}.content has a part of type {media!r}, but this model takes text only", param="messages"
        )
    return "\n".join(p["text"] for p in parts)


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise BadRequest(f"{where} must be an object with a type", param="messages")
    kind = part.get("type", "text")
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if not isinstance(text, str):
            raise BadRequest(f"{where}.text must be a string", param="messages")
        return {"type": "text", "text": text}
    if isinstance(kind, str) and kind in _MEDIA:
        # The template only marks the place; the picture itself never goes through it.
        return {"type": _MEDIA[kind]}
    raise BadRequest(
        f"{where}.type {kind!r} is not one we know (text, image_url, video_url, input_audio)", param="messages"
    )


def _call(call: Any, as_object: bool, where: str) -> dict[str, Any]:
    """A tool call with its arguments in the form that the template reads."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise BadRequest(f"{where}.function is missing", param="messages")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if as_object and (arguments is None or isinstance(arguments, str)):
        try:
            value = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise BadRequest(f"{where}.function.arguments must be a JSON object in a string", param="messages")
        function["arguments"] = value
    elif not as_object and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return {**call, "function": function}


def _append(message: dict[str, Any], mark: str, able: Capabilities) -> None:
    content = message.get("content")
    if isinstance(content, list):
        texts = [i for i, p in enumerate(content) if p["type"] == "text"]
        if texts:
            at = texts[-1]
            content = [*content[:at], {"type": "text", "text": content[at]["text"] + mark}, *content[at + 1 :]]
        else:
            content = [*content, {"type": "text", "text": mark}]
        message["content"] = content
    else:
        message["content"] = (content or "") + mark


def choose_template(
    option: str | None,
    sources: Mapping[str, str],
    special_tokens: Mapping[str, str] | None = None,
    *,
    defaults: Mapping[str, object] | None = None,
) -> ChatTemplate | None:
    """The template of ``--chat-template``: a built-in name, a name among the model's own, or a file; without it the
    model's own ``default``. None when the model has none. Raises ConfigError for a name or file that is not there."""
    if option is None:
        if not sources:
            return None
        return ChatTemplate(sources, special_tokens, defaults=defaults)
    if option in sources:
        return ChatTemplate(sources[option], special_tokens, defaults=defaults)
    if option in BUILTIN:
        return ChatTemplate(BUILTIN[option], special_tokens, defaults=defaults)
    path = Path(option)
    if path.is_file():
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the chat template {path}: {error}") from error
        return ChatTemplate(_from_file(text, path), special_tokens, defaults=defaults)
    known = ", ".join([*sorted(sources), *sorted(BUILTIN)])
    raise ConfigError(f"--chat-template {option!r} is neither a file nor a template we know: {known}")


def _from_file(text: str, path: Path) -> str:
    """Jinja as it stands; a JSON file (tokenizer_config.json, chat_template.json) by its ``chat_template``."""
    if path.suffix != ".json":
        return text
    try:
        found = json.loads(text)["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} has no chat_template in it") from error
    if isinstance(found, list):
        found = next((t.get("template") for t in found if t.get("name") == "default"), None)
    if not isinstance(found, str):
        raise ConfigError(f"{path} has no default chat_template in it")
    return found
