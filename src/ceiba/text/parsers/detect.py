"""``auto``: which parsers a model needs, from the text of its chat template.

Owns the rules. Each names the strings that only its family's templates hold; the first rule that fits wins, so the
special ones come before the general. Must never know the parsers themselves.
"""

from __future__ import annotations

from typing import NamedTuple

from ceiba.core.errors import ConfigError


class Detection(NamedTuple):
    """Names for `registry`, None where the template shows no such thing."""

    tool: str | None
    reasoning: str | None


class _Rule(NamedTuple):
    name: str
    all: tuple[str, ...]
    none: tuple[str, ...] = ()


_TOOLS = (
    _Rule("gpt-oss", ("<|channel|>", "to=functions.")),
    _Rule("gpt-oss", ("<|channel|>commentary",)),
    _Rule("kimi_k3", ("<|open|>", "<|sep|>")),
    _Rule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    _Rule("deepseekv41", ("｜DSML｜ ",)),
    _Rule("deepseekv32", ("｜DSML｜", "function_calls")),
    _Rule("deepseekv4", ("｜DSML｜",)),
    _Rule("step3", ("steptml:",)),
    _Rule("deepseekv3", ("<｜tool▁calls▁begin｜>", "```json")),
    _Rule("deepseekv31", ("<｜tool▁calls▁begin｜>",)),
    _Rule("gemma4", ("<|tool_call>",)),
    _Rule("minimax-m3", ("]<]minimax[>[",)),
    _Rule("minimax-m2", ("<minimax:tool_call>",)),
    _Rule("hunyuan", ("<tool_calls", "<tool_sep")),
    _Rule("hunyuan", ("<tool_calls>", "hy_")),
    _Rule("minimax", ("<tool_calls>", '"arguments"')),
    _Rule("cohere_command4", ("<|START_ACTION|>",)),
    _Rule("gigachat3", ("<|function_call|>",)),
    _Rule("gigachat3", ("<|role_sep|>", "function call")),
    _Rule("interns1", ("<|action_start|>",)),
    _Rule("lfm2", ("<|tool_call_start|>",)),
    _Rule("lfm2", ("<|tool_list_start|>",)),
    _Rule("lfm2", ("List of tools: [", "<|im_start|>")),
    _Rule("nemotron_nano2", ("<TOOLCALL>",)),
    _Rule("minicpm5", ('<function name="', "<param name=")),
    _Rule("qwen3_coder", ("<function=", "<parameter=", "<tool_call>")),
    _Rule("glm47", ("<arg_key>", "<arg_value>"), ("<arg_key>{{ k }}</arg_key>\n", "'</arg_key>\\n", "</arg_key>\\n<")),
    _Rule("glm45", ("<arg_key>", "<arg_value>")),
    _Rule("mistral", ("[TOOL_CALLS]",)),
    _Rule("granite", ("<|tool_call|>",)),
    _Rule("qwen25", ("<tool_call>", "You are Qwen", '\\"name\\"')),
    _Rule("hermes", ("<tool_call>", '"name"')),
    _Rule("hermes", ("<tool_call>", '\\"name\\"')),
    _Rule("llama3", ("<|python_tag|>", '"parameters"')),
    _Rule("llama3", ("<|start_header_id|>", '{"name": function name, "parameters"')),
    _Rule("pythonic", ("<|python_start|>",)),
    _Rule("pythonic", ("[func_name1(params_name1=params_value1",)),
)

_REASONING = (
    _Rule("gpt-oss", ("<|channel|>", "analysis")),
    _Rule("kimi_k3", ("<|open|>", "<|sep|>")),
    _Rule("gemma4", ("<|channel>",)),
    _Rule("minimax-m3", ("<mm:think>",)),
    _Rule("mistral", ("[THINK]",)),
    _Rule("cohere_command4", ("<|START_THINKING|>",)),
    _Rule("kimi", ("◁think▷",)),
    _Rule("granite", ("Here is my thought process:",)),
    _Rule("granite", ("<think></think>", "<response></response>")),
    _Rule("hunyuan", ("<think", "hy_")),
    _Rule("hunyuan", ("<think>", "<answer>")),
    _Rule("step3p5", ("<think>", "<tool_response>", "<|im_start|>tool_response")),
    _Rule("step3", ("steptml:",)),
    _Rule("kimi_k2", ("<think>", "<|im_assistant|>")),
    _Rule("deepseek-v4", ("｜DSML｜",), ("function_calls",)),
    _Rule("deepseek-v3", ("｜DSML｜",)),
    _Rule("deepseek-v3", ("<｜Assistant｜>", "</think>", "thinking"), ("<｜Assistant｜><think>\\n",)),
    _Rule("deepseek-r1", ("<｜Assistant｜>", "</think>")),
    _Rule("minimax", ("<think>", "]~b]ai")),
    _Rule("glm45", ("<think>", "<|assistant|>", "<arg_key>")),
    _Rule("nemotron_3", ("<think>", "truncate_history_thinking")),
    _Rule("poolside_v1", ("<think>", "<arg_key>")),
    _Rule("qwen3-thinking", ("<|im_start|>assistant\\n<think>\\n",), ("enable_thinking",)),
    _Rule("qwen3", ("</think>",)),
)


def detect(template: str) -> Detection:
    """The parsers for a model with this chat template."""
    return Detection(_first(_TOOLS, template), _first(_REASONING, template))


def explain(template: str | None, flag: str) -> ConfigError:
    """What to tell a user whose ``auto`` found nothing for ``flag``."""
    if not template:
        why = "the model has no chat template (DeepSeek-V3.2, DeepSeek-V4 and Kimi-K3 bring an encoder of their own)"
    else:
        why = "the chat template shows none of the known formats"
    return ConfigError(f"{flag} auto cannot choose: {why}. Name the parser, or leave the flag out.")


def _first(rules: tuple[_Rule, ...], template: str) -> str | None:
    for rule in rules:
        if all(s in template for s in rule.all) and not any(s in template for s in rule.none):
            return rule.name
    return None
