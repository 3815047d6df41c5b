"""Everything that crosses a process border, as msgspec structs encoded with msgpack. No pickle, ever.

Three mailboxes: *scheduler* (from the front: ``Generate``, ``Abort``, ``Control``; from the detokenizer: ``Abort``
when a stop string matched), *detokenizer* (from the scheduler: ``TokenBatch``), *front* (from the detokenizer:
``TextBatch``; from the scheduler: ``Reply``, ``Heartbeat``). One message per step holds arrays for all requests of the
batch. Token ids travel as the bytes of an int32 array (`ids_to_bytes`), never as lists.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ceiba.core.errors import CeibaError
from ceiba.core.sampling import LogprobSpec, SamplingParams


def ids_to_bytes(ids: object) -> bytes:
    """Token ids (any int sequence or array) as little-endian int32 bytes."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


def bytes_to_ids(data: bytes) -> np.ndarray:
    """The int32 array back; read-only, shares memory with ``data``."""
    return np.frombuffer(data, dtype="<i4")


class Wire(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """Base of all messages: positional encoding, so both ends must run the same version (they always do)."""


# ── front → scheduler ────────────────────────────────────────────────────────


class Generate(Wire):
    """One choice to generate. ``rid`` is unique among live requests; choices of one request are ``rid#k``."""

    rid: str
    input_ids: bytes
    sampling: SamplingParams
    logprob: LogprobSpec = LogprobSpec()
    stream: bool = False
    """Whether the front wants text as it comes; otherwise the detokenizer reports once, at the end."""
    namespace: str = ""
    """Extra key, cache salt and adapter version joined by the front: requests of different namespaces share no KV."""
    priority: int | None = None
    routing_key: str = ""
    arrival: float = 0.0
    """time.monotonic() at arrival in the front (one machine, one clock)."""
    queue_timeout: float | None = None
    """Seconds it may wait in the queue."""
    tenant: str = ""
    """Whose share it is charged to under --fair-share: a routing key or a digest of an API key."""
    pin: str = ""
    """Name under which the prompt's KV stays cached, within the pin budget; empty: not pinned."""
    pin_seconds: float = 0.0
    """How long the pin lasts after its last use; 0: until it is released."""
    pin_output: bool = False
    """Whether the pin grows by the answer (sessions)."""


class Pool(Wire):
    """One text for a model that gives numbers instead of text, answered by one entry of a ``Pooled``."""

    rid: str
    input_ids: bytes
    second: int = 0
    """Ids of a second text at the end (cross-encoders); 0: there is one text."""
    arrival: float = 0.0


class Abort(Wire):
    """End these requests now, in whatever state; unknown rids are ignored. ``everything`` ends all."""

    rids: list[str] = []
    everything: bool = False
    reason: str = "abort"
    """``abort``: the client left or asked. ``stop``: the detokenizer matched a stop string."""


class Control(Wire):
    """An operation on the scheduler, answered by one ``Reply`` with the same id.

    ``op``: ``flush_cache`` · ``state`` (for /server_info) · ``load`` · ``idle_check`` (assert_ledger) · ``shutdown`` ·
    ``cache_explain`` · ``cache_tree`` · ``cache_pin`` · ``cache_unpin`` · ``cache_pins`` · ``hicache_status`` ·
    ``hicache_attach`` · ``hicache_detach`` · ``hicache_clear`` · further ones as features
    come. ``args`` and the reply's ``value`` are plain msgpack values.
    """

    id: int
    op: str
    args: dict[str, object] = {}


# ── scheduler → front ────────────────────────────────────────────────────────


class Reply(Wire):
    id: int
    ok: bool
    value: object = None
    error: str = ""


class Pooled(Wire):
    """Numbers of one batch. Entry i: text ``rids[i]`` got ``widths[i]`` of ``values``: an embedding, or logits.

    Sent by whoever runs the model, straight to the front.
    """

    rids: list[str]
    widths: bytes
    """int32 [len(rids)]"""
    values: bytes
    """float32 [sum(widths)]"""
    finishes: dict[int, Finish] = {}
    """entry index -> why it has no numbers"""


class Heartbeat(Wire):
    """Sent at least every half second, also while a forward runs: health turns red when it stays away."""

    at: float
    """time.monotonic() of the last completed loop round."""
    stats: dict[str, float] = {}
    """Gauges and counters for metrics (running, waiting, token usage, forwards, …)."""


# ── scheduler → detokenizer → front ──────────────────────────────────────────


class Finish(Wire):
    """Why a choice ended; exactly one per choice."""

    kind: str
    """``stop`` · ``length`` · ``abort`` · ``error``"""
    matched: int | str | None = None
    """The stop token id or stop string."""
    message: str = ""
    """For ``abort`` and ``error``: what to tell the client."""
    status: int = 0
    """HTTP status for ``error`` and ``abort`` (0: not an error)."""
    param: str = ""
    """For ``error``: the request's field at fault, by its native name."""
    code: str = ""
    """For ``error``: its machine-readable name."""

    @classmethod
    def of(cls, error: CeibaError) -> Finish:
        """The end of a choice that failed with ``error``."""
        text, param, code = error.message, error.param or "", error.code or ""
        return cls(kind="error", message=text, status=error.status, param=param, code=code)


class Usage(Wire):
    """Token counts of one choice, attached to its first and last report."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_time: float = 0.0
    """Seconds from arrival to admission."""
    cached_by_tier: dict[str, int] = {}
    """Tier (device, host, storage) -> how many of ``cached_tokens`` came from there."""
    pinned_tokens: int = 0
    """Tokens of this sequence that stay cached because the request asked for it."""


class TopLogprobs(Wire):
    """Log-probabilities of N consecutive positions, as arrays."""

    values: bytes
    """float32 [N]"""
    top: int = 0
    top_ids: bytes = b""
    """int32 [N, top]"""
    top_values: bytes = b""
    """float32 [N, top]"""
    fixed_values: bytes = b""
    """float32 [N, len(LogprobSpec.token_ids)]"""


class DetokOpen(Wire):
    """What the detokenizer must know of a choice, sent once, in the first batch that mentions it."""

    rid: str
    stream: bool
    sampling: SamplingParams
    prompt_tail: bytes = b""
    """Last few prompt ids (int32), the left context for tokenizers that merge across the border."""


class TokenBatch(Wire):
    """One scheduler step's tokens. Entry i: choice ``rids[i]`` got ``counts[i]`` of ``tokens``."""

    rids: list[str]
    counts: bytes
    """int32 [len(rids)]"""
    tokens: bytes
    """int32 [sum(counts)]"""
    opened: list[DetokOpen] = []
    finishes: dict[int, Finish] = {}
    """entry index -> reason, for the choices that end here"""
    usages: dict[int, Usage] = {}
    logprobs: dict[int, TopLogprobs] = {}
    prompt_logprobs: dict[int, TopLogprobs] = {}


class TextBatch(Wire):
    """The same entries with text. A choice that does not stream appears once, at its end, with everything.

    A batch without entries is the detokenizer's heartbeat.
    """

    rids: list[str]
    texts: list[str]
    counts: bytes
    tokens: bytes
    finishes: dict[int, Finish] = {}
    usages: dict[int, Usage] = {}
    logprobs: dict[int, TopLogprobs] = {}
    prompt_logprobs: dict[int, TopLogprobs] = {}


ToScheduler = Generate | Abort | Control
ToPooling = Pool | Abort | Control
"""To the process that stands in the scheduler's place when the model gives numbers."""
ToDetokenizer = TokenBatch
ToFront = TextBatch | Pooled | Reply | Heartbeat
