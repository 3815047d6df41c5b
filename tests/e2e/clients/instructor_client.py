"""instructor: its modes, partial answers, and the retry on what does not validate. ``instructor_client.py URL``."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, field_validator
from shared import ASK

URL = sys.argv[1]
ASKED = {"model": "smol", "messages": ASK, "temperature": 0, "max_tokens": 100}


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    big: bool


class Never(BaseModel):
    name: Literal["Paris", "Rome"]

    @field_validator("name")
    @classmethod
    def refuse(cls, value: str) -> str:
        raise ValueError("never good enough")


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    more = {"parallel_tool_calls": False} if mode == instructor.Mode.TOOLS else {}
    made = client(mode)
    city, raw = made.chat.completions.create_with_completion(response_model=City, **ASKED, **more)
    assert isinstance(city, City), mode
    assert raw.usage.completion_tokens > 0
    parts = list(made.chat.completions.create_partial(response_model=City, **ASKED, **more))
    assert parts[-1].name == city.name, mode
    assert parts[-1].big == city.big, mode

seen = ""
try:
    client(instructor.Mode.JSON_SCHEMA).chat.completions.create(response_model=Never, max_retries=1, **ASKED)
except Exception as error:  # its class differs between versions
    seen = str(error)
assert "never good enough" in seen, seen
print("ok")
