"""langchain-openai: streams, batches, tools, structured answers, the responses API. ``langchain_client.py URL``."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from shared import ASK, chat

URL = sys.argv[1]
QUESTION = ASK[0]["content"]
COMMON = {"base_url": f"{URL}/v1", "api_key": "none", "model": "smol", "temperature": 0, "max_retries": 0}
WANTED = chat(URL, ASK, 10)


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    big: bool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def plain() -> None:
    model = ChatOpenAI(**COMMON, max_tokens=10, stream_usage=True)
    answer = model.invoke(QUESTION)
    assert answer.content == WANTED, answer
    assert answer.usage_metadata["output_tokens"] > 0
    pieces = list(model.stream(QUESTION))
    assert "".join(p.content for p in pieces) == WANTED
    assert len([p for p in pieces if p.content]) > 3
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]
    assert [a.content for a in model.batch([QUESTION] * 3)] == [WANTED] * 3
    assert asyncio.run(model.ainvoke(QUESTION)).content == WANTED
    probs = model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert len(probs) == answer.usage_metadata["output_tokens"]
    assert all(len(p["top_logprobs"]) == 2 for p in probs)


def tools() -> None:
    model = ChatOpenAI(**COMMON, max_tokens=60)
    bound = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    whole = None
    for piece in bound.stream(QUESTION):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls[0]["args"] == call["args"]
    end = ChatOpenAI(**COMMON, max_tokens=6).invoke([HumanMessage(QUESTION), answer, result])
    assert isinstance(end, AIMessage)
    assert end.content


def shapes() -> None:
    model = ChatOpenAI(**COMMON, max_tokens=120)
    for method in ("json_schema", "function_calling"):
        more = {"parallel_tool_calls": False} if method == "function_calling" else {}
        city = model.with_structured_output(City, method=method, **more).invoke(QUESTION)
        assert isinstance(city, City), method


def responses() -> None:
    model = ChatOpenAI(**COMMON, max_tokens=10, use_responses_api=True, output_version="v0")
    answer = model.invoke(QUESTION)
    assert answer.text == WANTED, answer
    assert "".join(p.text for p in model.stream(QUESTION)) == WANTED


def completions() -> None:
    model = OpenAI(**COMMON, max_tokens=4)
    text = model.invoke("One two three")
    assert text
    assert "".join(model.stream("One two three")) == text


plain()
tools()
shapes()
responses()
completions()
print("ok")
