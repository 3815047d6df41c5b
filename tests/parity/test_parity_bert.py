"""Encoders against transformers on tiny random configurations, float32; and the loop that batches them."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from ceiba.core.errors import CheckpointError, ConfigError
from ceiba.core.messages import Abort, Control, Pool, Pooled, Reply, bytes_to_ids, ids_to_bytes
from ceiba.models.bert import BertEncoder, pooling_of
from ceiba.runner.pooling import PoolingLoop

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
TEXTS = [([2, 5, 9, 11, 3], 0), ([2, 8, 3], 0), ([2, *range(10, 40), 3], 0), ([2, 7, 3, 12, 13, 3], 3)]


def build(family: str, head: str, **more):
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family}Config")
    extra = {"pad_token_id": 1, "type_vocab_size": 1} if "Roberta" in family else {"pad_token_id": 0}
    config = config_class(**SIZES, **extra, **more)
    name = f"{family}{head}"
    model = getattr(transformers, name)(config).eval()
    settings = {**config.to_dict(), "architectures": [name]}
    return model, settings


def reference(model, texts, pad):
    """Each text by itself, so that nothing depends on padding: hidden states [L, H], or logits."""
    found = []
    for ids, second in texts:
        kinds = [0] * (len(ids) - second) + [1] * second
        given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        if model.config.type_vocab_size > 1:
            given["token_type_ids"] = torch.tensor([kinds])
        with torch.inference_mode():
            out = model(**given)
        found.append(out.logits[0] if hasattr(out, "logits") else out.last_hidden_state[0])
    return found


def tensors(texts):
    return [(torch.tensor(ids), second) for ids, second in texts]


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_vectors(family, pooling):
    model, settings = build(family, "Model")
    encoder = BertEncoder(settings, model.state_dict(), pooling=pooling)
    hidden = reference(model, TEXTS, settings["pad_token_id"])
    pick = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "last": lambda h: h[-1]}[pooling]
    expected = torch.stack([pick(h) for h in hidden])
    torch.testing.assert_close(encoder(tensors(TEXTS)), expected, atol=2e-5, rtol=1e-4)
    assert encoder.max_length == 40 - (2 if "Roberta" in family else 0)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta"])
@pytest.mark.parametrize("labels", [1, 5])
def test_logits_of_classifiers_and_cross_encoders(family, labels):
    model, settings = build(family, "ForSequenceClassification", num_labels=labels)
    encoder = BertEncoder(settings, model.state_dict())
    expected = torch.stack(reference(model, TEXTS, settings["pad_token_id"]))
    assert expected.shape == (4, labels)
    torch.testing.assert_close(encoder(tensors(TEXTS)), expected, atol=2e-5, rtol=1e-4)


def test_what_cannot_be_loaded_is_refused(tmp_path):
    model, settings = build("Bert", "Model")
    weights = dict(model.state_dict())
    del weights["encoder.layer.1.output.dense.bias"]
    with pytest.raises(CheckpointError, match=r"encoder.layer.1.output.dense.bias"):
        BertEncoder(settings, weights)
    with pytest.raises(ConfigError, match="activation"):
        BertEncoder(settings | {"hidden_act": "strange"}, model.state_dict())
    with pytest.raises(ConfigError, match="position"):
        BertEncoder(settings | {"position_embedding_type": "relative_key"}, model.state_dict())
    assert pooling_of(tmp_path) == "mean"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    assert pooling_of(tmp_path) == "cls"
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ConfigError, match="pooling"):
        pooling_of(tmp_path)


class Port:
    def __init__(self):
        self.inbox, self.sent = [], []

    def receive(self, timeout):
        taken, self.inbox = self.inbox, []
        return taken

    def to_front(self, message):
        self.sent.append(message)


def pool(name, length):
    return Pool(rid=name, input_ids=ids_to_bytes([3] * length))


def width_one(texts):
    return torch.tensor([[float(len(ids))] for ids, _ in texts])


def test_the_loop_batches_within_its_budget_and_starves_no_one():
    port, seen = Port(), []

    def encode(texts):
        seen.append([len(ids) for ids, _ in texts])
        return width_one(texts)

    loop = PoolingLoop(encode, port, most_tokens=40, most_texts=3)
    lengths = [30, 5, 6, 31, 5, 5, 5, 50, 2]
    port.inbox = [pool(str(i), n) for i, n in enumerate(lengths)]
    rounds = 0
    while sum(len(m.rids) for m in port.sent) < len(lengths):
        loop.step(0)
        rounds += 1
        assert rounds < 20
    for batch in seen:
        assert len(batch) <= 3
        assert len(batch) == 1 or max(batch) * len(batch) <= 40
    got = {}
    for message in port.sent:
        values = torch.frombuffer(bytearray(message.values), dtype=torch.float32)
        assert bytes_to_ids(message.widths).tolist() == [1] * len(message.rids)
        got |= dict(zip(message.rids, values.tolist(), strict=True))
    assert got == {str(i): float(n) for i, n in enumerate(lengths)}
    assert port.sent[0].rids[0] == "0"


def test_one_text_that_fails_fails_alone():
    def encode(texts):
        if any(len(ids) == 7 for ids, _ in texts):
            raise ZeroDivisionError
        return width_one(texts)

    port = Port()
    loop = PoolingLoop(encode, port, most_tokens=100)
    port.inbox = [pool("a", 6), pool("b", 7), pool("c", 8)]
    loop.step(0)
    failed = {rid: m.finishes for m in port.sent for rid in m.rids}
    assert [bool(failed[name]) for name in "abc"] == [False, True, False]
    assert all(isinstance(m, Pooled) for m in port.sent)


def test_aborts_and_controls():
    port = Port()
    loop = PoolingLoop(width_one, port, most_tokens=100)
    port.inbox = [pool("a", 3), Abort(rids=["a"]), Control(id=1, op="load"), Control(id=2, op="strange")]
    loop.step(0)
    assert all(isinstance(m, Reply) for m in port.sent)
    assert [m.ok for m in port.sent] == [True, False]
    assert loop.latest().stats["waiting"] == 0
    port.inbox = [Control(id=3, op="shutdown")]
    loop.run()
    assert port.sent[-1].ok
