"""The real scheduler on a strict fake runner, and an oracle that computes a request's tokens in plain Python."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from ceiba.cache.ledger import assert_ledger
from ceiba.config.records import SchedulerConfig
from ceiba.core.messages import Abort, Control, Generate, Reply, ids_to_bytes
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.core.step import RunnerInfo
from ceiba.scheduler.fake import MULTIPLIER, FakeRunner
from ceiba.scheduler.loop import Scheduler
from ceiba.scheduler.memory_port import Answer, MemoryPort

MASK = (1 << 64) - 1
VOCAB = 50
EOS = (3, 4)


def mix(h: int) -> int:
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & MASK
    return h ^ (h >> 31)


def oracle(
    prompt: list[int], sampling: SamplingParams, *, limit: int, vocab: int = VOCAB, eos: tuple[int, ...] = EOS
) -> tuple[list[int], str]:
    """Tokens and finish kind of a request that runs alone; ``limit``: prompt and output together."""
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    state, power, out = 0, 1, []
    for token in prompt:
        state, power = (state + (token + 1) * power) & MASK, power * MULTIPLIER & MASK
    while len(prompt) + len(out) < limit and len(out) < sampling.max_new_tokens:
        token = mix(state) % vocab
        while token in ends and len(out) < sampling.min_new_tokens:
            token = (token + 1) % vocab
        out.append(token)
        if token in ends:
            return out, "stop"
        state, power = (state + (token + 1) * power) & MASK, power * MULTIPLIER & MASK
    return out, "length"


def continued(tokens: np.ndarray, count: int) -> np.ndarray:
    """What the fake model would say next, ends and all: the answers of a ``FakeDrafter``."""
    if not count:
        return np.empty(0, np.int32)
    free = SamplingParams(max_new_tokens=count, ignore_eos=True)
    return np.array(oracle(tokens.tolist(), free, limit=len(tokens) + count)[0], np.int32)


@dataclass
class World:
    scheduler: Scheduler
    runner: FakeRunner
    port: MemoryPort
    now: list[float]
    asked: dict[str, tuple[list[int], SamplingParams]] = field(default_factory=dict)

    def ask(self, rid: str, prompt: object, *, logprob: LogprobSpec | None = None, **fields: object) -> str:
        """Send a request; ``fields`` go to ``SamplingParams`` or ``Generate``, whichever has them."""
        own = {name: fields.pop(name) for name in list(fields) if name in Generate.__struct_fields__}
        sampling = SamplingParams(**fields)  # type: ignore[arg-type]
        ids = np.array(prompt, np.int32)
        self.asked[rid] = (ids.tolist(), sampling)
        self.port.push(
            Generate(rid=rid, input_ids=ids_to_bytes(ids), sampling=sampling, logprob=logprob or LogprobSpec(), **own)
        )
        return rid

    def abort(self, *rids: str, **fields: object) -> None:
        self.port.push(Abort(rids=list(rids), **fields))  # type: ignore[arg-type]

    def control(self, op: str) -> Reply:
        self.port.push(Control(id=len(self.port.replies), op=op))
        self.step()
        return self.port.replies[-1]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.scheduler.step(wait=0.0)
            assert_ledger(self.scheduler.leases)

    def finish(self, rounds: int = 5000) -> None:
        """Step until idle; then the books must balance and every request must have ended."""
        stalled = 0
        for _ in range(rounds):
            before = self.scheduler.counters.forwards
            self.step()
            if self.scheduler.idle and not self.port.inbox:
                break
            stalled = 0 if self.scheduler.counters.forwards > before else stalled + 1
            assert stalled < 5, f"stalled: {self.scheduler.admission.describe()}"
        else:
            raise AssertionError(f"{rounds} rounds were not enough: {self.scheduler.admission.describe()}")
        assert_ledger(self.scheduler.leases, idle=True)

    def answer(self, rid: str) -> Answer:
        return self.port.answers[rid]

    def check(self, rid: str) -> None:
        """The answer is exactly what the request gets alone."""
        prompt, sampling = self.asked[rid]
        tokens, kind = oracle(prompt, sampling, limit=self.scheduler.intake.max_len)
        answer = self.answer(rid)
        assert answer.tokens == tokens, f"{rid}: {answer.tokens} instead of {tokens}"
        assert answer.finish is not None
        assert (answer.finish.kind, answer.opened) == (kind, 1)
        assert answer.usages[-1].completion_tokens == len(tokens)
        assert answer.usages[-1].prompt_tokens == len(prompt)


def make_world(
    *,
    pool: int = 1000,
    rows: int = 16,
    context: int = 120,
    page: int = 1,
    eager: bool = False,
    grammar=None,
    drafter=None,
    **config,
) -> World:
    """``config`` are fields of ``SchedulerConfig``."""
    info = RunnerInfo(num_slots=pool, max_rows=rows, vocab_size=VOCAB, context_len=context, page_size=page, eos_ids=EOS)
    runner, port, now = FakeRunner(info, eager=eager), MemoryPort(), [0.0]
    settings = SchedulerConfig(**{"max_running_requests": rows, "page_size": page, **config})
    scheduler = Scheduler(settings, runner, port, clock=lambda: now[0], grammar=grammar, drafter=drafter)
    return World(scheduler, runner, port, now)


def prompt(seed: int, length: int) -> list[int]:
    """A random prompt."""
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def settle(world: World) -> None:
    """Real compiles take real time, in which the scheduler only looks at its mailbox."""
    for _ in range(20_000):
        world.step()
        if world.scheduler.idle and not world.port.inbox:
            assert_ledger(world.scheduler.leases, idle=True)
            return
        if len(world.scheduler.compiling):
            time.sleep(0.001)
    raise AssertionError(world.scheduler.admission.describe())
