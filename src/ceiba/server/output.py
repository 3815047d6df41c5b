"""Which parsers this server has, and what one request's answers are read with.

Owns the choice of the tool-call and reasoning formats (flags, or the chat template) and what they need of the rest:
visible special tokens, the marker that ends the thinking. Must never know a protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ceiba.core.errors import BadRequest
from ceiba.text.parsers import harmony, registry
from ceiba.text.parsers.output import OutputParser
from ceiba.text.parsers.reasoning.tags import ReasoningFormat
from ceiba.text.parsers.tools.base import ToolFormat


class Markers(Protocol):
    """What is asked of a tokenizer here."""

    def token_to_id(self, token: str) -> int | None: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, *, add_special: bool = True) -> Any: ...


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How one request's choices are read; each choice has a parser of its own."""

    reasoning: ReasoningFormat | None = None
    tool: ToolFormat | None = None
    vocabulary: Markers | None = None
    one_call: bool = False
    """Whether calls behind the first are dropped (``parallel_tool_calls: false``)."""

    spelled: bool = False
    """Whether a grammar writes the markers: it may spell them out in ordinary tokens, and they count all the same."""

    forced: tuple[str, ...] = ()
    """Where a grammar lets the answer be calls alone: the tools that may be called."""

    def parser(self, prompt: str) -> OutputParser:
        vocabulary = None if self.spelled else self.vocabulary
        return OutputParser(self.reasoning, self.tool, prompt=prompt, vocabulary=vocabulary, forced=self.forced)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether a marker is a single token, so that the text must show special tokens; the parser takes them out."""
        if self.vocabulary is None:
            return False
        return any(self.vocabulary.token_to_id(marker) is not None for marker in self.parser("").markers)

    def starts_thinking(self, prompt: str) -> bool:
        """Whether the model is already thinking where ``prompt`` (rendered) ends."""
        return self.reasoning is not None and self.reasoning.thinks(prompt) is True

    @property
    def channels(self) -> bool:
        """Whether thinking is a channel among others (gpt-oss), not a part at the start."""
        return self.reasoning is harmony.CHANNELS

    @property
    def think_end(self) -> str:
        """The text that ends the thinking and begins the answer, "" where it cannot be forced."""
        reasoning = self.reasoning
        if reasoning is None or reasoning.passed:
            return ""
        if self.channels:
            return "<|end|><|start|>assistant<|channel|>final<|message|>"
        return reasoning.pairs[0][1]

    def think_end_ids(self, answer: bool = False) -> tuple[int, ...]:
        """Token ids of the marker after which the thinking is over (with ``answer``: after which the answer's own
        text stands); empty where none is known."""
        reasoning, vocabulary = self.reasoning, self.vocabulary
        if reasoning is None or vocabulary is None or reasoning.passed:
            return ()
        marker = (reasoning.answer_at if answer else reasoning.ends_at)[0]
        token = vocabulary.token_to_id(marker)
        if token is not None:
            return (token,)
        return tuple(int(i) for i in vocabulary.encode(marker, add_special=False))


@dataclass(frozen=True, slots=True)
class Parsers:
    """The formats of the loaded model, by their registry names; None where it has none or nobody asked for it."""

    tool: str | None = None
    reasoning: str | None = None
    vocabulary: Markers | None = None

    def output(
        self, tools: Iterable[Mapping[str, Any]] = (), *, separate: bool = True, one_call: bool = False
    ) -> OutputFormat | None:
        """The format for a request with these tools (OpenAI tool objects); None when there is nothing to tell apart.

        ``separate``: whether thinking is taken out of the answer. Raises BadRequest for tools that this model has no
        format for.
        """
        tools = list(tools)
        reasoning = registry.reasoning_parser(self.reasoning) if self.reasoning and separate else None
        tool = None
        if tools:
            if self.tool is None:
                raise BadRequest(
                    "tools: the model's chat template shows no known tool-call format. Start the server with "
                    "--tool-call-parser NAME for a model that has one, or leave tools out.",
                    param="tools",
                    code="no_tool_parser",
                )
            tool = registry.tool_parser(self.tool, tools)
        if reasoning is None and tool is None:
            return None
        return OutputFormat(reasoning, tool, self.vocabulary, one_call)


def choose_parsers(
    tool: str | None, reasoning: str | None, template: str | None, vocabulary: Markers | None
) -> Parsers:
    """From the flags and the chat template's source. Raises ConfigError for a name or an ``auto`` that means nothing.

    Without --tool-call-parser the template decides (only requests with tools are read with it); without
    --reasoning-parser thinking stays in the answer, as the flag's users know it.
    """
    found = registry.detect(template or "")
    if tool == "auto" and found.tool is None:
        raise registry.explain(template, "--tool-call-parser")
    if reasoning == "auto" and found.reasoning is None:
        raise registry.explain(template, "--reasoning-parser")
    if tool is None or tool == "auto":
        tool = found.tool
    else:
        registry.tool_parser(tool)
    if reasoning == "auto":
        reasoning = found.reasoning
    elif reasoning is not None:
        registry.reasoning_parser(reasoning)
    return Parsers(tool, reasoning, vocabulary)


def template_text(template: Any) -> str | None:
    """All sources of a chat template, None where they are not known."""
    sources = getattr(template, "sources", None)
    if sources is not None:
        return "\n".join(sources.values())
    source = getattr(template, "source", None)
    return None if source is None else str(source())
