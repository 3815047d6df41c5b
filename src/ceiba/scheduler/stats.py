"""What the scheduler counts, for metrics, /server_info and log lines. Owns numbers; decides nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ceiba.scheduler.request import Request


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    forwards: int = 0
    prefill_forwards: int = 0
    decode_forwards: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed (retracted ones count again)."""
    decode_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, cached or not."""
    cached_tokens: int = 0
    """Of those, served by the cache."""
    generation_tokens: int = 0
    """Sampled tokens that belong to an output."""
    dropped_tokens: int = 0
    """Sampled after a request's end, because results come one step late."""
    requests_received: int = 0
    requests_admitted: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    requests_rejected: int = 0
    retractions: int = 0
    queue_seconds: float = 0.0
    """Sum over admitted requests of the time from arrival to admission."""

    def admitted(self, request: Request) -> None:
        self.requests_admitted += 1
        self.prompt_tokens += request.prompt_len
        self.cached_tokens += request.cached_tokens
        if request.admitted_at is not None:
            self.queue_seconds += max(0.0, request.admitted_at - request.arrival)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
