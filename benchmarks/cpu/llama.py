"""llama.cpp as a peer: its source from the llama-cpp-python package, compiled for this processor. Owns the build.

    python benchmarks/cpu/llama.py [--sdist llama_cpp_python-0.3.36.tar.gz] [--jobs 2]

Everything lies in build/llama.cpp, which git ignores: the source in src/, the programs in out/bin.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from server import BUILD

PACKAGE = "llama-cpp-python==0.3.36"
HOME = BUILD / "llama.cpp"
PROGRAMS = HOME / "out" / "bin"
NEEDED = ("llama-server", "llama-bench")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release", "GGML_NATIVE": "ON", "BUILD_SHARED_LIBS": "OFF", "GGML_CCACHE": "OFF",
    "LLAMA_CURL": "OFF", "LLAMA_OPENSSL": "OFF", "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF", "LLAMA_BUILD_SERVER": "ON", "LLAMA_BUILD_UI": "OFF", "LLAMA_USE_PREBUILT_UI": "OFF",
}  # fmt: skip


def unpack(sdist: Path) -> None:
    """llama.cpp alone, to ``HOME``/llama.cpp."""
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            _, _, inside = member.name.partition("/vendor/")
            if inside.startswith("llama.cpp/"):
                member.name = inside
                archive.extract(member, HOME, filter="data")


def mend_amx(source: Path) -> None:
    """GCC 12 drops the stores to a tile configuration that is only read by ``_tile_loadconfig``, and the processor then
    raises SIGILL: a clobber that names it keeps them."""
    for path in (source / "ggml/src/ggml-cpu/amx").glob("*.cpp"):
        text = path.read_text()
        mended = re.sub(
            r'(?<!"memory"\); )_tile_loadconfig\(([^;]+)\);',
            r'asm volatile("" :: "r"(\1) : "memory"); _tile_loadconfig(\1);',
            text,
        )
        if mended != text:
            path.write_text(mended)


def build(sdist: Path | None, jobs: int) -> None:
    """Fetch, mend and compile; what is there already is not done again."""
    if all((PROGRAMS / name).exists() for name in NEEDED):
        return
    source = HOME / "llama.cpp"
    if not source.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        if sdist is not None:
            unpack(sdist)
        else:
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--no-deps",
                    "--no-binary",
                    ":all:",
                    "--dest",
                    folder,
                ]
                subprocess.run([*command, PACKAGE], check=True)
                (found,) = Path(folder).glob("*.tar.gz")
                unpack(found)
    mend_amx(source)
    configure = ["cmake", "-S", str(source), "-B", str(HOME / "out"), *(f"-D{k}={v}" for k, v in OPTIONS.items())]
    subprocess.run(["nice", *configure], check=True)
    compile_ = ["cmake", "--build", str(HOME / "out"), "--parallel", str(jobs), "--target", *NEEDED]
    subprocess.run(["nice", *compile_], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile llama.cpp for the comparison.")
    parser.add_argument("--sdist", type=Path, help="instead of fetching the package")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    build(args.sdist, args.jobs)
    print(PROGRAMS)
