"""Doctor finds what is wrong and says what to do."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest

from ceiba.config.env import Env
from ceiba.core.errors import ConfigError
from ceiba.launch import facts
from ceiba.launch.commands import doctor


@pytest.fixture(autouse=True)
def quick_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch in a child takes seconds: one test does it."""
    monkeypatch.setattr(doctor, "check_torch", lambda: [doctor.Finding("torch", "ok", "not looked at")])


REAL_TORCH = doctor.check_torch


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_json_and_table_agree(capsys: pytest.CaptureFixture[str]) -> None:
    port = str(free_port())
    code = doctor.main(["--json", "--port", port])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    assert {"python", "packages", "cpu kernels", "torch", "memory", "cores", "model cache", "port", "open files"} <= {
        finding["check"] for finding in report["checks"]
    }
    assert all(f["remedy"] for f in report["checks"] if f["level"] == "fail")
    assert doctor.main(["--port", port]) == code
    out = capsys.readouterr().out
    assert all(finding["check"] in out for finding in report["checks"])


def test_a_failed_check_is_exit_status_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "host_memory", lambda: (1 << 30, 1 << 20))
    assert doctor.main(["--port", str(free_port())]) == 1
    assert "Mend what failed first" in capsys.readouterr().out


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[doctor.Finding]:
        raise RuntimeError("no such file")

    def refused() -> list[doctor.Finding]:
        raise ConfigError("CEIBA_LOG_LEVEL is wrong")

    monkeypatch.setattr(doctor, "check_cores", broken)
    monkeypatch.setattr(doctor, "check_environment", refused)
    by_check = {finding.check: finding for finding in doctor.examine("127.0.0.1", free_port())}
    assert by_check["cores"].level == "warn"
    assert "no such file" in by_check["cores"].found
    assert by_check["environment"].level == "fail"


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (finding,) = doctor.check_port("127.0.0.1", taken.getsockname()[1])
        assert finding.level == "warn"
        assert "--port" in finding.remedy
    assert doctor.check_port("127.0.0.1", free_port())[0].level == "ok"
    assert doctor.check_port("127.0.0.1", 99999)[0].level == "fail"


@pytest.mark.parametrize(("free", "level"), [(8 << 30, "ok"), (700 << 20, "warn"), (100 << 20, "fail")])
def test_memory(monkeypatch: pytest.MonkeyPatch, free: int, level: str) -> None:
    monkeypatch.setattr(facts, "host_memory", lambda: (16 << 30, free))
    assert doctor.check_memory()[0].level == level


def test_missing_kernels_name_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "cpu_kernels_built", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    (finding,) = doctor.check_kernels()
    assert finding.level == "warn"
    assert "compiler: none" in finding.found
    assert "install a C++17 compiler" in finding.remedy
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "install a C++17" not in doctor.check_kernels()[0].remedy


def test_missing_packages_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["no-such-package-of-ours>=1", "numpy>=1.26,<3", "xgrammar>=0.1; extra == 'xgrammar'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: lines)
    (finding,) = doctor.check_packages()
    assert finding.level == "fail"
    assert finding.remedy == "pip install no-such-package-of-ours"


def test_model_cache(tmp_path: Path) -> None:
    assert doctor.check_cache(Env(cache_dir=tmp_path / "a" / "b"))[0].level in {"ok", "note"}
    (tmp_path / "file").write_text("")
    (finding,) = doctor.check_cache(Env(cache_dir=tmp_path / "file" / "below"))
    assert finding.level == "fail"
    assert "CEIBA_CACHE_DIR" in finding.remedy


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1_000_000))
    (finding,) = doctor.check_limits()
    assert (finding.level, finding.remedy) == ("warn", "ulimit -n 65536")


def test_environment_lines_are_shown() -> None:
    levels = [f.level for f in doctor.check_environment(Env(notes=("a note",), warnings=("a warning",)))]
    assert levels == ["warn", "note"]


def test_torch_is_really_imported() -> None:
    (finding,) = REAL_TORCH()
    assert finding.level in {"ok", "note"}


def test_a_torch_that_does_not_import_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libc10.so is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = REAL_TORCH()
    assert finding.level == "fail"
    assert "libc10.so is missing" in finding.found
