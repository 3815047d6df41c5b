"""Routes that look into the prefix cache and hold parts of it: ``/cache/explain``, ``tree``, ``pin``, ``unpin``, …

Owns their fields and the words of an explanation; the facts come from the scheduler. They are admin routes: what is
cached tells about other people's prompts.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import Query
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ceiba.core.errors import BadRequest, EngineFault
from ceiba.core.messages import ids_to_bytes
from ceiba.core.sampling import SamplingParams
from ceiba.server import native, validate
from ceiba.server.auth import Access
from ceiba.server.decode import read
from ceiba.server.front import Front
from ceiba.server.native_schemas import TokenizeRequest
from ceiba.server.openapi import Operation
from ceiba.server.request import EngineRequest, Input
from ceiba.server.routes import Routes, json_answer


class CachePrompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt as a request would send it: exactly one of ``prompt``, ``input_ids`` and ``messages``."""

    prompt: Annotated[str | None, Meta(description="A text.")] = None
    input_ids: Annotated[list[int] | None, Meta(description="Token ids.")] = None
    messages: Annotated[
        list[dict[str, Any]] | None, Meta(description="A conversation, shown to the chat template first.")
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Only with messages.")] = None
    extra_key: Annotated[str | None, Meta(description="As in the request that is asked about.")] = None
    cache_salt: Annotated[str | None, Meta(description="As in the request that is asked about.")] = None


class PinRequest(CachePrompt, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /cache/pin. What is not cached yet is computed first."""

    name: Annotated[str | None, Meta(description="What to call the pin; made up if missing.")] = None
    seconds: Annotated[float, Meta(description="How long it lasts; 0 (default): until it is released.")] = 0.0


class UnpinRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /cache/unpin: ``name``, or ``all``."""

    name: Annotated[str | None, Meta(description="The pin.")] = None
    all: Annotated[bool, Meta(description="Release every pin, those of sessions too.")] = False


def wire(routes: Routes, front: Front) -> None:
    """Add the routes."""

    async def explain_(request: Request) -> Response:
        return json_answer(await explain(await read(request, CachePrompt), front))

    async def tree_(
        depth: int = Query(3, description="Levels below the root, at most 32."),
        width: int = Query(8, description="Children per node, the largest, at most 256."),
    ) -> Response:
        return json_answer(await tree(front, _within(depth, 0, 32), _within(width, 1, 256)))

    async def pin_(request: Request) -> Response:
        return json_answer(await pin(await read(request, PinRequest), front))

    async def unpin_(request: Request) -> Response:
        return json_answer(await unpin(await read(request, UnpinRequest), front))

    async def pins_() -> Response:
        return json_answer(await pins(front))

    for name, method, summary, body, handler in (
        ("explain", "POST", "Why a prompt hits or misses the prefix cache", CachePrompt, explain_),
        ("tree", "GET", "What the prefix cache holds, by subtree", None, tree_),
        ("pin", "POST", "Keep a prompt cached", PinRequest, pin_),
        ("unpin", "POST", "Release a pin", UnpinRequest, unpin_),
        ("pins", "GET", "Every pin", None, pins_),
    ):
        operation = Operation(summary, body, dict[str, Any])
        routes.add(f"/cache/{name}", (method,), Access.ADMIN, operation, handler)


async def explain(body: CachePrompt, front: Front) -> dict[str, Any]:
    """How far the prompt matches the cache, where it diverges, and why."""
    ids, namespace = await _prompt(body, front)
    facts = await front.control("cache_explain", {"input_ids": ids_to_bytes(ids), "namespace": namespace})
    answer: dict[str, Any] = dict(facts)
    answer["why"] = _why(answer)
    stored = answer["cached_by_tier"].get("storage", 0)
    if stored:
        answer["why"] += f" The storage has {stored} tokens more (--hicache-storage-backend)."
    if "diverges_at" in answer and front.tokenizer is not None:
        parts = [answer["before"], [answer["token"]], answer["after"], *answer["cached_instead"]]
        texts = await front.decode([np.asarray(part, np.int32) for part in parts], False)
        answer |= {"before_text": texts[0], "token_text": texts[1], "after_text": texts[2]}
        answer["cached_instead_texts"] = texts[3:]
    return answer


def _why(facts: dict[str, Any]) -> str:
    """One sentence for a person."""
    cached, total = facts["cached_tokens"], facts["prompt_tokens"]
    match facts["reason"]:
        case "off":
            return "The prefix cache is off (--disable-radix-cache)."
        case "cached":
            return f"{facts['usable_tokens']} of {total} tokens come from the cache; the last one is always computed."
        case "evicted":
            gone = facts["evictions"][0]
            cause = f"request {gone['for']}" if gone["for"] != "decode" else "the growing answers of running requests"
            return (
                f"{cached} of {total} tokens are cached. The next {gone['tokens']} were, and had to go "
                f"{gone['seconds_ago']:.0f} s ago to make room for {cause}."
            )
        case "diverges":
            return f"{cached} of {total} tokens are cached. From token {cached} on the cache holds other prompts."
    if facts.get("elsewhere", 0) > cached:
        return (
            f"{cached} of {total} tokens are cached here; {facts['elsewhere']} are under another cache_salt or "
            "extra_key, which is never shared."
        )
    return f"{cached} of {total} tokens are cached. Nothing has been computed beyond that, as far as the log reaches."


def _within(value: int, low: int, high: int) -> int:
    """Before it becomes a message, whose numbers have 64 bits."""
    return min(max(value, low), high)


async def tree(front: Front, depth: int, width: int) -> dict[str, Any]:
    """Subtrees by size, with the beginning of their texts."""
    value = await _ask(front, "cache_tree", {"depth": depth, "width": width})
    if front.tokenizer is not None:
        nodes: list[dict[str, Any]] = []
        stack = list(value["namespaces"])
        while stack:
            node = stack.pop()
            stack.extend(node["children"])
            if "token_ids" in node:
                nodes.append(node)
        texts = await front.decode([np.asarray(node["token_ids"], np.int32) for node in nodes], False)
        for node, text in zip(nodes, texts, strict=True):
            node["text"] = text
    return value


async def pin(body: PinRequest, front: Front) -> dict[str, Any]:
    """Compute what is missing and pin it. Raises BadRequest where the budget has no room."""
    if not 0 <= body.seconds < float("inf"):
        raise BadRequest("seconds must be 0 or more.", param="seconds")
    ids, namespace = await _prompt(body, front)
    name = body.name or f"pin-{uuid.uuid4().hex[:12]}"
    budget = front.config.scheduler.cache_pin_budget
    if len(ids) > budget:
        raise BadRequest(
            f"the prompt has {len(ids)} tokens and --cache-pin-budget is {budget}: shorten it, or raise the budget.",
            param="prompt",
            code="pin_budget",
        )
    args = {"input_ids": ids_to_bytes(ids), "namespace": namespace, "name": name, "seconds": body.seconds}
    facts = await front.control("cache_explain", args)
    if facts["reason"] != "cached":
        await _compute(ids, body, front)
    value = await _ask(front, "cache_pin", args)
    if not value["pinned_tokens"]:
        raise BadRequest(
            f"the pins hold {value['budget_used']} of {value['budget']} tokens (--cache-pin-budget), no room for "
            f"{len(ids)} more: release one, or raise the budget.",
            code="pin_budget",
        )
    return value


async def _compute(ids: np.ndarray, body: CachePrompt, front: Front) -> None:
    request = EngineRequest(
        [Input(ids, SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True))],
        rid=f"pin-{uuid.uuid4().hex}",
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        internal=True,
    )
    await front.collect(request)


async def unpin(body: UnpinRequest, front: Front) -> dict[str, Any]:
    if body.all == (body.name is not None):
        raise BadRequest("give either name or all: true.", param="name")
    return await _ask(front, "cache_unpin", {"everything": True} if body.all else {"name": body.name})


async def pins(front: Front) -> dict[str, Any]:
    return await _ask(front, "cache_pins", {})


async def _ask(front: Front, op: str, args: dict[str, Any]) -> dict[str, Any]:
    try:
        value: dict[str, Any] = await front.control(op, args)
    except EngineFault as error:
        raise BadRequest(error.message, code="cache_refused") from None
    return value


async def _prompt(body: CachePrompt, front: Front) -> tuple[np.ndarray, str]:
    """Token ids and namespace of the request that ``body`` stands for."""
    given = [body.prompt is not None, body.input_ids is not None, body.messages is not None]
    if sum(given) != 1:
        raise BadRequest("give exactly one of prompt, input_ids and messages.", param="prompt")
    if body.input_ids is not None:
        ids = validate.as_ids(body.input_ids, front.vocab_size, "input_ids")
    else:
        request = TokenizeRequest(
            prompt=body.prompt, messages=body.messages, chat_template_kwargs=body.chat_template_kwargs
        )
        ids = np.asarray((await native.tokenize(request, front))["tokens"], np.int32)
    if not len(ids):
        raise BadRequest("the prompt holds no token: give at least one.", param="prompt")
    return ids, EngineRequest([], rid="", extra_key=body.extra_key, cache_salt=body.cache_salt).namespace()
