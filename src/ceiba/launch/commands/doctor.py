"""``ceiba doctor``: looks at the machine and the installation and says what stands in the way. It changes nothing; each
check returns a finding with a way out, and a check that breaks is a finding too.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ceiba import __version__
from ceiba.config.env import Env, read_env
from ceiba.config.sizing import GiB, human
from ceiba.core.errors import CeibaError
from ceiba.launch import facts

Level = Literal["ok", "note", "warn", "fail"]
TORCH_SECONDS = 120
MIN_FILES = 4096
"""Open files: each connection takes one."""

OPTIONAL = {
    "xgrammar": "structured output compiled ahead: pip install 'ceiba[xgrammar]'",
    "outlines_core": "another engine of structured output: pip install 'ceiba[outlines]'",
    "transformers": "tokenizers and models beyond the built-in ones: pip install 'ceiba[transformers]'",
    "opentelemetry": "traces: pip install 'ceiba[otel]'",
    "triton": "GPU kernels: comes with a CUDA build of torch",
    "flashinfer": "faster attention on NVIDIA GPUs: pip install flashinfer-python",
}


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    found: str
    remedy: str = ""


def main(argv: list[str]) -> int:
    """Returns 0 when a server can start here, 1 when something must be mended first."""
    parser = argparse.ArgumentParser(prog="ceiba doctor", description="Check this machine and this installation.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="address whose port is tried (127.0.0.1)")
    parser.add_argument("--port", type=int, default=30000, help="port that should be free (30000)")
    args = parser.parse_args(argv)
    findings = examine(args.host, args.port)
    healthy = all(finding.level != "fail" for finding in findings)
    if args.json:
        print(json.dumps({"ok": healthy, "checks": [asdict(finding) for finding in findings]}, indent=1))
    else:
        _render(findings, healthy)
    return 0 if healthy else 1


def examine(host: str, port: int) -> list[Finding]:
    """Every check, in the order in which things are needed."""
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("python", check_python),
        ("packages", check_packages),
        ("cpu kernels", check_kernels),
        ("torch", check_torch),
        ("gpu", check_gpus),
        ("memory", check_memory),
        ("cores", check_cores),
        ("model cache", check_cache),
        ("port", lambda: check_port(host, port)),
        ("temporary files", check_sockets),
        ("open files", check_limits),
        ("environment", check_environment),
        ("extras", check_extras),
    ]
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except CeibaError as error:
            findings.append(Finding(name, "fail", error.message))
        except Exception as error:  # one broken check must not hide the others
            findings.append(Finding(name, "warn", f"the check itself failed: {error}"))
    return findings


def check_python() -> list[Finding]:
    version = platform.python_version()
    found = f"{version} on {platform.system()} {platform.machine()}, ceiba {__version__}"
    return [Finding("python", "ok", found)]


def check_packages() -> list[Finding]:
    """The declared dependencies, by the metadata of the installed distribution."""
    try:
        declared = metadata.requires("ceiba") or []
    except metadata.PackageNotFoundError:
        return [Finding("packages", "warn", "ceiba is run from its sources", "pip install -e .")]
    base = [line for line in declared if "extra ==" not in line]
    missing = [name for name in map(_requirement_name, base) if not _installed(name)]
    missing = [name for name in missing if not (name == "uvloop" and os.name == "nt")]
    if missing:
        return [Finding("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")]
    return [Finding("packages", "ok", f"all {len(base)} are installed")]


def _requirement_name(line: str) -> str:
    end = next((i for i, char in enumerate(line) if not (char.isalnum() or char in "-_.")), len(line))
    return line[:end]


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_kernels() -> list[Finding]:
    sets = ", ".join(facts.instruction_sets()) or "none that matter"
    if facts.cpu_kernels_built():
        unit = facts.cpu_kernel_unit()
        level: Level = "ok" if facts.instruction_sets() else "warn"
        remedy = "" if facts.instruction_sets() else "a CPU with AVX2 computes several times faster"
        return [Finding("cpu kernels", level, f"compiled; {unit} will be used; this CPU has: {sets}", remedy)]
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    step = "" if compiler else "install a C++17 compiler (Debian: apt-get install g++), then "
    return [
        Finding(
            "cpu kernels",
            "warn",
            f"not compiled, plain torch computes instead (slower); compiler: {compiler or 'none'}; CPU has: {sets}",
            f"{step}pip install --force-reinstall --no-deps ceiba",
        )
    ]


def check_torch() -> list[Finding]:
    """Imports torch in a process of its own: the import is what may fail."""
    version = facts.torch_version()
    if version is None:
        return [Finding("torch", "fail", "not installed", "pip install torch")]
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"],
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Finding("torch", "warn", f"{version} takes over {TORCH_SECONDS} s to import", "check the disk")]
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else f"exit status {done.returncode}"
        return [Finding("torch", "fail", f"{version} does not import: {why}", "pip install --force-reinstall torch")]
    cuda = facts.torch_cuda()
    usable, count = done.stdout.split()
    if cuda is None:
        return [Finding("torch", "ok", f"{version}, built for CPUs")]
    if usable == "True":
        return [Finding("torch", "ok", f"{version}, CUDA {cuda}, {count} GPUs usable")]
    return [Finding("torch", "note", f"{version}, built for CUDA {cuda}, no GPU usable: the CPU is used")]


def check_gpus() -> list[Finding]:
    from ceiba.launch.nvml import list_gpus

    gpus = list_gpus(read_env().visible_gpus)
    if not gpus:
        return [Finding("gpu", "note", "no NVIDIA GPU visible: the CPU is used")]
    shown = "; ".join(f"{g.index}: {g.name}, {human(g.free_bytes)} of {human(g.memory_bytes)} free" for g in gpus)
    if facts.torch_cuda() is None:
        return [Finding("gpu", "warn", f"{shown}; torch is built without CUDA", "install a CUDA build of torch")]
    return [Finding("gpu", "ok", shown)]


def check_memory() -> list[Finding]:
    total, free = facts.host_memory()
    found = f"{human(free)} of {human(total)} free"
    if free < GiB:
        return [
            Finding("memory", "fail" if free < GiB // 2 else "warn", found, "free memory: a server takes 1 GiB and up")
        ]
    return [Finding("memory", "ok", found)]


def check_cores() -> list[Finding]:
    count = facts.usable_cores()
    return [Finding("cores", "ok", f"{count} usable ({facts.cpu_name()})")]


def check_cache(env: Env | None = None) -> list[Finding]:
    from ceiba.checkpoint.catalogue import DEFAULT, local_path

    directory = (env or read_env()).cache_dir
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        return [
            Finding(
                "model cache", "fail", f"{directory} cannot be written", "set CEIBA_CACHE_DIR to a directory that can"
            )
        ]
    here = local_path(DEFAULT) is not None
    found = f"{directory}, {human(free)} free; {DEFAULT.name} is {'there' if here else 'not there yet'}"
    if not here and free < 2 * DEFAULT.size:
        return [Finding("model cache", "fail", found, "free disk space, or set CEIBA_CACHE_DIR")]
    return [Finding("model cache", "ok" if here else "note", found, "" if here else "`ceiba pull` fetches it")]


def check_port(host: str, port: int) -> list[Finding]:
    if not 0 < port < 65536:
        return [Finding("port", "fail", f"{port} is no port", "give --port a number from 1 to 65535")]
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        if taken:
            return [Finding("port", "warn", f"{host}:{port} is in use", "stop what listens there, or give --port")]
        return [Finding("port", "fail", f"{host}:{port}: {error}", "give another --host and --port")]
    return [Finding("port", "ok", f"{host}:{port} is free")]


def check_sockets() -> list[Finding]:
    """The processes of a server talk over sockets in the temporary directory."""
    directory = Path(tempfile.gettempdir())
    try:
        with tempfile.TemporaryDirectory(prefix="ceiba-") as name, socket.socket(socket.AF_UNIX) as probe:
            probe.bind(os.path.join(name, "probe"))
    except OSError as error:
        return [
            Finding(
                "temporary files", "fail", f"no socket in {directory}: {error}", "set TMPDIR to a short, local path"
            )
        ]
    return [Finding("temporary files", "ok", f"sockets work in {directory}")]


def check_limits() -> list[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        wanted = MIN_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)
        return [Finding("open files", "warn", f"{text}: about that many connections", f"ulimit -n {wanted}")]
    return [Finding("open files", "ok", text)]


def check_environment(env: Env | None = None) -> list[Finding]:
    env = env or read_env()
    findings = [Finding("environment", "warn", line) for line in env.warnings]
    findings += [Finding("environment", "note", line) for line in env.notes]
    return findings or [Finding("environment", "ok", "no variable is misspelt or without effect")]


def check_extras() -> list[Finding]:
    here = [name for name in OPTIONAL if find_spec(name) is not None]
    missing = [name for name in OPTIONAL if name not in here]
    findings = [Finding("extras", "ok", f"installed: {', '.join(here)}")] if here else []
    return findings + [Finding("extras", "note", f"{name} is not installed", OPTIONAL[name]) for name in missing]


def _render(findings: list[Finding], healthy: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "note": "[cyan]note[/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("check", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.check, marks[finding.level], escape(finding.found), escape(finding.remedy))
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(table)
    verdict = "[green]A server can start here.[/]" if healthy else "[red]Mend what failed first.[/]"
    console.print(f"\n{verdict}", highlight=False)
