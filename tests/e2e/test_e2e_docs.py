"""Every Python example of the client's and the language's pages runs against a real server."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import ceiba
from live_server import LiveServer

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = [
    pytest.param(code, id=f"{name}-{i}")
    for name in ("client.md", "frontend.md")
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.M | re.S))
]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_example_runs(server: LiveServer, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "http://127.0.0.1:30000" in code
    path = tmp_path / "example.py"
    path.write_text(code.replace("http://127.0.0.1:30000", server.url))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        ceiba.set_default_backend(None)
    assert capsys.readouterr().out.strip()
