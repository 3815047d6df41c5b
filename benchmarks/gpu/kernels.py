"""Times every GPU kernel at the shapes of Qwen3-8B and Qwen3-30B-A3B and prints a table: microseconds, the floor that
bytes and operations set, the ratio. ``--sweep`` also times the candidate tiles from which the tables in the code come.
Parity is tests/gpu; run it first.

    PYTHONPATH=src python benchmarks/gpu/kernels.py [--only dense,decode,...] [--sweep]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from step import shared_on_device
from timing import WARM, eager_us, replay_us

from ceiba.attention.shared_prefix import MAX_PARTS, plan_shared
from ceiba.core.step import PrefixGroup
from ceiba.kernels.triton import decode as decoding
from ceiba.kernels.triton import moe as experts
from ceiba.kernels.triton import route as routing
from ceiba.kernels.triton import skinny
from ceiba.kernels.triton.decode import DecodeWorkspace, decode, shared_parts, shared_tile
from ceiba.kernels.triton.prefill import PrefillShape, plan_tiles, prefill
from ceiba.kernels.triton.sample import choose, thresholds

BANDWIDTH, FLOPS, ATTENTION_FLOPS = 4.26e12, 700e12, 575e12
BF16 = torch.bfloat16


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda").normal_(0, 0.5)


def line(name: str, us: float, floor: float, note: str = "") -> None:
    if not WARM.count:
        print(f"{name:58s} {us:9.2f} us  floor {floor:9.2f}  ratio {us / floor:5.2f}  {note}", flush=True)


def attempt(call: Callable[[], float]) -> float:
    """A tile that does not fit the device's shared memory is no candidate."""
    try:
        return call()
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return float("inf")


DECODE_TILES = ((64, 5, 4), (32, 8, 4), (32, 8, 2), (32, 5, 2))
WEIGHTS = {
    "8b qkv": (6144, 4096, False),
    "8b out": (4096, 4096, False),
    "8b gate_up": (24576, 4096, True),
    "8b down": (4096, 12288, False),
    "lm_head": (151936, 4096, False),
    "30b qkv": (5120, 2048, False),
    "30b out": (2048, 4096, False),
}


def dense(sweep: bool) -> None:
    for name, (n, k, paired) in WEIGHTS.items():
        copies = max(2, min(12, int(400e6 / (n * k * 2)) + 1))
        ws = [rand(n, k) for _ in range(copies)]
        half = n // 2 if paired else n
        for m in (1, 8, 16, 32, 64, 128, 256):
            x = rand(m, k)
            floor = max(n * k * 2 / BANDWIDTH, 2 * m * n * k / FLOPS) * 1e6
            base = replay_us([lambda w=w: torch.mm(x, w.t()) for w in ws])
            note = f"cuBLAS {base:8.2f}"
            if m > 64:
                line(f"{name} m={m} cuBLAS", base, floor)
            elif m == 1:
                ours = replay_us([lambda w=w: skinny.gemv(x, w, silu_pairs=paired) for w in ws])
                if sweep:
                    found = []
                    for rows, cols, warps in itertools.product((1, 2, 4, 8, 16), (256, 512, 1024, 2048), (2, 4)):
                        if not 16 <= rows * cols * (2 if paired else 1) / (warps * 32) <= 64 or cols > k:
                            continue
                        tile = skinny.GemvShape(rows, cols, warps)
                        us = replay_us(
                            [lambda w=w, t=tile: skinny.gemv(x, w, silu_pairs=paired, shape=t) for w in ws], replays=5
                        )
                        found.append((round(us, 2), rows, cols, warps))
                    note += f"  best {sorted(found)[:4]}"
                line(f"{name} m={m} gemv", ours, floor, note)
            else:
                single = n > 100000
                ours = replay_us([lambda w=w: skinny.matmul_parts(x, w, silu_pairs=paired, single=single) for w in ws])
                if sweep and m in (8, 32, 64):
                    found = []
                    for rows, cols, parts, stages in itertools.product(
                        (16, 32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (3, 4, 5)
                    ):
                        size = (rows * (2 if paired else 1) + max(16, m)) * cols * 2 * stages
                        blocks = -(-half // rows) * parts
                        if size > 160e3 or size < 40e3 or ((paired or single) and parts > 1):
                            continue
                        if (
                            k // parts < 256
                            or blocks < 128
                            or (blocks > 1100 and parts > 1)
                            or (cols == 64 and rows < 64)
                        ):
                            continue
                        tile = skinny.SkinnyShape(rows, cols, parts, stages, 4)
                        us = attempt(
                            lambda t=tile: replay_us(
                                [
                                    lambda w=w: skinny.matmul_parts(x, w, silu_pairs=paired, single=single, shape=t)
                                    for w in ws
                                ],
                                replays=4,
                            )
                        )
                        found.append((round(us, 2), rows, cols, parts, stages))
                    note += f"  best {sorted(found)[:4]}"
                line(f"{name} m={m} matmul_parts", ours, floor, note)


def decode_case(
    batch: int, context: int, heads: int, kv_heads: int, copies: int
) -> tuple[list[tuple[torch.Tensor, ...]], Callable[[torch.Tensor, torch.Tensor], object]]:
    """(``copies`` pools of keys and values, decode attention over one of them)."""
    slots = batch * context
    pools = [(rand(slots, kv_heads, 128), rand(slots, kv_heads, 128)) for _ in range(copies)]
    table = torch.randperm(slots, device="cuda").int().view(batch, context)
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    q = rand(batch, heads, 128)
    work = DecodeWorkspace.allocate(batch, heads, kv_heads, 128, 0, q.device)
    return pools, lambda k, v: decode(q, k, v, table, rows, lens, work, 0.09)


def decode_attention(sweep: bool) -> None:
    for heads, kv_heads in ((32, 8), (32, 4)):
        for batch, context in ((1, 1024), (1, 32768), (8, 1024), (64, 1024), (256, 1024), (32, 16384)):
            size = batch * context * kv_heads * 512
            pools, attend = decode_case(batch, context, heads, kv_heads, max(1, min(16, int(200e6 / size))))
            for tile in DECODE_TILES if sweep else (None,):
                kept, decoding.TILE = decoding.TILE, tile
                us = replay_us([lambda k=k, v=v: attend(k, v) for k, v in pools])
                decoding.TILE = kept
                name = f"decode {heads}/{kv_heads} batch {batch} context {context} {tile}"
                line(name, us, size / BANDWIDTH * 1e6)


def shared_attention() -> None:
    batch, prefix, own = 64, 3000, 94
    on = lambda a: torch.from_numpy(np.ascontiguousarray(a)).cuda()  # noqa: E731
    for heads, kv_heads in ((32, 8), (32, 4)):
        slots = prefix + batch * own
        pools = [(rand(slots, kv_heads, 128), rand(slots, kv_heads, 128)) for _ in range(8)]
        order = torch.randperm(slots, device="cuda").int()
        table = torch.cat([order[:prefix].expand(batch, -1), order[prefix:].view(batch, own)], 1).contiguous()
        short = order[prefix:].view(batch, own).contiguous()
        rows = np.arange(batch, dtype=np.int32)
        lens = np.full(batch, prefix + own, np.int32)
        group = heads // kv_heads
        started = time.perf_counter()
        groups = [PrefixGroup(prefix, rows)]
        plan = plan_shared(groups, 0, rows, lens, shared_tile(group), kv_heads, 132)
        planning = (time.perf_counter() - started) * 1e6
        assert plan is not None
        work = DecodeWorkspace.allocate(batch, heads, kv_heads, 128, MAX_PARTS, torch.device("cuda"))
        q = rand(batch, heads, 128)
        shared = shared_on_device(plan)
        rows_d, lens_d = on(rows), on(lens)
        short_lens = torch.full_like(lens_d, own)

        def both(k: torch.Tensor, v: torch.Tensor) -> None:
            decode(q, k, v, table, rows_d, lens_d, work, 0.09, shared=shared)

        apart = replay_us([lambda k=k, v=v: decode(q, k, v, table, rows_d, lens_d, work, 0.09) for k, v in pools])
        alone = replay_us([lambda k=k, v=v: decode(q, k, v, short, rows_d, short_lens, work, 0.09) for k, v in pools])
        only = replay_us([lambda k=k, v=v: shared_parts(q, k, v, table, shared, work, 0.09) for k, v in pools])
        us = replay_us([lambda k=k, v=v: both(k, v) for k, v in pools])
        note = f"shared part {only:.1f}, not shared {apart:.1f}, 94 tokens alone {alone:.1f}, plan {planning:.0f} us"
        line(f"shared decode {heads}/{kv_heads} 64 x (3000 + 94)", us, slots * kv_heads * 512 / BANDWIDTH * 1e6, note)


def prefill_attention(sweep: bool) -> None:
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, kv_heads = 32, 8
    kp, vp = rand(70000, kv_heads, 128), rand(70000, kv_heads, 128)
    table = torch.randperm(70000, device="cuda").int().view(2, -1)
    cases = [([4096], [0]), ([16384], [0]), ([1024] * 8, [0] * 8), ([8192], [8192]), ([30] * 64, [3000] * 64)]
    for lengths, cached in cases:
        total = sum(lengths)
        q, kv = rand(total, heads, 128), rand(total, 2 * kv_heads * 128)
        k = kv[:, : kv_heads * 128].view(total, kv_heads, 128)
        v = kv[:, kv_heads * 128 :].view(total, kv_heads, 128)
        rows = np.zeros(len(lengths), np.int32)
        plans = {
            size: torch.from_numpy(
                plan_tiles(np.array(lengths, np.int32), np.array(cached, np.int32), rows, heads // kv_heads, size)
            ).cuda()
            for size in (64, 128)
        }
        flops = sum(4 * heads * 128 * (n * n / 2 + n * c) for n, c in zip(lengths, cached, strict=True))
        name = f"prefill {len(lengths)} x {lengths[0]} after {cached[0]}"
        shapes = (
            [(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2)] if sweep else [None]
        )
        for pooled, shape in itertools.product((False, True), shapes):
            us = attempt(
                lambda p=pooled, s=shape: eager_us(
                    lambda: prefill(
                        q,
                        None if p else k,
                        None if p else v,
                        kp,
                        vp,
                        table,
                        plans[s[0] if s else 64],
                        0.09,
                        shape=PrefillShape(*s) if s else None,
                    )
                )
            )
            how = ("pool" if pooled else "own") + f" {shape}"
            if not pooled and any(cached):
                held = torch.cat([table[0, :n] for n in cached])
                us2 = attempt(
                    lambda s=shape: eager_us(
                        lambda: prefill(
                            q,
                            k,
                            v,
                            kp,
                            vp,
                            table,
                            plans[s[0] if s else 64],
                            0.09,
                            shape=PrefillShape(*s) if s else None,
                            prefix_slots=held,
                        )
                    )
                )
                line(f"{name} gathered {shape}", us2, flops / ATTENTION_FLOPS * 1e6, f"{flops / us2 / 1e6:.0f} TFLOP/s")
            line(f"{name} {how}", us, flops / ATTENTION_FLOPS * 1e6, f"{flops / us / 1e6:.0f} TFLOP/s")
        if len(lengths) == 1 and not cached[0]:
            qs, ks, vs = (t.transpose(0, 1)[None] for t in (q, k, v))
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                with sdpa_kernel(backend):
                    us = eager_us(
                        lambda: functional.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)
                    )
                line(
                    f"{name} torch {backend.name}", us, flops / ATTENTION_FLOPS * 1e6, f"{flops / us / 1e6:.0f} TFLOP/s"
                )
        elif not any(cached):
            from torch.nn.attention.varlen import varlen_attn

            ends = torch.from_numpy(np.cumsum([0, *lengths])).int().cuda()
            ke, ve = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
            try:
                us = eager_us(lambda: varlen_attn(q, ke, ve, ends, ends, max(lengths), max(lengths), is_causal=True))
            except TypeError:
                us = eager_us(
                    lambda: varlen_attn(q, ke, ve, ends, ends, max(lengths), max(lengths), window_size=(-1, 0))
                )
            line(f"{name} torch varlen", us, flops / ATTENTION_FLOPS * 1e6, f"{flops / us / 1e6:.0f} TFLOP/s")


def moe_layers(sweep: bool) -> None:
    copies, dim, inner, count, top_k = 3, 2048, 768, 128, 8
    layers = [(rand(count, 2 * inner, dim), rand(count, dim, inner)) for _ in range(copies)]
    counters = torch.zeros(64, dtype=torch.int32, device="cuda")
    norm, router = rand(dim), rand(count, dim)
    x = rand(1, dim)
    us = replay_us([lambda: routing.norm_route(x, norm, router, 1e-6, top_k, counters)], repeat=20)
    line("norm_route batch 1", us, count * dim * 2 / BANDWIDTH * 1e6)
    for tokens in (1, 2, 4, 8, 16, 64, 256, 1024, 4096):
        x = rand(tokens, dim)
        routes = [routing.route(rand(tokens, count), top_k) for _ in range(8)]
        used = sum(int(i.unique().numel()) for i, _ in routes) / len(routes)
        floor = max(used * 3 * inner * dim * 2 / BANDWIDTH, tokens * top_k * 6 * inner * dim / FLOPS) * 1e6
        calls = [lambda w=layers[j % copies], r=routes[j]: experts.moe(x, *w, *r) for j in range(len(routes))]
        us = replay_us(calls, replays=6)
        note = ""
        if sweep and tokens == 1:
            found = []
            for rows, columns, warps, which in itertools.product((1, 2, 4, 8), (512, 1024, 2048), (2, 4, 8), (0, 1)):
                elements = rows * (1024 if which else columns * 2) / (warps * 32)
                if not 16 <= elements <= 64 or (which and columns != 1024):
                    continue
                tiles = list(experts.SMALL_TILES)
                tiles[which] = skinny.GemvShape(rows, columns, warps)
                ours = replay_us(
                    [
                        lambda w=layers[j % copies], r=routes[j], t=tuple(tiles): experts.moe_small(x, *w, *r, tiles=t)
                        for j in range(len(routes))
                    ],
                    replays=6,
                )
                found.append((which, round(ours, 1), rows, columns, warps))
            note = f"best {sorted(found)[:4]} {sorted(f for f in found if f[0])[:4]}"
        elif sweep and tokens in (8, 64, 256, 1024, 4096):
            found = []
            for rows, columns, depth, stages, warps, tiled in itertools.product(
                (16, 32, 64, 128), (32, 64, 128, 256), (64, 128, 256), (3, 4), (4, 8), (False, True)
            ):
                mean = tokens * top_k / count
                if (
                    rows > max(16, 2 * mean)
                    or (rows < 64 and mean > 100)
                    or (rows >= 64) != (columns >= 64 and depth == 64)
                ):
                    continue
                if (rows == 16 and warps == 8) or (rows == 32 and tokens > 512) or (rows == 128 and warps == 4):
                    continue
                if (rows + 2 * columns) * depth * 2 * stages > 200e3 or rows * columns > 128 * 128:
                    continue
                if tiled and rows < 64:
                    continue
                tile = experts.GroupedShape(rows, columns, depth, stages, warps, tiled)
                ours = attempt(
                    lambda t=tile: replay_us(
                        [
                            lambda w=layers[j % copies], r=routes[j]: experts.moe(x, *w, *r, shapes=(t, t))
                            for j in range(len(routes))
                        ],
                        replays=3,
                    )
                )
                found.append((round(ours, 1), rows, columns, depth, stages, warps, tiled))
            note = f"best {sorted(found)[:4]}"
        line(f"moe batch {tokens} ({used:.0f} experts)", us, floor, note)


def ordering() -> None:
    """What surrounds the experts' products of a chunk: routing, the order by expert, the sum over a token's choices.
    The notes say how uneven; with distinct choices the fullest of 128 experts has at most 16 times the mean."""
    count, dim, top_k = 128, 2048, 8
    for tokens in (1024, 8192):
        logits = [rand(tokens, count) for _ in range(4)]
        us = replay_us([lambda x=x: routing.route(x, top_k) for x in logits], repeat=4)
        line(f"route {tokens} tokens", us, tokens * (count * 2 + top_k * 8) / BANDWIDTH * 1e6)
        block = experts.grouped_shapes(tokens * top_k, count)[0].rows
        for name, skew in (("even", 0.0), ("uneven", 1.6)):
            ids = [(rand(count) * 2 * skew + torch.randn_like(x)).topk(top_k).indices.int() for x in logits]
            us = replay_us([lambda i=i: experts.order_by_expert(i, count, block) for i in ids], repeat=4)
            fullest = max(int(i.flatten().bincount(minlength=count).max()) for i in ids) * count / (tokens * top_k)
            note = f"blocks of {block}, fullest {fullest:.1f} x mean"
            line(f"order {tokens} tokens {name}", us, tokens * top_k * 3 * 4 / BANDWIDTH * 1e6, note)
        buffers = [(rand(tokens * top_k, dim), rand(tokens, dim)) for _ in range(16 if tokens < 4096 else 2)]
        out = torch.empty_like(buffers[0][1])
        us = replay_us([lambda b=b: experts.combine(*b, out) for b in buffers])
        line(f"combine {tokens} tokens", us, tokens * dim * 2 * (top_k + 2) / BANDWIDTH * 1e6)


def sampling() -> None:
    vocab = 151936
    counters = torch.zeros(256, dtype=torch.int32, device="cuda")
    for batch in (1, 64, 256):
        logits = [torch.randn(batch, vocab, device="cuda") * 3 for _ in range(2 if batch > 1 else 100)]
        floor = batch * vocab * 4 / BANDWIDTH * 1e6
        temperature, keys = torch.ones(batch, device="cuda"), torch.randint(2**62, (batch,), device="cuda")
        us = replay_us([lambda x=x: choose(x, counters) for x in logits])
        line(f"choose greedy batch {batch}", us, floor)
        us = replay_us([lambda x=x: choose(x, counters, temperature, keys) for x in logits])
        line(f"choose temperature batch {batch}", us, floor)
        rows = torch.arange(batch, device="cuda")
        top_k = torch.full((batch,), 50, dtype=torch.int32, device="cuda")
        top_p, min_p = torch.full((batch,), 0.9, device="cuda"), torch.zeros(batch, device="cuda")
        no_k = torch.zeros_like(top_k)
        us = replay_us([lambda x=x: thresholds(x, rows, temperature, top_k, top_p, min_p) for x in logits])
        line(f"thresholds top-k 50, top-p 0.9 batch {batch}", us, floor)
        us = replay_us([lambda x=x: thresholds(x, rows, temperature, no_k, top_p, min_p) for x in logits])
        line(f"thresholds top-p 0.9 batch {batch}", us, floor)
        us = replay_us([lambda x=x: x.sort(dim=1) for x in logits[:2]], replays=3)
        line(f"torch.sort batch {batch}", us, floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="dense,decode,shared,prefill,moe,order,sample")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--warm", default="0/0", help="i/n: compile the i-th of n shares and time nothing")
    options = parser.parse_args()
    WARM.index, WARM.count = map(int, options.warm.split("/"))
    print(torch.cuda.get_device_name(), torch.__version__)
    parts = {
        "dense": lambda: dense(options.sweep),
        "decode": lambda: decode_attention(options.sweep),
        "shared": shared_attention,
        "prefill": lambda: prefill_attention(options.sweep),
        "sample": sampling,
        "moe": lambda: moe_layers(options.sweep),
        "order": ordering,
    }
    for name in options.only.split(","):
        started = time.perf_counter()
        parts[name]()
        torch.cuda.empty_cache()
        print(f"-- {name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
