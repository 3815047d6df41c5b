"""One choice on its way through the scheduler: its facts, its state and what it may turn into next.

Owns the state machine; knows neither slots (``cache.lease`` does) nor the arrays of running rows (``rows`` does).

    QUEUED -> PREFILLING -> RUNNING -> FINISHED        and back to QUEUED by retraction
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from ceiba.cache.base import Match
from ceiba.cache.keys import CacheKey, Int32
from ceiba.core.messages import Generate, bytes_to_ids
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.scheduler.logprobs import LogprobBuffer

if TYPE_CHECKING:
    from ceiba.scheduler.grammar import GrammarState
    from ceiba.spec.base import Guesser


class State(IntEnum):
    QUEUED = 0
    """Waits for a row; holds no KV."""
    PREFILLING = 1
    """Has a row; some known tokens have not been launched yet."""
    RUNNING = 2
    """Has a row; all known tokens are launched, one is sampled per step."""
    FINISHED = 3
    """Ended in whatever way. Results that still arrive for it are dropped."""


_NEXT = {
    State.QUEUED: {State.PREFILLING, State.FINISHED},
    State.PREFILLING: {State.RUNNING, State.QUEUED, State.FINISHED},
    State.RUNNING: {State.QUEUED, State.FINISHED},
    State.FINISHED: set[State](),
}


@dataclass(slots=True, eq=False)
class Request:
    rid: str
    tokens: Int32
    """All known tokens while the request has no row: the prompt and, after a retraction, the output so far."""
    prompt_len: int
    sampling: SamplingParams
    logprob: LogprobSpec
    stream: bool
    namespace: str
    priority: int
    """Larger goes first, also where the operator's low values do."""
    routing_key: str
    tenant: str
    arrival: float
    seed: int
    max_len: int
    """Prompt and output together never exceed this: max_new_tokens, the context and the pool, whichever is least."""
    end_ids: tuple[int, ...]
    """Every token id that ends it: the model's unless ignore_eos, and the request's own."""
    pin: str = ""
    """Name under which its prompt stays cached; empty for none."""
    pin_seconds: float = 0.0
    """How long; 0 for ever."""
    pin_output: bool = False
    deadline: float | None = None
    """When it must have left the queue for the first time."""
    grammar: GrammarState | None = None
    guesser: Guesser | None = None
    """Guesses its next tokens from those it has; made when it is first asked."""
    on_path: bool = True
    """Whether its tokens may still be the beginning of what the prefix cache holds."""
    jumps: bool = False
    """Whether tokens that its grammar forces are taken over without sampling them."""
    compiling: bool = False
    """Whether its grammar is not there yet: it waits in the queue and is passed over."""
    state: State = State.QUEUED
    row: int = -1
    cached_tokens: int = 0
    """Prompt tokens the cache held at the first admission."""
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    """Where those lay, if not all on the device."""
    pinned_tokens: int = 0
    prefill_mark: int = 0
    """Prefill tokens that had been processed when it came."""
    match_memo: tuple[int, Match] | None = None
    """(cache version, match) while it waits; ``policy.Matches`` alone reads and writes it."""
    length_memo: tuple[int, int] | None = None
    """The same for the length over all tiers."""
    admitted_at: float | None = None
    retractions: int = 0
    held_for: str = ""
    """Request whose prefill of the same beginning it stands back for; it does so for one at most."""
    opened: bool = False
    """Whether the detokenizer has been told of it."""
    reported: int = 0
    """Tokens the detokenizer has, prompt included; kept here while the request has no row."""
    next_prompt_logprob: int = 0
    """First prompt position whose log-probability has not arrived yet."""
    output_logprobs: LogprobBuffer = field(default_factory=LogprobBuffer)
    prompt_logprobs: LogprobBuffer = field(default_factory=LogprobBuffer)

    def to(self, state: State) -> None:
        """Change state; RuntimeError on a transition that the machine above does not have."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"request {self.rid} cannot go from {self.state.name} to {state.name}")
        self.state = state

    @property
    def key(self) -> CacheKey:
        """Cache key of the known tokens, valid while the request has no row."""
        return CacheKey(self.namespace, self.tokens)

    @property
    def max_new(self) -> int:
        return self.max_len - self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions still owe a log-probability."""
        return self.logprob.prompt_start >= 0 and self.next_prompt_logprob < self.prompt_len

    @property
    def match_limit(self) -> int:
        """How much of the prefix the cache may serve: the last token must be computed to sample the next one, and a
        wanted log-probability of position p needs position p - 1 computed."""
        limit = len(self.tokens) - 1
        return min(limit, max(self.next_prompt_logprob - 1, 0)) if self.wants_prompt_logprobs else limit

    def remaining_logprobs(self) -> LogprobSpec:
        """The log-probabilities still owed, for opening a row (again)."""
        spec = self.logprob
        start = self.next_prompt_logprob if self.wants_prompt_logprobs else -1
        if start == spec.prompt_start:
            return spec
        return LogprobSpec(output=spec.output, top=spec.top, token_ids=spec.token_ids, prompt_start=start)


def make_request(
    message: Generate,
    *,
    seed: int,
    eos_ids: tuple[int, ...],
    max_len: int,
    queue_timeout: float | None,
    priority: int,
    now: float,
) -> Request:
    """The scheduler-side form of a ``Generate``. ``max_len``: prompt and output together, at most."""
    tokens = np.array(bytes_to_ids(message.input_ids), np.int32)  # copied: the message's buffer goes away
    sampling = message.sampling
    own = sampling.stop_token_ids
    timeout = message.queue_timeout if message.queue_timeout is not None else queue_timeout
    arrival = message.arrival or now
    return Request(
        rid=message.rid,
        tokens=tokens,
        prompt_len=len(tokens),
        sampling=sampling,
        logprob=message.logprob,
        stream=message.stream,
        namespace=message.namespace,
        priority=priority,
        routing_key=message.routing_key,
        tenant=message.tenant,
        pin=message.pin,
        pin_seconds=message.pin_seconds,
        pin_output=message.pin_output,
        arrival=arrival,
        seed=seed if sampling.seed is None else sampling.seed,
        max_len=min(max_len, len(tokens) + sampling.max_new_tokens),
        end_ids=own if sampling.ignore_eos else tuple(dict.fromkeys((*eos_ids, *own))),
        deadline=None if timeout is None else arrival + timeout,
        reported=len(tokens),
        next_prompt_logprob=max(message.logprob.prompt_start, 0),
    )
