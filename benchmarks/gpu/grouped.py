"""Which rows a block and which tiles the experts' grouped products should take, by tokens of a step, under even and
uneven routing, at the shape of Qwen3-30B-A3B. Prints a table beside the floor that bytes and operations set, then the
lines of ``kernels.triton.moe.TILES`` that follow from it; ``--write`` puts them there. Under a minute on one H200.

    PYTHONPATH=src python benchmarks/gpu/grouped.py [--tokens 512,1536] [--skew 1.6] [--rows 64,128] [--write]

Uneven: experts' scores differ by a normal deviate times ``--skew``; with 1.6 the fullest of 128 gets ten times the
mean, as the router of random weights does. Rows: what blocks compute over what there is to compute, and in how many
blocks. Each candidate of one product is timed beside the standard tile of the other, then the two best together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from math import inf
from pathlib import Path

import numpy as np
import torch
from kernels import BANDWIDTH, BF16, FLOPS, attempt, rand
from timing import replay_us

from ceiba.kernels.triton import moe as moe_source
from ceiba.kernels.triton.launch import compile_only
from ceiba.kernels.triton.moe import TILES, GroupedShape, grouped_shapes, moe

EXPERTS, DIM, INNER, TOP_K = 128, 2048, 768, 8
SHARED_MEMORY = 227 * 1024
NEAR = 1.02
"""A choice within so much of the best is kept, from one number of tokens to the next (fewer kernels to compile) or as
the table has it."""

DECLARED = "TILES: tuple[tuple[float, GroupedShape, GroupedShape], ...]"

Pair = tuple[GroupedShape, GroupedShape]

CANDIDATES: dict[int, tuple[tuple[GroupedShape, ...], tuple[GroupedShape, ...]]] = {
    32: (
        (GroupedShape(32, 64, 128, 3, 4), GroupedShape(32, 128, 64, 4, 4), GroupedShape(32, 128, 64, 3, 4)),
        (GroupedShape(32, 64, 128, 3, 4), GroupedShape(32, 128, 64, 4, 4), GroupedShape(32, 128, 128, 3, 4)),
    ),
    64: (
        (
            GroupedShape(64, 128, 64, 4, 4),
            GroupedShape(64, 128, 64, 4, 4, copies=True),
            GroupedShape(64, 128, 64, 4, 8, copies=True),
            GroupedShape(64, 128, 64, 3, 8),
            GroupedShape(64, 64, 64, 4, 4, copies=True),
            GroupedShape(64, 64, 128, 3, 4),
            GroupedShape(64, 128, 64, 2, 4, copies=True),
            GroupedShape(64, 256, 64, 3, 8, copies=True),
        ),
        (
            GroupedShape(64, 256, 64, 3, 4),
            GroupedShape(64, 256, 64, 4, 8, copies=True),
            GroupedShape(64, 256, 64, 3, 8),
            GroupedShape(64, 128, 64, 4, 4, copies=True),
            GroupedShape(64, 128, 128, 3, 4),
            GroupedShape(64, 256, 64, 2, 4),
            GroupedShape(64, 512, 64, 3, 8),
            GroupedShape(64, 128, 64, 3, 4, copies=True),
        ),
    ),
    128: (
        (
            GroupedShape(128, 128, 64, 4, 8, copies=True),
            GroupedShape(128, 128, 64, 3, 8, copies=True),
            GroupedShape(128, 128, 64, 4, 8),
            GroupedShape(128, 64, 64, 3, 4, copies=True),
            GroupedShape(128, 64, 64, 4, 8, copies=True),
        ),
        (
            GroupedShape(128, 256, 64, 3, 8),
            GroupedShape(128, 256, 64, 4, 8, copies=True),
            GroupedShape(128, 128, 64, 3, 4),
            GroupedShape(128, 128, 64, 3, 4, copies=True),
            GroupedShape(128, 128, 64, 4, 8, copies=True),
            GroupedShape(128, 128, 128, 2, 8),
        ),
    ),
}
"""By rows of a block: tiles of the gate-up product and of the down product, the standard ones first. Those that leave
room for a second block on a multiprocessor hide one's beginning and end behind the other's products."""


def variants(rows: int, which: int) -> Iterable[GroupedShape]:
    """The tiles that fit a multiprocessor, those of 128 rows also with halves."""
    for tile in CANDIDATES[rows][which]:
        if (rows + tile.columns * (2 - which)) * tile.depth * 2 * tile.stages <= SHARED_MEMORY:
            yield tile
            if rows == 128:
                yield replace(tile, halves=True)


def spelled(tile: GroupedShape) -> str:
    *sizes, copies, halves = astuple(tile)
    flags = ", copies=True" * copies + ", halves=True" * halves
    return f"GroupedShape({', '.join(map(str, sizes))}{flags})"


def choose(rng: np.random.Generator, tokens: int, skew: float) -> np.ndarray:
    """int32 [tokens, TOP_K]: distinct experts."""
    scores = rng.normal(size=EXPERTS)[None] * skew + rng.gumbel(size=(tokens, EXPERTS))
    return np.argpartition(-scores, TOP_K, axis=1)[:, :TOP_K].astype(np.int32)


@dataclass
class Case:
    """A number of tokens under one kind of routing."""

    tokens: int
    skew: float
    copies: int = 3

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.tokens)
        ids = [choose(rng, self.tokens, self.skew) for _ in range(self.copies)]
        self.counts = [np.bincount(chosen.ravel(), minlength=EXPERTS) for chosen in ids]
        self.ids = [torch.from_numpy(chosen).cuda() for chosen in ids]
        self.weights = torch.rand(self.tokens, TOP_K, device="cuda")
        self.x = rand(self.tokens, DIM)

    def us(self, layers: list[tuple[torch.Tensor, torch.Tensor]], pair: Pair) -> float:
        def call(turn: int) -> object:
            return moe(self.x, *layers[turn], self.ids[turn], self.weights, self.x, shapes=pair)

        return attempt(lambda: replay_us([lambda turn=turn: call(turn) for turn in range(self.copies)], replays=3))

    @property
    def floor(self) -> float:
        used = float(np.mean([(count > 0).sum() for count in self.counts]))
        moved, done = used * 3 * INNER * DIM * 2, self.tokens * TOP_K * 6 * INNER * DIM
        return max(moved / BANDWIDTH, done / FLOPS) * 1e6

    def padding(self, rows: int) -> tuple[float, float]:
        """(rows computed over rows there are, blocks) for blocks of ``rows``."""
        blocks = float(np.mean([(-(-count // rows)).sum() for count in self.counts]))
        return blocks * rows / (self.tokens * TOP_K), blocks


def fits(rows: int, tokens: int) -> bool:
    """Whether blocks of ``rows`` may be right for ``tokens``."""
    mean = tokens * TOP_K / EXPERTS
    return {32: mean <= 100, 64: mean >= 16, 128: mean >= 30}[rows]


def compile_all(rows: list[int], layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    case, begun = Case(512, 0.0, copies=1), time.perf_counter()
    with compile_only(16):
        for size in rows:
            firsts, seconds = list(variants(size, 0)), list(variants(size, 1))
            pairs = [(first, seconds[0]) for first in firsts] + [(firsts[0], second) for second in seconds]
            for pair in pairs:
                moe(case.x, *layers[0], case.ids[0], case.weights, case.x, shapes=pair)
    print(f"compiled in {time.perf_counter() - begun:.1f} s", flush=True)


def search(case: Case, rows: int, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[Pair, float]:
    """Microseconds of the pairs tried."""
    standard = (CANDIDATES[rows][0][0], CANDIDATES[rows][1][0])
    found: dict[Pair, float] = {}
    for which in (0, 1):
        for tile in variants(rows, which):
            pair = (tile, standard[1]) if which == 0 else (standard[0], tile)
            if pair not in found:
                found[pair] = case.us(layers, pair)
    first = min((pair for pair in found if pair[1] == standard[1]), key=found.__getitem__)[0]
    second = min((pair for pair in found if pair[0] == standard[0]), key=found.__getitem__)[1]
    found[first, second] = case.us(layers, (first, second))
    if rows == 128:  # whether halves pay depends on the routing: the best pair with and without them
        for halves in (False, True):
            pair = (replace(first, halves=halves), replace(second, halves=halves))
            found[pair] = case.us(layers, pair)
    return found


def measure(case: Case, rows: list[int], layers: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[Pair, float]:
    """Microseconds of every pair tried with blocks of ``rows``, and of the present choice; prints a line for each."""
    standard = grouped_shapes(case.tokens * TOP_K, EXPERTS)
    found = {standard: case.us(layers, standard)}
    for size in rows:
        mine = search(case, size, layers)
        found |= mine
        best = min(mine, key=mine.__getitem__)
        padded, blocks = case.padding(size)
        print(
            f"{case.tokens:5d} tokens {'uneven' if case.skew else 'even':6s} blocks of {size:3d}: {mine[best]:7.1f} us"
            f"  {mine[best] / case.floor:4.2f} x floor  now {found[standard]:7.1f}  rows {padded:4.2f} x"
            f"  {blocks:4.0f} blocks  {spelled(best[0])} {spelled(best[1])}",
            flush=True,
        )
    return found


def decide(times: dict[int, list[dict[Pair, float]]]) -> list[tuple[int, Pair]]:
    """For each number of tokens the pair with the least sum, over the routings, of time over the best time; the one
    before it or the table's where that is within ``NEAR``."""
    chosen: list[tuple[int, Pair]] = []
    for tokens, kinds in times.items():
        common = set(kinds[0]).intersection(*kinds[1:])
        score = {pair: sum(kind[pair] / min(kind.values()) for kind in kinds) for pair in common}
        best = min(score, key=score.__getitem__)
        kept = [chosen[-1][1]] if chosen else []
        kept.append(grouped_shapes(tokens * TOP_K, EXPERTS))
        chosen.append((tokens, next((pair for pair in kept if score.get(pair, inf) <= NEAR * score[best]), best)))
    return chosen


def table(chosen: list[tuple[int, Pair]]) -> str:
    """``TILES`` as source: what lies below the least number of tokens as it is, then the choices, whose borders lie
    between two numbers of tokens that differ."""
    least = chosen[0][0] * TOP_K / EXPERTS
    lines = [(str(most), (first, second)) for most, first, second in TILES if most < least]
    for at, (tokens, pair) in enumerate(chosen):
        last = at + 1 == len(chosen)
        if last or chosen[at + 1][1] != pair:
            border = "inf" if last else str(round((tokens * chosen[at + 1][0]) ** 0.5 * TOP_K / EXPERTS))
            lines.append((border, pair))
    rows = [f"    ({border}, {spelled(first)}, {spelled(second)}),\n" for border, (first, second) in lines]
    return f"{DECLARED} = (\n{''.join(rows)})\n"


def write(source: Path, text: str) -> None:
    """Put the table in place of the one in ``source``."""
    before = source.read_text()
    begin = before.index(f"{DECLARED} = (\n")
    end = before.index("\n)\n", begin) + 3
    source.write_text(before[:begin] + text + before[end:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="160,256,512,768,1024,1536,2048,3072,4096,8192")
    parser.add_argument("--rows", default="32,64,128")
    parser.add_argument("--skew", type=float, default=1.6)
    parser.add_argument("--write", action="store_true", help="put the table into the source")
    options = parser.parse_args()
    rows = [int(size) for size in options.rows.split(",")]
    begun = time.perf_counter()
    layers = [(rand(EXPERTS, 2 * INNER, DIM) * 0.05, rand(EXPERTS, DIM, INNER) * 0.05) for _ in range(3)]
    compile_all(rows, layers)
    times: dict[int, list[dict[Pair, float]]] = {}
    for tokens in map(int, options.tokens.split(",")):
        cases = [Case(tokens, skew) for skew in (0.0, options.skew)]
        times[tokens] = [measure(case, [size for size in rows if fits(size, tokens)], layers) for case in cases]
        for case, found in zip(cases, times[tokens], strict=True):  # what is best under one routing, under the other
            best = {pair for kind in times[tokens] for pair in sorted(kind, key=kind.__getitem__)[:4]}
            found |= {pair: case.us(layers, pair) for pair in best - set(found)}
        del cases
        torch.cuda.empty_cache()
    chosen = decide(times)
    for tokens, pair in chosen:
        standard = grouped_shapes(tokens * TOP_K, EXPERTS)
        gains = "  ".join(f"{kind[standard]:.0f} to {kind[pair]:.0f} us" for kind in times[tokens])
        print(f"{tokens:5d} tokens, even and uneven: {gains}")
    print(table(chosen), end="")
    if options.write:
        write(Path(moe_source.__file__), table(chosen))
    print(f"-- {time.perf_counter() - begun:.0f} s on {torch.cuda.get_device_name()}, {BF16}")


if __name__ == "__main__":
    main()
