"""The front without HTTP: what it sends, how it wakes readers, how it fits lengths."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from ceiba.core.errors import BadRequest, ConfigError, DeadlineExceeded, EngineFault, Overloaded, Unavailable
from ceiba.core.messages import Abort, Finish, Generate, TextBatch, TopLogprobs, Usage, ids_to_bytes
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.server.choices import Choice
from ceiba.server.front import Front
from ceiba.server.request import ChatPrompt, Chunk, EngineRequest, Input, TextPrompt
from support.fake_engine import ByteTokenizer, FakeEngine, PlainTemplate, make_config, text_for
from support.front_world import make_world, until


def request(*inputs: Input, **fields) -> EngineRequest:
    return EngineRequest(list(inputs), **{"rid": "r", **fields})


def text(prompt: str, **sampling) -> Input:
    return Input(TextPrompt(prompt), SamplingParams(**{"max_new_tokens": 4, **sampling}))


async def test_collect_gives_whole_choices_in_order():
    async with make_world() as world:
        first, second = text("a", seed=1), text("bc")
        first.n = 2
        got = await world.front.collect(request(first, second))
        prompts = [[97], [97], [98, 99]]
        assert [c.text for c in got] == [text_for(p, s)[:4] for p, s in zip(prompts, (1, 2, None), strict=True)]
        assert [c.prompt_tokens for c in got] == [1, 1, 2]
        assert [c.token_ids for c in got] == [[ord(x) for x in c.text] for c in got]
        assert all(c.finish.kind == "length" for c in got)


async def test_generate_streams_chunks_of_all_choices():
    async with make_world() as world:
        entry = text("a", seed=1)
        entry.n = 2
        said = {0: "", 1: ""}
        async for chunk in world.front.generate(request(entry, stream=True)):
            said[chunk.index] += chunk.text
        assert said == {0: text_for([97], 1)[:4], 1: text_for([97], 2)[:4]}


async def test_messages_carry_what_the_scheduler_needs():
    async with make_world() as world:
        before = time.monotonic()
        wanted = request(text("ab"), stream=True, cache_salt="s", routing_key="k")
        async for _ in world.front.generate(wanted):
            pass
        (message,) = [m for m in world.engine.received if isinstance(m, Generate)]
        assert (message.rid, message.stream, message.routing_key) == ("r#0", True, "k")
        assert message.input_ids == ids_to_bytes([97, 98])
        assert before <= message.arrival <= time.monotonic()
        assert message.namespace != request(text("x"), extra_key="s").namespace()


class Hand:
    """A port whose messages the test puts in itself."""

    def __init__(self) -> None:
        self.sent: list = []
        self.inbox: asyncio.Queue = asyncio.Queue()

    def to_scheduler(self, message) -> None:
        self.sent.append(message)

    async def receive(self):
        return await self.inbox.get()


def batch(entries, finish=()):
    """entries: (rid, text, tokens)"""
    return TextBatch(
        rids=[e[0] for e in entries],
        texts=[e[1] for e in entries],
        counts=ids_to_bytes([len(e[2]) for e in entries]),
        tokens=ids_to_bytes([t for e in entries for t in e[2]]),
        finishes={i: Finish(kind="stop") for i in finish},
    )


async def test_one_wake_up_per_request_and_step():
    port = Hand()
    front = Front(make_config(), ByteTokenizer(), PlainTemplate(), port)
    await front.start()
    entry = text("a")
    entry.n = 3
    generation = await front.submit(request(entry, stream=True))
    rids = [m.rid for m in port.sent]
    steps = []

    async def read():
        while chunks := await generation.next():
            steps.append([(c.index, c.text, c.tokens) for c in chunks])

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    port.inbox.put_nowait(batch([(rids[0], "x", [1]), ("stranger", "?", [9, 9]), (rids[2], "z", [2, 3])]))
    await until(lambda: steps)
    await asyncio.sleep(0.01)  # nor does a second wake-up follow
    assert steps == [[(0, "x", ids_to_bytes([1])), (2, "z", ids_to_bytes([2, 3]))]]
    port.inbox.put_nowait(batch([(rid, "", []) for rid in rids], finish=(0, 1, 2)))
    await asyncio.wait_for(reader, 20)
    assert len(steps) == 2
    assert front.num_live == 0
    await front.close()


async def test_a_chunk_after_the_end_reaches_nobody():
    port = Hand()
    front = Front(make_config(), ByteTokenizer(), PlainTemplate(), port)
    await front.start()
    generation = await front.submit(request(text("a")))
    port.inbox.put_nowait(batch([("r#0", "end", [1])], finish=(0,)))
    port.inbox.put_nowait(batch([("r#0", "late", [1])]))
    assert [c.text for c in await generation.next()] == ["end"]
    await asyncio.sleep(0.01)
    assert await generation.next() == []
    await front.close()


@pytest.mark.parametrize(
    "finish", [Finish(kind="stop", matched="."), Finish(kind="error", message="no text", status=500)]
)
async def test_a_name_that_the_detokenizer_ended_reaches_the_scheduler_under_another(finish):
    """The scheduler may not have heard of that end yet, and refuses a name that it still holds."""
    port = Hand()
    front = Front(make_config(), ByteTokenizer(), PlainTemplate(), port)
    await front.start()
    for _ in range(3):
        generation = await front.submit(request(text("a")))
        rid = port.sent[-1].rid
        port.inbox.put_nowait(
            TextBatch(rids=[rid], texts=["x"], counts=ids_to_bytes([0]), tokens=b"", finishes={0: finish})
        )
        assert [c.text for c in await generation.next()] == ["x"]
        generation.abort()
    names = [m.rid for m in port.sent if isinstance(m, Generate)]
    assert len(names) == len(set(names)) == 3
    await front.close()


async def test_a_request_that_cannot_be_sent_is_forgotten():
    """The second choice's message fails, so that the first is with the scheduler by then."""

    class Choosy(Hand):
        def to_scheduler(self, message):
            if isinstance(message, Generate) and message.rid == "r#1":
                raise ValueError("cannot be encoded")
            super().to_scheduler(message)

    port = Choosy()
    front = Front(make_config(), ByteTokenizer(), PlainTemplate(), port)
    await front.start()
    with pytest.raises(ValueError, match="cannot be encoded"):
        await front.submit(request(text("a"), text("b")))
    assert front.num_live == 0
    assert [type(m) for m in port.sent] == [Generate, Abort]
    assert "r#0" in port.sent[1].rids
    await front.submit(request(text("a")))
    await front.close()


async def test_what_no_context_can_hold_is_refused_without_tokenizing(monkeypatch):
    class Counting(ByteTokenizer):
        read = 0

        def encode_batch(self, texts, **options):
            Counting.read += sum(map(len, texts))
            return super().encode_batch(texts, **options)

    monkeypatch.setattr("ceiba.server.front.ENDLESS_CHARS", 100)
    front = Front(make_config(context=512), Counting(), PlainTemplate(), Hand())
    await front.start()
    # The longest token of this tokenizer, "<eos>", has 5 bytes.
    with pytest.raises(BadRequest, match="5121 characters") as caught:
        await front.submit(request(text("a" * (2 * 512 * 5 + 1))))
    assert (caught.value.code, Counting.read, front.num_live) == ("context_length_exceeded", 0, 0)
    with pytest.raises(BadRequest, match="alone has 5120"):
        await front.submit(request(text("a" * (2 * 512 * 5))))
    assert Counting.read == 5120
    await front.submit(request(text("a" * 500)))
    await front.close()


async def test_a_malformed_message_harms_nobody_else():
    port = Hand()
    front = Front(make_config(), ByteTokenizer(), PlainTemplate(), port)
    await front.start()
    generation = await front.submit(request(text("a")))
    port.inbox.put_nowait(TextBatch(rids=["r#0", "x"], texts=[], counts=b"\x01", tokens=b""))
    port.inbox.put_nowait(batch([("r#0", "fine", [1])], finish=(0,)))
    assert [c.text for c in await generation.next()] == ["fine"]
    await front.close()


async def test_a_port_that_breaks_fails_the_engine():
    class Broken(Hand):
        async def receive(self):
            message = await super().receive()
            raise ConnectionError(message)

    port = Broken()
    front = Front(make_config(), ByteTokenizer(), PlainTemplate(), port)
    await front.start()
    generation = await front.submit(request(text("a")))
    port.inbox.put_nowait("gone")
    with pytest.raises(Unavailable, match="gone"):
        await generation.next()
    assert front.health().state == "failed"
    with pytest.raises(Unavailable):
        front.open(request(text("a")))
    await front.close()


async def test_ids_must_be_printable():
    async with make_world() as world:
        for rid in ("a\r\nset-cookie: x", "a\x00", ""):
            with pytest.raises(BadRequest) as error:
                world.front.open(request(text("a"), rid=rid))
            assert error.value.param == "rid"


async def test_chat_prompts_render_without_http():
    async with make_world() as world:
        entry = Input(ChatPrompt([{"role": "user", "content": "x"}]), SamplingParams(max_new_tokens=1))
        (choice,) = await world.front.collect(request(entry))
        assert bytes(choice.prompt.tolist()) == b"<user>x\n<assistant>"


async def test_a_template_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr("ceiba.core.limits.TEMPLATE_SECONDS", -0.9)
    async with make_world() as world:
        entry = Input(ChatPrompt([{"role": "user", "content": "x"}], kwargs={"slow": 0.5}), SamplingParams())
        with pytest.raises(BadRequest, match="did not finish"):
            await world.front.submit(request(entry))
        assert world.front.num_live == 0


async def test_who_is_cancelled_just_as_a_template_ends_is_cancelled():
    """A batch that was cancelled went on, since ``asyncio.wait_for`` of Python 3.11 gave it the text instead."""
    async with make_world() as world:
        prompt = ChatPrompt([{"role": "user", "content": "x"}], kwargs={"slow": 0.05})
        rendering = asyncio.create_task(world.front.render(prompt))
        await asyncio.sleep(0.01)
        time.sleep(0.2)  # noqa: ASYNC251 - the thread is done, its news stand behind what the loop does now
        await asyncio.sleep(0)
        rendering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rendering


async def test_without_a_tokenizer_ids_work_and_text_is_refused():
    engine = FakeEngine()
    front = Front(make_config(), None, None, engine, vocab_size=257)
    engine.start()
    await front.start()
    (choice,) = await front.collect(request(Input(np.array([1, 2], np.int32), SamplingParams(max_new_tokens=2))))
    assert choice.completion_tokens == 2
    with pytest.raises(BadRequest, match="without a tokenizer"):
        await front.submit(request(text("a")))
    await front.close()
    await engine.stop()


def test_wrong_preferred_sampling_params_are_a_start_up_error():
    for wrong in ({"max_tokens": 4}, {"temperature": "hot"}):
        with pytest.raises(ConfigError, match="preferred-sampling-params"):
            Front(make_config(preferred_sampling_params=wrong), ByteTokenizer(), None, Hand())


async def test_preferred_lengths_shorten_to_what_fits():
    config = make_config(context=16, preferred_sampling_params={"max_new_tokens": 12, "stop": "#"})
    async with make_world(config) as world:
        for prompt, expected in (("ab", 12), ("abcdefgh", 8)):
            reply = await world.client.post("/v1/completions", json={"prompt": prompt})
            assert reply.json()["usage"]["completion_tokens"] == expected
        assert world.engine.received[-1].sampling.stop == ("#",)


def wire(values, top=0) -> TopLogprobs:
    floats = np.array(values, np.float32)
    ids = np.array([[7] * top for _ in values], np.int32)
    return TopLogprobs(values=floats.tobytes(), top=top, top_ids=ids.tobytes(), top_values=floats.repeat(top).tobytes())


def test_prompt_logprobs_that_come_in_pieces_are_joined():
    choice = Choice(0, np.arange(10, 16, dtype=np.int32), LogprobSpec(output=True, top=1, prompt_start=2))
    choice.feed(Chunk(index=0, text="", count=0, prompt_logprobs=wire([-1, -2], 2)))
    choice.feed(Chunk(index=0, text="", count=0, prompt_logprobs=wire([-3, -4], 2)))
    last = Chunk(
        index=0, text="a", count=1, tokens=ids_to_bytes([5]), logprobs=wire([-5], 2), finish=Finish(kind="stop")
    )
    choice.feed(last)
    assert choice.prompt_logprobs.ids.tolist() == [12, 13, 14, 15]
    assert choice.prompt_logprobs.values.tolist() == [-1, -2, -3, -4]
    assert choice.prompt_logprobs.top_ids.shape == (4, 1)
    assert choice.logprobs.ids.tolist() == [5]
    with pytest.raises(RuntimeError):
        choice.feed(last)


def test_the_finish_of_a_choice_is_kept_with_its_usage():
    choice = Choice(0, np.zeros(3, np.int32), LogprobSpec())
    usage = Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=1, queue_time=0.5)
    choice.feed(Chunk(index=0, text="a", count=1, tokens=ids_to_bytes([1]), usage=usage, finish=Finish(kind="stop")))
    assert (choice.cached_tokens, choice.queue_time, choice.completion_tokens) == (2, 0.5, 1)


@pytest.mark.parametrize(
    ("finish", "kind", "status"),
    [
        (Finish(kind="error", message="m", status=503), Overloaded, 503),
        (Finish(kind="error", message="m", status=504), DeadlineExceeded, 504),
        (Finish(kind="error", message="m", status=400), BadRequest, 400),
        (Finish(kind="error", message="m", status=500), EngineFault, 500),
        (Finish(kind="error", message="m"), EngineFault, 500),
        (Finish(kind="abort", message="m", status=503), Overloaded, 503),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_is_a_status(finish, kind, status, stream):
    async with make_world() as world:
        world.engine.faults["x#0"] = world.engine.faults["y#0"] = finish
        with pytest.raises(kind, match="m"):
            await world.front.collect(request(text("a"), rid="x"))
        body = {"prompt": "a", "rid": "y", "stream": stream}
        assert (await world.client.post("/v1/completions", json=body)).status_code == status
        assert world.front.num_live == 0
