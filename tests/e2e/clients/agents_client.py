"""openai-agents: a tool is called, its result goes back, an answer follows; over chat completions and over responses,
whole and streamed, and with a typed result. ``agents_client.py URL``."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel
from shared import ASK

URL = sys.argv[1]
set_tracing_disabled(True)
calls: list[str] = []


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    big: bool


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    calls.append(city)
    return f"sunny in {city}"


async def main() -> None:
    api = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="smol", openai_client=api)
        forced = ModelSettings(temperature=0, max_tokens=120, tool_choice="required", parallel_tool_calls=False)
        agent = Agent(name="helper", instructions="Be short.", model=model, tools=[get_weather], model_settings=forced)
        result = await Runner.run(agent, ASK[0]["content"], max_turns=4)
        assert len(calls) == 1, (kind, calls)
        assert isinstance(result.final_output, str), kind
        assert result.context_wrapper.usage.requests == 2, kind
        streamed = Runner.run_streamed(agent, ASK[0]["content"], max_turns=4)
        kinds = [event.type async for event in streamed.stream_events()]
        assert kinds.count("raw_response_event") > 5, kind
        assert streamed.final_output == result.final_output, kind
        assert len(calls) == 2, kind
        calls.clear()
        settings = ModelSettings(temperature=0, max_tokens=120)
        typed = Agent(name="typed", model=model, output_type=City, model_settings=settings)
        assert isinstance((await Runner.run(typed, ASK[0]["content"])).final_output, City), kind


asyncio.run(main())
print("ok")
