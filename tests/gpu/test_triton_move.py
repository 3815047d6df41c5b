"""Rows by index between the device and pinned host memory: every byte, and none beside them."""

from __future__ import annotations

import gpu_reference as ref
import pytest
import torch

from ceiba.kernels.triton.move import Matrices, move_rows
from ceiba.kernels.triton.step import pull


def matrices(tensors: list[torch.Tensor]) -> Matrices:
    return Matrices.of([t.data_ptr() for t in tensors], tensors[0].stride(0), torch.device(ref.DEVICE))


def random_bytes(*shape: int, host: bool) -> torch.Tensor:
    data = torch.randint(0, 256, shape, dtype=torch.uint8)
    if ref.DEVICE == "cpu":
        return data
    return data.pin_memory() if host else data.cuda()


@pytest.mark.parametrize("width", [2048, 24, 36, 7, 12288])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("to_host", [False, True])
def test_rows_arrive_and_nothing_else_changes(width: int, by_token: bool, to_host: bool) -> None:
    layers, slots, tokens, count = 3, 150, 90, 41
    device = [random_bytes(slots, width, host=False) for _ in range(layers)]
    if by_token:
        whole = random_bytes(tokens, layers, width, host=True)
        host = [whole[:, layer] for layer in range(layers)]
    else:
        host = list(random_bytes(layers, tokens, width, host=True))
    below, above = torch.randperm(slots)[:count].int(), torch.randperm(tokens)[:count].int()
    wanted = [(d.cpu().clone(), h.cpu().clone()) for d, h in zip(device, host, strict=True)]
    for d, h in wanted:
        if to_host:
            h[above.long()] = d[below.long()]
        else:
            d[below.long()] = h[above.long()]
    sides = [(matrices(device), below.to(ref.DEVICE)), (matrices(host), above.to(ref.DEVICE))]
    (source, source_rows), (target, target_rows) = sides if to_host else sides[::-1]
    move_rows(source, target, source_rows, target_rows, width)
    if ref.DEVICE == "cuda":
        torch.cuda.synchronize()
    for (d, h), found, kept in zip(wanted, device, host, strict=True):
        assert torch.equal(found.cpu(), d)
        assert torch.equal(kept.cpu(), h)


@pytest.mark.parametrize("offset", [1, 4])
def test_rows_that_begin_off_a_word_are_moved_in_smaller_ones(offset: int) -> None:
    width, slots = 64, 20
    raw, target = random_bytes(slots * width + offset, host=False), random_bytes(slots, width, host=True)
    source = raw[offset:].view(slots, width)
    wanted = target.cpu().clone()
    wanted[3], wanted[0] = source[19].cpu(), source[2].cpu()
    below, above = (torch.tensor(rows, dtype=torch.int64, device=ref.DEVICE) for rows in ([19, 2], [3, 0]))
    move_rows(matrices([source]), matrices([target]), below, above, width)
    if ref.DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(target.cpu(), wanted)


def test_no_rows() -> None:
    data = random_bytes(4, 16, host=False)
    before = data.cpu().clone()
    none = torch.empty(0, dtype=torch.int32, device=ref.DEVICE)
    move_rows(matrices([data]), matrices([data]), none, none, 16)
    assert torch.equal(data.cpu(), before)


@pytest.mark.parametrize("count", [1, 31, 1024, 1025, 5000])
def test_a_steps_inputs_arrive(count: int) -> None:
    source = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32)
    target = torch.full((count + 64,), -7, dtype=torch.int32, device=ref.DEVICE)
    pull(source if ref.DEVICE == "cpu" else source.pin_memory(), target[:count])
    assert torch.equal(target[:count].cpu(), source)
    assert (target[count:] == -7).all()
