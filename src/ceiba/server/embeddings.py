"""Routes of models that give numbers: embeddings, rankings and classes, in OpenAI's, SGLang's and Ollama's forms.

Owns these requests' meaning and the form of their answers. On a model of another kind every route says what it needs.
Must never know how the numbers are computed.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import Request, Response
from msgspec import Meta

from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.server.auth import Access
from ceiba.server.decode import decoded, read
from ceiba.server.front import Front
from ceiba.server.openai.completions import prompts_of
from ceiba.server.openapi import Operation
from ceiba.server.request import TextPrompt
from ceiba.server.routes import Routes, hinting
from ceiba.server.sse import until_gone

Prompts = str | list[int | str | list[int]]
_INPUT = Meta(description="A text, a list of texts, a list of token ids, or a list of such lists.")
_MODEL = Meta(description="Any name: the one loaded model answers, and the name is repeated.")
_USER = Meta(description="Hint: has no effect here.")


class EmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings."""

    input: Annotated[Prompts, _INPUT]
    model: Annotated[str, _MODEL] = ""
    encoding_format: Annotated[str | None, Meta(description="`float` (default) or `base64` of float32.")] = None
    dimensions: Annotated[int | None, Meta(description="The first so many numbers, scaled to length 1 again.")] = None
    user: Annotated[str | None, _USER] = None


class ClassifyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/classify and /classify."""

    input: Annotated[Prompts | None, _INPUT] = None
    text: Annotated[str | list[str] | None, Meta(description="Another name of `input`.")] = None
    model: Annotated[str, _MODEL] = ""
    user: Annotated[str | None, _USER] = None


class EncodeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /encode."""

    text: Annotated[str | list[str] | None, Meta(description="A text, or a list of texts.")] = None
    input_ids: Annotated[list[int | list[int]] | None, Meta(description="Token ids instead of text.")] = None
    model: Annotated[str, _MODEL] = ""


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/rerank."""

    query: Annotated[str, Meta(description="What is looked for.")]
    documents: Annotated[
        list[str | dict[str, Any]], Meta(description=f"1..{limits.MAX_BATCH} texts, or objects with a `text`.")
    ]
    model: Annotated[str, _MODEL] = ""
    top_n: Annotated[int | None, Meta(description="Only the best so many.")] = None
    return_documents: Annotated[bool, Meta(description="Repeat the documents. Default true.")] = True


class OllamaEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/embed."""

    input: Annotated[str | list[str], Meta(description="A text, or a list of texts.")]
    model: Annotated[str, _MODEL] = ""
    truncate: Annotated[bool | None, Meta(description="Cut texts that are too long. Default true.")] = None
    dimensions: Annotated[int | None, Meta(description="The first so many numbers, scaled to length 1 again.")] = None
    options: Annotated[dict[str, Any] | None, Meta(description="Hint: nothing of it matters here.")] = None
    keep_alive: Annotated[float | str | None, Meta(description="Hint: the model stays while the server runs.")] = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/embeddings."""

    prompt: Annotated[str, Meta(description="The text.")]
    model: Annotated[str, _MODEL] = ""
    options: Annotated[dict[str, Any] | None, Meta(description="Hint: nothing of it matters here.")] = None
    keep_alive: Annotated[float | str | None, Meta(description="Hint: the model stays while the server runs.")] = None


class EmbeddingsAnswer(msgspec.Struct, kw_only=True):
    object: Annotated[str, Meta(description="`list`.")]
    data: Annotated[list[dict[str, Any]], Meta(description="Per text `index` and `embedding`.")]
    model: Annotated[str, Meta(description="The model name that the request gave.")]
    usage: Annotated[dict[str, int], Meta(description="Token counts.")]


class ClassifyAnswer(msgspec.Struct, kw_only=True):
    object: Annotated[str, Meta(description="`list`.")]
    data: Annotated[list[dict[str, Any]], Meta(description="Per text `index`, `label`, `probs` and `num_classes`.")]
    model: Annotated[str, Meta(description="The model name that the request gave.")]
    usage: Annotated[dict[str, int], Meta(description="Token counts.")]


class EncodeAnswer(msgspec.Struct, kw_only=True):
    embedding: Annotated[list[float], Meta(description="The vector.")]
    meta_info: Annotated[dict[str, Any], Meta(description="`prompt_tokens`.")]


class RankedAnswer(msgspec.Struct, kw_only=True):
    score: Annotated[float, Meta(description="How well it fits, 0..1.")]
    index: Annotated[int, Meta(description="Which document.")]
    document: Annotated[str | None, Meta(description="Its text.")] = None


class OllamaEmbedAnswer(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(description="The model name that the request gave.")]
    embeddings: Annotated[list[list[float]], Meta(description="One per text.")]
    prompt_eval_count: Annotated[int, Meta(description="Tokens of all texts.")]


class OllamaEmbeddingsAnswer(msgspec.Struct, kw_only=True):
    embedding: Annotated[list[float], Meta(description="The vector.")]


_NEEDS = {
    "embed": "an embedding model (BERT, RoBERTa, all-MiniLM)",
    "classify": "a model for sequence classification",
    "rerank": "a reranker (a cross-encoder)",
}


def need(front: Front, *tasks: str) -> None:
    """Raises BadRequest where the model is of another kind."""
    if front.config.model.task not in tasks:
        raise BadRequest(
            f"this needs {_NEEDS[tasks[0]]}; the loaded model gives "
            f"{'text' if front.config.model.task == 'generate' else front.config.model.task}.",
            code="not_available",
        )


async def encoded(front: Front, given: Prompts, name: str, truncate: bool) -> list[np.ndarray]:
    """Token ids of every text. Raises BadRequest naming ``name``."""
    prompts = prompts_of(given, front.vocab_size, name)
    texts = [p.text for p in prompts if isinstance(p, TextPrompt)]
    if any(not text for text in texts):
        raise BadRequest(f"{name} holds an empty text: give at least one character.", param=name)
    if sum(map(len, texts)) > limits.MAX_PROMPT_CHARS:
        raise BadRequest(f"{name} has more than {limits.MAX_PROMPT_CHARS} characters, the limit.", param=name)
    ready = iter(await front.encode_texts(texts)) if texts else iter(())
    ids = [next(ready) if isinstance(p, TextPrompt) else p for p in prompts]
    cut = truncate or front.config.server.allow_auto_truncate
    return [front.pool.fit(np.ascontiguousarray(i, np.int32), name, cut) for i in ids]


def unit(vectors: Sequence[np.ndarray], dimensions: int | None) -> list[np.ndarray]:
    """Scaled to length 1, of the first ``dimensions`` numbers. Raises BadRequest for more than there are."""
    made = []
    for vector in vectors:
        if dimensions is not None and not 1 <= dimensions <= len(vector):
            raise BadRequest(
                f"dimensions is {dimensions}; this model's vectors have {len(vector)} numbers.", param="dimensions"
            )
        part = vector[:dimensions].astype(np.float64)
        made.append((part / max(float(np.linalg.norm(part)), 1e-12)).astype(np.float32))
    return made


async def embed(body: EmbeddingsRequest, front: Front) -> dict[str, Any]:
    need(front, "embed")
    if body.encoding_format not in {None, "float", "base64"}:
        raise BadRequest("encoding_format must be float or base64.", param="encoding_format")
    ids = await encoded(front, body.input, "input", False)
    vectors = unit(await front.pool.run([(i, 0) for i in ids]), body.dimensions)
    in_base64 = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": base64.b64encode(v.astype("<f4").tobytes()).decode() if in_base64 else v.tolist(),
        }
        for i, v in enumerate(vectors)
    ]
    return _listed(body.model, front, data, ids)


def _listed(model: str, front: Front, data: list[dict[str, Any]], ids: list[np.ndarray]) -> dict[str, Any]:
    tokens = sum(map(len, ids))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model or front.config.model.name, "usage": usage}


async def classify(body: ClassifyRequest, front: Front) -> dict[str, Any]:
    need(front, "classify")
    given: Any = body.input if body.input is not None else body.text
    if given is None or (body.input is not None and body.text is not None):
        raise BadRequest("give exactly one of input and text.", param="input")
    ids = await encoded(front, given, "input", False)
    data = []
    for i, logits in enumerate(await front.pool.run([(x, 0) for x in ids])):
        weights = np.exp(logits.astype(np.float64) - logits.max())
        probs = (weights / weights.sum()).tolist()
        best, names = int(np.argmax(logits)), front.config.model.labels
        label = names[best] if best < len(names) else f"LABEL_{best}"
        data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
    return _listed(body.model, front, data, ids)


async def encode(body: EncodeRequest, front: Front) -> Any:
    """The vectors as the model gives them, neither scaled nor cut."""
    need(front, "embed", "classify")
    if (body.text is None) == (body.input_ids is None):
        raise BadRequest("give exactly one of text and input_ids.", param="text")
    name = "text" if body.text is not None else "input_ids"
    given: Any = body.text if body.text is not None else body.input_ids
    ids = await encoded(front, given, name, False)
    vectors = await front.pool.run([(i, 0) for i in ids])
    answers = [
        {"embedding": v.tolist(), "meta_info": {"prompt_tokens": len(i)}} for v, i in zip(vectors, ids, strict=True)
    ]
    many = isinstance(given, list) and (name == "text" or isinstance(given[0], list))
    return answers if many else answers[0]


async def rerank(body: RerankRequest, front: Front) -> list[dict[str, Any]]:
    """Best first."""
    need(front, "rerank")
    if not 1 <= len(body.documents) <= limits.MAX_BATCH:
        raise BadRequest(f"{len(body.documents)} documents; it must be 1..{limits.MAX_BATCH}.", param="documents")
    if body.top_n is not None and body.top_n < 1:
        raise BadRequest(f"top_n is {body.top_n}; it must be at least 1.", param="top_n")
    documents = [d if isinstance(d, str) else d.get("text") for d in body.documents]
    texts = [d for d in documents if isinstance(d, str)]
    if len(texts) != len(documents):
        raise BadRequest("documents must be texts, or objects with a text.", param="documents")
    if not body.query:
        raise BadRequest("query is empty: give at least one character.", param="query")
    query, *seconds = await front.encode_texts([body.query, *texts], add_special_tokens=False)
    begin, middle, end = (
        np.asarray(getattr(front.tokenizer, name, ()), np.int32) for name in ("prefix_ids", "middle_ids", "suffix_ids")
    )
    first = np.concatenate([begin, query, middle]).astype(np.int32)
    pairs = []
    for second in seconds:
        whole = np.concatenate([first, second, end]).astype(np.int32)
        whole = front.pool.fit(whole, "documents", front.config.server.allow_auto_truncate)
        pairs.append((whole, max(1, len(whole) - len(first))))
    logits = [float(v[-1]) for v in await front.pool.run(pairs)]
    scores = [1.0 / (1.0 + float(np.exp(-x))) for x in logits]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
    return [{"score": scores[i], "index": i, "document": texts[i] if body.return_documents else None} for i in best]


async def ollama_embed(body: OllamaEmbedRequest, front: Front) -> dict[str, Any]:
    need(front, "embed")
    ids = await encoded(front, body.input, "input", body.truncate is not False)  # type: ignore[arg-type]
    vectors = unit(await front.pool.run([(i, 0) for i in ids]), body.dimensions)
    return {
        "model": body.model or front.config.model.name,
        "embeddings": [v.tolist() for v in vectors],
        "prompt_eval_count": sum(map(len, ids)),
    }


async def ollama_embeddings(body: OllamaEmbeddingsRequest, front: Front) -> dict[str, Any]:
    need(front, "embed")
    ids = await encoded(front, body.prompt, "prompt", True)
    return {"embedding": (await front.pool.run([(ids[0], 0)]))[0].tolist()}


def endpoint(front: Front) -> Any:
    """/v1/embeddings for batches."""

    async def answer(data: bytes) -> bytes:
        return msgspec.json.encode(await embed(await decoded(data, EmbeddingsRequest), front))

    return answer


def wire(routes: Routes, front: Front) -> None:
    def route(path: str, kind: Any, answer: Any, summary: str, work: Any) -> None:
        async def handler(request: Request) -> Response:
            body = await read(request, kind)
            return await until_gone(request, work(body, front), hinting(body))

        routes.add(path, ("POST",), Access.USER, Operation(summary, kind, answer), handler)

    route("/v1/embeddings", EmbeddingsRequest, EmbeddingsAnswer, "Vectors of texts", embed)
    route("/encode", EncodeRequest, EncodeAnswer | list[EncodeAnswer], "Vectors of texts (native)", encode)
    route("/v1/classify", ClassifyRequest, ClassifyAnswer, "Classes of texts", classify)
    route("/classify", ClassifyRequest, ClassifyAnswer, "Classes of texts (native)", classify)
    route("/v1/rerank", RerankRequest, list[RankedAnswer], "Documents by how well they fit", rerank)
    route("/api/embed", OllamaEmbedRequest, OllamaEmbedAnswer, "Vectors of texts (Ollama)", ollama_embed)
    route(
        "/api/embeddings",
        OllamaEmbeddingsRequest,
        OllamaEmbeddingsAnswer,
        "Vector of a text (Ollama, older)",
        ollama_embeddings,
    )
