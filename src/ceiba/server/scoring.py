"""POST /v1/score and /v1/decisions: a generative model as a judge, by the probabilities of its next token.

Owns these requests' meaning and the form of their answers. No text is generated and none is parsed: one token is
computed for each prompt and only the probabilities of the labels are looked at. Must never know how they are computed.
"""

from __future__ import annotations

import string
import uuid
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import Request, Response
from msgspec import Meta
from starlette.datastructures import Headers

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.server import validate
from ceiba.server.auth import Access
from ceiba.server.choices import Choice, totals
from ceiba.server.conversation import conversation
from ceiba.server.decode import read
from ceiba.server.front import Front
from ceiba.server.openai.translate import routing_key
from ceiba.server.openapi import Operation
from ceiba.server.output import template_text
from ceiba.server.request import EngineRequest, Input, Prompt, TextPrompt
from ceiba.server.responses.translate import messages_of
from ceiba.server.routes import Routes, hinting
from ceiba.server.sse import until_gone
from ceiba.text.parsers import registry

_LOOK = SamplingParams(max_new_tokens=1, ignore_eos=True)
_LABELS = [*string.ascii_uppercase, *string.ascii_lowercase, *string.digits]
_PAIRS = [a + b for a in string.ascii_uppercase for b in string.ascii_uppercase]


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/score."""

    query: Annotated[str | list[int], Meta(description="What every item is judged with: a text or token ids.")]
    items: Annotated[
        str | list[str | list[int]], Meta(description="Texts or lists of token ids, in the form of the query.")
    ]
    label_token_ids: Annotated[
        list[int], Meta(description=f"1..{limits.MAX_LOGPROB_TOKEN_IDS} token ids whose probabilities are the scores.")
    ]
    apply_softmax: Annotated[bool, Meta(description="Let the scores of each item add up to 1.")] = False
    item_first: Annotated[bool, Meta(description="Item before query. Default: query before item.")] = False
    model: Annotated[str, Meta(description="Any name: the one loaded model answers, and the name is repeated.")] = ""
    user: Annotated[str | None, Meta(description="Hint: has no effect here.")] = None
    rid: Annotated[str | None, Meta(description="Your own id for the request; /abort_request takes it.")] = None
    cache_salt: Annotated[str | None, Meta(description="A secret per tenant that keeps cached prefixes apart.")] = None


class Option(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    value: Annotated[str | bool, Meta(description="What comes back when it is chosen.")]
    description: Annotated[str | None, Meta(description="What it means.")] = None


class Level(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    label: Annotated[str, Meta(description="Name of the level.")]
    description: Annotated[str | None, Meta(description="What it means.")] = None


class Question(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Annotated[str, Meta(description="`predicate` (how likely is it true), `choice` or `score` (which level).")]
    instructions: Annotated[str | list[dict[str, Any]], Meta(description="The question: text or input_text parts.")]
    name: Annotated[str | None, Meta(description="Given back with the answer.")] = None
    choices: Annotated[list[Option] | None, Meta(description=f"2..{limits.MAX_OPTIONS} different options.")] = None
    levels: Annotated[list[Level] | None, Meta(description=f"2..{limits.MAX_OPTIONS} levels, lowest first.")] = None


class DecisionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/decisions."""

    input: Annotated[
        str | list[dict[str, Any]], Meta(description="What is judged: a text, or items as in /v1/responses.")
    ]
    questions: Annotated[list[Question], Meta(description=f"1..{limits.MAX_QUESTIONS} questions about it.")]
    model: Annotated[str, Meta(description="Any name: the one loaded model answers, and the name is repeated.")] = ""
    return_prompt_token_ids: Annotated[bool, Meta(description="Show what the model read (extension).")] = False
    cache_salt: Annotated[str | None, Meta(description="A secret per tenant that keeps cached prefixes apart.")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="Hint: prefixes are cached without it.")] = None
    prompt_cache_options: Annotated[Any, Meta(description="Hint: prefixes are cached without it.")] = None
    safety_identifier: Annotated[str | None, Meta(description="Hint: has no effect here.")] = None


class ScoreAnswer(msgspec.Struct, kw_only=True):
    scores: Annotated[list[list[float]], Meta(description="Per item the probability of each label.")]
    model: Annotated[str, Meta(description="The model name that the request gave.")]
    usage: Annotated[dict[str, int], Meta(description="Token counts.")]
    object: Annotated[str, Meta(description="`scoring`.")]


class DecisionAnswer(msgspec.Struct, kw_only=True):
    answers: Annotated[list[dict[str, Any]], Meta(description="In the order of the questions.")]
    model: Annotated[str, Meta(description="The model name that the request gave.")]
    usage: Annotated[dict[str, Any], Meta(description="Token counts.")]


def label_probabilities(choice: Choice, softmax: bool) -> np.ndarray:
    """Probabilities of the label tokens as the next token, float64 [labels]; with ``softmax`` among each other."""
    part = choice.logprobs
    assert part is not None
    values = part.fixed_values[0].astype(np.float64)
    if softmax:
        values = values - values.max() if np.isfinite(values.max()) else np.zeros_like(values)
        weights = np.exp(values)
        return weights / weights.sum()
    return np.exp(values)


# ── scores ───────────────────────────────────────────────────────────────────


async def score(body: ScoreRequest, front: Front, headers: Headers) -> dict[str, Any]:
    """Raises BadRequest naming the field that cannot be served."""
    items: list[Any] = [body.items] if isinstance(body.items, str) else body.items
    if not 1 <= len(items) <= limits.MAX_SCORE_ITEMS:
        raise BadRequest(f"{len(items)} items; it must be 1..{limits.MAX_SCORE_ITEMS}.", param="items")
    if not body.label_token_ids:
        raise BadRequest("label_token_ids is empty: give at least one.", param="label_token_ids")
    validate.check_ids(body.label_token_ids, front.vocab_size, "label_token_ids")
    if isinstance(body.items, list):
        _check_joined(len(items) * len(body.query) + sum(map(len, items)), "items")
    prompts = [_joined(body, item, front) for item in items]
    spec = LogprobSpec(output=True, token_ids=tuple(body.label_token_ids))
    request = EngineRequest(
        [Input(prompt, _LOOK, spec) for prompt in prompts],
        rid=body.rid or f"score-{uuid.uuid4().hex}",
        cache_salt=body.cache_salt,
        routing_key=routing_key(None, headers),
        names={"prompt": "items"},
    )
    choices = await front.collect(request)
    sums = totals(request, choices)
    return {
        "scores": [label_probabilities(choice, body.apply_softmax).tolist() for choice in choices],
        "model": body.model or front.config.model.name,
        "usage": {"prompt_tokens": sums.prompt, "completion_tokens": 0, "total_tokens": sums.prompt},
        "object": "scoring",
    }


def _joined(body: ScoreRequest, item: Any, front: Front) -> Prompt:
    if isinstance(body.query, str) != isinstance(item, str):
        raise BadRequest("query and items must both be texts, or both be token ids.", param="items")
    if isinstance(item, str):
        assert isinstance(body.query, str)
        return TextPrompt(item + body.query if body.item_first else body.query + item)
    assert isinstance(body.query, list)
    return validate.as_ids([*item, *body.query] if body.item_first else [*body.query, *item], front.vocab_size, "items")


def _check_joined(size: int, name: str) -> None:
    """Before the prompts are made: a megabyte that stands in thousands of them is gigabytes."""
    if size > limits.MAX_JOINED:
        raise BadRequest(
            f"{name}: all prompts together would have {size} characters or ids; the limit is {limits.MAX_JOINED}: "
            "split the request.",
            param=name,
        )


# ── decisions ────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Asked:
    question: Question
    labels: list[str]
    ids: tuple[int, ...]
    text: str


async def decide(body: DecisionRequest, front: Front, headers: Headers) -> dict[str, Any]:
    """Raises BadRequest naming the field that cannot be served."""
    if not 1 <= len(body.questions) <= limits.MAX_QUESTIONS:
        raise BadRequest(f"{len(body.questions)} questions; it must be 1..{limits.MAX_QUESTIONS}.", param="questions")
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if len(items) > limits.MAX_MESSAGES:
        raise BadRequest(f"{len(items)} items in input; the limit is {limits.MAX_MESSAGES}.", param="input")
    before = messages_of(items)
    labels = await _labels(front, max(len(_options(q, f"questions[{i}]")) for i, q in enumerate(body.questions)))
    asked = [_ask(question, f"questions[{i}]", labels) for i, question in enumerate(body.questions)]
    inputs = []
    for entry in asked:
        text = await _render(front, before, entry.text)
        _check_joined(len(text) * len(asked), "input")
        spec = LogprobSpec(output=True, token_ids=entry.ids)
        inputs.append(Input(TextPrompt(text, add_special_tokens=False), _LOOK, spec))
    request = EngineRequest(
        inputs,
        rid=f"decision-{uuid.uuid4().hex}",
        cache_salt=body.cache_salt,
        routing_key=routing_key(None, headers),
        names={"prompt": "input"},
    )
    choices = await front.collect(request)
    answers = [_answer(e.question, label_probabilities(c, True)) for e, c in zip(asked, choices, strict=True)]
    if body.return_prompt_token_ids:
        for answer, choice in zip(answers, choices, strict=True):
            answer["prompt_token_ids"] = choice.prompt.tolist()
    sums = totals(request, choices)
    return {
        "answers": answers,
        "model": body.model or front.config.model.name,
        "usage": {
            "input_tokens": sums.prompt,
            "input_tokens_details": {"cached_tokens": sums.cached, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sums.prompt,
        },
    }


def _options(question: Question, where: str) -> list[tuple[str, str | None]]:
    """(name, meaning) of every option. Raises BadRequest."""
    if question.type == "predicate":
        return [("Yes", "it is true"), ("No", "it is false")]
    if question.type == "choice":
        field, options = "choices", [(_shown(o.value), o.description) for o in question.choices or ()]
        distinct = len({(type(o.value), o.value) for o in question.choices or ()})
    elif question.type == "score":
        field, options = "levels", [(level.label, level.description) for level in question.levels or ()]
        distinct = len({level.label for level in question.levels or ()})
    else:
        raise BadRequest(f"{where}.type must be predicate, choice or score.", param=f"{where}.type")
    if not 2 <= len(options) <= limits.MAX_OPTIONS or distinct != len(options):
        raise BadRequest(f"{where}.{field} must be 2..{limits.MAX_OPTIONS} different ones.", param=f"{where}.{field}")
    return options


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else ("true" if value else "false")


async def _labels(front: Front, count: int) -> list[tuple[str, int]]:
    """So many labels that are one token each, and their ids."""
    names = _LABELS + (_PAIRS if count > len(_LABELS) else [])
    encoded = await front.encode_texts(names, add_special_tokens=False)
    seen: dict[int, str] = {}
    for name, ids in zip(names, encoded, strict=True):
        if len(ids) == 1:
            seen.setdefault(int(ids[0]), name)
    found = [(name, token) for token, name in seen.items()]
    if len(found) < count:
        raise BadRequest(
            f"questions: {count} options need as many labels of one token; this model's tokenizer has {len(found)}.",
            param="questions",
        )
    return found[:count]


def _ask(question: Question, where: str, labels: list[tuple[str, int]]) -> _Asked:
    options = _options(question, where)
    parts = messages_of([{"role": "user", "content": question.instructions}])
    lines = [str(parts[0]["content"]), "", "Options:"]
    used = labels[: len(options)]
    for (label, _), (name, meaning) in zip(used, options, strict=True):
        lines.append(f"{label}. {name}" + (f": {meaning}" if meaning else ""))
    lines += ["", "Answer with the label of one option only."]
    return _Asked(question, [name for name, _ in used], tuple(token for _, token in used), "\n".join(lines))


async def _render(front: Front, before: list[dict[str, Any]], question: str) -> str:
    """The prompt whose next token is the label. Raises BadRequest where the model would think first."""
    source = template_text(front.template) or ""
    kwargs = {name: False for name in ("enable_thinking", "thinking") if name in source}
    messages = [*before, {"role": "user", "content": question}]
    text = await front.render(conversation(messages, kwargs=kwargs))
    name = front.parsers.reasoning or registry.detect(source).reasoning
    if name is not None:
        reasoning = registry.reasoning_parser(name)
        if reasoning.opened_by(text):
            return f"{text}\n{reasoning.pairs[0][1]}\n\n"
    return text


def _answer(question: Question, probabilities: np.ndarray) -> dict[str, Any]:
    values = probabilities.tolist()
    best = int(np.argmax(probabilities))
    answer: dict[str, Any] = {"type": question.type, "name": question.name}
    if question.type == "predicate":
        return answer | {"probability": values[0]}
    if question.type == "choice":
        options = [option.value for option in question.choices or ()]
        pairs = [{"value": v, "probability": p} for v, p in zip(options, values, strict=True)]
        return answer | {"choice": options[best], "confidence": values[best], "probabilities": pairs}
    levels = [
        {"value": i, "label": level.label, "probability": p}
        for i, (level, p) in enumerate(zip(question.levels or (), values, strict=True))
    ]
    mean = float(np.dot(probabilities, np.arange(len(values))))
    return answer | {"score": mean, "confidence": values[best], "probabilities": levels}


def wire(routes: Routes, front: Front) -> None:
    async def v1_score(request: Request) -> Response:
        body = await read(request, ScoreRequest)
        return await until_gone(request, score(body, front, request.headers), hinting(body))

    async def v1_decisions(request: Request) -> Response:
        body = await read(request, DecisionRequest)
        return await until_gone(request, decide(body, front, request.headers), hinting(body))

    post, user = ("POST",), Access.USER
    operation = Operation("Probabilities of labels behind each item", ScoreRequest, ScoreAnswer)
    routes.add("/v1/score", post, user, operation, v1_score)
    operation = Operation("Answer typed questions with probabilities", DecisionRequest, DecisionAnswer)
    routes.add("/v1/decisions", post, user, operation, v1_decisions)
