"""SGLang's own load client, from its own wheel, without the runtime that its package imports (torch, CUDA kernels).

``sglang_bench_serving.py FOLDER …``: FOLDER is where ``pip download --no-deps sglang`` was unpacked; what follows are
the arguments of ``python -m sglang.bench_serving``. Its imports beyond the wheel: transformers, datasets, aiohttp,
msgspec, orjson, pybase64, pillow, requests, tqdm, psutil, pyzmq. docs/api.md has a whole command.
"""

from __future__ import annotations

import importlib
import sys
import types

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation")
"""Whose ``__init__`` would start the runtime; as bare packages they let the client's own modules be imported."""


def main() -> None:
    root = sys.argv.pop(1)
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [f"{root}/{name.replace('.', '/')}"]
        sys.modules[name] = package
    constants = types.ModuleType("sglang.srt.disaggregation.utils")  # the one name that the client takes from there
    constants.FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # type: ignore[attr-defined]
    sys.modules[constants.__name__] = constants
    importlib.import_module("sglang.benchmark.serving").cli_main()


if __name__ == "__main__":
    main()
