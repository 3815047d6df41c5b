"""One decode step of Qwen3-8B or Qwen3-30B-A3B shapes, random weights, made of the kernels alone in one CUDA graph:
what the kernels make possible, without an engine around them. Prints ms a step against the time to read the bytes once.

    PYTHONPATH=src python benchmarks/gpu/step.py [--models 8b,30b] [--batches 1,64,256] [--context 1024] [--check]
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from timing import WARM, replay_us

from ceiba.attention.shared_prefix import MAX_PARTS, SharedPlan, plan_shared
from ceiba.core.step import PrefixGroup
from ceiba.kernels.triton import moe as moe_module
from ceiba.kernels.triton import skinny
from ceiba.kernels.triton.decode import DecodeWorkspace, Shared, decode, shared_tile
from ceiba.kernels.triton.gather import gather_rows
from ceiba.kernels.triton.linear import gate_up_silu, linear, linear_parts
from ceiba.kernels.triton.moe import moe
from ceiba.kernels.triton.norm import add_rms_norm
from ceiba.kernels.triton.rope import qkv_norm_rope_write
from ceiba.kernels.triton.route import norm_route, route
from ceiba.kernels.triton.sample import choose
from ceiba.kernels.triton.skinny import gemv

BANDWIDTH = 4.26e12
BF16 = torch.bfloat16


def shared_on_device(plan: SharedPlan) -> Shared:
    on = lambda a: torch.from_numpy(np.ascontiguousarray(a)).cuda()  # noqa: E731
    count = np.array([len(plan.items)], np.int32)
    return Shared(*map(on, (plan.items, count, plan.members, plan.own_starts, plan.counts)), most=MAX_PARTS)


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    experts: int = 0
    top_k: int = 0
    dim: int = 128
    vocab: int = 151936


SHAPES = {
    "8b": Shape(36, 4096, 32, 8, 12288),
    "30b": Shape(48, 2048, 32, 4, 768, 128, 8),
}


class Model:
    """Random weights of a shape, and the step over a batch of one length."""

    def __init__(self, shape: Shape, batch: int, context: int, dtype: torch.dtype = BF16) -> None:
        self.shape = s = shape
        self.context = context

        def weight(*size: int) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device="cuda").normal_(0, size[-1] ** -0.5)

        def gain(n: int) -> torch.Tensor:
            return 1 + 0.1 * torch.randn(n, dtype=dtype, device="cuda")

        self.embedding = weight(s.vocab, s.hidden)
        self.head = weight(s.vocab, s.hidden)
        self.final_norm = gain(s.hidden)
        width = (s.heads + 2 * s.kv_heads) * s.dim
        self.layers = []
        for _ in range(s.layers):
            layer = {
                "norm": gain(s.hidden),
                "qkv": weight(width, s.hidden),
                "q_norm": gain(s.dim),
                "k_norm": gain(s.dim),
                "out": weight(s.hidden, s.heads * s.dim),
                "mlp_norm": gain(s.hidden),
            }
            if s.experts:
                layer["router"] = weight(s.experts, s.hidden)
                layer["gate_up"] = weight(s.experts, 2 * s.inner, s.hidden)
                layer["down"] = weight(s.experts, s.hidden, s.inner)
            else:
                layer["gate_up"] = weight(2 * s.inner, s.hidden)
                layer["down"] = weight(s.hidden, s.inner)
            self.layers.append(layer)
        angle = torch.arange(max(context, 4096) + 1, device="cuda")[:, None] * 1e6 ** (
            -torch.arange(0, s.dim, 2, device="cuda") / s.dim
        )
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], -1).float()
        self.set_batch(batch)

    def set_batch(self, batch: int) -> None:
        s, context = self.shape, self.context
        self.batch = batch
        self.pools: list[tuple[torch.Tensor, torch.Tensor]] = []
        slots = batch * context + 1
        for _ in range(s.layers):
            k = torch.randn(slots, s.kv_heads, s.dim, dtype=BF16, device="cuda").to(self.head.dtype)
            self.pools.append((k, torch.randn_like(k)))
        self.table = torch.randperm(slots, device="cuda")[: batch * context].int().view(batch, context)
        self.rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.positions = torch.full((batch,), context - 1, dtype=torch.int32, device="cuda")
        self.slots = self.table[:, -1].long()
        self.ids = torch.randint(0, s.vocab, (batch,), device="cuda")
        device = torch.device("cuda")
        self.workspace = DecodeWorkspace.allocate(batch, s.heads, s.kv_heads, s.dim, MAX_PARTS, device)
        self.shared: Shared | None = None
        self.counters = torch.zeros(1024, dtype=torch.int32, device="cuda")

    def share(self, prefix: int) -> None:
        """Let every segment begin with the first one's ``prefix`` slots, and read them once."""
        s = self.shape
        self.table[:, :prefix] = self.table[:1, :prefix]
        rows = np.arange(self.batch, dtype=np.int32)
        lens = np.full(self.batch, self.context, np.int32)
        plan = plan_shared(
            [PrefixGroup(prefix, rows)], 0, rows, lens, shared_tile(s.heads // s.kv_heads), s.kv_heads, 132
        )
        assert plan is not None
        self.shared = shared_on_device(plan)

    def attend(self, index: int, qkv: torch.Tensor) -> torch.Tensor:
        s, layer = self.shape, self.layers[index]
        k, v = self.pools[index]
        q, _, _ = qkv_norm_rope_write(
            qkv, self.cos_sin, self.positions, self.slots, k, v, s.heads, layer["q_norm"], layer["k_norm"],
            dtype=self.head.dtype,
        )  # fmt: skip
        scale = s.dim**-0.5
        out = decode(q, k, v, self.table, self.rows, self.lens, self.workspace, scale, shared=self.shared)
        return out.view(self.batch, -1)

    def token(self) -> torch.Tensor:
        """A whole step: the next token of each segment, greedy."""
        return choose(self.step(), self.counters)[0]

    def step(self) -> torch.Tensor:
        """Logits [batch, vocab]."""
        return self.step_one() if self.batch == 1 else self.step_many()

    def step_one(self) -> torch.Tensor:
        s = self.shape
        x = gather_rows(self.embedding, self.ids)
        for index, layer in enumerate(self.layers):
            qkv = gemv(x, layer["qkv"], norm=layer["norm"])
            x = gemv(self.attend(index, qkv), layer["out"], residual=x)
            if s.experts:
                normed, ids, weights = norm_route(x, layer["mlp_norm"], layer["router"], 1e-6, s.top_k, self.counters)
                x = moe(normed, layer["gate_up"], layer["down"], ids, weights, residual=x)
            else:
                h = gemv(x, layer["gate_up"], norm=layer["mlp_norm"], silu_pairs=True)
                x = gemv(h, layer["down"], residual=x)
        return gemv(x, self.head, norm=self.final_norm)

    def step_many(self) -> torch.Tensor:
        s = self.shape
        residual = gather_rows(self.embedding, self.ids)
        normed = add_rms_norm(residual, self.layers[0]["norm"], 1e-6)
        for index, layer in enumerate(self.layers):
            qkv = linear_parts(normed, layer["qkv"])
            out = linear_parts(self.attend(index, qkv), layer["out"])
            normed = add_rms_norm(out, layer["mlp_norm"], 1e-6, residual)
            if s.experts:
                ids, weights = route(linear(normed, layer["router"]), s.top_k)
                y = moe(normed, layer["gate_up"], layer["down"], ids, weights)
            else:
                y = linear_parts(gate_up_silu(normed, layer["gate_up"]), layer["down"])
            last = index + 1 == s.layers
            normed = add_rms_norm(y, self.final_norm if last else self.layers[index + 1]["norm"], 1e-6, residual)
        return linear(normed, self.head)

    def bytes(self) -> float:
        """Least bytes of a step: every weight that is used, once, and the KV cache."""
        s = self.shape
        layer = (s.heads + 2 * s.kv_heads) * s.dim * s.hidden + s.heads * s.dim * s.hidden
        if s.experts:
            used = s.experts * (1 - (1 - s.top_k / s.experts) ** self.batch)
            layer += s.experts * s.hidden + used * 3 * s.inner * s.hidden
        else:
            layer += 3 * s.inner * s.hidden
        kv = self.batch * self.context * s.kv_heads * s.dim * 2
        return 2 * (s.layers * (layer + kv) + s.vocab * s.hidden)

    def reference(self) -> torch.Tensor:
        """The same logits in float64, from the pool as the step left it."""
        s = self.shape

        def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w.double()

        def act(x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up

        def rotate(x: torch.Tensor) -> torch.Tensor:
            c, n = self.cos_sin[self.positions.long()].double()[:, None].chunk(2, -1)
            a, b = x.chunk(2, -1)
            return torch.cat([a * c - b * n, b * c + a * n], -1)

        x = self.embedding[self.ids].double()
        for (k_pool, v_pool), layer in zip(self.pools, self.layers, strict=True):
            qkv = norm(x, layer["norm"]) @ layer["qkv"].double().t()
            q, k, v = qkv.view(self.batch, -1, s.dim).split([s.heads, s.kv_heads, s.kv_heads], 1)
            q, k = rotate(norm(q, layer["q_norm"])), rotate(norm(k, layer["k_norm"]))
            outs = []
            for b in range(self.batch):
                at = self.table[b].long()
                keys, values = k_pool[at].double(), v_pool[at].double()
                keys[-1], values[-1] = k[b], v[b]
                group = s.heads // s.kv_heads
                keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
                p = (torch.einsum("hd,nhd->hn", q[b], keys) / math.sqrt(s.dim)).softmax(-1)
                outs.append(torch.einsum("hn,nhd->hd", p, values).flatten())
            x = x + torch.stack(outs) @ layer["out"].double().t()
            h = norm(x, layer["mlp_norm"])
            if s.experts:
                p, chosen = (h @ layer["router"].double().t()).softmax(-1).topk(s.top_k, -1)
                p = p / p.sum(-1, keepdim=True)
                y = torch.zeros_like(x)
                for e in chosen.unique().tolist():
                    token, choice = (chosen == e).nonzero(as_tuple=True)
                    part = act(h[token] @ layer["gate_up"][e].double().t()) @ layer["down"][e].double().t()
                    y.index_add_(0, token, part * p[token, choice][:, None])
                x = x + y
            else:
                x = x + act(h @ layer["gate_up"].double().t()) @ layer["down"].double().t()
        return norm(x, self.final_norm) @ self.head.double().t()


def check(name: str) -> None:
    """Two layers of the shape against float64, eager and as a graph."""
    s = SHAPES[name]
    small = Shape(2, s.hidden, s.heads, s.kv_heads, s.inner, s.experts, s.top_k, s.dim, 32000)
    for batch in (1, 3, 16, 64, 100):
        model = Model(small, batch, 300)
        out = model.step().double()
        expected = model.reference()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = model.step()
        again.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        error = ((out - expected).norm() / expected.norm()).item()
        row = ((out - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()
        print(f"check {name} batch {batch}: error {error:.4f}, median row {row:.4f}, "
              f"graph against eager {((again.double() - out).norm() / out.norm()).item():.1e}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="8b,30b")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--shared", action="store_true", help="64 segments with and without a shared prefix")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tune", action="store_true", help="try other GEMV tiles in the whole step")
    parser.add_argument("--warm", default="0/0", help="i/n: compile the i-th of n shares and time nothing")
    parser.add_argument("--profile", action="store_true", help="print the time by kernel")
    options = parser.parse_args()
    WARM.index, WARM.count = map(int, options.warm.split("/"))
    for name in options.models.split(","):
        if options.check:
            check(name)
        model = Model(SHAPES[name], 1, options.context)
        for batch in map(int, options.batches.split(",")):
            model.set_batch(batch)
            us = replay_us([model.token], replays=15)
            floor = model.bytes() / BANDWIDTH * 1e6
            print(f"{name} batch {batch:3d} context {options.context}: {us / 1e3:.3f} ms a step, "
                  f"floor {floor / 1e3:.3f}, ratio {us / floor:.2f}", flush=True)  # fmt: skip
            if options.profile:
                profile(model)
            if options.tune and batch == 1:
                tune(model)
        if options.shared:
            for prefix in (0, 3000):
                model.context = prefix + 94
                model.set_batch(64)
                apart = replay_us([model.token], replays=9)
                print(f"{name} 64 x ({prefix} + 94): {apart / 1e3:.3f} ms a step", flush=True)
            model.share(3000)
            us = replay_us([model.token], replays=9)
            print(f"{name} 64 x (3000 shared + 94): {us / 1e3:.3f} ms a step", flush=True)
        del model
        torch.cuda.empty_cache()


def tune(model: Model) -> None:
    """Time the step of one segment with other GEMV tiles, one kind of product at a time; each kind keeps its best."""
    kept: dict[tuple[int, bool, bool], skinny.GemvShape] = {}
    default = skinny.gemv_shape

    def shape(k: int, paired: bool, normed: bool) -> skinny.GemvShape:
        return kept.get((k, paired, normed)) or default(k, paired, normed)

    skinny.gemv_shape = shape  # type: ignore[assignment]
    s = model.shape
    kinds = [(s.hidden, False, True), (s.heads * s.dim, False, False)]
    kinds += [] if s.experts else [(s.hidden, True, True), (s.inner, False, False)]
    tiles = list(itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)))
    for kind in kinds:
        found = []
        for tile in tiles:
            elements = tile[0] * tile[1] * (2 if kind[1] else 1) // (tile[2] * 32)
            if tile[1] <= kind[0] and 16 <= elements <= 64:
                kept[kind] = skinny.GemvShape(*tile)
                found.append((round(replay_us([model.token], replays=5) / 1e3, 3), tile))
        found.sort()
        kept[kind] = skinny.GemvShape(*found[0][1])
        print(f"tiles of {kind}: {found}", flush=True)
    if s.experts:
        found = []
        for first in ((1, 1024, 4), (1, 2048, 4), (1, 2048, 8), (2, 1024, 4), (2, 2048, 8)):
            for second in ((4, 1024, 2), (4, 1024, 4), (2, 1024, 2), (2, 1024, 4), (8, 1024, 4)):
                moe_module.SMALL_TILES = (skinny.GemvShape(*first), skinny.GemvShape(*second))
                found.append((round(replay_us([model.token], replays=5) / 1e3, 3), first, second))
        found.sort()
        print(f"expert tiles: {found[:8]}", flush=True)


def profile(model: Model) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as found:
        model.step()
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=48))


if __name__ == "__main__":
    main()
