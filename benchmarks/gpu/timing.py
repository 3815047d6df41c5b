"""Device time of launches by graph replay, over rotating inputs. Knows no kernel."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch


class Share:
    """This process's share of a warm-up that several processes divide: every ``count``-th call, run once, not timed.
    Fills Triton's compile cache in parallel.
    """

    def __init__(self) -> None:
        self.index, self.count = 0, 0
        self.calls = itertools.count()

    def take(self, call: Callable[[], object]) -> bool:
        """Whether this is a warm-up; if so, run ``call`` when it is this process's turn."""
        if self.count and next(self.calls) % self.count == self.index:
            call()
        return self.count > 0


WARM = Share()


def replay_us(calls: Sequence[Callable[[], object]], replays: int = 12, repeat: int = 1) -> float:
    """Median microseconds of one call when ``calls`` (``repeat`` times over) are replayed as one graph.

    Give calls on different buffers that together exceed the L2, so that the memory is measured and not the cache.
    """
    if WARM.take(calls[0]):
        return 1.0
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / (len(calls) * repeat)


def eager_us(call: Callable[[], object], times: int = 7) -> float:
    """Median microseconds of one launch between events; for calls that take much longer than a launch."""
    if WARM.take(call):
        return 1.0
    call()
    call()
    measured = []
    for _ in range(times):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda._sleep(2_000_000)  # the launch itself must not be waited for
        start.record()
        call()
        end.record()
        end.synchronize()
        measured.append(start.elapsed_time(end))
    return statistics.median(measured) * 1e3
