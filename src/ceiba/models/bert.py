"""BERT-class encoders: token ids to one vector, or to logits of classes (BERT, RoBERTa, XLM-RoBERTa).

Owns the whole model, in plain torch: it has no KV cache, so it shares nothing with the decoders. Must never know how
texts are batched or what the numbers are for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ceiba.checkpoint.base import Checkpoint
from ceiba.core.errors import CheckpointError, ConfigError
from ceiba.layers.quant.decode import view_plain

Pooling = Literal["mean", "cls", "last"]
_ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; linear ones as [out, in]."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    norm1: tuple[torch.Tensor, torch.Tensor]
    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    norm2: tuple[torch.Tensor, torch.Tensor]


class BertEncoder:
    """``config`` in the keys of Hugging Face's config.json, ``weights`` by its names.

    Source: Devlin et al., "BERT", arXiv:1810.04805; Liu et al., "RoBERTa", arXiv:1907.11692 (positions start behind the
    padding id). Raises CheckpointError for a missing tensor, ConfigError for what is not supported.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pooling: Pooling = "mean",
    ) -> None:
        self._weights, self._dtype, self._device = weights, dtype, torch.device(device)
        self.architecture = config["architectures"][0]
        roberta = "Roberta" in self.architecture
        self._prefix = ""
        for prefix in ("bert.", "roberta."):
            if f"{prefix}embeddings.word_embeddings.weight" in weights:
                self._prefix = prefix
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise ConfigError(f"{self.architecture}: only absolute position embeddings are available.")
        activation = config.get("hidden_act", "gelu")
        if activation not in _ACTIVATIONS:
            raise ConfigError(f"{self.architecture}: activation {activation!r} is not available.")
        self._activation = _ACTIVATIONS[activation]
        self._heads = config["num_attention_heads"]
        self._eps = config.get("layer_norm_eps", 1e-12)
        self._first = (config.get("pad_token_id", 1) or 0) + 1 if roberta else 0
        """Position of a text's first token."""
        self._pooling = pooling
        self._words = self._get("embeddings.word_embeddings.weight")
        self._places = self._get("embeddings.position_embeddings.weight")
        self._types = self._get("embeddings.token_type_embeddings.weight")
        self._norm = self._norm_of("embeddings.LayerNorm")
        self._layers = [self._layer(f"encoder.layer.{i}.") for i in range(config["num_hidden_layers"])]
        self._classifies = self.architecture.endswith("ForSequenceClassification")
        self._head = self._head_of(roberta) if self._classifies else None
        self.max_length = len(self._places) - self._first
        """Tokens of one text."""
        self.vocab_size = len(self._words)
        self._weights = {}

    def _raw(self, name: str) -> torch.Tensor:
        found = self._weights.get(name)
        if found is None:
            raise CheckpointError(f"the checkpoint lacks {name}, which {self.architecture} needs")
        return found.to(self._device, self._dtype, copy=True)

    def _get(self, name: str) -> torch.Tensor:
        return self._raw(self._prefix + name)

    def _norm_of(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        gamma = f"{self._prefix}{name}.gamma" in self._weights  # the oldest checkpoints
        names = ("gamma", "beta") if gamma else ("weight", "bias")
        return self._get(f"{name}.{names[0]}"), self._get(f"{name}.{names[1]}")

    def _layer(self, at: str) -> Layer:
        parts = [f"{at}attention.self.{name}" for name in ("query", "key", "value")]
        return Layer(
            torch.cat([self._get(f"{p}.weight") for p in parts]),
            torch.cat([self._get(f"{p}.bias") for p in parts]),
            self._get(f"{at}attention.output.dense.weight"),
            self._get(f"{at}attention.output.dense.bias"),
            self._norm_of(f"{at}attention.output.LayerNorm"),
            self._get(f"{at}intermediate.dense.weight"),
            self._get(f"{at}intermediate.dense.bias"),
            self._get(f"{at}output.dense.weight"),
            self._get(f"{at}output.dense.bias"),
            self._norm_of(f"{at}output.LayerNorm"),
        )

    def _head_of(self, roberta: bool) -> tuple[torch.Tensor, ...]:
        """(weight, bias) of the dense layer with tanh, then of the classifier."""
        if roberta:
            names = ("classifier.dense", "classifier.out_proj")
        else:
            names = (f"{self._prefix}pooler.dense", "classifier")
        return tuple(self._raw(f"{name}.{part}") for name in names for part in ("weight", "bias"))

    @torch.inference_mode()
    def __call__(self, texts: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """float32 [N, width]: a pooled vector of each text, or its logits. ``texts``: (ids [L], how many of them are a
        second text at the end). Texts are padded to the longest; padding is never looked at."""
        n, longest = len(texts), max(len(ids) for ids, _ in texts)
        ids = torch.zeros(n, longest, dtype=torch.long)
        kinds = torch.zeros(n, longest, dtype=torch.long)
        lengths = torch.tensor([len(text) for text, _ in texts])
        for i, (text, second) in enumerate(texts):
            ids[i, : len(text)] = text
            if second and len(self._types) > 1:
                kinds[i, len(text) - second : len(text)] = 1
        inside = torch.arange(longest)[None] < lengths[:, None]
        ids, kinds, inside = ids.to(self._device), kinds.to(self._device), inside.to(self._device)
        places = torch.arange(self._first, self._first + longest, device=self._device)
        x = self._words[ids] + self._types[kinds] + self._places[places][None]
        x = F.layer_norm(x, x.shape[-1:], *self._norm, eps=self._eps)
        mask = None if bool(inside.all()) else inside[:, None, None, :]
        for layer in self._layers:
            x = self._step(layer, x, mask)
        return self._pooled(x, inside).float().cpu()

    def _step(self, layer: Layer, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        n, length, width = x.shape
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(n, length, 3, self._heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        seen = seen.transpose(1, 2).reshape(n, length, width)
        x = F.layer_norm(x + F.linear(seen, layer.out, layer.out_bias), (width,), *layer.norm1, eps=self._eps)
        y = self._activation(F.linear(x, layer.up, layer.up_bias))
        return F.layer_norm(x + F.linear(y, layer.down, layer.down_bias), (width,), *layer.norm2, eps=self._eps)

    def _pooled(self, x: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        if self._head is not None:
            dense, dense_bias, out, out_bias = self._head
            return F.linear(torch.tanh(F.linear(x[:, 0], dense, dense_bias)), out, out_bias)
        if self._pooling == "cls":
            return x[:, 0]
        if self._pooling == "last":
            return x[torch.arange(len(x)), inside.sum(1) - 1]
        weights = inside[..., None].to(torch.float32)
        return (x.float() * weights).sum(1) / weights.sum(1)


def pooling_of(folder: str | Path) -> Pooling:
    """What a sentence-transformers folder says (1_Pooling/config.json); the mean where it says nothing."""
    try:
        said = json.loads((Path(folder) / "1_Pooling" / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return "mean"
    names: dict[str, Pooling] = {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_lasttoken": "last",
    }
    chosen = [pooling for name, pooling in names.items() if said.get(name)]
    others = [name for name, on in said.items() if name.startswith("pooling_mode") and on and name not in names]
    if len(chosen) != 1 or others:
        raise ConfigError(f"{folder}: this way of pooling is not available; mean, cls and last token are.")
    return chosen[0]


def load_bert(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> BertEncoder:
    """The encoder of an opened checkpoint with plain weights."""
    weights = {raw.name: view_plain(raw) for raw in checkpoint if raw.kind.startswith(("F", "BF"))}
    return BertEncoder(checkpoint.config, weights, dtype=dtype, device=device, pooling=pooling_of(checkpoint.path))
