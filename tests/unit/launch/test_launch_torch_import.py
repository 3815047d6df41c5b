"""The shortened import of torch: it computes, and what was left out comes when somebody asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ceiba.launch import torch_import
from ceiba.launch.torch_import import SHAPES_ONLY, cpu_build

CODE = """
import sys
from ceiba.launch.torch_import import SHAPES_ONLY, import_torch
import_torch()
import torch
import_torch()
print(sum(name in sys.modules for name in SHAPES_ONLY), hasattr(torch, "_meta_registrations"))
x = torch.arange(12.0).view(3, 4)
print((x @ x.T).softmax(-1).sum().item(), torch.topk(x, 2).values.sum().item())
import torch._meta_registrations
print(torch._meta_registrations.__file__ is not None, len(torch._meta_registrations.__dict__) > 100)
print(tuple(torch.empty(5, 3, device="meta").softmax(-1).shape))
"""


def test_torch_works_and_the_rest_can_still_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    first, second, *rest = done.stdout.splitlines()
    if cpu_build():
        assert first.split() == ["0", "False"]
    assert second.split() == ["3.0", str(3.0 + 2.0 + 7.0 + 6.0 + 11.0 + 10.0)]
    assert rest == ["True True", "(5, 3)"]


DUMMY = """
from ceiba.launch.torch_import import import_torch
import_torch()
import types, torch
from ceiba.models.loader import fill_dummy
filled = []
target = types.SimpleNamespace(fill=lambda generator: filled.append(torch.rand(2, generator=generator)))
rotary = types.SimpleNamespace(table=torch.zeros(1))
fill_dummy(types.SimpleNamespace(rotary=rotary, slots=lambda: {"a": types.SimpleNamespace(target=target)}))
print(len(filled))
"""


def test_dummy_weights_still_have_their_generator() -> None:
    done = subprocess.run([sys.executable, "-c", DUMMY], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = None\n", True),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", False),
        ("cuda = None\nhip = '6.4'\n", False),
        ("__version__ = '2.13'\n", False),
    ],
)
def test_only_a_build_for_cpus_alone_is_shortened(
    text: str, expected: bool, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text(text)
    monkeypatch.setattr(
        torch_import.importlib.util,
        "find_spec",
        lambda name: type("Spec", (), {"origin": str(package / "__init__.py")}),
    )
    assert cpu_build() is expected


def test_the_modules_left_out_exist() -> None:
    """A torch without them would have to be looked at anew."""
    import importlib.util

    assert all(importlib.util.find_spec(name) is not None for name in SHAPES_ONLY)
