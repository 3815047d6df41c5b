"""What the scripts of this folder ask, and how they ask it without their client. Standard library only."""

from __future__ import annotations

import json
import urllib.request

ASK = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def chat(url: str, messages: list, max_tokens: int) -> str:
    """The greedy answer, by a plain request."""
    body = {"messages": messages, "temperature": 0, "max_tokens": max_tokens}
    return post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"]


def long_prompt() -> str:
    """More than the context of SmolLM2 (8192 tokens)."""
    return "word " * 9000
