"""litellm over all three protocols that it can speak to us. Run as ``litellm_client.py URL``."""

from __future__ import annotations

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be fetched

import litellm
from shared import ASK, TOOL, chat, long_prompt

litellm.suppress_debug_info = True
URL = sys.argv[1]
WAYS = {
    "openai": {"model": "openai/smol", "api_base": f"{URL}/v1", "api_key": "none"},
    "anthropic": {"model": "anthropic/smol", "api_base": URL, "api_key": "none"},
    "ollama": {"model": "ollama_chat/smol", "api_base": URL},
}
EXACT = {"messages": ASK, "temperature": 0.0, "max_tokens": 10}


def text_of(chunks) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def conversations() -> None:
    wanted = chat(URL, ASK, 10)
    for name, way in WAYS.items():
        answer = litellm.completion(**way, **EXACT)
        assert answer.choices[0].message.content == wanted, (name, answer)
        assert answer.usage.completion_tokens > 0, name
        chunks = list(litellm.completion(**way, **EXACT, stream=True))
        assert text_of(chunks) == wanted, name
        assert len(chunks) > 3, name
        built = litellm.stream_chunk_builder(chunks)
        assert built.choices[0].message.content == wanted, name
        assert built.choices[0].finish_reason == answer.choices[0].finish_reason, name

    async def several():
        calls = [litellm.acompletion(**WAYS["openai"], **EXACT) for _ in range(3)]
        return [a.choices[0].message.content for a in await asyncio.gather(*calls)]

    assert asyncio.run(several()) == [wanted] * 3


def shapes() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 3]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    answer = litellm.completion(**WAYS["openai"], messages=ASK, max_tokens=40, temperature=0, response_format=form)
    assert json.loads(answer.choices[0].message.content)["n"] in {1, 2, 3}
    for name in ("openai", "anthropic"):
        asked = {
            "messages": ASK,
            "tools": [TOOL],
            "tool_choice": "required",
            "max_tokens": 60,
            "temperature": 0,
            "parallel_tool_calls": False,
        }
        answer = litellm.completion(**WAYS[name], **asked)
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "get_weather", name
        assert json.loads(call.function.arguments)["city"] in {"Paris", "Rome"}, name
        assert answer.choices[0].finish_reason == "tool_calls", name
        streamed = litellm.stream_chunk_builder(list(litellm.completion(**WAYS[name], **asked, stream=True)))
        assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments, name


def errors() -> None:
    for wanted, more in (
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": long_prompt()}]}),
    ):
        try:
            litellm.completion(**WAYS["openai"], **{**EXACT, **more})
        except wanted:
            continue
        raise AssertionError(wanted)


def completions() -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/smol", api_base=f"{URL}/v1", api_key="none", prompt="One two", max_tokens=4
    )
    assert answer.choices[0].text


conversations()
shapes()
errors()
completions()
print("ok")
