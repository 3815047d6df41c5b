"""The mailboxes, over ZeroMQ and in process: order, draining, wake-ups, peers that come late or go away."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time

import numpy as np
import pytest

from ceiba.core.messages import (
    Abort,
    Control,
    DetokOpen,
    Finish,
    Generate,
    Heartbeat,
    Reply,
    TextBatch,
    TokenBatch,
    Usage,
    bytes_to_ids,
    ids_to_bytes,
)
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.launch.local_ports import LocalHub
from ceiba.launch.zmq_ports import (
    ZmqDetokenizerPort,
    ZmqFrontPort,
    ZmqSchedulerPort,
    make_endpoints,
    remove_endpoints,
)


class Ends:
    """The three ports of one launch, whatever they are made of."""

    def __init__(self, kind: str) -> None:
        self.directory = None
        if kind == "local":
            hub = LocalHub()
            self.front, self.scheduler, self.detokenizer = (
                hub.front_port(),
                hub.scheduler_port(),
                hub.detokenizer_port(),
            )
            return
        endpoints, self.directory = make_endpoints()
        self.front = ZmqFrontPort(endpoints)
        self.scheduler = ZmqSchedulerPort(endpoints)
        self.detokenizer = ZmqDetokenizerPort(endpoints, self.front.context if kind == "zmq-thread" else None)

    def close(self) -> None:
        self.scheduler.close()
        self.detokenizer.close()
        self.front.close()
        if self.directory is not None:
            remove_endpoints(self.directory)


@pytest.fixture(params=["local", "zmq", "zmq-thread"])
def ends(request):
    made = Ends(request.param)
    yield made
    made.close()


def collect(receive, count: int, seconds: float = 30.0) -> list:
    got: list = []
    deadline = time.monotonic() + seconds
    while len(got) < count and time.monotonic() < deadline:
        got += receive(0.2)
    return got


def generate(i: int) -> Generate:
    return Generate(
        rid=f"r{i}",
        input_ids=ids_to_bytes(range(i, i + 5)),
        sampling=SamplingParams(max_new_tokens=i, stop=("a", "b"), logit_bias={3: -1.5}, seed=i),
        logprob=LogprobSpec(output=True, top=2, token_ids=(1, 2)),
        stream=bool(i % 2),
        namespace="ns",
        queue_timeout=None if i % 3 else 1.5,
    )


async def test_all_messages_survive_the_way_unchanged(ends):
    for message in (
        generate(1),
        Abort(rids=["x"], reason="stop"),
        Control(id=7, op="state", args={"a": [1, "b", None]}),
    ):
        ends.front.to_scheduler(message)
        assert await asyncio.to_thread(collect, ends.scheduler.receive, 1) == [message]
    ends.detokenizer.to_scheduler(Abort(everything=True))
    assert await asyncio.to_thread(collect, ends.scheduler.receive, 1) == [Abort(everything=True)]

    batch = TokenBatch(
        rids=["r1", "r2"],
        counts=ids_to_bytes([1, 2]),
        tokens=ids_to_bytes([5, 6, 7]),
        opened=[DetokOpen(rid="r1", stream=True, sampling=SamplingParams(), prompt_tail=ids_to_bytes([9]))],
        finishes={1: Finish(kind="stop", matched="end"), 0: Finish(kind="length", matched=3)},
        usages={0: Usage(prompt_tokens=4, cached_tokens=2, completion_tokens=1)},
    )
    ends.scheduler.to_detokenizer(batch)
    assert await asyncio.to_thread(collect, ends.detokenizer.receive, 1) == [batch]

    text = TextBatch(rids=["r1"], texts=["é"], counts=ids_to_bytes([1]), tokens=ids_to_bytes([5]))
    for message, send in (
        (text, ends.detokenizer.to_front),
        (Reply(id=7, ok=False, error="no", value={"k": [1.5]}), ends.scheduler.to_front),
        (Heartbeat(at=1.25, stats={"running": 3.0}), ends.scheduler.to_front),
    ):
        send(message)
        assert await asyncio.wait_for(ends.front.receive(), 30) == message


async def test_receive_drains_everything_that_is_ready_in_order(ends):
    sent = [generate(i) for i in range(500)]
    for attempt in range(1, 8):  # on a busy machine the last of them may take their time to get there
        for message in sent:
            ends.front.to_scheduler(message)
        await asyncio.sleep(0.2 * attempt)
        first = await asyncio.to_thread(ends.scheduler.receive, 1.0)
        rest = await asyncio.to_thread(collect, ends.scheduler.receive, len(sent) - len(first))
        assert first + rest == sent
        if not rest:
            break
    assert not rest, "one call takes what is there"
    assert ends.scheduler.receive(0) == []


async def test_receive_waits_for_parts_of_a_millisecond(ends):
    """A scheduler waits so for the last moment before the device needs its next step."""
    start = time.perf_counter()
    assert await asyncio.to_thread(ends.scheduler.receive, 0.0005) == []
    assert time.perf_counter() - start >= 0.0004
    ends.front.to_scheduler(Abort(rids=["early"]))
    assert await asyncio.to_thread(collect, lambda _: ends.scheduler.receive(0.0005), 1) == [Abort(rids=["early"])]


async def test_receive_waits_no_longer_than_told_and_wakes_at_once(ends):
    waits = []
    while not waits or (waits[-1] >= 0.6 and len(waits) < 10):
        start = time.perf_counter()
        assert await asyncio.to_thread(ends.scheduler.receive, 0.15) == []
        waits.append(time.perf_counter() - start)
        assert waits[-1] >= 0.14
    assert waits[-1] < 0.6, waits
    wakes = []
    while not wakes or (wakes[-1] >= 1.0 and len(wakes) < 10):
        threading.Timer(0.1, ends.front.to_scheduler, (Abort(rids=["late"]),)).start()
        start = time.perf_counter()
        assert len(await asyncio.to_thread(ends.scheduler.receive, 60.0)) == 1
        wakes.append(time.perf_counter() - start)
    assert wakes[-1] < 1.0, wakes


async def test_front_reader_loses_no_wake_up(ends):
    """Bursts and pauses from two writers while the reader is slow and fast in turn: the edge-triggered trap."""
    count = 2000
    rng = np.random.default_rng(1)
    pauses = rng.integers(0, 40, size=count)

    def write(send, make) -> None:
        for i in range(count):
            send(make(i))
            if pauses[i] == 0:
                time.sleep(0.002)

    threads = [
        threading.Thread(target=write, args=(ends.scheduler.to_front, lambda i: Heartbeat(at=float(i)))),
        threading.Thread(
            target=write,
            args=(
                ends.detokenizer.to_front,
                lambda i: TextBatch(rids=[str(i)], texts=["t"], counts=b"", tokens=b""),
            ),
        ),
    ]
    for thread in threads:
        thread.start()
    beats, texts = [], []
    for i in range(2 * count):
        message = await asyncio.wait_for(ends.front.receive(), 30)
        if isinstance(message, Heartbeat):
            beats.append(int(message.at))
        else:
            texts.append(int(message.rids[0]))
        if i % 97 == 0:
            await asyncio.sleep(0.003)
    for thread in threads:
        thread.join()
    assert beats == list(range(count))
    assert texts == list(range(count))


async def test_heartbeats_from_another_thread_do_not_disturb(ends):
    def beat() -> None:
        for i in range(500):
            ends.scheduler.to_front(Heartbeat(at=float(i)))

    threads = [threading.Thread(target=beat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        await asyncio.wait_for(ends.front.receive(), 30)
    for thread in threads:
        thread.join()


async def test_a_cancelled_receive_loses_nothing(ends):
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(ends.front.receive(), 0.05)
    ends.scheduler.to_front(Heartbeat(at=1.0))
    assert (await asyncio.wait_for(ends.front.receive(), 30)).at == 1.0


async def test_a_megabyte_prompt(ends):
    ids = np.arange(300_000)
    ends.front.to_scheduler(Generate(rid="big", input_ids=ids_to_bytes(ids), sampling=SamplingParams()))
    (message,) = await asyncio.to_thread(collect, ends.scheduler.receive, 1)
    assert np.array_equal(bytes_to_ids(message.input_ids), ids)


async def test_sending_before_the_reader_exists_and_after_it_is_gone():
    endpoints, directory = make_endpoints()
    front = ZmqFrontPort(endpoints)
    front.to_scheduler(Abort(rids=["early"]))
    scheduler = ZmqSchedulerPort(endpoints)
    assert await asyncio.to_thread(collect, scheduler.receive, 1) == [Abort(rids=["early"])]
    scheduler.close()
    start = time.perf_counter()
    for _ in range(10_000):
        front.to_scheduler(Abort(rids=["nobody"]))
    assert time.perf_counter() - start < 20
    front.close()
    remove_endpoints(directory)


def test_the_directory_is_private_and_its_name_is_new_each_time():
    first, one = make_endpoints()
    second, two = make_endpoints()
    try:
        assert stat.S_IMODE(os.stat(one).st_mode) == 0o700
        names = [getattr(e, f) for e in (first, second) for f in e.__struct_fields__]
        assert len(set(names)) == 8
    finally:
        remove_endpoints(one)
        remove_endpoints(two)
    assert not one.exists()
