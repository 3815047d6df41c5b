"""Operations on a live scheduler: one method per ``Control.op``. Owns their answers; knows no HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ceiba.cache.ledger import LedgerError, assert_ledger, read_ledger
from ceiba.core.errors import CeibaError
from ceiba.core.messages import Control, Reply
from ceiba.scheduler import hicache_control, inspect
from ceiba.scheduler.hicache import HiCache

if TYPE_CHECKING:
    from ceiba.scheduler.loop import Scheduler

Args = Mapping[str, Any]
Operation = Callable[[Args], dict[str, object]]

log = logging.getLogger("ceiba.scheduler")


class Refused(Exception):
    """The operation cannot be done now; the text says why and when."""


class Controls:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._operations: dict[str, Operation] = {
            "flush_cache": self._flush_cache,
            "state": self._state,
            "load": self._load,
            "idle_check": self._idle_check,
            "shutdown": self._shutdown,
            "hicache_status": self._tiers(hicache_control.status),
            "hicache_detach": self._tiers(hicache_control.detach),
            "cache_tree": self._inspect(inspect.tree),
            "cache_pin": self._inspect(inspect.pin),
            "cache_unpin": self._inspect(inspect.unpin),
            "cache_pins": self._inspect(inspect.list_pins),
        }

        self._later: dict[str, Callable[[Args, hicache_control.Answer], None]] = {
            "cache_explain": self._explain,
            "hicache_attach": lambda args, answer: hicache_control.attach(self._hicache(), args, answer),
            "hicache_clear": lambda args, answer: hicache_control.clear(self._hicache(), answer),
        }

    def answer(self, message: Control) -> Reply | None:
        """Do it; every outcome is a reply, now or (None) later."""
        if message.op in self._later:
            return self._begin(message)
        operation = self._operations.get(message.op)
        if operation is None:
            known = ", ".join(sorted([*self._operations, *self._later]))
            return Reply(id=message.id, ok=False, error=f"operation {message.op!r} is not known; known: {known}")
        try:
            return Reply(id=message.id, ok=True, value=operation(message.args))
        except KeyError as error:
            return Reply(id=message.id, ok=False, error=f"{message.op} needs the argument {error}")
        except Refused as refusal:
            return Reply(id=message.id, ok=False, error=str(refusal))

    def _begin(self, message: Control) -> Reply | None:
        """An operation whose answer may take a while; it is sent when it is there."""

        def answer(ok: bool, value: object, error: str) -> None:
            self._scheduler.port.to_front(Reply(id=message.id, ok=ok, value=value, error=error))

        try:
            self._later[message.op](message.args, answer)
        except KeyError as error:
            return Reply(id=message.id, ok=False, error=f"{message.op} needs the argument {error}")
        except (hicache_control.NoHiCache, hicache_control.Refusal) as refusal:
            return Reply(id=message.id, ok=False, error=str(refusal))
        except CeibaError as error:
            return Reply(id=message.id, ok=False, error=error.message)
        return None

    def _hicache(self) -> HiCache:
        if self._scheduler.hicache is None:
            raise hicache_control.NoHiCache
        return self._scheduler.hicache

    def _tiers(self, function: Callable[[HiCache], dict[str, object]]) -> Operation:
        def answer(args: Args) -> dict[str, object]:
            try:
                return function(self._hicache())
            except (hicache_control.NoHiCache, hicache_control.Refusal) as error:
                raise Refused(str(error)) from error

        return answer

    def _explain(self, args: Args, answer: hicache_control.Answer) -> None:
        inspect.explain(self._scheduler, args, lambda value: answer(True, value, ""))

    def _inspect(self, function: Callable[[Scheduler, Args], dict[str, object]]) -> Operation:
        def answer(args: Args) -> dict[str, object]:
            try:
                return function(self._scheduler, args)
            except inspect.NothingCached as error:
                raise Refused(str(error)) from error

        return answer

    def _flush_cache(self, args: Args) -> dict[str, object]:
        """Forget all cached KV, pinned or not. Refused unless idle: running requests read it."""
        scheduler = self._scheduler
        if not scheduler.idle:
            raise Refused(
                f"the cache can be flushed only when nothing runs; now {scheduler.rows.num_used} requests run and "
                f"{len(scheduler.queue)} wait"
            )
        if scheduler.hicache is not None:
            scheduler.hicache.drain()
        flushed = scheduler.leases.flush()
        scheduler.history.clear()
        log.info("Cache flushed. #token: %d", flushed)
        return {"flushed_tokens": flushed}

    def _state(self, args: Args) -> dict[str, object]:
        scheduler = self._scheduler
        info = scheduler.runner.info
        return {
            **scheduler.stats(),
            "tokens_locked": float(scheduler.leases.cache.locked),
            "runner": scheduler.runner.stats(),
            "max_total_num_tokens": scheduler.leases.allocator.total,
            "max_running_requests": len(scheduler.rows.requests),
            "context_len": info.context_len,
            "page_size": info.page_size,
            "device": info.device,
            "schedule_policy": scheduler.config.policy,
            "overlap": scheduler.depth > 0,
            "tenants": 0 if scheduler.fair is None else len(scheduler.fair.services()),
        }

    def _load(self, args: Args) -> dict[str, object]:
        """What a router asks for: how much work lies here."""
        scheduler = self._scheduler
        waiting_tokens = sum(len(request.tokens) for request in scheduler.queue)
        return {
            "running": scheduler.rows.num_used,
            "waiting": len(scheduler.queue),
            "waiting_tokens": waiting_tokens,
            "tokens_used": scheduler.gauges.tokens_used,
            "token_usage": scheduler.gauges.usage,
        }

    def _idle_check(self, args: Args) -> dict[str, object]:
        """Recount the KV ledger; refused with the imbalance if there is one."""
        scheduler = self._scheduler
        try:
            assert_ledger(scheduler.leases, idle=scheduler.idle)
        except LedgerError as error:
            raise Refused(str(error)) from error
        return {"idle": scheduler.idle, "ledger": str(read_ledger(scheduler.leases))}

    def _shutdown(self, args: Args) -> dict[str, object]:
        """End every request and leave the loop after this round."""
        scheduler = self._scheduler
        scheduler.abort_all("the server is shutting down")
        scheduler.stopped = True
        return {}
