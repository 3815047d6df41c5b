"""The order of (token, choice) pairs by expert, and the sum over a token's choices. Runs in the interpreter too."""

from __future__ import annotations

import gpu_reference as ref
import pytest
import torch

from ceiba.kernels.triton import moe
from ceiba.kernels.triton import route as route_module
from ceiba.kernels.triton.moe import ONE_BLOCK_PAIRS, combine, order_by_expert

POISON = -7


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the wrapper allocates holds garbage."""
    empty = torch.empty

    def filled(*size: int, **options: object) -> torch.Tensor:
        return empty(*size, **options).fill_(POISON)

    monkeypatch.setattr(moe.torch, "empty", filled)


def choose(tokens: int, top_k: int, experts: int, routing: str) -> torch.Tensor:
    """int32 [T, top_k]: distinct experts of a token, but for ``one``, where all choose the same."""
    if routing == "one":
        return torch.full((tokens, top_k), experts - 1, dtype=torch.int32, device=ref.DEVICE)
    scores = torch.randn(tokens, experts, device=ref.DEVICE)
    if routing == "uneven":
        scores += torch.randn(experts, device=ref.DEVICE) * 1.6
    if routing == "few":  # all but top_k experts have no pairs, the first and the last among them
        scores[:, experts // 2 - top_k // 2 :][:, :top_k] += 100
    return scores.topk(top_k, -1).indices.int()


def check(ids: torch.Tensor, experts: int, block: int) -> None:
    order = order_by_expert(ids, experts, block)
    flat = ids.flatten().cpu().long()
    pairs = flat.numel()
    blocks = -(-flat.bincount(minlength=experts) // block)
    total = int(blocks.sum())
    assert order.num_blocks.tolist() == [total]
    assert total <= order.experts.numel()
    assert order.pairs.numel() == order.experts.numel() * block
    owners = order.experts.cpu()
    # Blocks of an expert lie together, in the experts' order.
    assert torch.equal(owners[:total].long(), torch.repeat_interleave(torch.arange(experts), blocks))
    assert (owners[total:] == POISON).all()
    held = order.pairs.cpu().view(-1, block)
    assert (held[total:] == POISON).all()
    held = held[:total].long()
    live = held != pairs
    assert torch.equal(held[live].sort().values, torch.arange(pairs))
    assert torch.equal(flat[held[live]], owners[:total].long()[:, None].expand(-1, block)[live])
    # Padding follows the pairs, in an expert's last block alone, which is not empty.
    assert (live[:, :-1] | ~live[:, 1:]).all()
    assert live[:, 0].all()
    last = torch.ones(total, dtype=torch.bool)
    last[:-1] = owners[: total - 1] != owners[1:total]
    assert live[~last].all()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("routing", ["even", "uneven", "few", "one"])
@pytest.mark.parametrize(("experts", "top_k"), [(6, 2), (60, 4), (128, 8), (5, 1), (1, 1), (512, 10)])
@pytest.mark.parametrize("block", [16, 128])
def test_many(experts: int, top_k: int, routing: str, block: int) -> None:
    for tokens in (ONE_BLOCK_PAIRS // top_k + 1, 7001 // top_k):
        check(choose(tokens, top_k, experts, routing), experts, block)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("pairs", [1, 7, 512, ONE_BLOCK_PAIRS - 1, ONE_BLOCK_PAIRS, ONE_BLOCK_PAIRS + 1, 65536, 70000])
def test_sizes(pairs: int) -> None:
    """Up to one block and beyond; as many pairs as programs have steps, and more."""
    for routing in ("even", "one"):
        check(choose(pairs, 1, 9, routing), 9, 64)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("programs", [1, 3])
def test_few_programs(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Several steps a program, the last of them short."""
    monkeypatch.setattr(moe, "ORDER_PROGRAMS", programs)
    for routing in ("even", "uneven"):
        check(choose(2111, 4, 20, routing), 20, 32)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("tokens", [1, 64, 511, 512, 513])
def test_sizes_of_a_model(tokens: int) -> None:
    for routing in ("even", "uneven"):
        check(choose(tokens, 8, 128, routing), 128, 16)


def test_broken_logits_choose_experts_that_exist() -> None:
    """Whatever a row holds, its ids index tables of experts; sound rows beside it choose as ever."""
    logits = torch.randn(route_module.MANY + 3, 128, device=ref.DEVICE)
    logits[2] = float("nan")
    logits[3, 5] = float("nan")
    logits[4] = -float("inf")
    logits[5, 7:] = -float("inf")
    logits[6, 3] = float("inf")
    logits[7, :] = 1.0
    ids, _ = route_module.route(logits, 8)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 128
    assert ids[7].tolist() == list(range(8))
    sound = [0, 1, *range(8, len(logits))]
    assert torch.equal(ids[sound].long(), logits[sound].sort(dim=-1, descending=True, stable=True).indices[:, :8])


@pytest.mark.skipif(ref.DEVICE == "cpu", reason="needs a device")
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("routing", ["even", "uneven", "few", "one"])
@pytest.mark.parametrize("tokens", [1024, 8192, 20000])
def test_large(tokens: int, routing: str) -> None:
    for _ in range(3):
        check(choose(tokens, 8, 128, routing), 128, 128)


@pytest.mark.skipif(ref.DEVICE == "cpu", reason="needs a device")
def test_graph() -> None:
    """A captured order follows what the ids' buffer holds when it is replayed."""
    ids = choose(2048, 8, 128, "even")
    order_by_expert(ids, 128, 64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        order = order_by_expert(ids, 128, 64)
    for routing in ("uneven", "one", "even", "few"):
        ids.copy_(choose(2048, 8, 128, routing))
        graph.replay()
        flat = ids.flatten().cpu().long()
        held = order.pairs.cpu().view(-1, 64)[: int(order.num_blocks)].long()
        live = held < flat.numel()
        assert torch.equal(held[live].sort().values, torch.arange(flat.numel()))
        owners = order.experts.cpu()[: len(held)].long()
        assert torch.equal(flat[held[live]], owners[:, None].expand(-1, 64)[live])


@pytest.mark.parametrize(("tokens", "dim", "top_k"), [(5, 2048, 8), (3, 320, 2), (4, 1032, 1)])
@pytest.mark.parametrize("residual", [False, True])
def test_combine(tokens: int, dim: int, top_k: int, residual: bool) -> None:
    split = torch.randn(tokens * top_k, dim, device=ref.DEVICE).bfloat16()
    added = torch.randn(tokens, dim, device=ref.DEVICE).bfloat16() if residual else None
    out = ref.poisoned(tokens, dim)
    combine(split, added, out)
    expected = split.double().view(tokens, top_k, dim).sum(1)
    if added is not None:
        expected += added.double()
    assert ref.error(out, expected) < ref.BF16_BOUND
