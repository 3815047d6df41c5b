"""From flags to a configuration on this machine, over a model made for the test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ceiba.config.env import Env
from ceiba.config.flags import flags_from_kwargs
from ceiba.core.errors import ConfigError
from ceiba.launch.configure import configure

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return str(tmp_path)


def test_a_model_directory(model: str) -> None:
    config = configure(flags_from_kwargs(model_path=model, load_format="dummy", device="cpu"), Env())
    assert config.model.path == model
    assert config.model.name == model
    assert config.model.context_len == 256
    assert config.runner.device == "cpu"
    assert config.scheduler.max_total_tokens >= 256


def test_each_start_has_its_own_seed_unless_one_is_given(model: str) -> None:
    def seed(**more: object) -> int:
        flags = flags_from_kwargs(model_path=model, load_format="dummy", device="cpu", **more)
        return configure(flags, Env()).scheduler.random_seed

    assert seed() != seed()
    assert seed(random_seed=5) == 5


def test_a_revision_of_what_has_none_is_refused(model: str) -> None:
    for path in (model, None):
        with pytest.raises(ConfigError, match="has no revisions"):
            configure(flags_from_kwargs(model_path=path, revision="main"), Env())


def test_a_damaged_model_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        configure(flags_from_kwargs(model_path=str(tmp_path), load_format="dummy", device="cpu"), Env())
