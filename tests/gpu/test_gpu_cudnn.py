"""cuDNN's attention of long prefills: alone against float64, in the backend against the Triton kernel."""

from __future__ import annotations

import gpu_reference as ref
import pytest
import torch
from test_triton_backend import Engine

from ceiba.attention.backends.triton import TritonAttention
from ceiba.attention.base import AttentionLayer
from ceiba.kernels import cudnn

B = torch.bfloat16


@pytest.fixture(autouse=True)
def able() -> None:
    probe = torch.empty(8, 2, 64, dtype=B, device=ref.DEVICE)
    if not cudnn.can_attend(probe, probe, probe):
        pytest.skip("cuDNN's attention needs Hopper or newer")


@pytest.mark.parametrize("cached", [0, 64, 2048])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (4, 4, 64), (8, 1, 128)])
def test_attend_against_float64(heads: int, kv_heads: int, dim: int, cached: int) -> None:
    tokens = 1024
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim, device="cuda").to(B)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    before = tuple(torch.randn(2, cached, kv_heads, dim, device="cuda").to(B).unbind())
    out = ref.poisoned(tokens, heads, dim)
    cudnn.attend(q, k, v, before if cached else None, dim**-0.5, out)
    expected = ref.attention(q, torch.cat([before[0], k]), torch.cat([before[1], v]), dim**-0.5)
    assert ref.error(out, expected) < ref.BF16_BOUND
    if not cached:
        alone = cudnn.attend_alone(q, k, v, dim**-0.5)
        assert alone.is_contiguous()
        assert torch.equal(alone, out)


def test_parts_far_apart_are_merged() -> None:
    """A prefix that outweighs the new keys by far, and the other way round."""
    q = torch.randn(1024, 4, 64, device="cuda").to(B)
    k, v = torch.randn(2, 1024, 4, 64, device="cuda").to(B).unbind()
    for factor in (30.0, 1e-3):
        before = (q[:512] * factor).contiguous(), torch.randn(512, 4, 64, device="cuda").to(B)
        out = ref.poisoned(1024, 4, 64)
        cudnn.attend(q, k, v, before, 0.125, out)
        expected = ref.attention(q, torch.cat([before[0], k]), torch.cat([before[1], v]), 0.125)
        assert ref.error(out, expected) < ref.BF16_BOUND


def test_the_backend_takes_it_for_long_chunks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two long segments, one behind a prefix, and a row that decodes; the same with shapes that do not come again."""
    engine = Engine(2, 128, B, B)
    engine.table = torch.zeros(128, 8192, dtype=torch.int32, device="cuda")
    layer = AttentionLayer(0, 8, 2, 128, 128**-0.5)
    calls = []
    attend = cudnn.attend
    monkeypatch.setattr(cudnn, "attend", lambda *args: (calls.append(args[0].shape[0]), attend(*args)))
    for lengths, long in (([4096, 5120, 1], True), ([4096, 5121, 1], False), ([4096, 2048, 1], False)):
        engine.used, calls[:] = 0, []
        starts = [0, 1024, 700]
        for i, (s, n) in enumerate(zip(starts, lengths, strict=True)):
            engine.table[i, : s + n] = engine.take(s + n)
        batch = engine.batch(starts, lengths, 2, [])
        total = sum(lengths)
        q = torch.randn(total, 8, 128, device="cuda").to(B)
        k, v = torch.randn(2, total, 2, 128, device="cuda").to(B).unbind()
        backend = TritonAttention()
        backend.plan(batch)
        out = backend.run(q, k, v, layer, engine.pool)
        assert calls == (lengths[:2] if long else [])
        wanted = backend.run(q, None, None, layer, engine.pool)  # from the pool, by the Triton kernel
        assert ref.error(out, wanted) < ref.BF16_BOUND


def test_a_chunk_alone_needs_no_copy() -> None:
    engine = Engine(2, 128, B, B)
    engine.table = torch.zeros(128, 8192, dtype=torch.int32, device="cuda")
    layer = AttentionLayer(0, 8, 2, 128, 128**-0.5)
    engine.used = 0
    engine.table[0, :4096] = engine.take(4096)
    q = torch.randn(4096, 8, 128, device="cuda").to(B)
    k, v = torch.randn(2, 4096, 2, 128, device="cuda").to(B).unbind()
    backend = TritonAttention()
    backend.plan(engine.batch([0], [4096], 1, []))
    out = backend.run(q, k, v, layer, engine.pool)
    assert out.shape == (4096, 8, 128)
    assert ref.error(out, backend.run(q, None, None, layer, engine.pool)) < ref.BF16_BOUND
