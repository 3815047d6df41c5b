"""One call to the server with its retries, as steps that somebody else performs (so async and sync share it).

Owns what is sent, when it is tried again and what the answer means. Must never send, sleep or await by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import httpx

from ceiba.client import errors
from ceiba.client.answers import read_answer
from ceiba.core.errors import CeibaError

_RETRIED = frozenset({429, 502, 503})
"""Statuses that say the server did not take the request."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, and how its answer is read."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    parse: Callable[[Any], Any] = lambda value: value
    admin: bool = False
    """Goes with the admin key."""
    stream: bool = False
    accept: frozenset[int] = frozenset()
    """Error statuses whose body is an answer all the same."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``retries`` further attempts, after ``Retry-After`` or else an exponential wait with jitter.

    A wait longer than ``longest_wait`` seconds is not waited for: the error is raised at once.
    """

    retries: int = 2
    first_wait: float = 0.25
    longest_wait: float = 60.0

    def wait(self, attempt: int, asked: float | None) -> float | None:
        """Seconds before attempt ``attempt + 1`` (counted from 0); None: give up."""
        if attempt >= self.retries:
            return None
        if asked is not None:
            return asked if asked <= self.longest_wait else None
        return min(self.longest_wait, self.first_wait * 2**attempt) * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Send:
    """Perform the request; answer with the response (read, unless it streams and is no error) or the exception."""


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


Steps = Generator[Send | Sleep, Any, Any]


def exchange(call: Call, policy: RetryPolicy, url: str) -> Steps:
    """Yields steps; returns the parsed answer, or the open response of a stream. Raises the typed error.

    Tried again: refused connections (the request was never taken) and the statuses 429, 502 and 503. Not tried again:
    time-outs and connections that broke later, since the server may be working on the request.
    """
    attempt = 0
    while True:
        outcome = yield Send()
        asked: float | None = None
        again: bool
        if isinstance(outcome, httpx.Response):
            if outcome.is_success or outcome.status_code in call.accept:
                return outcome if call.stream else read_answer(outcome.content, call.parse)
            asked = errors.retry_after(outcome.headers)
            again = outcome.status_code in _RETRIED
            error: CeibaError = errors.from_answer(outcome.status_code, outcome.headers, outcome.content)
        else:
            again = isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            error = broken(outcome, url)
        wait = policy.wait(attempt, asked) if again else None
        if wait is None:
            raise error from (outcome if isinstance(outcome, Exception) else None)
        attempt += 1
        yield Sleep(wait)


def broken(error: Exception, url: str) -> CeibaError:
    """The typed error for a failed transport."""
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return errors.RequestTimeout(f"{url} sent nothing in time: raise the client's timeout, or abort the request.")
    reason = str(error) or type(error).__name__
    return errors.ConnectionFailed(f"no answer from {url}: {reason}. Is the server up?")
