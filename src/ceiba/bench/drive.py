"""Sends the jobs of a workload with its pacing and collects what became of each. Owns concurrency and arrival times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from ceiba.bench.client import Job, Outcome, Target, open_session, send

ARRIVAL_SEED = 7
Progress = Callable[[Outcome], None]


@dataclass(slots=True)
class Run:
    outcomes: list[Outcome]
    seconds: float


async def drive(
    target: Target,
    jobs: Sequence[Job],
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    arrival_seed: int = ARRIVAL_SEED,
    progress: Progress | None = None,
) -> Run:
    """Send all jobs. ``rate``: Poisson arrivals per second, None sends all at once; ``concurrency`` caps those in
    flight. Outcomes come in the order in which requests ended; seconds run from the first send to the last end."""
    outcomes: list[Outcome] = []
    gate = asyncio.Semaphore(concurrency or len(jobs) or 1)
    rng = random.Random(arrival_seed)
    async with open_session() as session:

        async def go(job: Job) -> None:
            async with gate:
                outcome = await send(session, target, job)
            outcomes.append(outcome)
            if progress is not None:
                progress(outcome)

        start = time.perf_counter()
        tasks = []
        for job in jobs:
            tasks.append(asyncio.create_task(go(job)))
            if rate:
                await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*tasks)
        return Run(outcomes, time.perf_counter() - start)


async def get_json(url: str, headers: dict[str, str] | None = None) -> dict[str, object]:
    """One GET; raises aiohttp.ClientError when the server does not answer with JSON."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
        session.get(url, headers=headers) as response,
    ):
        response.raise_for_status()
        data = await response.json()
        return data if isinstance(data, dict) else {}


async def post(url: str, headers: dict[str, str] | None = None) -> int:
    """One empty POST; returns the HTTP status."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
        session.post(url, headers=headers) as response,
    ):
        return response.status
