"""``auto``: the right parsers for public chat templates, and a clear word where there is nothing to go by."""

from __future__ import annotations

import pytest

from ceiba.text.parsers.registry import detect, explain, reasoning_parser, tool_parser
from support import golden_sdist

# What the models' own publishers name, for templates in the archive.
PUBLIC = {
    "Cohere2MoE": ("cohere_command4", "cohere_command4"),
    "GLM-4.6": ("glm45", "glm45"),
    "GLM-4.7-Flash": ("glm47", "glm45"),
    "GigaChat3-10B-A1.8B": ("gigachat3", None),
    "GigaChat3.1-10B-A1.8B": ("gigachat3", None),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "kimi_k2"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "LFM2-8B-A1B": ("lfm2", None),
    "LFM2.5-8B-A1B": ("lfm2", "qwen3"),
    "MiniMax-M2": ("minimax-m2", "minimax"),
    "MiniMax-M3": ("minimax-m3", "minimax-m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "nemotron_3"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("qwen25", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "StepFun3.5-Flash": ("qwen3_coder", "step3p5"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseekv3", "deepseek-r1"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseekv31", "deepseek-v3"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseekv32", "deepseek-v3"),
    "deepseek-ai-DeepSeek-V4": ("deepseekv4", "deepseek-v4"),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "openai-gpt-oss-120b": ("gpt-oss", "gpt-oss"),
    "openbmb-MiniCPM5-1B": ("minicpm5", "qwen3"),
    "poolside-Laguna-XS.2": ("poolside_v1", "poolside_v1"),
    "tencent-Hy3": ("hunyuan", "hunyuan"),
}
SAME = {"poolside_v1": "glm45"}


@pytest.mark.network
@pytest.mark.parametrize("name", PUBLIC)
def test_public_templates(name: str) -> None:
    template = (golden_sdist.folder() / "templates" / f"{name}.jinja").read_text()
    tool, reasoning = PUBLIC[name]
    assert detect(template) == (SAME.get(tool or "", tool), reasoning)


@pytest.mark.network
def test_what_is_found_is_known() -> None:
    for path in (golden_sdist.folder() / "templates").glob("*.jinja"):
        found = detect(path.read_text())
        if found.tool:
            tool_parser(found.tool)
        if found.reasoning:
            reasoning_parser(found.reasoning)


def test_templates_that_are_not_public() -> None:
    assert detect("… <|action_start|><|plugin|> …").tool == "interns1"
    assert detect('… <steptml:invoke name="x"> … <think>').tool == "step3"
    assert detect("{{ messages }}") == (None, None)


def test_auto_says_why_it_cannot_choose() -> None:
    assert "Kimi-K3" in explain(None, "--tool-call-parser").message
    assert "DeepSeek-V4" in explain("", "--tool-call-parser").message
    error = explain("{{ messages }}", "--reasoning-parser")
    assert error.message.startswith("--reasoning-parser auto cannot choose: the chat template")
