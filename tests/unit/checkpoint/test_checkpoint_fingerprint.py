"""The name of a model's weights: the same for the same bytes, wherever they lie, and another one for others."""

from __future__ import annotations

import os

from ceiba.checkpoint.fingerprint import BLOCK_BYTES, BLOCKS, HEAD_BYTES, fingerprint


def test_it_depends_on_contents_and_names_and_not_on_folders_or_order(tmp_path):
    data = os.urandom(3 * HEAD_BYTES)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.safetensors").write_bytes(data)
        (tmp_path / folder / "two.safetensors").write_bytes(data[::-1])
    a, b = ([str(tmp_path / f / f"{n}.safetensors") for n in ("one", "two")] for f in ("a", "b"))
    assert fingerprint(a) == fingerprint(b[::-1])
    assert fingerprint(a) != fingerprint(a[:1])
    assert fingerprint([]) != fingerprint(a)


def test_a_change_of_any_block_size_run_shows(tmp_path):
    """What training changes: everything. The coarsest change that must show is one sampling step long."""
    size = 4 << 20
    data = bytearray(os.urandom(size))
    path = tmp_path / "w"
    path.write_bytes(data)
    before = fingerprint([str(path)])
    step = (size - HEAD_BYTES) // BLOCKS
    assert step > BLOCK_BYTES
    for at in range(0, size - step, step):
        changed = data[:]
        changed[at : at + step] = bytes(step)
        path.write_bytes(changed)
        assert fingerprint([str(path)]) != before, at
    for cut in (size - 1, HEAD_BYTES, 10, 0):
        path.write_bytes(data[:cut])
        assert fingerprint([str(path)]) != before
