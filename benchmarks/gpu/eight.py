"""Times the eight-bit kernels at the shapes of Qwen3-8B and Qwen3-30B-A3B beside bfloat16: weights by row and in
blocks, where rounding activations begins to pay, attention over an eight-bit cache. ``--sweep`` tries other tiles.
Parity is tests/gpu/test_triton_fp8.py and test_triton_kv8.py; run them first.

    PYTHONPATH=src python benchmarks/gpu/eight.py [--only dense,moe,kv] [--sweep]
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch
from kernels import BANDWIDTH, FLOPS, WEIGHTS, attempt, decode_case, line, rand
from timing import replay_us

from ceiba.kernels.triton import moe as experts
from ceiba.kernels.triton import scaled, skinny
from ceiba.kernels.triton.quantize import norm_quantize, quantize, silu_mul_quantize
from ceiba.kernels.triton.route import route
from ceiba.layers.scaled import Scaled, scale_rows

FP8_FLOPS = 1300e12


def by_row(*shape: int) -> Scaled:
    if len(shape) == 2:
        return Scaled(*scale_rows(rand(*shape)))
    parts = [scale_rows(rand(*shape[1:])) for _ in range(shape[0])]
    values = torch.stack([part.view(torch.uint8) for part, _ in parts]).view(torch.float8_e4m3fn)
    return Scaled(values, torch.stack([scales for _, scales in parts]))


def in_blocks(matrix: Scaled) -> Scaled:
    *lead, rows, columns = matrix.shape
    return Scaled(matrix.values, torch.rand(*lead, -(-rows // 128), -(-columns // 128), device="cuda") * 0.01, True)


def dense(sweep: bool) -> None:
    for name, (n, k, paired) in WEIGHTS.items():
        if name == "lm_head":
            continue
        copies = max(2, min(12, int(400e6 / (n * k)) + 1))
        rows = [by_row(n, k) for _ in range(copies)]
        blocks = [in_blocks(w) for w in rows]
        for m in (1, 8, 16, 32, 64, 128, 256, 4096):
            x = rand(m, k)
            floor = max(n * k / BANDWIDTH, 2 * m * n * k / FP8_FLOPS) * 1e6
            plain = max(2 * n * k / BANDWIDTH, 2 * m * n * k / FLOPS) * 1e6
            found = {}
            for kind, ws in (("rows", rows), ("blocks", blocks)):
                if m == 1:
                    calls = [lambda w=w: skinny.gemv(x, w.values, silu_pairs=paired, scales=w.scales) for w in ws]
                    found[f"gemv {kind}"] = replay_us(calls)
                elif m <= 64:
                    calls = [
                        lambda w=w: skinny.matmul_parts(x, w.values, silu_pairs=paired, scales=w.scales) for w in ws
                    ]
                    found[f"parts {kind}"] = replay_us(calls)
                if m > 1:
                    grouped = kind == "blocks"
                    values, scales = quantize(x, grouped)
                    calls = [lambda w=w: scaled.matmul_scaled(values, scales, w.values, w.scales, x.dtype) for w in ws]
                    found[f"rounded {kind}"] = replay_us(calls)
                    both = rand(m, 2 * k) if m * k < 1 << 26 else None
                    found[f"rounding {kind}"] = replay_us([lambda g=grouped: quantize(x, g)])
                    if both is not None:
                        found[f"silu, rounding {kind}"] = replay_us([lambda g=grouped: silu_mul_quantize(both, g)])
                    weight = rand(k)
                    found[f"norm, rounding {kind}"] = replay_us([lambda g=grouped: norm_quantize(x, weight, 1e-6, g)])
            for what, us in found.items():
                line(f"{name} m={m} {what}", us, floor, f"floor in bf16 {plain:.1f}")
            if sweep and m in (1, 8, 64):
                tune(m, n, k, paired, x, rows)
            if sweep and m in (64, 256, 4096):
                values, scales = quantize(x, grouped=True)
                seen = []
                for tile in itertools.product((64, 128), (64, 128), (3, 4), (4, 8)):
                    shape = scaled.BlocksShape(*tile)
                    calls = [
                        lambda w=w, s=shape: scaled.matmul_blocks(values, scales, w.values, w.scales, x.dtype, s)
                        for w in blocks
                    ]
                    seen.append((round(attempt(lambda c=calls: replay_us(c, replays=4)), 1), tile))
                print(f"    best tiles in blocks {sorted(seen)[:4]}", flush=True)


def tune(m: int, n: int, k: int, paired: bool, x: torch.Tensor, ws: list[Scaled]) -> None:
    seen = []
    if m == 1:
        for rows, columns, warps in itertools.product((1, 2, 4, 8), (1024, 2048, 4096), (2, 4, 8)):
            if columns <= k and 16 <= rows * columns * (2 if paired else 1) / (warps * 32) <= 128:
                tile = skinny.GemvShape(rows, columns, warps)
                calls = [
                    lambda w=w, t=tile: skinny.gemv(x, w.values, silu_pairs=paired, scales=w.scales, shape=t)
                    for w in ws
                ]
                seen.append((round(replay_us(calls, replays=5), 2), rows, columns, warps))
    else:
        for rows, columns, parts, stages in itertools.product((32, 64), (128, 256, 512), (1, 2, 4, 8), (3, 4)):
            if (paired and parts > 1) or k // parts < columns:
                continue
            shape = skinny.SkinnyShape(rows, columns, parts, stages, 4)
            calls = [
                lambda w=w, s=shape: skinny.matmul_parts(x, w.values, silu_pairs=paired, scales=w.scales, shape=s)
                for w in ws
            ]
            seen.append((round(attempt(lambda c=calls: replay_us(c, replays=4)), 2), rows, columns, parts, stages))
    print(f"    best tiles m={m} {sorted(seen)[:4]}", flush=True)


def moe_layers(sweep: bool) -> None:
    dim, inner, count, top_k = 2048, 768, 128, 8
    layers = [(by_row(count, 2 * inner, dim), by_row(count, dim, inner)) for _ in range(3)]
    blocked = [(in_blocks(up), in_blocks(down)) for up, down in layers]
    for tokens in (1, 4, 8, 16, 64, 256, 1024, 4096):
        x = rand(tokens, dim)
        routes = [route(rand(tokens, count), top_k) for _ in range(8)]
        used = sum(int(ids.unique().numel()) for ids, _ in routes) / len(routes)
        floor = max(used * 3 * inner * dim / BANDWIDTH, tokens * top_k * 6 * inner * dim / FP8_FLOPS) * 1e6
        for kind, weights in (("rows", layers), ("blocks", blocked)):
            for border in (experts.ROUNDED_PAIRS, 1e9 if experts.rounds_activations(tokens * top_k, count) else 0):
                kept, experts.ROUNDED_PAIRS = experts.ROUNDED_PAIRS, border
                pairs = [(weights[i % 3], routes[i]) for i in range(len(routes))]
                calls = [
                    lambda w=w, r=r: experts.moe(x, w[0].values, w[1].values, *r, scales=(w[0].scales, w[1].scales))
                    for w, r in pairs
                ]
                rounded = experts.rounds_activations(tokens * top_k, count) and tokens > experts.GEMV_TOKENS
                line(f"experts {tokens} {kind} rounded={rounded}", attempt(lambda c=calls: replay_us(c)), floor)
                if sweep and rounded and tokens >= 256:
                    seen = []
                    for rows, stages, tiled in itertools.product((64, 128), (2, 3), (False, True)):
                        tile = experts.GroupedShape(rows, 128, 128, stages, rows // 16, tiled)
                        calls = [
                            lambda w=w, r=r, t=tile: experts.moe(
                                x, w[0].values, w[1].values, *r, scales=(w[0].scales, w[1].scales), shapes=(t, t)
                            )
                            for w, r in pairs
                        ]
                        us = attempt(lambda c=calls: replay_us(c, replays=4))
                        seen.append((round(us, 1), rows, stages, tiled))
                    print(f"    best tiles {sorted(seen)[:4]}", flush=True)
                experts.ROUNDED_PAIRS = kept


def attention(sweep: bool) -> None:
    for heads, kv_heads in ((32, 8), (32, 4)):
        for batch, context in ((1, 1024), (64, 1024), (256, 1024), (32, 16384)):
            size = batch * context * kv_heads * 256
            pools, attend = decode_case(batch, context, heads, kv_heads, max(1, min(16, int(200e6 / size))))
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                narrow = [(k.to(dtype), v.to(dtype)) for k, v in pools]
                us = replay_us([lambda k=k, v=v: attend(k, v) for k, v in narrow])
                line(f"decode {heads}/{kv_heads} {batch} x {context} {dtype}", us, size / BANDWIDTH * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="dense,moe,kv")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    parts = {"dense": dense, "moe": moe_layers, "kv": attention}
    for name in options.only.split(","):
        started = time.perf_counter()
        parts[name](options.sweep)
        torch.cuda.empty_cache()
        print(f"-- {name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
