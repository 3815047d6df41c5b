"""HAZARDS 28: trust_remote_code is one explicit value, off by default, and nothing a checkpoint brings is ever run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ceiba.checkpoint import open_checkpoint
from ceiba.config.env import Env
from ceiba.config.flags import flags_from_kwargs, table
from ceiba.config.records import ModelConfig
from ceiba.launch.configure import configure

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "auto_map": {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilModel",
        "AutoTokenizer": ["tokenization_evil.EvilTokenizer", None],
    },
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory whose Python files leave a mark when they are imported."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name in ("configuration_evil", "modeling_evil", "tokenization_evil"):
        (directory / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').write('run')\n")
    return directory


def test_off_by_default() -> None:
    assert table()["--trust-remote-code"].default is False
    assert ModelConfig(path="m", name="m", tokenizer_path="m").trust_remote_code is False


@pytest.mark.parametrize("trusted", [False, True])
def test_no_code_of_a_checkpoint_runs(model: Path, trusted: bool) -> None:
    flags = flags_from_kwargs(model_path=str(model), load_format="dummy", device="cpu", trust_remote_code=trusted)
    config = configure(flags, Env())
    assert config.model.trust_remote_code is trusted
    assert any("no code from a checkpoint is ever run" in note for note in config.notes) is trusted
    checkpoint = open_checkpoint(str(model), "dummy")
    checkpoint.facts()
    checkpoint.tokenizer()
    checkpoint.close()
    assert not (model.parent / "mark").exists()
