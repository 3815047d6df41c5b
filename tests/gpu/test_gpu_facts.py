"""What the driver's library says of the GPUs is what CUDA says."""

from __future__ import annotations

import pytest

from ceiba.config.choose import attention_backend
from ceiba.launch.facts import device_facts, torch_cuda

pytestmark = pytest.mark.gpu


def test_facts_agree_with_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = device_facts()
    assert found.kind == "cuda"
    assert found.count == torch.cuda.device_count()
    assert found.capability == torch.cuda.get_device_capability(0)
    assert torch_cuda() == torch.version.cuda
    free, total = torch.cuda.mem_get_info(0)
    # The driver rounds, and this process's own CUDA context takes some hundred MiB.
    assert found.memory_bytes == pytest.approx(total, rel=0.02)
    assert found.free_bytes == pytest.approx(free, abs=2 << 30)
    assert attention_backend(None, found)[0] in {"triton", "torch_native"}
