"""``serve(config)``: the whole server in this process and its children, from the listening socket to the exit status.

Owns the socket, signals, the order of start-up and shut-down and what the terminal shows of it. Exit status: 0 after a
stop that was asked for, 1 when a part died or the start failed, 2 for a configuration or model that cannot work.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import resource
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ceiba.config.records import Config
from ceiba.core.errors import CeibaError, ConfigError, EngineFault
from ceiba.launch.graph import EngineGraph, explain
from ceiba.launch.starting import Starting

if TYPE_CHECKING:
    import uvicorn

    from ceiba.server.front import Front

log = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
"""How long requests in flight may go on after a stop was asked for."""
FLUSH_SECONDS = 2.0
"""How long connections may take to carry the last bytes, an error mostly."""
BACKLOG = 2048
MAX_FILES = 65_536
RESTART_PAUSE = 1.0


def serve(config: Config, early: Starting | None = None) -> int:
    """Run until stopped; returns the exit status. ``early``: the scheduler's process, which was started when all that
    was known was that there will be one; it is ended where this cannot serve."""
    try:
        return _serve(config, early)
    finally:
        if early is not None and early.process.poll() is None:
            early.discard()


def _serve(config: Config, early: Starting | None) -> int:
    started = time.monotonic() if early is None else early.started
    from ceiba.obs import logs

    logs.setup(config.obs)
    _allow_connections()
    with contextlib.ExitStack() as sockets:
        try:
            sock = sockets.enter_context(listen(config.server.host, config.server.port))
            port = config.obs.metric_port
            metrics_sock = None if port is None else sockets.enter_context(listen(config.server.host, port))
        except CeibaError as error:
            _complain(error.message)
            return 2
        for note in config.notes:
            log.info("%s", note)
        log.info("model %s on %s, %s", config.model.name, config.runner.device, config.model.dtype)
        while True:
            run = _Run(config, sock, metrics_sock, started, early)
            early = None
            code = _run_loop(run)
            if not (config.launch.restart_on_failure and run.lost_a_part):
                return code
            log.warning("starting the engine again (--restart-on-failure)")
            time.sleep(RESTART_PAUSE)
            started = time.monotonic()


def _allow_connections() -> None:
    """Each connection takes a file descriptor, and many systems start a process with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, made before anything slow so that a taken port is known at once.

    SO_REUSEADDR: connections of a killed predecessor that still linger do not hold the port. Children never inherit
    the socket.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"--host {host}: {error.strerror}; 127.0.0.1 is this machine, 0.0.0.0 every network"
        ) from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(_why_not_bound(host, port, error)) from None
    return sock


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        free = next((p for p in range(port + 1, port + 50) if p < 65536 and _can_bind(host, p)), None)
        other = f"--port {free}" if free else "another --port"
        return f"port {port} on {host} is in use: stop what listens there, or give {other}"
    if error.errno == errno.EACCES:
        return f"port {port} needs rights that this user lacks: give a --port of 1024 or more"
    return f"cannot listen on {host}:{port}: {error.strerror}"


def _can_bind(host: str, port: int) -> bool:
    try:
        with socket.create_server((host.strip("[]"), port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except OSError:
        return False


def _complain(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


def _run_loop(run: _Run) -> int:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run.main())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class _Run:
    """One life of the engine behind the listening socket."""

    def __init__(
        self,
        config: Config,
        sock: socket.socket,
        metrics_sock: socket.socket | None,
        started: float,
        early: Starting | None,
    ) -> None:
        self.config = config
        self.lost_a_part = False
        self._sock = sock
        self._metrics_sock = metrics_sock
        self._started = started
        self._early = early
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._graph = EngineGraph(config, self._on_failure)
        self._servers: list[uvicorn.Server] = []

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        http: asyncio.Task[None] | None = None
        try:
            self._graph.spawn(self._early)
            front = await self._graph.start()
            http = asyncio.create_task(self._serve_http(front), name="http")
            await self._until_ready(front, http)
            if not self._stop.is_set():
                self._announce(front)
                await self._until_end(http)
            return await self._wind_down(front, http)
        except CeibaError as error:
            self._fail_front(error)
            if self._stop.is_set():
                return 1 if self.lost_a_part else 0
            _complain(error.message)
            return 2 if isinstance(error, ConfigError) else 1
        except Exception as error:
            self._fail_front(error)
            log.exception("start-up failed")
            _complain(explain(error))
            return 1
        finally:
            await self._close(http)

    def _fail_front(self, error: Exception) -> None:
        """Whoever has asked already, while the model was loading, hears why nothing comes."""
        if self._graph.front is not None:
            self._graph.front.fail(f"it could not start: {explain(error)}")

    # ── events ───────────────────────────────────────────────────────────────

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
            for server in self._servers:
                server.force_exit = True
            return
        log.info("stopping; once more to stop at once")
        self._stop.set()

    def _on_failure(self, reason: str) -> None:
        self.lost_a_part = True
        self._stop.set()

    # ── start ────────────────────────────────────────────────────────────────

    async def _serve_http(self, front: Front) -> None:
        from ceiba.launch.wiring import make_http_server, make_metrics_server

        # A server closes the sockets it is given; a restart needs ours again.
        pairs = [(make_http_server(self.config, front), self._sock.dup())]
        if self._metrics_sock is not None:
            pairs.append((make_metrics_server(self.config, front), self._metrics_sock.dup()))
        self._servers = [server for server, _ in pairs]
        await asyncio.gather(*(server.serve(sockets=[sock]) for server, sock in pairs))

    async def _until_ready(self, front: Front, http: asyncio.Task[None]) -> None:
        ready = asyncio.create_task(self._ready(front), name="ready")
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait({ready, stop, http}, return_when=asyncio.FIRST_COMPLETED)
            if ready in done:
                ready.result()
            elif http in done:
                http.result()
                raise CeibaError("the HTTP server ended while starting")
        finally:
            for task in (ready, stop):
                task.cancel()
            await asyncio.gather(ready, stop, return_exceptions=True)

    async def _ready(self, front: Front) -> None:
        await self._graph.wait_ready()
        if not self.config.server.skip_server_warmup:
            begun = time.perf_counter()
            await warm_up(front)
            self._graph.phases.append(("warm-up", time.perf_counter() - begun))

    def _announce(self, front: Front) -> None:
        from ceiba.config.report import startup_line

        config, graph = self.config, self._graph
        available = graph.info.get("available_memory", 0)
        log.info("%s", startup_line(config, int(available), graph.info.get("num_slots")))
        total = time.monotonic() - self._started
        log.info("started in %.2f s (%s)", total, ", ".join(f"{name} {seconds:.2f}" for name, seconds in graph.phases))
        gc.collect()
        gc.freeze()  # what start-up made lives for ever: the collector need not look at it again
        print(ready_text(config, front, self._sock.getsockname()[1]), flush=True)

    # ── end ──────────────────────────────────────────────────────────────────

    async def _until_end(self, http: asyncio.Task[None]) -> None:
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({stop, http}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()

    async def _wind_down(self, front: Front, http: asyncio.Task[None]) -> int:
        """Let requests end (after a failure they have just got their errors), then close the connections."""
        if self.lost_a_part:
            code = 1
        elif http.done() and not self._stop.is_set():
            _complain("the HTTP server ended on its own")
            code = 1
        else:
            code = 0
            front.drain()
            deadline = time.monotonic() + DRAIN_SECONDS
            if front.num_live:
                log.info("waiting up to %g s for %d requests in flight", DRAIN_SECONDS, front.num_live)
            while front.num_live and time.monotonic() < deadline and not self._hurry.is_set():
                if self.lost_a_part:
                    code = 1
                    break
                await asyncio.sleep(0.02)
            front.fail("it is shutting down")
        return code

    async def _close(self, http: asyncio.Task[None] | None) -> None:
        if http is not None:
            for server in self._servers:
                server.should_exit = True
            await asyncio.wait({http}, timeout=FLUSH_SECONDS + 1.0)
            if not http.done():
                http.cancel()
                await asyncio.gather(http, return_exceptions=True)
        with contextlib.suppress(Exception):
            await self._graph.stop()
        self._graph.kill()


async def warm_up(front: Front) -> None:
    """One short request through every part, so that no client pays for first uses; then the cache is emptied."""
    import numpy as np

    from ceiba.core.sampling import SamplingParams
    from ceiba.server.request import EngineRequest, Input

    length = max(1, min(32, front.capacity - 4))
    tokens = max(1, min(4, front.capacity - length))
    ids = (np.arange(length) % front.vocab_size).astype(np.int32)
    if front.config.model.task != "generate":
        await front.pool.run([(ids, 0)])
        return
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    await front.collect(EngineRequest([Input(ids, sampling)], rid="warm-up", internal=True))
    with contextlib.suppress(EngineFault):  # a client was quicker: its request runs, and the cache stays as it is
        await front.control("flush_cache")


def ready_text(config: Config, front: Front, port: int) -> str:
    """What a person needs first: that it is ready, where, and a command to try."""
    host = config.server.host.strip("[]")
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{reachable}:{port}{config.server.root_path}"
    question = "What is the capital of France?"
    body: dict[str, object]
    kind = config.model.task
    if kind != "generate":
        path = {"embed": "/v1/embeddings", "classify": "/v1/classify", "rerank": "/v1/rerank"}[kind]
        body = {"query": question, "documents": ["Paris", "Rome"]} if kind == "rerank" else {"input": question}
    elif front.template is not None:
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": question}], "max_tokens": 64}
    else:
        path, body = "/v1/completions", {"prompt": "The capital of France is", "max_tokens": 16}
    greedy = {"temperature": 0} if kind == "generate" else {}
    data = json.dumps({"model": config.model.name, **body, **greedy})
    lines = [f"curl {url}{path}", "-H 'Content-Type: application/json'"]
    if config.server.api_key:
        lines.append("-H 'Authorization: Bearer YOUR_API_KEY'")
    lines.append(f"-d {shlex.quote(data)}")
    return f"\nThe server is up and ready: {url}\nTry it:\n\n" + " \\\n  ".join(lines) + "\n"
