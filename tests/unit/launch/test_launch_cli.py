"""The command line as a user meets it: help, versions, mistakes, exit codes, and how long it takes to say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

import ceiba
from ceiba.launch.cli import BENCHES, COMMANDS, main
from ceiba.launch.facts import device_facts

OURS = ("serve", "flags", "doctor")


def test_no_command_and_help_list_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert all(f"  {name}" in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ceiba {ceiba.__version__}\n"


@pytest.mark.parametrize("name", OURS)
def test_help_of_a_command_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: ceiba " + name in out
    for example in COMMANDS[name].examples:
        assert example in out


def test_help_of_serve_lists_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])
    out = capsys.readouterr().out
    assert "--max-running-requests, --max-num-seqs INT" in out
    assert "--speculative-eagle-topk" not in out
    assert max(map(len, out.splitlines())) <= 120


def test_bench_lists_its_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in BENCHES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["srve"], "Did you mean serve?"),
        (["bench", "srve"], "Did you mean serve?"),
        (["gateway"], "not available yet"),
        (["serve", "--tp", "2"], "--tp-size 2: not available yet"),
        (["serve", "--max-totl-tokens", "2"], "Did you mean --max-total-tokens"),
        (["serve", "--device", "tpu"], "no such device"),
        (["serve", "/no/such/model.gguf"], "/no/such/model.gguf"),
    ],
)
def test_a_mistake_is_one_message_and_exit_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_every_problem_of_a_command_line_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--tp", "2", "--port", "0", "--lora-paths", "a"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0 if i else 1] for i, line in enumerate(lines)] == ["--tp-size", "--port", "--lora-paths"]


def test_flags_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    by_name = {row["flag"]: row for row in rows}
    assert by_name["--port"]["default"] == 30000
    assert "--tp-size" not in by_name
    here = device_facts().kind
    assert ("triton" in by_name["--attention-backend"]["values"]) == (here == "cuda")


def test_flags_filter_and_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "--json", "--all", "SPECULATIVE-EAGLE"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["status"] == "refused"
    assert "Instead" in row["description"]
    assert main(["flags", "speculative-eagle"]) == 1
    assert "--all looks" in capsys.readouterr().out


def test_flags_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "--all"]) == 0
    out = capsys.readouterr().out
    assert "--schedule-policy" in out
    assert "On this machine" in out


def run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, env=env, check=False)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ceiba.launch.cli import main; main(['serve', '--help']); main(['flags', '--json']);"
        "heavy = {'torch', 'fastapi', 'transformers', 'numpy', 'rich'} & set(sys.modules);"
        "print('HEAVY', sorted(heavy))"
    )
    assert run("-c", code).stdout.strip().endswith("HEAVY []")


def test_help_is_quick() -> None:
    run("-m", "ceiba", "serve", "--help")

    def seconds(*words: str) -> float:
        begun = time.perf_counter()
        assert run(*words).returncode == 0
        return time.perf_counter() - begun

    # 0.3 s on an idle machine; a busy one is measured by what a bare interpreter takes there at the same time.
    tries = []
    while len(tries) < 8:
        tries.append((seconds("-m", "ceiba", "serve", "--help"), seconds("-c", "pass")))
        if tries[-1][0] < max(0.3, 8 * tries[-1][1]):
            return
    raise AssertionError(f"help beside a bare interpreter: {tries}")


def test_a_closed_pipe_is_no_error() -> None:
    env = dict(os.environ)
    done = subprocess.run(
        f"{sys.executable} -m ceiba flags --all --json | head -c 10",
        shell=True, capture_output=True, text=True, timeout=60, env=env, check=False,
    )  # fmt: skip
    assert done.stderr == ""


def test_the_older_module_is_serve() -> None:
    done = run("-m", "ceiba.launch_server", "--model-path", "/no/such/model.gguf", "--tp", "2")
    assert done.returncode == 2
    assert "--tp-size 2" in done.stderr
