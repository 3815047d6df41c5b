"""The engine's thread without a model: calls from other threads at the moment it stops."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ceiba.core.errors import Unavailable
from ceiba.launch.engine import Engine, _run_loop


def bare_engine() -> Engine:
    """An engine whose loop runs and that has no processes."""
    engine = Engine.__new__(Engine)
    engine._closed = False
    engine._loop = asyncio.new_event_loop()
    engine._thread = threading.Thread(target=_run_loop, args=(engine._loop,), daemon=True)
    engine._thread.start()
    return engine


def stop(engine: Engine) -> None:
    engine._closed = True
    engine._loop.call_soon_threadsafe(engine._loop.stop)


def test_a_call_in_flight_ends_when_the_engine_stops() -> None:
    engine = bare_engine()
    began = threading.Event()
    caught: list[BaseException] = []

    async def endless() -> None:
        began.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            engine._run(endless())
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert began.wait(30)
    stop(engine)
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(caught[0], Unavailable)


def test_a_call_between_check_and_stop_is_refused() -> None:
    """As if another thread had shut the engine down right after this one looked."""
    engine = bare_engine()
    stop(engine)
    engine._thread.join(30)
    assert engine._loop.is_closed()
    engine._closed = False

    async def work() -> int:
        return 1

    with pytest.raises(Unavailable, match="shut down"):
        engine._run(work())
