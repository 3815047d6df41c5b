"""Plans made just before the device needs them: the estimate alone, and in the scheduler on a simulated device."""

from __future__ import annotations

import numpy as np
import pytest

from ceiba.config.records import SchedulerConfig
from ceiba.core.messages import Abort, Control
from ceiba.scheduler import loop
from ceiba.scheduler.costs import StepCosts
from ceiba.scheduler.fake import CostModel, FakeRunner, SimClock
from ceiba.scheduler.simulate import simulate
from ceiba.scheduler.timing import LEADS, SPARE, SURE, PlanTiming
from ceiba.scheduler.traces import TraceRequest
from support.scheduler_world import make_world, prompt


def test_planning_begins_before_the_device_is_done():
    costs = StepCosts()
    timing = PlanTiming(costs)
    assert timing.due(5.0, 0, 8) == 5.0  # nothing is known
    timing.planned(0.0005, 0.0005)
    assert timing.due(5.0, 0, 8) <= 5.0
    costs.observe(0, 8, 0.010)
    assert timing.due(5.0, 0, 8) == pytest.approx(5.0 + SURE * 0.010 - LEADS * 0.001 - SPARE)
    assert timing.due(5.0, 1000, 8) <= 5.0  # what prompts cost is not
    costs.observe(1000, 8, 0.030)
    assert timing.due(5.0, 1000, 8) == pytest.approx(5.0 + SURE * 0.030 - LEADS * 0.001 - SPARE)
    timing.planned(0.002, 0.001)
    timing.planned(0.0005, 0.0005)
    assert 0.002 < timing.lead < 0.003  # a slow plan is remembered for some time


def arrivals(count: int, every: float) -> list[TraceRequest]:
    """Eight requests that decode all the time, and ``count`` that come in beside them."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return rng.integers(0, 30000, length).astype(np.int32)

    beside = [TraceRequest(0.5 + every * i + rng.uniform(0, every / 2), ids(400), 4) for i in range(count)]
    return [*(TraceRequest(0.0, ids(64), int(count * every / 0.008)) for _ in range(8)), *beside]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_late_plan_has_whoever_arrived_meanwhile(mixed):
    """A request waits for the rest of a step instead of that and another, and the device never waits for a plan."""
    device = CostModel(step=8e-3, prefill_token=2e-5, decode_row=0.0, context_token=0.0, host=1e-3)
    trace = arrivals(60, 0.05)
    found = {}
    for late in (False, True):
        config = SchedulerConfig(
            max_running_requests=64, max_total_tokens=100_000, chunked_prefill_size=8192, late_planning=late,
            enable_mixed_chunk=mixed, mixed_chunk_target=0.027 if mixed else 0.0,
        )  # fmt: skip
        found[late] = simulate(trace, config, cost=device)
        assert found[late]["finished"] == len(trace)
    early, late = (found[key]["ttft_s"]["mean"] for key in (False, True))
    assert early - late > 0.003  # of a step of 8 ms, two plans and what is not trusted
    assert found[True]["device_busy"] > found[False]["device_busy"] - 0.005
    assert found[True]["simulated_s"] < 1.01 * found[False]["simulated_s"]


def running_world(**config):
    """A scheduler that has learnt what steps take on a device of 10 ms each, and a step that has just begun."""
    clock = SimClock()
    world = make_world(rows=8, context=200, **config)
    scheduler = world.scheduler
    scheduler.clock = clock
    world.runner.clock, world.runner.cost = clock, CostModel(10e-3, 1e-5, 0.0, 0.0, 1e-3)
    world.ask("run", prompt(1, 10), max_new_tokens=100, ignore_eos=True)
    world.step(20)
    assert len(scheduler._flights) == 1
    return world, clock


class Mailbox:
    """Passes the time it is asked to wait, and hands out messages when their time comes."""

    def __init__(self, world, clock, *messages):
        self.clock, self.messages = clock, list(messages)
        self.inner, self.waits = world.port, []
        world.scheduler.port = self

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def receive(self, timeout):
        self.waits.append(timeout)
        self.clock.advance_to(self.clock.now + timeout)
        due = [message for at, message in self.messages if at <= self.clock.now]
        self.messages = [(at, message) for at, message in self.messages if at > self.clock.now]
        return due + self.inner.receive(0.0)


def test_messages_are_handled_while_a_step_runs():
    world, clock = running_world()
    box = Mailbox(world, clock, (clock.now + 0.003, Abort(rids=["run"])))
    world.scheduler._linger()
    assert "run" not in world.scheduler._requests
    assert sum(box.waits) > 0.004
    world.step()
    assert world.answer("run").finish.kind == "abort"
    world.finish()


def test_a_step_that_ends_early_is_noticed():
    """Ten times as fast as expected: the next plan is made within a wait of its end."""
    world, clock = running_world()
    world.scheduler._flights[-1].result.done_at = clock.now + 0.0004
    begun = clock.now
    Mailbox(world, clock)
    world.scheduler._linger()
    assert clock.now - begun <= loop.LINGER_WAIT + 1e-9
    world.finish()
    world.check("run")


def test_shutting_down_does_not_wait():
    world, clock = running_world()
    begun = clock.now
    Mailbox(world, clock, (0.0, Control(id=1, op="shutdown")))
    world.scheduler._linger()
    assert world.scheduler.stopped
    assert clock.now - begun <= loop.LINGER_WAIT + 1e-9


def test_a_clock_that_stands_still_is_not_waited_for():
    world, _ = running_world()
    world.scheduler._linger()  # the port of tests passes no time
    world.finish()
    world.check("run")


@pytest.mark.parametrize("config", [{"late_planning": False}, {"overlap": False}])
def test_plans_are_made_at_once_where_that_is_asked_for(config):
    clock = SimClock()
    world = make_world(rows=8, context=200, **config)
    world.scheduler.clock = world.runner.clock = clock
    world.runner.cost = CostModel(10e-3, 1e-5, 0.0, 0.0, 1e-3)
    box = Mailbox(world, clock)
    world.ask("run", prompt(1, 10), max_new_tokens=100, ignore_eos=True)
    world.step(20)
    assert not any(box.waits)
    world.finish()


def test_running_requests_are_owed_a_step_between_two_prefills():
    """Prefill first: behind a step of prompts alone a decode step is planned at once, whoever comes meanwhile."""
    world, clock = running_world()
    world.ask("new", prompt(2, 100), max_new_tokens=4, ignore_eos=True)
    world.step()
    assert world.scheduler._flights[-1].tokens == (100, 0)
    box = Mailbox(world, clock)
    world.scheduler._linger()
    assert not box.waits
    world.finish()


def test_a_runner_without_a_device_is_not_waited_for():
    world = make_world(eager=True)
    assert isinstance(world.runner, FakeRunner)
    world.ask("run", prompt(1, 10), max_new_tokens=10, ignore_eos=True)
    world.step(3)
    assert not world.scheduler._flights
    world.finish()
