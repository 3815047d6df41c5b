"""Build the CPU kernels by themselves, check every instruction set of this machine against float64, and time it.

Needs g++ (12 or later), cmake, numpy and nanobind; nothing else of Ceiba. ``python benchmarks/cpu/units.py`` builds
into a temporary folder, ``--module`` takes a built extension instead. ``--emulate`` adds the unit of matrix tiles, with
them in plain C++, so that all around them is checked on a machine without them. Exits with 1 if a product is off
by more than the bound of its family, or a row has other bits in company than alone (of a unit with tiles: where a fixed
order is asked for), or packed weights give other bits than the AVX2 unit does.

Bounds are relative to the size that the products have before they cancel: plain weights 1e-6, packed weights 1e-4, with
int8 activations 2e-2, bfloat16 on tiles 4e-3. Attention is held against float64 too: float32 1e-5, on tiles 3e-2, of
values of size 1 and scores of size 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
KINDS = {  # columns and bytes of a block, offsets of its half-precision scales
    "F32": (1, 4, ()), "BF16": (1, 2, ()), "Q4_0": (32, 18, (0,)), "Q4_1": (32, 20, (0, 2)), "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)), "Q8_0": (32, 34, (0,)), "Q4_K": (256, 144, (0, 2)), "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}  # fmt: skip
PLAIN, TILES, WIDE, INT8 = 1e-6, 4e-3, 1e-4, 2e-2


def build(folder: Path, emulate: bool) -> Any:
    """Configure and compile the extension into ``folder``; returns the module."""
    import nanobind

    flags = [
        "-DSKBUILD_PROJECT_NAME=ceiba", f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}", f"-DCEIBA_EMULATED_UNITS={'ON' if emulate else 'OFF'}",
    ]  # fmt: skip
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(folder), *flags], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder), "-j2"], check=True, stdout=subprocess.DEVNULL)
    (path,) = folder.rglob("_cpu*.so")
    return load(path)


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("_cpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_source(kind: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, row bytes] of a type: random codes with tame scales, or random values."""
    block_cols, block_bytes, scales = KINDS[kind]
    values = rng.normal(size=(rows, cols)).astype(np.float32)
    if kind == "F32":
        return values.view(np.uint8)
    if kind == "BF16":
        return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
    data = rng.integers(0, 256, (rows, cols // block_cols, block_bytes), dtype=np.uint8)
    for at in scales:
        chosen = (rng.normal(size=data.shape[:2]) * 0.02).astype(np.float16)
        data[..., at : at + 2] = chosen[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def packed(module: Any, kind: str, rows: int, cols: int, rng: np.random.Generator) -> Any:
    source = random_source(kind, rows, cols, rng)
    out = np.empty(module.packed_size(kind, rows, cols) + 64, np.uint8)
    out = out[-out.ctypes.data % 64 :][: module.packed_size(kind, rows, cols)]
    module.pack(module.Context(1, "generic"), kind, source, cols, out)
    return module.PackedMatrix(kind, rows, cols, out)


def check(module: Any, isa: str, kind: str, rng: np.random.Generator) -> list[str]:
    """Lines for the products of a unit that are wrong."""
    rows, cols, wrong = 40, 512 + (32 if KINDS[kind][0] < 256 else 256), []
    matrix = packed(module, kind, rows, cols, rng)
    quantized, tiles = KINDS[kind][0] > 1, module.Context(1, isa).tiles
    contexts = [module.Context(2, isa, fixed_order=fixed) for fixed in (False, True)]
    weight = np.empty((rows, cols), np.float32)
    module.lookup(module.Context(1, "generic"), matrix, np.arange(rows), weight)
    known = "avx2" if isa != "generic" and quantized and "avx2" in module.instruction_sets() else None
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 20, 33, 48, 300):
        x = rng.normal(size=(m, cols)).astype(np.float32)
        expected = x.astype(np.float64) @ weight.T.astype(np.float64)
        size = np.linalg.norm(np.sqrt(x.astype(np.float64) ** 2 @ weight.T.astype(np.float64) ** 2))
        for int8, fixed in itertools.product((False, True), (False, True) if tiles or not quantized else (False,)):
            out = np.full((m, rows), np.nan, np.float32)
            module.linear(contexts[fixed], matrix, x, out, int8)
            error = np.linalg.norm(out - expected) / size
            name = f"{isa} {kind} {m} rows{' int8' if int8 else ''}{' fixed' if fixed else ''}"
            bound = (INT8 if int8 else WIDE) if quantized else PLAIN
            if tiles and not fixed and kind != "F32":
                bound = max(bound, TILES)
            if not error < bound:
                wrong.append(f"{name}: error {error:.1e}, bound {bound:.0e}")
            same = fixed or not tiles
            if known and same:
                module.linear(module.Context(1, known), matrix, x, agreed := np.empty_like(out), int8)
                if not np.array_equal(agreed, out):
                    wrong.append(f"{name}: other bits than {known}")
            for part in (slice(0, 1), slice(m // 2, m // 2 + 3)) if same else ():
                alone = np.empty_like(out[part])
                module.linear(contexts[fixed], matrix, x[part], alone, int8)
                if not np.array_equal(alone, out[part]):
                    wrong.append(f"{name}: rows {part.start} to {part.stop} have other bits in other company")
    return wrong


def check_attention(module: Any, isa: str, kv: str, rng: np.random.Generator) -> list[str]:
    """Lines for the attention of a unit that are wrong: prompts beside decoding, with and without a prefix that
    the decoding segments share."""
    wrong, slots, tiles = [], 3000, module.Context(1, isa).tiles
    shapes = [(6, 2, 64), (16, 2, 32), (4, 4, 96), (8, 1, 128), (9, 3, 256)]
    chunks = [[(0, 1)], [(0, 5), (3, 129)], [(0, 70)], [(300, 33)], [(511, 2), (0, 40)], [(700, 257)], []]
    for (heads, kv_heads, dim), prefill in zip(itertools.cycle(shapes), chunks, strict=False):
        decode = [int(value) for value in rng.integers(256, 700, 5)]
        starts = np.array([start for start, _ in prefill] + decode, np.int32)
        lengths = np.array([length for _, length in prefill] + [1] * len(decode), np.int32)
        ends, first = starts + lengths, len(prefill)
        table = np.stack([rng.permutation(slots)[: ends.max()] for _ in ends]).astype(np.int32)
        table[first:, :256] = table[first, :256]
        pools = [rng.normal(size=(slots, kv_heads, dim)).astype(np.float32) for _ in range(2)]
        if kv == "bfloat16":
            pools = [np.ascontiguousarray(pool.view(np.uint16)[..., 1::2]) for pool in pools]
        exact = [np.repeat(floats(pool).astype(np.float64), heads // kv_heads, 1) for pool in pools]
        q = (rng.normal(size=(lengths.sum(), heads, dim)) * 2).astype(np.float32)
        expected, at = np.empty(q.shape), 0
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            k, v = (pool[table[row, : start + length]] for pool in exact)
            scores = np.einsum("qhd,khd->hqk", q[at : at + length].astype(np.float64), k) * dim**-0.5
            scores += np.triu(np.full((length, start + length), -np.inf), start + 1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected[at : at + length] = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
            at += length
        places = np.concatenate([table[i, starts[i] : ends[i]] for i in range(len(ends))]).astype(np.int64)
        covered = np.where(np.arange(len(ends)) < first, 0, 256).astype(np.int32)
        members = np.arange(first, len(ends), dtype=np.int32)
        shared = module.Groups(*(np.array([value], np.int32) for value in (0, 256, 0, len(members))), members, covered)
        for fixed, groups in itertools.product((False, True), (None, shared)):
            out = np.full_like(q, np.nan)
            module.attention(
                module.Context(2, isa, fixed_order=fixed), q, None, None, *(pool.ctypes.data for pool in pools), slots,
                kv_heads, kv, dim**-0.5, np.arange(len(ends), dtype=np.int32), starts, lengths, first, table, places,
                groups, out,
            )  # fmt: skip
            error = float(np.abs(out - expected).max())
            bound = 3e-2 if tiles and not fixed and kv != "float32" else 1e-5
            if not error < bound:
                name = f"{isa} attention {kv} {heads}/{kv_heads}/{dim} {prefill}{' fixed' if fixed else ''}"
                wrong.append(f"{name}{' shared' if groups else ''}: error {error:.1e}, bound {bound:.0e}")
    return wrong


def floats(pool: np.ndarray) -> np.ndarray:
    """A pool as float32."""
    return pool if pool.dtype == np.float32 else (pool.astype(np.uint32) << 16).view(np.float32)


def best(run: Any, seconds: float) -> float:
    """Least seconds of a call."""
    run()
    found, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        found = min(found, time.perf_counter() - start)
    return found


def timings(module: Any, isa: str, kind: str, threads: int, seconds: float, rng: np.random.Generator) -> str:
    """GB/s of weights for one row, GFLOP/s for many; 1536 × 768, eight copies for one row so that caches do not hold
    them alone."""
    rows, cols = 1536, 768
    matrices = [packed(module, kind, rows, cols, rng) for _ in range(8)]
    size = module.packed_size(kind, rows, cols)
    context, cells = module.Context(threads, isa), []
    for int8 in (False, True) if KINDS[kind][0] > 1 else (False,):
        for m in (1, 4, 8, 32, 512):
            x, out = rng.normal(size=(m, cols)).astype(np.float32), np.empty((m, rows), np.float32)

            def run(x: np.ndarray = x, out: np.ndarray = out, int8: bool = int8) -> None:
                for matrix in matrices:
                    module.linear(context, matrix, x, out, int8)

            each = best(run, seconds) / len(matrices)
            cells.append(f"{size / each / 1e9:6.1f} GB/s" if m == 1 else f"{2 * m * rows * cols / each / 1e9:6.0f} GF")
    return f"{isa:13} {kind:5} " + " ".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--emulate", action="store_true", help="also check the unit of matrix tiles, in plain C++")
    parser.add_argument("--module", type=Path, help="a built extension, instead of building one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.1, help="per timing; 0 checks only")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    args = parser.parse_args()
    rng, wrong = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as folder:
        module = load(args.module) if args.module else build(Path(folder), args.emulate)
        emulated = ["amx_emulated"] if args.emulate and not args.module else []
        sets = ["generic", *module.instruction_sets(), *emulated]
        print("instruction sets:", ", ".join(sets), flush=True)
        for isa in sets:
            for kind in args.kinds:
                wrong += check(module, isa, kind, rng)
            for kv in ("float32", "bfloat16"):
                wrong += check_attention(module, isa, kv, rng)
        print("\n".join(wrong) or "every product is within its bound", flush=True)
        if args.seconds > 0:
            print("columns: 1, 4, 8, 32, 512 rows of x, then the same with int8 activations")
            for isa in module.instruction_sets():
                for kind in args.kinds:
                    print(timings(module, isa, kind, args.threads, args.seconds, rng), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
