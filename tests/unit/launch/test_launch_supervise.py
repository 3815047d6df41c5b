"""Supervision with dummy children: every kind of death is noticed within two seconds and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from ceiba.core.errors import ConfigError
from ceiba.launch.starting import start
from ceiba.launch.supervise import ChildDied, Supervisor

PRELUDE = """
import os, sys, time, signal, threading
from ceiba.launch import children
from ceiba.launch.status import StatusWriter, Ready, Failed, read_frame
children._prepare()
status = StatusWriter(int(sys.argv[1]))
first = read_frame(0)
threading.Thread(target=children._die_with_parent, daemon=True).start()
"""


def script(body: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(body)]


SERVE = "status.send(Ready({'first': len(first)}))\ntime.sleep(60)"


class Watch:
    def __init__(self) -> None:
        self.deaths: list[tuple[str, str, float]] = []
        self.event = asyncio.Event()
        self.supervisor = Supervisor(self.on_death)
        self.supervisor.attach(asyncio.get_running_loop())

    def on_death(self, child, reason: str) -> None:
        self.deaths.append((child.name, reason, time.monotonic()))
        self.event.set()


@pytest.fixture
async def watch():
    made = Watch()
    yield made
    made.supervisor.stop_now()


async def test_ready_carries_info_and_the_first_message_arrives_whole(watch):
    child = watch.supervisor.spawn("a", script(SERVE), b"x" * 3_000_000)
    await asyncio.wait_for(watch.supervisor.wait_ready(), 60)
    assert child.ready.info == {"first": 3_000_000}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", "SIGKILL"),
        ("abort", "SIGABRT"),
        ("segv", "SIGSEGV"),
        ("exit", "exit status 3"),
        ("zero", "exit status 0"),
    ],
)
async def test_any_death_is_noticed_at_once_and_told_once(watch, how, words, tmp_path):
    deaths = {
        "kill": "time.sleep(60)",
        "abort": "os.abort()",
        "segv": "os.kill(os.getpid(), signal.SIGSEGV)",
        "exit": "os._exit(3)",
        "zero": "os._exit(0)",
    }
    go = tmp_path / "go"  # it dies when both are ready, however long the other takes
    wait = "" if how == "kill" else f"while not os.path.exists({str(go)!r}): time.sleep(0.005)\n"
    child = watch.supervisor.spawn("victim", script(f"status.send(Ready())\n{wait}{deaths[how]}"), b"")
    watch.supervisor.spawn("other", script(SERVE), b"")
    await asyncio.wait_for(watch.supervisor.wait_ready(), 60)
    before = time.monotonic()
    if how == "kill":
        os.kill(child.pid, signal.SIGKILL)
    go.touch()
    await asyncio.wait_for(watch.event.wait(), 20)
    name, reason, at = watch.deaths[0]
    assert name == "victim"
    assert words in reason
    assert at - before < 2.0
    await watch.supervisor.stop()
    assert len(watch.deaths) == 1
    assert not psutil.pid_exists(child.pid)


async def test_a_grandchild_that_outlives_the_child_does_not_hide_its_death(watch):
    body = """
    import subprocess
    helper = subprocess.Popen(["sleep", "30"], close_fds=False)
    status.send(Ready({"helper": helper.pid}))
    time.sleep(60)
    """
    child = watch.supervisor.spawn("a", script(body), b"")
    await asyncio.wait_for(watch.supervisor.wait_ready(), 60)
    os.kill(child.pid, signal.SIGKILL)
    try:
        await asyncio.wait_for(watch.event.wait(), 15)  # before the helper ends
    finally:
        os.kill(child.ready.info["helper"], signal.SIGKILL)


async def test_a_child_that_cannot_start_says_why(watch):
    watch.supervisor.spawn("a", script("status.send(Failed('no such model'))\nos._exit(2)"), b"")
    with pytest.raises(ConfigError, match="no such model"):
        await asyncio.wait_for(watch.supervisor.wait_ready(), 60)
    assert watch.deaths == []


async def test_a_child_that_dies_while_starting(watch):
    watch.supervisor.spawn("a", script("os.kill(os.getpid(), signal.SIGKILL)"), b"")
    with pytest.raises(ChildDied, match=r"the a process ended while starting .*SIGKILL"):
        await asyncio.wait_for(watch.supervisor.wait_ready(), 60)


async def test_stop_ends_even_a_child_that_ignores_sigterm(watch):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVE
    stubborn = watch.supervisor.spawn("a", script(body), b"")
    polite = watch.supervisor.spawn("b", script(SERVE), b"")
    await asyncio.wait_for(watch.supervisor.wait_ready(), 60)
    start = time.monotonic()
    await watch.supervisor.stop(grace=0.3)
    assert time.monotonic() - start < 20  # it sleeps for a minute
    assert not psutil.pid_exists(stubborn.pid)
    assert not psutil.pid_exists(polite.pid)
    assert watch.deaths == []


async def test_children_can_be_started_again_after_a_death(watch):
    child = watch.supervisor.spawn("a", script(SERVE), b"")
    await asyncio.wait_for(watch.supervisor.wait_ready(), 60)
    os.kill(child.pid, signal.SIGKILL)
    await asyncio.wait_for(watch.event.wait(), 20)
    await watch.supervisor.stop()
    watch.event.clear()
    again = watch.supervisor.spawn("a", script(SERVE), b"")
    await asyncio.wait_for(watch.supervisor.wait_ready(), 60)
    os.kill(again.pid, signal.SIGKILL)
    await asyncio.wait_for(watch.event.wait(), 20)
    assert len(watch.deaths) == 2


@pytest.mark.parametrize("parent_death", [True, False], ids=["prctl", "pipe"])
def test_children_die_with_a_killed_parent(tmp_path, parent_death):
    body = PRELUDE if parent_death else PRELUDE.replace("children._prepare()", "")
    parent = textwrap.dedent(
        """
        import asyncio, sys
        from ceiba.launch.supervise import Supervisor
        async def main():
            supervisor = Supervisor(lambda child, reason: None)
            supervisor.attach(asyncio.get_running_loop())
            children = [supervisor.spawn(str(i), [sys.executable, "-c", sys.argv[1]], b"") for i in range(2)]
            await supervisor.wait_ready()
            print(*[c.pid for c in children], flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", parent, body + SERVE], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    deadline = time.monotonic() + 20  # they sleep for a minute
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_process_that_was_started_early_becomes_a_child_or_is_ended(watch):
    early = start("early", script(SERVE))
    child = watch.supervisor.adopt("early", early, b"x" * 70_000)
    await asyncio.wait_for(watch.supervisor.wait_ready(), 60)
    assert child.ready.info == {"first": 70_000}
    await watch.supervisor.stop()
    assert not psutil.pid_exists(early.process.pid)
    unused = start("unused", script(SERVE))
    unused.discard()
    assert not psutil.pid_exists(unused.process.pid)
