"""The grammar of the command line."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceiba.config.parse import parse_args
from ceiba.core.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("model", {"model_path": "model"}),
        ("--model-path model", {"model_path": "model"}),
        ("--model=model", {"model_path": "model"}),
        ("model --model-path model", {"model_path": "model"}),
        ("--port 8000 model", {"port": 8000, "model_path": "model"}),
        ("--port=8000", {"port": 8000}),
        ("--port 1 --port 2", {"port": 2}),
        ("--enable-metrics model", {"enable_metrics": True, "model_path": "model"}),
        ("--enable-metrics=false", {"enable_metrics": False}),
        ("--enable-metrics true", {"enable_metrics": True}),
        ("--no-enable-metrics", {"enable_metrics": False}),
        ("--chunked-prefill-size -1", {"chunked_prefill_size": -1}),
        ("--mem-fraction-static .5", {"mem_fraction_static": 0.5}),
        ('--preferred-sampling-params {"top_k":3}', {"preferred_sampling_params": {"top_k": 3}}),
        ("--tp 1 --dp-size 1 --nnodes 1", {"tp_size": 1, "dp_size": 1, "nnodes": 1}),
        ("", {}),
    ],
)
def test_lines_that_parse(line: str, values: dict[str, Any]) -> None:
    assert dict(parse_args(line.split()).values) == values


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--port", "--port needs a value"),
        ("--port --host x", "--port needs a value"),
        ("--port eight", "expected a whole number"),
        ("--mem-fraction-static nan", "expected a number"),
        ("--mem-fraction-static 1.5", "out of range"),
        ("--enable-metrics=perhaps", "expected true or false"),
        ("--no-enable-metrics=1", "takes no value"),
        ("--no-port", "unknown flag"),
        ("-p 8000", "two dashes"),
        ("--max-total-tokns 5", "Did you mean --max-total-tokens"),
        ("--preferred-sampling-params {a:1}", "not valid JSON"),
        ("--preferred-sampling-params " + "[" * 100_000, "not valid JSON"),
        ("a b", "several models"),
        ("a --model-path b", "several models"),
        ("--model-path a=x b=y", "several models"),
        ("--lora-paths a b c", "LoRA adapters are not built"),
        ("--tp-size 8", "tensor parallelism needs several GPUs"),
        ("--schedule-policy lmp", "Did you mean lpm"),
        ("--worker-addresses a:1 b:2", "--nnodes, --node-rank and --dist-init-addr"),
        ("--enable-dp-attention --dp-size 4", "--attn-dp-size"),
    ],
)
def test_lines_that_are_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(line.split())
    assert message in caught.value.message


def test_a_json_list_is_a_list() -> None:
    with pytest.raises(ConfigError, match=r"\['a', 'b'\]"):
        parse_args(["--worker-addresses", '["a", "b"]'])


@given(st.lists(st.text(max_size=12), max_size=5))
def test_any_words_parse_or_are_refused(words: list[str]) -> None:
    known = {"model_path"}
    with contextlib.suppress(ConfigError):
        known = set(parse_args(words).values) | known
    assert known == {"model_path"}
