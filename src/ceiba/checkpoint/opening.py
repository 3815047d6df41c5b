"""From what the user names to an opened checkpoint: owns the order in which a name is looked up and the choice of a
format. Must never look inside a weight file.
"""

from __future__ import annotations

import os
import re
from typing import Final, Literal, get_args

from ceiba.checkpoint import catalogue
from ceiba.checkpoint.base import Checkpoint
from ceiba.checkpoint.dummy import DummyCheckpoint
from ceiba.checkpoint.gguf import GgufCheckpoint
from ceiba.checkpoint.safetensors import INDEX, SafetensorsCheckpoint, TorchCheckpoint, torch_files
from ceiba.core.errors import CheckpointError

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy", "pt"]
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUB_FILE: Final = re.compile(rf"({_HUB_NAME.pattern})/([A-Za-z0-9._/-]{{1,200}}\.gguf)")
_LATER_PART: Final = re.compile(r".+-(?!00001)\d{5}-of-\d{5}\.gguf")
_HUB_PATTERNS: Final = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


def open_checkpoint(
    path_or_name: str | os.PathLike[str] | None,
    load_format: str = "auto",
    *,
    download_dir: str | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> Checkpoint:
    """Open a model: a directory, a GGUF file, a catalogue name, a hub name, or None for the embedded default.

    Fetches what is not here. ``load_format``: ``auto`` takes safetensors, then GGUF, then torch's files. Raises
    CheckpointError, with the way out, for anything that is missing, damaged, hostile or of no known kind.
    """
    if load_format not in get_args(LoadFormat):
        raise CheckpointError(f"load format {load_format!r} is not known; known: {', '.join(get_args(LoadFormat))}")
    path = resolve_path(path_or_name, download_dir=download_dir, revision=revision, progress=progress)
    if os.path.isdir(path):
        return _open_directory(path, load_format)
    return _open_file(path, load_format)


def resolve_path(
    path_or_name: str | os.PathLike[str] | None,
    *,
    download_dir: str | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> str:
    """The local path of a model, fetched when needed. A path that exists and holds a model wins over a name.

    ``revision`` is for hub names; with any other it is refused, not ignored.
    """
    name = catalogue.DEFAULT.name if path_or_name is None else os.fspath(path_or_name)
    path = os.path.expanduser(name)
    entry = catalogue.find(name)
    local = os.path.exists(path) and path_or_name is not None
    if revision is not None and (local or entry is not None):
        raise CheckpointError(f"revision {revision!r}: only hub models have revisions, {name} has none; leave it out")
    if path_or_name is None:
        return str(catalogue.fetch(catalogue.DEFAULT, download_dir, progress=progress))
    if os.path.isfile(path) or (os.path.isdir(path) and (entry is None or _holds_model(path))):
        return os.path.abspath(path)
    if entry is not None:
        return str(catalogue.fetch(entry, download_dir, progress=progress))
    if name.startswith(("/", ".", "~")) or os.path.exists(path):
        raise CheckpointError(f"{name}: no such model file or directory")
    if _HUB_NAME.fullmatch(name) or (_HUB_FILE.fullmatch(name) and ".." not in name):
        return _from_hub(name, download_dir, revision)
    known = ", ".join(e.name for e in catalogue.CATALOGUE)
    raise CheckpointError(f"{name!r:.300} is no local path, no hub name (ORG/NAME) and not in the catalogue ({known})")


def _holds_model(directory: str) -> bool:
    return any(n == "config.json" or n.endswith(".gguf") for n in os.listdir(directory))


def _from_hub(name: str, download_dir: str | None, revision: str | None) -> str:
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(f"{name}: hub models need the huggingface-hub package; pip install it") from error
    file = _HUB_FILE.fullmatch(name)
    try:
        if file:
            return huggingface_hub.hf_hub_download(file[1], file[2], revision=revision, cache_dir=download_dir)
        path = huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=download_dir, allow_patterns=_HUB_PATTERNS
        )
        if not any(n.endswith(".safetensors") for n in os.listdir(path)):
            path = huggingface_hub.snapshot_download(
                name, revision=revision, cache_dir=download_dir, allow_patterns=[*_HUB_PATTERNS, "pytorch_model*.bin"]
            )
        return path
    except Exception as error:  # the client raises errors of several libraries
        why = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        known = ", ".join(e.name for e in catalogue.CATALOGUE)
        raise CheckpointError(
            f"{name} is not a local path, and the hub did not give it: {why}. Give the path of a model, or a catalogue "
            f"name ({known})"
        ) from error


def _open_file(path: str, load_format: str) -> Checkpoint:
    if path.endswith((".safetensors", ".bin", ".json")):
        raise CheckpointError(f"{path}: name the directory that holds config.json and the weights, not one file of it")
    if load_format in ("safetensors", "pt"):
        raise CheckpointError(f"{path}: a single file is read as GGUF; --load-format {load_format} needs a directory")
    checkpoint = GgufCheckpoint(path)
    return DummyCheckpoint(checkpoint) if load_format == "dummy" else checkpoint


def _open_directory(path: str, load_format: str) -> Checkpoint:
    names = os.listdir(path)
    configured = "config.json" in names
    if load_format == "safetensors" or (
        load_format == "auto" and configured and (INDEX in names or any(n.endswith(".safetensors") for n in names))
    ):
        return SafetensorsCheckpoint(path)
    if load_format == "dummy" and configured:
        return DummyCheckpoint(path)
    ggufs = sorted(n for n in names if n.endswith(".gguf") and not _LATER_PART.fullmatch(n))
    if load_format in ("auto", "gguf", "dummy") and ggufs:
        if len(ggufs) > 1:
            shown = ", ".join(ggufs[:10])
            raise CheckpointError(f"{path}: {len(ggufs)} GGUF models ({shown}); name one of the files")
        return _open_file(os.path.join(path, ggufs[0]), load_format)
    if load_format == "pt" or (load_format == "auto" and configured and torch_files(path)):
        return TorchCheckpoint(path)
    if configured and load_format == "auto":
        raise CheckpointError(f"{path}: config.json without weights; fetch them, or start with --load-format dummy")
    raise CheckpointError(f"{path}: nothing that --load-format {load_format} reads (config.json with weights, or GGUF)")
