"""How one request wants its tokens chosen: the engine-side form of every protocol's sampling fields.

The protocols in ``server`` translate into these structs and check against ``core.limits``; from here on every field is
known to be valid. Names and defaults are those of the native ``/generate`` route.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Sampling of one choice. ``n`` is expanded by the front, so the engine sees single choices only."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    """0 means greedy: the most likely token, the lowest id among equals."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 means the whole vocabulary."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the choice besides the model's own end ids (which ``ignore_eos`` switches off)."""
    ignore_eos: bool = False
    seed: int | None = None
    """Same seed, same prompt: same text, whatever else runs. None: the engine draws one per request."""
    no_stop_trim: bool = False
    """Keep the stop string (or stop token's text) in the answer."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream_interval: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    think_end_ids: tuple[int, ...] = ()
    """The token ids that end the thinking part, where the answer begins with one: the grammar begins after them."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def penalized(self) -> bool:
        """Whether the sampler needs counts of the tokens seen so far."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def constrained(self) -> bool:
        return any(x is not None for x in (self.json_schema, self.regex, self.ebnf, self.structural_tag))


class LogprobSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Which log-probabilities a request wants back."""

    output: bool = False
    """Log-probability of each generated token."""
    top: int = 0
    """How many most likely alternatives per position, 0 for none."""
    token_ids: tuple[int, ...] = ()
    """Fixed ids whose log-probability is reported at each position."""
    prompt_start: int = -1
    """First prompt position whose log-probability is wanted; -1: none. Position 0 has none (reported null)."""

    @property
    def wanted(self) -> bool:
        return self.output or self.prompt_start >= 0
