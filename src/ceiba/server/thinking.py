"""A real limit on the tokens of thinking: one choice, generated in two parts.

The first part ends at the marker that ends the thinking, or when the limit is reached; then the marker is written for
the model and the second part goes on from there, over a prefix that the cache still has. Owns that hand-over; the
client sees one choice. Must never know HTTP or the parsers.

Frequency and presence penalties count the tokens of a part: the answer is not penalized for the thinking's words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ceiba.core.messages import Finish, Generate, TopLogprobs, Usage, bytes_to_ids, ids_to_bytes
from ceiba.server.output import OutputFormat
from ceiba.server.request import Chunk, EngineRequest, Input

_CLOSING = "\n{}\n\n"
_UNBOUND = {"json_schema": None, "regex": None, "ebnf": None, "structural_tag": None, "think_end_ids": ()}
"""A grammar holds for the answer only."""


@dataclass(slots=True)
class BoundedThinking:
    """``message``: the whole choice as it would be generated without a limit. ``end_text``: the marker as text,
    ``end_ids`` as tokens; ``closing``: what is written when the limit is reached, ``closing_ids`` as tokens."""

    message: Generate
    budget: int
    opened: bool
    """Whether the prompt leaves the model thinking; else it does once it has written ``begin_ids``."""
    begin_ids: tuple[int, ...]
    end_text: str
    end_ids: tuple[int, ...]
    closing: str
    closing_ids: tuple[int, ...]
    _tokens: list[bytes] = field(default_factory=list)
    _usage: Usage | None = None
    _spent: int = 0
    _answering: bool = False

    def first(self) -> Generate:
        """What is sent first. Call only when the limit is below ``max_new_tokens`` and at least 1."""
        sampling = self.message.sampling
        fields: dict[str, object] = {
            "max_new_tokens": self.budget,
            "min_new_tokens": min(sampling.min_new_tokens, self.budget),
            **_UNBOUND,
        }
        if len(self.end_ids) == 1:
            fields["stop_token_ids"] = (*sampling.stop_token_ids, *self.end_ids)
        else:
            fields["stop"] = (*sampling.stop, self.end_text)
        return msgspec.structs.replace(self.message, sampling=msgspec.structs.replace(sampling, **fields))

    def after(self, chunk: Chunk) -> tuple[Chunk, Generate | None]:
        """What the client gets of ``chunk``, and the second part where the first has just ended."""
        if self._answering:
            if chunk.usage is not None and self._usage is not None:
                chunk.usage = msgspec.structs.replace(
                    self._usage, completion_tokens=self._spent + chunk.usage.completion_tokens
                )
            return chunk, None
        self._usage = chunk.usage or self._usage
        if chunk.count:
            self._tokens.append(chunk.tokens)
            self._spent += chunk.count
        finish = chunk.finish
        if finish is None:
            return chunk, None
        over = finish.kind == "stop" and (
            finish.matched == self.end_text or (len(self.end_ids) == 1 and finish.matched == self.end_ids[0])
        )
        if not over and (finish.kind != "length" or self._spent >= self.message.sampling.max_new_tokens):
            return chunk, None
        return self._go_on(chunk, over)

    def _go_on(self, chunk: Chunk, over: bool) -> tuple[Chunk, Generate | None]:
        sampling = self.message.sampling
        if over:
            if not chunk.text.endswith(self.end_text):
                chunk.text += self.end_text
        elif self.opened or _holds(bytes_to_ids(b"".join(self._tokens)).tolist(), self.begin_ids):
            chunk.text = chunk.text.rstrip("\ufffd") + self.closing
            chunk.tokens += ids_to_bytes(self.closing_ids)
            chunk.logprobs = _padded(chunk.logprobs, chunk.count, len(self.closing_ids))
            chunk.count += len(self.closing_ids)
            self._tokens.append(ids_to_bytes(self.closing_ids))
            self._spent += len(self.closing_ids)
        left = sampling.max_new_tokens - self._spent
        if left < 1:
            chunk.finish = Finish(kind="length")
            if self._usage is not None:
                chunk.usage = msgspec.structs.replace(self._usage, completion_tokens=self._spent)
            return chunk, None
        chunk.finish = None
        self._answering = True
        fields = {
            "max_new_tokens": left,
            "min_new_tokens": max(0, sampling.min_new_tokens - self._spent),
            "think_end_ids": (),
        }
        follow = msgspec.structs.replace(
            self.message,
            rid=f"{self.message.rid}~t",
            input_ids=self.message.input_ids + b"".join(self._tokens),
            sampling=msgspec.structs.replace(sampling, **fields),
            logprob=msgspec.structs.replace(self.message.logprob, prompt_start=-1),
        )
        return chunk, follow


def prepared(text: str, entry: Input, output: OutputFormat | None) -> str:
    """A rendered prompt, with the thinking begun where the answer must keep to a grammar (which begins when the
    thinking ends, so it must be known that there is thinking), or ended where no token of it is allowed."""
    if output is None or output.reasoning is None or not output.think_end or output.channels:
        return text
    opened = output.reasoning.opened_by(text)
    if opened is None and entry.sampling.constrained and entry.think_tokens != 0:
        return f"{text}{output.reasoning.begins[0]}{output.reasoning.label}\n"
    if opened and entry.think_tokens == 0:
        return f"{text}{_CLOSING.format(output.think_end)}"
    return text


def settle(request: EngineRequest, texts: list[str]) -> None:
    """Tell the grammar of each input where the thinking ends, if the prompt leaves the model thinking."""
    output = request.output
    if output is None:
        return
    for entry, text in zip(request.inputs, texts, strict=True):
        ids = output.think_end_ids(answer=entry.sampling.structural_tag is None)
        if entry.sampling.constrained and (output.channels or output.starts_thinking(text)):
            entry.sampling = msgspec.structs.replace(entry.sampling, think_end_ids=ids)


def bounded(message: Generate, entry: Input, text: str, output: OutputFormat | None) -> BoundedThinking | None:
    """The choice in two parts, where its thinking has a limit that can be reached."""
    budget, sampling = entry.think_tokens, message.sampling
    if budget is None or output is None or output.reasoning is None or output.vocabulary is None:
        return None
    opened = output.starts_thinking(text)
    if not 1 <= budget < sampling.max_new_tokens or output.reasoning.opened_by(text) is False:
        return None
    if sampling.constrained and not opened:
        return None
    end = output.think_end
    closing = end if output.channels else _CLOSING.format(end)
    encode = output.vocabulary.encode
    return BoundedThinking(
        message,
        budget,
        opened,
        _ids(encode(output.reasoning.begins[0], add_special=False)),
        output.think_end if not output.channels else "<|end|>",
        output.think_end_ids() if not output.channels else _ids(encode("<|end|>", add_special=False)),
        closing,
        _ids(encode(closing, add_special=False)),
    )


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _holds(tokens: list[int], wanted: tuple[int, ...]) -> bool:
    n = len(wanted)
    return n > 0 and any(tuple(tokens[i : i + n]) == wanted for i in range(len(tokens) - n + 1))


def _padded(values: TopLogprobs | None, count: int, more: int) -> TopLogprobs | None:
    """With no value (NaN) for ``more`` further tokens, which were written and not sampled."""
    if values is None or not count:
        return values
    fixed = len(values.fixed_values) // 4 // count
    nothing = np.full(more, np.nan, "<f4").tobytes()
    return msgspec.structs.replace(
        values,
        values=values.values + nothing,
        top_ids=values.top_ids + ids_to_bytes(np.zeros(more * values.top, np.int32)),
        top_values=values.top_values + nothing * values.top,
        fixed_values=values.fixed_values + nothing * fixed,
    )
