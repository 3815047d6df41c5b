"""The process graph of one engine: mailboxes, children, the front. The same for the server and for ``ceiba.Engine``.

Owns the order of start and stop, and what happens when a part dies. Must never know HTTP. The children are started
first and load while this process builds the front. The detokenizer is a process or a thread here
(``config.launch.detokenizer``); the components do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ceiba.config.records import Config
from ceiba.core.errors import CeibaError
from ceiba.launch import children
from ceiba.launch.starting import DETOKENIZER, SCHEDULER, Starting, command
from ceiba.launch.supervise import Child, Supervisor
from ceiba.launch.zmq_ports import (
    ZmqDetokenizerPort,
    ZmqFrontPort,
    make_endpoints,
    remove_endpoints,
)

if TYPE_CHECKING:
    from ceiba.launch.wiring import Text
    from ceiba.server.front import Front
    from ceiba.text.detokenizer import Detokenizer

log = logging.getLogger(__name__)

WATCHDOG_INTERVAL = 1.0
STOP_SECONDS = 3.0
"""How long children may take to end before they are killed."""


class EngineGraph:
    """One engine. ``spawn``, then on one event loop ``start``, ``wait_ready``, …, ``stop``. ``spawn`` may come before
    the loop, from a thread that lives as long as the engine (the kernel ties children to it).

    ``on_failure(reason)`` is called once, on the loop, when a part has died; by then the front has given every client
    an error.
    """

    def __init__(self, config: Config, on_failure: Callable[[str], None]) -> None:
        self.config = config
        self.front: Front | None = None
        self.info: dict[str, Any] = {}
        """What the runner says of itself (``core.step.RunnerInfo``), once ready."""
        self.phases: list[tuple[str, float]] = []
        """Stages of start-up with their seconds, as the processes report them."""
        self._on_failure = on_failure
        self._failed = False
        self._stopping = False
        self._supervisor = Supervisor(self._on_death)
        self._directory: Path | None = None
        self._port: ZmqFrontPort | None = None
        self._thread: threading.Thread | None = None
        self._thread_stop = threading.Event()
        self._text: Text | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def spawn(self, scheduler: Starting | None = None) -> None:
        """Start the children; returns at once, they load on their own. ``scheduler``: that one runs already."""
        self._endpoints, self._directory = make_endpoints()
        boot = msgspec.msgpack.encode(children.Boot(self.config, self._endpoints))
        if scheduler is not None:
            self._supervisor.adopt(SCHEDULER, scheduler, boot)
        else:
            self._supervisor.spawn(SCHEDULER, command(SCHEDULER), boot)
        if self.config.launch.detokenizer == "process":
            self._supervisor.spawn(DETOKENIZER, command(DETOKENIZER), boot)

    async def start(self) -> Front:
        """Build the front on the running loop; it accepts requests from now on, answers come when all is ready."""
        self._loop = asyncio.get_running_loop()
        self._supervisor.attach(self._loop)
        begun = time.perf_counter()
        from ceiba.launch import wiring

        text = self._text = wiring.open_text(self.config)
        self._port = ZmqFrontPort(self._endpoints)
        self.front = wiring.make_front(self.config, text, self._port)
        self.phases.append(("front", time.perf_counter() - begun))
        if self.config.launch.detokenizer == "thread":
            port = ZmqDetokenizerPort(self._endpoints, self._port.context)
            work = (wiring.make_detokenizer(self.config, text.tokenizer), port)
            self._thread = threading.Thread(target=self._detokenize, args=work, name=DETOKENIZER, daemon=True)
            self._thread.start()
        await self.front.start()
        return self.front

    async def wait_ready(self) -> None:
        """Until the model is loaded and the scheduler's first heartbeat is here. Raises what went wrong."""
        assert self.front is not None, "start first"
        await self._supervisor.wait_ready()
        for child in self._supervisor.children:
            self.phases += [(f"{child.name}: {phase.name}", phase.seconds) for phase in child.phases]
            if child.name == SCHEDULER and child.ready is not None:
                self.info = child.ready.info
        while self.front.health().state == "starting":  # noqa: ASYNC110 - the monitor is looked at, never asked
            await asyncio.sleep(0.01)
        self._watchdog = asyncio.create_task(self._watch(), name="watchdog")

    @property
    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self._supervisor.children}

    async def stop(self) -> None:
        """End all parts, with requests in flight failed. Safe in every state, more than once."""
        self._stopping = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self.front is not None:
            await self.front.close()
        self._stop_thread()
        await self._supervisor.stop(STOP_SECONDS)
        self._release()

    def kill(self) -> None:
        """The same without a loop and without grace: for ``finally`` and ``atexit``."""
        self._stopping = True
        self._supervisor.stop_now()
        self._stop_thread()
        self._close_text()
        if self._directory is not None:
            remove_endpoints(self._directory)

    def _release(self) -> None:
        self._close_text()
        if self._port is not None:
            self._port.close()
            self._port = None
        if self._directory is not None:
            remove_endpoints(self._directory)
            self._directory = None

    def _close_text(self) -> None:
        if self._text is not None and self._text.template is not None:
            self._text.template.close()  # its rendering processes
        self._text = None

    def _stop_thread(self) -> None:
        if self._thread is not None:
            self._thread_stop.set()
            self._thread.join(2.0)
            self._thread = None

    def _detokenize(self, detokenizer: Detokenizer, port: ZmqDetokenizerPort) -> None:
        try:
            detokenizer.run(port, self._thread_stop)
        except Exception as error:
            log.exception("the detokenizer thread failed")
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._fail, f"the detokenizer failed ({error})")
        finally:
            port.close()

    def _on_death(self, child: Child, how: str) -> None:
        self._fail(f"the {child.name} process died ({how})")

    def _fail(self, reason: str) -> None:
        if self._failed or self._stopping:
            return
        self._failed = True
        log.error("%s; ending all requests in flight", reason)
        if self.front is not None:
            self.front.fail(reason)
        self._on_failure(reason)

    async def _watch(self) -> None:
        """Kill a scheduler whose loop has not gone round for --watchdog-timeout; its death then takes the usual way.

        SIGABRT first: the child's fault handler writes where every thread stands.
        """
        assert self.front is not None
        limit = self.config.launch.watchdog_timeout
        while True:
            await asyncio.sleep(WATCHDOG_INTERVAL)
            stalled = self.front.monitor.stalled()
            if stalled <= limit:
                continue
            log.error(
                "scheduler or detokenizer has made no progress for %.0f s (--watchdog-timeout %g): ending the engine",
                stalled,
                limit,
            )
            for child in self._supervisor.children:
                if child.name == SCHEDULER:
                    self._supervisor.kill(child, signal.SIGABRT)
                    await asyncio.sleep(1.0)
                    self._supervisor.kill(child)
            return


def explain(error: BaseException) -> str:
    """One message for the terminal."""
    return error.message if isinstance(error, CeibaError) else f"{type(error).__name__}: {error}"
