"""Every behaviour of the loop that one or two requests can show."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ceiba.cache.ledger import assert_ledger
from ceiba.core.errors import BadRequest
from ceiba.core.messages import Control
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.scheduler.fake import FakeRunner
from support.scheduler_world import make_world, oracle, prompt


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_one_request_gets_its_tokens(overlap, eager):
    world = make_world(overlap=overlap, eager=eager)
    world.ask("a", prompt(1, 20), max_new_tokens=30)
    world.finish()
    world.check("a")


def test_a_length_limited_end_costs_no_extra_step():
    for overlap in (True, False):
        world = make_world(overlap=overlap)
        world.ask("a", prompt(1, 20), max_new_tokens=10, ignore_eos=True)
        world.finish()
        assert world.scheduler.counters.forwards == 10
        assert world.scheduler.counters.dropped_tokens == 0


def test_overlap_drops_exactly_one_token_after_a_stop():
    for overlap in (True, False):
        world = make_world(overlap=overlap)
        tokens, _ = oracle(prompt(1, 20), SamplingParams(max_new_tokens=50, ignore_eos=True), limit=120)
        stop = tokens[5]
        cut = tokens.index(stop) + 1
        world.ask("a", prompt(1, 20), max_new_tokens=50, ignore_eos=True, stop_token_ids=(stop,))
        world.finish()
        answer = world.answer("a")
        assert answer.tokens == tokens[:cut]
        assert (answer.finish.kind, answer.finish.matched) == ("stop", stop)
        assert world.scheduler.counters.dropped_tokens == (1 if overlap else 0)


@pytest.mark.parametrize(("together", "in_flight"), [(True, 1), (False, 0)])
def test_two_prefills_in_a_row_overlap_unless_told_not_to(together, in_flight):
    world = make_world(chunked_prefill_size=16, consecutive_prefill_overlap=together)
    seen = []
    build = world.scheduler.planner.build

    def record(now, *, in_flight):
        seen.append(int(in_flight))
        return build(now, in_flight=in_flight)

    world.scheduler.planner.build = record
    world.ask("a", prompt(1, 40), max_new_tokens=4, ignore_eos=True)
    world.finish()
    world.check("a")
    assert seen[:4] == [0, in_flight, in_flight, 1]  # three chunks, then decoding overlaps in any case


def test_min_new_tokens_holds_the_end_back():
    world = make_world()
    for i in range(20):
        world.ask(str(i), prompt(i, 9), max_new_tokens=60, min_new_tokens=25)
    world.finish()
    for i in range(20):
        world.check(str(i))
        assert len(world.answer(str(i)).tokens) > 25 or world.answer(str(i)).finish.kind == "length"


def test_max_new_tokens_zero_computes_the_prompt_only():
    world = make_world()
    world.ask("a", prompt(1, 9), max_new_tokens=0, logprob=LogprobSpec(prompt_start=0))
    world.finish()
    answer = world.answer("a")
    assert (answer.tokens, answer.finish.kind) == ([], "length")
    assert len(answer.prompt_logprobs[0].values) == 4 * 9
    assert world.scheduler.counters.forwards == 1


def test_batching_shares_forwards():
    world = make_world()
    for i in range(16):
        world.ask(str(i), prompt(i, 9), max_new_tokens=20, ignore_eos=True)
    world.finish()
    assert world.scheduler.counters.forwards <= 22


def test_the_second_identical_prompt_is_cached_but_for_its_last_token():
    world = make_world(context=2000, pool=4000, max_prefill_tokens=4000)
    world.ask("a", prompt(1, 1000), max_new_tokens=4)
    world.finish()
    world.ask("b", prompt(1, 1000), max_new_tokens=4)
    world.finish()
    assert [world.answer(rid).usages[0].cached_tokens for rid in "ab"] == [0, 999]
    world.check("b")


def test_the_answer_is_cached_too():
    world = make_world()
    world.ask("a", prompt(1, 10), max_new_tokens=20, ignore_eos=True)
    world.finish()
    # The last token's KV was never computed: nothing needed it.
    follow = prompt(1, 10) + world.answer("a").tokens + prompt(2, 5)
    world.ask("b", follow, max_new_tokens=1)
    world.finish()
    assert world.answer("b").usages[0].cached_tokens == 29


def test_namespaces_share_no_kv():
    world = make_world()
    for rid, namespace in (("a", "x"), ("b", "y"), ("c", "x")):
        world.ask(rid, prompt(1, 20), max_new_tokens=2, namespace=namespace)
        world.finish()
    assert [world.answer(rid).usages[0].cached_tokens for rid in "abc"] == [0, 0, 19]


# ── limits ───────────────────────────────────────────────────────────────────


def refusal(world, rid):
    answer = world.answer(rid)
    assert answer.finish.kind == "error"
    assert (answer.opened, answer.tokens) == (1, [])
    return answer.finish.status, answer.finish.message


def test_prompt_at_under_and_over_the_context():
    world = make_world(context=50, pool=200)
    for n in (48, 49, 50, 51):
        world.ask(str(n), prompt(1, n), max_new_tokens=10, ignore_eos=True)
    world.finish()
    assert [len(world.answer(str(n)).tokens) for n in (48, 49)] == [2, 1]
    assert world.answer("49").finish.kind == "length"
    for n in (50, 51):
        status, message = refusal(world, str(n))
        assert status == 400
        assert str(n) in message
        assert "50" in message


def test_prompt_that_the_pool_cannot_hold_names_the_flag():
    world = make_world(context=100, pool=30)
    world.ask("big", prompt(1, 30), max_new_tokens=1)
    world.ask("fits", prompt(1, 29), max_new_tokens=5, ignore_eos=True)
    world.finish()
    status, message = refusal(world, "big")
    assert status == 400
    assert "--max-total-tokens" in message
    world.check("fits")


@pytest.mark.parametrize("ids", [[], [1, -2], [1, 50]])
def test_bad_prompts_are_refused_not_computed(ids):
    world = make_world()
    world.ask("a", ids, max_new_tokens=1)
    world.finish()
    assert refusal(world, "a")[0] == 400


def test_full_queue_answers_503():
    world = make_world(rows=1, max_queued_requests=2)
    world.ask("0", prompt(0, 5), max_new_tokens=20, ignore_eos=True)
    world.step()
    for i in (1, 2, 3):
        world.ask(str(i), prompt(i, 5), max_new_tokens=3)
    world.finish()
    status, message = refusal(world, "3")
    assert status == 503
    assert "--max-queued-requests 2" in message
    for i in (0, 1, 2):
        world.check(str(i))


def test_queue_timeout_answers_504_and_spares_the_admitted():
    world = make_world(rows=1, queue_timeout=5.0)
    world.now[0] = 100.0
    world.ask("runs", prompt(0, 5), max_new_tokens=30, ignore_eos=True)
    world.ask("waits", prompt(1, 5), max_new_tokens=3)
    world.ask("longer", prompt(2, 5), max_new_tokens=3, queue_timeout=60.0)
    world.step(3)
    world.now[0] = 106.0
    world.finish()
    assert refusal(world, "waits")[0] == 504
    world.check("runs")
    world.check("longer")


def test_a_living_name_is_not_taken_twice(caplog):
    world = make_world()
    world.ask("a", prompt(1, 5), max_new_tokens=10)
    world.step()
    asked = world.asked["a"]
    world.ask("a", prompt(2, 5), max_new_tokens=10)
    world.asked["a"] = asked
    world.finish()
    world.check("a")
    assert "still alive" in caplog.text
    assert world.scheduler.counters.requests_rejected == 1


# ── ends ─────────────────────────────────────────────────────────────────────


def test_abort_in_every_state():
    """Queued, partly prefilled, just launched, decoding, unknown: one end each, the rest undisturbed."""
    for steps in range(8):
        world = make_world(rows=2, chunked_prefill_size=8)
        world.ask("victim", prompt(0, 30), max_new_tokens=20, ignore_eos=True)
        world.ask("other", prompt(1, 30), max_new_tokens=20)
        world.ask("queued", prompt(2, 30), max_new_tokens=20)
        world.step(steps)
        world.abort("victim", "queued", "never heard of")
        world.finish()
        for rid in ("victim", "queued"):
            assert world.answer(rid).finish.kind == "abort"
        world.check("other")


def test_abort_everything():
    world = make_world(rows=2)
    for i in range(5):
        world.ask(str(i), prompt(i, 30), max_new_tokens=20, ignore_eos=True)
    world.step(3)
    world.abort(everything=True)
    world.finish()
    assert [world.answer(str(i)).finish.kind for i in range(5)] == ["abort"] * 5
    world.ask("after", prompt(9, 5), max_new_tokens=5)
    world.finish()
    world.check("after")


def test_a_stop_string_found_downstream_ends_silently():
    world = make_world()
    world.ask("a", prompt(0, 10), max_new_tokens=50, ignore_eos=True, stop=("x",))
    world.step(4)
    world.abort("a", reason="stop")
    world.finish()
    assert world.answer("a").finish is None
    assert world.scheduler.counters.requests_finished == 1


def test_a_fault_ends_one_request():
    for overlap in (True, False):
        world = make_world(overlap=overlap)
        for rid in "abc":
            world.ask(rid, prompt(ord(rid), 10), max_new_tokens=20, ignore_eos=True)
        world.step(3)
        row = next(r.row for r in world.scheduler.rows.live() if r.rid == "b")
        world.runner.fault_rows[row] = "non-finite logits"
        world.finish()
        assert refusal_of(world, "b") == (500, "non-finite logits")
        world.check("a")
        world.check("c")


def refusal_of(world, rid):
    finish = world.answer(rid).finish
    return finish.status, finish.message


def test_faulty_prefill_leaves_no_kv_behind():
    world = make_world(overlap=False)
    world.runner.fault_rows[0] = "non-finite logits"
    world.ask("a", prompt(1, 10), max_new_tokens=5)
    world.finish()
    assert refusal_of(world, "a")[0] == 500
    assert world.scheduler.leases.cache.evictable == 0


# ── reports ──────────────────────────────────────────────────────────────────


def test_streams_report_each_token_and_others_seldom():
    world = make_world(context=400)
    world.ask("stream", prompt(0, 5), max_new_tokens=100, ignore_eos=True, stream=True)
    world.ask("stop", prompt(1, 5), max_new_tokens=100, ignore_eos=True, stop=("x",))
    world.ask("plain", prompt(2, 5), max_new_tokens=100, ignore_eos=True)
    world.ask("every 10", prompt(3, 5), max_new_tokens=100, ignore_eos=True, stream=True, stream_interval=10)
    world.finish()
    assert [world.answer(rid).reports for rid in ("stream", "stop", "plain", "every 10")] == [100, 100, 2, 11]
    for rid in ("stream", "stop", "plain", "every 10"):
        world.check(rid)
        assert len(world.answer(rid).usages) == 2


def test_one_message_per_step():
    world = make_world()
    for i in range(10):
        world.ask(str(i), prompt(i, 5), max_new_tokens=20, ignore_eos=True, stream=True)
    world.finish()
    assert world.port.batches <= world.scheduler.counters.forwards + 1


def spec_values(messages):
    return np.concatenate([np.frombuffer(m.values, np.float32) for m in messages])


def test_output_logprobs_follow_the_tokens():
    world, plain = make_world(), make_world(overlap=False)
    spec = LogprobSpec(output=True, top=3, token_ids=(7, 8))
    for w in (world, plain):
        w.ask("a", prompt(0, 10), max_new_tokens=30, ignore_eos=True, logprob=spec)
        w.ask("b", prompt(1, 10), max_new_tokens=30, ignore_eos=True)
        w.finish()
        (message,) = w.answer("a").logprobs
        assert np.frombuffer(message.top_ids, np.int32).reshape(30, 3)[:, 0].tolist() == w.answer("a").tokens
        assert len(np.frombuffer(message.fixed_values, np.float32)) == 60
        assert not w.answer("b").logprobs
    assert np.array_equal(spec_values(world.answer("a").logprobs), spec_values(plain.answer("a").logprobs))


@pytest.mark.parametrize("start", [0, 1, 5, 29])
@pytest.mark.parametrize("chunk", [-1, 7])
def test_prompt_logprobs_are_recomputed_where_the_cache_has_the_prompt(start, chunk):
    alone = make_world(disable_radix_cache=True, chunked_prefill_size=-1)
    world = make_world(chunked_prefill_size=chunk)
    spec = LogprobSpec(prompt_start=start, top=2)
    alone.ask("a", prompt(1, 30), max_new_tokens=3, logprob=spec)
    alone.finish()
    world.ask("warm", prompt(1, 30), max_new_tokens=3)
    world.finish()
    world.ask("a", prompt(1, 30), max_new_tokens=3, logprob=spec)
    world.finish()
    expected, got = (spec_values(w.answer("a").prompt_logprobs) for w in (alone, world))
    assert len(got) == 30 - start
    assert np.array_equal(expected, got, equal_nan=True)
    assert np.isnan(got[0]) == (start == 0)
    assert world.answer("a").usages[0].cached_tokens == max(start - 1, 0)
    world.check("a")


# ── grammar ──────────────────────────────────────────────────────────────────


class EvenThenTen:
    """Even tokens only; complete after ten of them."""

    problem = ""

    def __init__(self):
        self.seen: list[int] = []

    @property
    def terminated(self):
        return len(self.seen) == 10

    def fill(self, bits):
        bits[:] = 0x55555555
        return True

    def accept(self, token):
        if token % 2:
            return False
        self.seen.append(token)
        return True

    def forced_tokens(self):
        return []


class Ticket:
    """Ready after ``rounds`` looks at it."""

    def __init__(self, regex, rounds=0):
        self.regex, self.rounds, self.cancelled = regex, rounds, False

    def ready(self):
        self.rounds -= 1
        return self.rounds < 0

    def state(self):
        if self.regex == "late-bad":
            raise BadRequest("the regex cannot be compiled", param="regex")
        return Stuck() if self.regex == "stuck" else EvenThenTen()

    def cancel(self):
        self.cancelled = True


class Provider:
    def __init__(self):
        self.tickets = []

    def create(self, sampling):
        if sampling.regex == "bad":
            raise BadRequest("the regex cannot be read", param="regex")
        rounds = {"late": 20, "late-bad": 20, "never": 10**9}.get(sampling.regex, 0)
        self.tickets.append(Ticket(sampling.regex, rounds))
        return self.tickets[-1]

    def fill(self, states, bits):
        return np.array([state.fill(row) for state, row in zip(states, bits, strict=True)])


class Stuck(EvenThenTen):
    def fill(self, bits):
        return len(self.seen) < 2 and super().fill(bits)


@pytest.mark.parametrize("overlap", [True, False])
def test_masks_are_filled_between_results_and_sampling(overlap):
    world = make_world(grammar=Provider(), overlap=overlap)
    world.ask("g", prompt(1, 10), max_new_tokens=50, ignore_eos=True, regex="even")
    world.ask("free", prompt(2, 10), max_new_tokens=50)
    world.ask("stuck", prompt(3, 10), max_new_tokens=50, ignore_eos=True, regex="stuck")
    world.ask("bad", prompt(3, 10), max_new_tokens=50, regex="bad")
    world.finish()
    answer = world.answer("g")
    assert len(answer.tokens) == 10
    assert all(token % 2 == 0 for token in answer.tokens)
    assert answer.finish.kind == "stop"
    assert refusal_of(world, "stuck") == (500, "the grammar allows no next token")
    assert len(world.answer("stuck").tokens) == 2
    assert refusal_of(world, "bad")[0] == 400
    world.check("free")


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_that_wait_for_their_grammar_hold_nobody_up(overlap):
    world = make_world(grammar=Provider(), overlap=overlap, rows=2)
    world.ask("late", prompt(1, 10), max_new_tokens=50, ignore_eos=True, regex="late")
    world.ask("late-bad", prompt(4, 10), max_new_tokens=50, regex="late-bad")
    for i in range(4):
        world.ask(f"free{i}", prompt(10 + i, 10), max_new_tokens=4, ignore_eos=True)
    world.step(8)
    assert world.scheduler.stats()["num_grammar_queue_reqs"] == 2
    assert world.answer("free0").finish is not None
    for _ in range(200):
        world.step()
    assert world.scheduler.idle
    assert len(world.answer("late").tokens) == 10
    assert refusal_of(world, "late-bad") == (400, "the regex cannot be compiled")
    assert world.scheduler.stats()["num_grammar_queue_reqs"] == 0
    for i in range(4):
        world.check(f"free{i}")
    assert_ledger(world.scheduler.leases, idle=True)


def test_a_request_that_leaves_while_its_grammar_compiles_cancels_it():
    world = make_world(grammar=Provider())
    world.ask("gone", prompt(1, 10), regex="never")
    world.ask("late", prompt(2, 10), regex="never", queue_timeout=5.0)
    world.step(3)
    world.abort("gone")
    world.step()
    gone, late = world.scheduler.grammar.tickets
    assert (gone.cancelled, late.cancelled) == (True, False)
    assert world.answer("gone").finish.kind == "abort"
    world.now[0] = 6.0
    world.step()
    assert late.cancelled
    assert refusal_of(world, "late")[0] == 504
    assert world.scheduler.idle
    assert_ledger(world.scheduler.leases, idle=True)


def test_without_a_grammar_backend_constraints_are_refused():
    world = make_world()
    world.ask("g", prompt(1, 10), json_schema="{}")
    world.finish()
    status, message = refusal(world, "g")
    assert status == 400
    assert "--grammar-backend" in message


# ── control ──────────────────────────────────────────────────────────────────


def test_flush_only_when_idle():
    world = make_world()
    world.ask("a", prompt(1, 10), max_new_tokens=10, ignore_eos=True)
    world.step(3)
    reply = world.control("flush_cache")
    assert not reply.ok
    assert "1 requests run" in reply.error
    world.finish()
    reply = world.control("flush_cache")
    assert reply.ok
    assert reply.value == {"flushed_tokens": 19}
    assert world.scheduler.leases.allocator.free == 1000


def test_state_load_and_idle_check():
    world = make_world()
    world.ask("a", prompt(1, 10), max_new_tokens=10, ignore_eos=True)
    world.step(2)
    load = world.control("load").value
    assert (load["running"], load["waiting"]) == (1, 0)
    world.finish()
    state = world.control("state").value
    assert (state["prefill_tokens"], state["generation_tokens"], state["forwards"]) == (10, 10, 10)
    assert (state["running"], state["token_usage"]) == (0, 0)
    assert world.control("idle_check").ok
    world.scheduler.leases.allocator.alloc(1)
    reply = world.scheduler.controls.answer(Control(id=9, op="idle_check"))
    assert not reply.ok
    assert "1 slots lost" in reply.error


def test_unknown_operation_lists_the_known():
    reply = make_world().control("dance")
    assert not reply.ok
    assert "flush_cache" in reply.error


def test_run_leaves_after_shutdown_and_beats_meanwhile():
    world = make_world()
    beats = []
    world.ask("a", prompt(1, 10), max_new_tokens=10)
    world.port.push(Control(id=1, op="shutdown"))
    world.scheduler.run(beats.append)
    assert world.answer("a").finish.kind == "abort"
    assert len(beats) >= 1
    assert world.runner.closed is False


def test_heartbeat_through_the_port_between_rounds():
    world = make_world()
    for i in range(10):
        world.now[0] = i * 0.25
        world.step()
    assert [beat.at for beat in world.port.beats] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert world.port.beats[0].stats["running"] == 0


def test_beats_come_while_a_forward_blocks():
    import threading

    release = threading.Event()
    beats = []

    class Slow(FakeRunner):
        def forward(self, plan):
            release.wait(60)
            return super().forward(plan)

    world = make_world()
    world.scheduler.runner = Slow(world.runner.info)

    def beat(message):
        beats.append(message)
        if len(beats) == 4:
            release.set()

    world.ask("a", prompt(1, 5), max_new_tokens=2)
    thread = threading.Thread(target=world.scheduler.run, args=(beat,))
    thread.start()
    assert release.wait(60)
    world.port.push(Control(id=1, op="shutdown"))
    thread.join(60)
    assert not thread.is_alive()
    assert len(beats) >= 4


# ── logs ─────────────────────────────────────────────────────────────────────


def test_log_lines(caplog):
    caplog.set_level(logging.INFO, "ceiba.scheduler")
    world = make_world(decode_log_interval=5)
    world.ask("a", prompt(1, 10), max_new_tokens=12, ignore_eos=True)
    world.finish()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == (
        "Prefill batch. #new-seq: 1, #new-token: 10, #cached-token: 0, token usage: 0.01, "
        "#running-req: 1, #queue-req: 0"
    )
    decode = [line for line in lines if line.startswith("Decode batch.")]
    assert len(decode) == 2
    assert "#running-req: 1, #token: 15, token usage: 0.01, cuda graph: False, gen throughput (token/s): " in decode[0]
    assert decode[0].endswith("#queue-req: 0")


@pytest.mark.parametrize("limit", [0, 1])
def test_a_burst_into_free_rows_does_not_fill_the_queue(limit: int) -> None:
    """Requests that come together and find a row each never wait, whatever the queue may hold."""
    world = make_world(rows=4, max_queued_requests=limit)
    for i in range(7):
        world.ask(f"r{i}", [1, 2, i], max_new_tokens=50, ignore_eos=True)
    world.step()
    refused = [rid for rid in world.asked if (answer := world.port.answers.get(rid)) and answer.finish]
    assert refused == [f"r{i}" for i in range(4 + limit, 7)]
    world.ask("late", [5], max_new_tokens=1)
    world.step()
    finish = world.port.answers["late"].finish
    assert finish is not None
    assert finish.status == 503
    world.finish()
    world.ask("after", [5], max_new_tokens=1)
    world.finish()
    assert world.port.answers["after"].finish.kind in {"stop", "length"}


def test_deadlines_of_requests_that_have_left_are_not_kept() -> None:
    """A queue timeout of hours must not keep every request of those hours."""
    world = make_world(queue_timeout=10_000.0)
    for i in range(300):
        world.ask(f"r{i}", [1, 2, 3], max_new_tokens=1)
        world.finish()
    assert len(world.scheduler.queue._deadlines) < 100


def test_a_name_used_again_has_its_own_deadline() -> None:
    world = make_world(rows=1, queue_timeout=5.0)
    world.now[0] = 100.0
    world.ask("same", [1, 2], max_new_tokens=1)
    world.finish()
    del world.port.answers["same"]
    world.now[0] = 103.0
    world.ask("runs", [4, 5], max_new_tokens=30, ignore_eos=True)
    world.step()
    world.ask("same", [1, 2], max_new_tokens=1, arrival=103.0)
    world.step()
    world.now[0] = 106.0
    world.finish()
    assert world.port.answers["same"].finish.kind in {"stop", "length"}
