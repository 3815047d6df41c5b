"""Calls written the way each family's model writes them, straight from the format: what parsers are tested against.

Each writer gets [(name, arguments)] and gives the raw text. Kept naive on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from xml.sax.saxutils import quoteattr

Call = tuple[str, dict[str, Any]]
NS = "]<]minimax[>["


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def python(value: Any) -> str:
    return repr(value)


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return dumped(value)


def hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{dumped({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def listed(begin: str, end: str, name: str = "name", arguments: str = "arguments") -> Callable[[list[Call]], str]:
    return lambda calls: begin + dumped([{name: n, arguments: a} for n, a in calls]) + end


def one_object(begin: str, end: str, arguments: str = "arguments") -> Callable[[list[Call]], str]:
    return lambda calls: "".join(f"{begin}{dumped({'name': n, arguments: a})}{end}" for n, a in calls)


def llama3(calls: list[Call]) -> str:
    return "; ".join(dumped({"name": n, "parameters": a}) for n, a in calls)


def mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumped(a)}" for n, a in calls)


def qwen3_coder(calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(f"<parameter={k}>\n{bare(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(one(*c) for c in calls)


def minimax_m2(calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(f'<parameter name="{k}">{bare(v)}</parameter>\n' for k, v in arguments.items())
        return f'<invoke name="{name}">\n{inner}</invoke>\n'

    return "<minimax:tool_call>\n" + "".join(one(*c) for c in calls) + "</minimax:tool_call>"


def minimax_m3(calls: list[Call]) -> str:
    def tree(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(f"{NS}<{k}>{tree(v)}{NS}</{k}>" for k, v in value.items())
        if isinstance(value, list):
            return "".join(f"{NS}<item>{tree(v)}{NS}</item>" for v in value)
        return bare(value)

    inner = "".join(f'{NS}<invoke name="{n}">{tree(a)}{NS}</invoke>\n' for n, a in calls)
    return f"{NS}<tool_call>\n{inner}{NS}</tool_call>"


def minicpm5(calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        def value(v: Any) -> str:
            return f"<![CDATA[{v}]]>" if isinstance(v, str) and set(v) & set("<&\n") else bare(v)

        return (
            f'<function name="{name}">'
            + "".join(f'<param name="{k}">{value(v)}</param>' for k, v in arguments.items())
            + "</function>"
        )

    return "\n".join(one(*c) for c in calls)


def step3(calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(f'<steptml:parameter name="{k}">{bare(v)}</steptml:parameter>\n' for k, v in arguments.items())
        invoke = f'<steptml:invoke name="{name}">\n{inner}</steptml:invoke>'
        return f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke}<｜tool_call_end｜>\n"

    return "<｜tool_calls_begin｜>\n" + "".join(one(*c) for c in calls) + "<｜tool_calls_end｜>"


def dsml(word: str, gap: str = "") -> Callable[[list[Call]], str]:
    tag = "｜DSML｜" + gap

    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f'<{tag}parameter name="{k}" string="{dumped(isinstance(v, str))}">{bare(v)}</{tag}parameter>\n'
            for k, v in arguments.items()
        )
        return f'<{tag}invoke name="{name}">\n{inner}</{tag}invoke>\n'

    return lambda calls: f"\n\n<{tag}{word}>\n" + "".join(one(*c) for c in calls) + f"</{tag}{word}>"


def kimi_k2(calls: list[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumped(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def kimi_k3(calls: list[Call]) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}

    def one(index: int, name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f'<|open|>argument key={quoteattr(k)} type="{kinds.get(type(v), "null")}"<|sep|>'
            f"{bare(v)}<|close|>argument<|sep|>"
            for k, v in arguments.items()
        )
        return f'<|open|>call tool="{name}" index="{index}"<|sep|>{inner}<|close|>call<|sep|>'

    body = "".join(one(i, *c) for i, c in enumerate(calls, 1))
    return f"<|open|>tools<|sep|>{body}<|close|>tools<|sep|><|close|>message<|sep|>"


def glm(gap: str) -> Callable[[list[Call]], str]:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f"<arg_key>{k}</arg_key>{gap}<arg_value>{bare(v)}</arg_value>{gap}" for k, v in arguments.items()
        )
        return f"<tool_call>{name}{gap}{inner}</tool_call>"

    return lambda calls: gap.join(one(*c) for c in calls)


def hunyuan(mark: str) -> Callable[[list[Call]], str]:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f"<arg_key{mark}>{k}</arg_key{mark}>\n<arg_value{mark}>{bare(v)}</arg_value{mark}>\n"
            for k, v in arguments.items()
        )
        return f"<tool_call{mark}>{name}<tool_sep{mark}>\n{inner}</tool_call{mark}>\n"

    return lambda calls: f"<tool_calls{mark}>\n" + "".join(one(*c) for c in calls) + f"</tool_calls{mark}>"


def deepseek_v3(calls: list[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumped(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[Call]) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumped(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def pythonic(begin: str, end: str) -> Callable[[list[Call]], str]:
    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{k}={python(v)}' for k, v in arguments.items())})"

    return lambda calls: f"{begin}[{', '.join(one(*c) for c in calls)}]{end}"


def gemma4(calls: list[Call]) -> str:
    return "".join(f"<|tool_call>call:{n}{gemma(a)}<tool_call|>" for n, a in calls)


def gpt_oss(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumped(a)}<|call|>" for n, a in calls
    )


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "cohere_command4": listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    "deepseekv3": deepseek_v3,
    "deepseekv31": deepseek_v31,
    "deepseekv32": dsml("function_calls"),
    "deepseekv4": dsml("tool_calls"),
    "deepseekv41": dsml("calls", " "),
    "gemma4": gemma4,
    "gigachat3": one_object("<|function_call|>", ""),
    "glm": glm("\n"),
    "glm45": glm("\n"),
    "glm47": glm(""),
    "gpt-oss": gpt_oss,
    "granite": listed("<|tool_call|>", ""),
    "hermes": hermes,
    "hunyuan": hunyuan(":opensource"),
    "hunyuan_a13b": listed("<tool_calls>", "</tool_calls>"),
    "interns1": one_object("<|action_start|><|plugin|>\n", "<|action_end|>", "parameters"),
    "kimi_k2": kimi_k2,
    "kimi_k3": kimi_k3,
    "lfm2": pythonic("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama3": llama3,
    "mimo": qwen3_coder,
    "minicpm5": minicpm5,
    "minimax": one_object("<tool_calls>\n", "\n</tool_calls>\n"),
    "minimax-m2": minimax_m2,
    "minimax-m3": minimax_m3,
    "mistral": mistral,
    "nemotron_nano2": listed("<TOOLCALL>", "</TOOLCALL>"),
    "poolside_v1": glm("\n"),
    "pythonic": pythonic("", ""),
    "qwen": hermes,
    "qwen25": hermes,
    "qwen3_coder": qwen3_coder,
    "step3": step3,
    "step3p5": qwen3_coder,
    "trinity": hermes,
}

OTHER_FORMS: list[tuple[str, Callable[[list[Call]], str]]] = [
    ("hunyuan", hunyuan("")),
    ("hunyuan", listed("<tool_calls>", "</tool_calls>")),
    ("gigachat3", one_object("<|message_sep|>\n\nfunction call<|role_sep|>\n", "")),
    ("interns1", one_object("<|action_start|> <|plugin|>\n", "<|action_end|>", "arguments")),
    ("lfm2", listed("<|tool_call_start|>", "<|tool_call_end|>")),
    ("llama3", one_object("<|python_tag|>", "")),
    ("mistral", listed("[TOOL_CALLS] ", "")),
    ("pythonic", pythonic("<|python_start|>", "<|python_end|>")),
]
