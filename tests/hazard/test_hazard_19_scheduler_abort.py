"""Hazard 19, scheduler level: an abort reaches every queue in every state, whichever way the request went there."""

from __future__ import annotations

import pytest

from ceiba.scheduler.request import State
from support.scheduler_world import make_world, prompt


def find(world, state):
    return [request for request in world.scheduler._requests.values() if state(request)]


STATES = {
    "queued": lambda r: r.state is State.QUEUED and not r.retractions,
    "retracted": lambda r: r.state is State.QUEUED and r.retractions > 0,
    "prefilling": lambda r: r.state is State.PREFILLING,
    "running": lambda r: r.state is State.RUNNING,
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", STATES)
def test_abort_in(name, overlap):
    world = make_world(
        pool=80, context=70, rows=4, chunked_prefill_size=4, conservativeness=0.0, overlap=overlap,
        enable_mixed_chunk=True,
    )  # fmt: skip
    for i in range(8):
        world.ask(str(i), prompt(i, 10), max_new_tokens=45, ignore_eos=True)
    for _ in range(400):
        world.step()
        victims = find(world, STATES[name])
        if victims:
            break
    victim = victims[0]
    world.abort(victim.rid)
    world.step()
    assert victim.state is State.FINISHED
    assert victim.row == -1
    assert victim not in world.scheduler.queue
    world.finish()
    assert world.answer(victim.rid).finish.kind == "abort"
    for rid in world.asked:
        if rid != victim.rid:
            world.check(rid)


def test_abort_arrives_with_its_request():
    world = make_world()
    world.ask("a", prompt(1, 10), max_new_tokens=5)
    world.abort("a")
    world.finish()
    assert world.answer("a").finish.kind == "abort"
    assert world.scheduler.counters.forwards == 0


def test_a_name_is_free_again_after_its_abort():
    world = make_world()
    world.ask("a", prompt(1, 10), max_new_tokens=30, ignore_eos=True)
    world.step(3)
    world.abort("a")
    world.finish()
    del world.port.answers["a"]
    world.ask("a", prompt(2, 10), max_new_tokens=5)
    world.finish()
    world.check("a")
