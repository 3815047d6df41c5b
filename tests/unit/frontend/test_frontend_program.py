"""Programs over a real HTTP server whose engine is the fake one: its text is a function of the prompt, token = byte."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

import ceiba as sgl
from ceiba.core.errors import BadRequest
from ceiba.core.messages import Generate, bytes_to_ids
from ceiba.frontend import as_backend
from ceiba.frontend.primitives import _PATTERNS
from ceiba.server.front import Front
from support.fake_engine import ByteTokenizer, FakeEngine, PlainTemplate, make_config, text_for
from support.http_server import serving, wait_until


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[str, FakeEngine]]:
    def make() -> tuple[Front, FakeEngine]:
        engine = FakeEngine()
        return Front(make_config(context=4096), ByteTokenizer(), PlainTemplate(), engine), engine

    with serving(make) as (url, engine):
        yield url, engine


@pytest.fixture
def engine(world: tuple[str, FakeEngine]) -> FakeEngine:
    world[1].received.clear()
    return world[1]


@pytest.fixture
def backend(world: tuple[str, FakeEngine]) -> Iterator[Any]:
    made = sgl.RuntimeEndpoint(world[0])
    yield made
    made.close()


def said(prompt: str, length: int) -> str:
    """What the fake engine writes after ``prompt``, greedy seeds aside."""
    return text_for(list(prompt.encode()), 0)[:length]


def prompts(engine: FakeEngine) -> list[str]:
    return [
        bytes_to_ids(m.input_ids).astype("u1").tobytes().decode() for m in engine.received if isinstance(m, Generate)
    ]


@sgl.function
def route(s: Any, question: str) -> str:
    s += sgl.system("be brief")
    s += sgl.user(question)
    s += sgl.assistant("It is: " + sgl.gen("answer", max_tokens=5, seed=0))
    s += sgl.user("and now?")
    s += sgl.assistant(sgl.gen("next", max_tokens=4, seed=0) + ".")
    return s["answer"]


def test_turns_are_the_templates_and_text_goes_on_from_what_was_said(backend: Any, engine: FakeEngine) -> None:
    state = route.run(question="why", backend=backend)
    first = "<system>be brief\n<user>why\n<assistant>It is: "
    answer = said(first, 5)
    second = first + answer + "\n<user>and now?\n<assistant>"
    assert prompts(engine) == [first, second]
    assert (state["answer"], state["next"], state.ret_value) == (answer, said(second, 4), answer)
    assert state.text() == second + state["next"] + "."
    assert state.messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "It is: " + answer},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": state["next"] + "."},
    ]
    meta = state.get_meta_info("next")
    assert meta["cached_tokens"] >= len(first)
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(second), 4)
    assert state.error() is None


def test_text_without_roles(backend: Any, engine: FakeEngine) -> None:
    @sgl.function
    def plain(s: Any) -> None:
        s += "a" + sgl.gen("x", max_tokens=2, seed=0) + "b"
        s += sgl.gen("y", max_tokens=2, seed=0, stop=["q"])

    state = plain.run(backend=backend)
    assert prompts(engine) == ["a", "a" + state["x"] + "b"]
    assert state.text() == "a" + state["x"] + "b" + state["y"]
    assert state.variables == {"x": state["x"], "y": state["y"]}


def test_roles_in_all_three_spellings(backend: Any) -> None:
    @sgl.function
    def one(s: Any) -> None:
        s += sgl.user("q")
        s += sgl.assistant("a" + sgl.gen("x", max_tokens=1, seed=0))

    @sgl.function
    def two(s: Any) -> None:
        s += sgl.user_begin() + "q" + sgl.user_end()
        s += sgl.assistant_begin()
        s += "a"
        s += sgl.gen("x", max_tokens=1, seed=0)
        s += sgl.assistant_end()

    @sgl.function
    def three(s: Any) -> None:
        s.user("q")
        with s.assistant():
            s += "a"
            s += sgl.gen("x", max_tokens=1, seed=0)

    texts = {program.run(backend=backend).text() for program in (one, two, three)}
    assert len(texts) == 1


def test_a_fork_sends_what_its_branches_share_first(backend: Any, engine: FakeEngine) -> None:
    shared = "<user>" + "shared words " * 20

    @sgl.function
    def tips(s: Any) -> None:
        s += sgl.user("shared words " * 20)
        forks = s.fork(3)
        forks += lambda i: sgl.assistant(f"tip {i}: " + sgl.gen("tip", max_tokens=3, seed=0))
        forks.join()
        s["cached"] = [fork.get_meta_info("tip")["cached_tokens"] for fork in forks]

    state = tips.run(backend=backend)
    sent = prompts(engine)
    assert sent[0] == shared
    expected = [f"{shared}\n<assistant>tip {i}: " for i in range(3)]
    assert sorted(sent[1:]) == expected
    assert state["tip"] == [said(prompt, 3) for prompt in expected]
    assert min(state["cached"]) >= len(shared)
    assert "tip" not in state.text()


def test_branches_run_at_the_same_time_and_can_be_concatenated(backend: Any, engine: FakeEngine) -> None:
    engine.step_seconds = 0.1  # a line takes a second
    try:

        @sgl.function
        def story(s: Any) -> None:
            s += "Once"
            with s.fork(4) as forks:
                for i, fork in enumerate(forks):
                    fork += f" {i}"
                    fork += sgl.gen("line", max_tokens=10, seed=0)
                    fork["mark"] = i
                wait_until(lambda: len(engine.live) == 4)
            s["after"] = 1
            forks.join("concatenate")

        state = story.run(backend=backend)
    finally:
        engine.step_seconds = 0.0
    parts = [f" {i}" + said(f"Once {i}", 10) for i in range(4)]
    assert state.text() == "Once" + "".join(parts)
    assert state["line"] == [said(f"Once {i}", 10) for i in range(4)]
    assert (state["mark"], state["after"]) == ([0, 1, 2, 3], 1)


def test_concatenated_turns_are_messages_of_the_parent(backend: Any) -> None:
    @sgl.function
    def both(s: Any) -> None:
        s += sgl.user("q")
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += sgl.assistant(f"a{i}" + sgl.gen("x", max_tokens=1, seed=0))
        forks.join("concatenate")
        s += sgl.user("next")

    messages = both.run(backend=backend).messages()
    assert [message["role"] for message in messages] == ["user", "assistant", "assistant", "user"]


def test_inherited_variables_are_not_gathered_and_changed_ones_are(backend: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s["kept"], s["changed"] = 1, 1
        with s.fork(2) as forks:
            for i, fork in enumerate(forks):
                assert fork["kept"] == 1
                fork["changed"] = i

    state = program.run(backend=backend)
    assert (state["kept"], state["changed"]) == (1, [0, 1])


def test_the_sum_of_the_scored_tokens_is_that_of_the_choices_own(backend: Any, engine: FakeEngine) -> None:
    @sgl.function
    def pick(s: Any) -> None:
        s += "ab"
        s += sgl.select("x", choices=["c", "cd", "e"])

    state = pick.run(backend=backend)
    assert prompts(engine) == ["abc", "abcd", "abe"]
    specs = [m.logprob.prompt_start for m in engine.received if isinstance(m, Generate)]
    assert specs == [2, 2, 2]
    meta = state.get_meta_info("x")
    assert [len(entry) for entry in meta["input_token_logprobs"]] == [1, 2, 1]
    means = [sum(value for value, *_ in entry) / len(entry) for entry in meta["input_token_logprobs"]]
    assert meta["normalized_prompt_logprobs"] == pytest.approx(means)
    best = max(range(3), key=means.__getitem__)
    assert state["x"] == ["c", "cd", "e"][best]
    assert state.text() == "ab" + state["x"]


def test_choices_of_gen_are_a_select(backend: Any) -> None:
    @sgl.function
    def pick(s: Any) -> None:
        s += "ab" + sgl.gen("x", choices=["c", "d"], choices_method=sgl.unconditional_likelihood_normalized)

    assert pick.run(backend=backend)["x"] in {"c", "d"}


def test_a_batch_keeps_its_order_and_an_error_stays_with_its_run(backend: Any) -> None:
    @sgl.function
    def count(s: Any, i: int) -> None:
        time.sleep(0.01 * (5 - i))
        if i == 2:
            raise ZeroDivisionError("two")
        s += f"n{i}"
        s += sgl.gen("x", seed=0)

    states = count.run_batch([{"i": i} for i in range(5)], backend=backend, max_new_tokens=3, progress_bar=True)
    assert [s.text() for i, s in enumerate(states) if i != 2] == [
        f"n{i}" + said(f"n{i}", 3) for i in range(5) if i != 2
    ]
    assert isinstance(states[2].error(), ZeroDivisionError)
    assert [s.error() for i, s in enumerate(states) if i != 2] == [None] * 4
    lazy = count.run_batch([0, 1], backend=backend, num_threads=1, generator_style=True, max_new_tokens=1)
    assert [s.text()[:2] for s in lazy] == ["n0", "n1"]
    assert count.run_batch([], backend=backend) == []
    with pytest.raises(TypeError, match="required argument: 'i'"):
        count.run_batch([{"question": 1}], backend=backend)


def test_streams_come_piece_by_piece(backend: Any) -> None:
    state = route.run(question="why", backend=backend, stream=True)
    pieces = list(state.text_iter("answer"))
    assert len(pieces) == 5
    assert "".join(pieces) == state["answer"] == said("<system>be brief\n<user>why\n<assistant>It is: ", 5)
    everything = "".join(state.text_iter())
    assert everything == "be briefwhyIt is: " + state["answer"] + "and now?" + state["next"] + "."

    async def read() -> list[str]:
        later = route.run(question="why", backend=backend, stream=True)
        return [piece async for piece in later.text_async_iter("next")]

    assert "".join(asyncio.run(read())) == state["next"]
    whole = route.run(question="why", backend=backend)
    assert list(whole.text_iter("answer")) == [whole["answer"]]


def test_errors_reach_whoever_asks(backend: Any) -> None:
    @sgl.function
    def wrong(s: Any) -> None:
        s += "a"
        s += sgl.gen("x", temperature=-1)

    with pytest.raises(BadRequest, match="temperature"):
        wrong.run(backend=backend)
    state = wrong.run(backend=backend, stream=True)
    with pytest.raises(BadRequest, match="temperature"):
        list(state.text_iter("x"))
    with pytest.raises(BadRequest, match="temperature"):
        _ = state["x"]

    @sgl.function
    def branch(s: Any) -> None:
        s += "a"
        forks = s.fork(2)
        forks[0] += sgl.gen("x", temperature=-1)
        forks[0] += sgl.gen("y", max_tokens=1)
        forks[1] += sgl.gen("x", max_tokens=1)
        with pytest.raises(BadRequest, match="temperature"):
            _ = forks[0]["y"]
        assert len(forks[1]["x"]) == 1
        forks.join()

    with pytest.raises(BadRequest, match="temperature"):
        branch.run(backend=backend)
    with pytest.raises(KeyError, match="nothing"):
        _ = route.run(question="q", backend=backend)["nothing"]


def test_what_cannot_work_is_refused_before_it_runs() -> None:
    for bad in (
        lambda: sgl.gen("x", regex="a", choices=["a"]),
        lambda: sgl.gen("x", dtype=list),
        lambda: sgl.gen("x", choices_method=sgl.token_length_normalized),
        lambda: sgl.select("x"),
        lambda: sgl.select("x", choices=["a", ""]),
        lambda: sgl.select("x", choices=["a"], temperature=1.0),
        lambda: as_backend(3),
    ):
        with pytest.raises(BadRequest):
            bad()
    with pytest.raises(BadRequest, match="set_default_backend"):
        route.run(question="x")
    with pytest.raises(TypeError, match="question"):
        route.run(backend="http://127.0.0.1:9")
    with pytest.raises(TypeError, match=r"route\.run"):
        route("why")


def test_the_default_backend_and_bound_arguments(world: tuple[str, FakeEngine]) -> None:
    sgl.set_default_backend(world[0])
    try:
        assert route.bind(question="why").run()["answer"] == route.run("why")["answer"]
        assert "served_model_name" in sgl.get_server_info()
        assert sgl.flush_cache()["success"]
    finally:
        sgl.set_default_backend(None)


def test_a_program_inside_a_program(backend: Any) -> None:
    @sgl.function
    def ask(s: Any, what: str) -> str:
        s += what + sgl.gen("x", max_tokens=1, seed=0)
        return s["x"]

    @sgl.function
    def outer(s: Any) -> None:
        s["first"] = ask(s, "a")
        ask(s, what="b")

    state = outer.run(backend=backend)
    assert state.text() == "a" + state["first"] + "b" + state["x"]


def test_copies_and_scopes_leave_the_state_alone(backend: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a"
        with s.copy() as trial:
            trial += "b" + sgl.gen("x", max_tokens=1, seed=0)
            assert trial["x"] == said("ab", 1)
        with s.var_scope("part"):
            s += "c" + sgl.gen("y", max_tokens=1, seed=0)

    state = program.run(backend=backend)
    assert (state["part"], state.text()) == ("c" + state["y"], "ac" + state["y"])
    assert "x" not in state


class Point(BaseModel):
    x: int


class Recording:
    """A backend that notes what it is asked and answers from a list."""

    messages_only = False

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.asked: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self.lock = threading.Lock()

    def seam(self, roles: tuple[str, ...]) -> str:
        return f"<{roles[-1]}>"

    def generate(self, prompt: Any, sampling: Any, fields: Any) -> Any:
        from ceiba.frontend.backends.base import Result

        with self.lock:
            self.asked.append((prompt, dict(sampling), dict(fields)))
            return Result(self.texts.pop(0))

    def score(self, *args: Any) -> Any:
        raise AssertionError


def test_constraints_reach_the_backend_and_parsed_reads_them() -> None:
    backend = Recording("-12", "3.5", "True", '"a b"', '{"x": 1}', "oops")

    @sgl.function
    def program(s: Any) -> None:
        s += "a"
        s += sgl.gen_int("i") + sgl.gen("f", dtype=float) + sgl.gen("b", dtype="bool") + sgl.gen_string("t")
        s += sgl.gen("j", json_schema=Point)
        s += sgl.gen("bad", dtype=int, return_logprob=True)

    state = program.run(backend=backend, temperature=0.5)
    assert [state.parsed(name) for name in "ifbtj"] == [-12, 3.5, True, "a b", {"x": 1}]
    assert state["i"] == "-12"
    with pytest.raises(BadRequest, match="oops"):
        state.parsed("bad")
    sampling = [entry[1] for entry in backend.asked]
    assert [s.get("regex") for s in sampling] == [_PATTERNS[k] for k in (int, float, bool, str)] + [
        None,
        _PATTERNS[int],
    ]
    assert '"x"' in sampling[4]["json_schema"]
    assert all(s["temperature"] == 0.5 for s in sampling)
    assert backend.asked[-1][2] == {"return_logprob": True}


def test_images_make_messages() -> None:
    backend = Recording("cat", "dog")
    picture = b"\x89PNG\r\n\x1a\n0"

    @sgl.function
    def look(s: Any) -> None:
        s += sgl.user(sgl.image(picture) + "What is it?")
        s += sgl.assistant(sgl.gen("x"))
        s += sgl.user("Sure?")
        s += sgl.assistant("It is a " + sgl.gen("y"))

    look.run(backend=backend)
    first, second = (entry[0] for entry in backend.asked)
    assert [part["type"] for part in first.messages[0]["content"]] == ["image_url", "text"]
    assert first.messages[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert (len(first.messages), first.continued) == (1, False)
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user", "assistant"]
    assert (second.messages[-1]["content"], second.continued) == ("It is a ", True)
    with pytest.raises(BadRequest, match="belongs into a turn"):
        sgl.function(lambda s: s.__iadd__(sgl.image(picture))).run(backend=backend)
