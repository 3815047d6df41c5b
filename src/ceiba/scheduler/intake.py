"""Turns a ``Generate`` into a request or into the reason why not. Owns what the scheduler accepts; queues nothing.

The front has checked everything it can know; what is checked here depends on the pool, the context and the queue, or
protects the engine from a front that erred.
"""

from __future__ import annotations

import numpy as np

from ceiba.config.records import SchedulerConfig
from ceiba.core.errors import BadRequest, Overloaded
from ceiba.core.messages import Generate, bytes_to_ids
from ceiba.core.step import RunnerInfo
from ceiba.scheduler.grammar import GrammarProvider, GrammarTicket
from ceiba.scheduler.request import Request, make_request


class Intake:
    def __init__(
        self, config: SchedulerConfig, info: RunnerInfo, pool_tokens: int, grammar: GrammarProvider | None
    ) -> None:
        self._config = config
        self._info = info
        self._grammar = grammar
        self.pool_tokens = pool_tokens
        self.max_len = min(info.context_len, pool_tokens)
        """Prompt and output of one request together."""
        self._seeds = np.random.default_rng(config.random_seed)

    def accept(self, message: Generate, waiting: int, now: float) -> Request:
        """The request, or ``CeibaError`` saying what is wrong and what would work. ``waiting``: how many stand
        before it in the queue, less those (itself too) whom the next plan can serve."""
        ids = bytes_to_ids(message.input_ids)
        self._check_prompt(ids)
        limit = self._config.max_queued_requests
        if limit is not None and waiting >= limit:
            raise Overloaded(f"{waiting} requests wait already (--max-queued-requests {limit}): try again later")
        request = make_request(
            message,
            seed=int(self._seeds.integers(2**63 - 1)),
            eos_ids=self._info.eos_ids,
            max_len=self.max_len,
            queue_timeout=self._config.queue_timeout,
            priority=self._priority(message.priority),
            now=now,
        )
        if message.sampling.constrained and self._grammar is None:
            raise BadRequest(
                "json_schema, regex, ebnf and structural_tag need a grammar backend and none is loaded: "
                "send the request without them, or start the server with --grammar-backend"
            )
        # A token that is not sampled has no log-probability.
        request.jumps = self._config.jump_forward and message.sampling.constrained and not message.logprob.output
        return request

    def grammar(self, request: Request) -> GrammarTicket | None:
        """A ticket for the grammar that ``request`` asks for, None for none. Raises ``CeibaError``."""
        if self._grammar is None or not request.sampling.constrained:
            return None
        return self._grammar.create(request.sampling)

    def _priority(self, given: int | None) -> int:
        value = self._config.default_priority if given is None else given
        return -value if self._config.low_priority_first else value

    def _check_prompt(self, ids: np.ndarray) -> None:
        n = len(ids)
        if n == 0:
            raise BadRequest("the prompt is empty: it needs at least one token", param="prompt")
        if n >= self._info.context_len:
            raise BadRequest(
                f"the prompt has {n} tokens and the context holds {self._info.context_len}, one of them for the "
                "answer: shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        if n >= self.pool_tokens:
            raise BadRequest(
                f"the prompt has {n} tokens and the KV pool holds {self.pool_tokens}, one of them for the answer: "
                "shorten the prompt or start the server with a larger --max-total-tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._info.vocab_size:
            bad = low if low < 0 else high
            raise BadRequest(f"token id {bad} is outside the vocabulary [0, {self._info.vocab_size})", param="prompt")
