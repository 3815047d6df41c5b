"""The fields of Ollama's requests: the source of both decoding and the OpenAPI document.

Owns names, types and descriptions. Every field works, is a hint, or is refused with its reason.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ceiba.core import limits


class OllamaOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    num_predict: Annotated[int | None, Meta(description="Most tokens of the answer; -1 and -2: what is left.")] = None
    temperature: Annotated[float | None, Meta(description="0 is greedy. Default 1, or the model's.")] = None
    top_k: Annotated[int | None, Meta(description="Only the k most likely tokens; 0: all.")] = None
    top_p: Annotated[float | None, Meta(description="Nucleus sampling.")] = None
    min_p: Annotated[float | None, Meta(description="Only tokens this fraction as likely as the likeliest.")] = None
    seed: Annotated[int | None, Meta(description="Same seed and prompt, same answer.")] = None
    stop: Annotated[
        str | list[str] | None, Meta(description=f"Up to {limits.MAX_STOP_STRINGS} strings that end the answer.")
    ] = None
    repeat_penalty: Annotated[
        float | None, Meta(description="0.01..100: divides the logits of tokens already seen.")
    ] = None
    presence_penalty: Annotated[float | None, Meta(description="-2..2.")] = None
    frequency_penalty: Annotated[float | None, Meta(description="-2..2.")] = None
    repeat_last_n: Annotated[int | None, Meta(description="Hint: the penalty looks at everything.")] = None
    penalize_newline: Annotated[bool | None, Meta(description="Hint: newlines count as other tokens do.")] = None
    num_ctx: Annotated[int | None, Meta(description="Hint: the context is set when the server starts.")] = None
    num_keep: Annotated[int | None, Meta(description="Hint: nothing is ever cut out of the context.")] = None
    num_batch: Annotated[int | None, Meta(description="Hint: set when the server starts.")] = None
    num_gpu: Annotated[int | None, Meta(description="Hint: set when the server starts.")] = None
    main_gpu: Annotated[int | None, Meta(description="Hint: set when the server starts.")] = None
    num_thread: Annotated[int | None, Meta(description="Hint: set when the server starts.")] = None
    low_vram: Annotated[bool | None, Meta(description="Hint: set when the server starts.")] = None
    f16_kv: Annotated[bool | None, Meta(description="Hint: set when the server starts.")] = None
    use_mmap: Annotated[bool | None, Meta(description="Hint: set when the server starts.")] = None
    use_mlock: Annotated[bool | None, Meta(description="Hint: set when the server starts.")] = None
    numa: Annotated[bool | None, Meta(description="Hint: set when the server starts.")] = None
    vocab_only: Annotated[bool | None, Meta(description="Refused: the whole model is loaded.")] = None
    logits_all: Annotated[bool | None, Meta(description="Refused: send logprobs.")] = None
    embedding_only: Annotated[bool | None, Meta(description="Refused: set when the server starts.")] = None
    typical_p: Annotated[float | None, Meta(description="Refused unless 1: not available.")] = None
    tfs_z: Annotated[float | None, Meta(description="Refused unless 1: not available.")] = None
    mirostat: Annotated[int | None, Meta(description="Refused unless 0: not available.")] = None
    mirostat_tau: Annotated[float | None, Meta(description="Hint: mirostat is off.")] = None
    mirostat_eta: Annotated[float | None, Meta(description="Hint: mirostat is off.")] = None


REFUSED_OPTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "vocab_only": ("the whole model is loaded", ()),
    "logits_all": ("send logprobs", ()),
    "embedding_only": ("what a model does is set when the server starts", ()),
    "typical_p": ("typical sampling is not available", (1, 1.0)),
    "tfs_z": ("tail-free sampling is not available", (1, 1.0)),
    "mirostat": ("mirostat is not available", (0,)),
}


class Common(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(description="Any name: the one loaded model answers, and the name is repeated.")] = ""
    stream: Annotated[bool | None, Meta(description="Send lines as they come. Default true.")] = None
    options: Annotated[OllamaOptions | None, Meta(description="How tokens are chosen.")] = None
    format: Annotated[str | dict[str, Any] | None, Meta(description="`json`, or a JSON schema for the answer.")] = None
    keep_alive: Annotated[float | str | None, Meta(description="Hint: the model stays while the server runs.")] = None
    think: Annotated[
        bool | str | None,
        Meta(description="Whether to think, or `low`, `medium`, `high` as a limit. Needs --reasoning-parser."),
    ] = None
    logprobs: Annotated[bool | None, Meta(description="Return the log-probability of each token.")] = None
    top_logprobs: Annotated[
        int | None, Meta(description=f"Alternatives per token, 0..{limits.MAX_TOP_LOGPROBS}; needs `logprobs`.")
    ] = None


class OllamaChatRequest(Common, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/chat."""

    messages: Annotated[
        list[dict[str, Any]],
        Meta(description="role, content, thinking, tool_calls, tool_name. None: the model is said to be loaded."),
    ] = []
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Functions that the model may call.")] = None


class OllamaGenerateRequest(Common, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/generate."""

    prompt: Annotated[str, Meta(description="What to answer. Empty: the model is said to be loaded.")] = ""
    system: Annotated[str | None, Meta(description="The system prompt.")] = None
    raw: Annotated[bool | None, Meta(description="Use the prompt as it is, without the chat template.")] = None
    suffix: Annotated[
        str | None,
        Meta(description="Text behind the gap that the answer fills; needs a model with fill-in-the-middle tokens."),
    ] = None
    template: Annotated[Any, Meta(description="Refused: templates from requests are never rendered.")] = None
    context: Annotated[Any, Meta(description="Refused: send the conversation to /api/chat.")] = None
    images: Annotated[Any, Meta(description="Refused: this model takes text only.")] = None
    width: Annotated[Any, Meta(description="Refused: no images are made here.")] = None
    height: Annotated[Any, Meta(description="Refused: no images are made here.")] = None
    steps: Annotated[Any, Meta(description="Refused: no images are made here.")] = None


REFUSED_GENERATE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "template": ("templates from requests are never rendered", ()),
    "context": ("send the conversation to /api/chat", ()),
    "images": ("this model takes text only", ()),
    "width": ("no images are made here", ()),
    "height": ("no images are made here", ()),
    "steps": ("no images are made here", ()),
}


class ShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(description="Any name: the one loaded model is shown.")] = ""
    name: Annotated[str | None, Meta(description="Older name of `model`.")] = None
    verbose: Annotated[bool | None, Meta(description="Hint: there is no more to show.")] = None


class Answer(msgspec.Struct, kw_only=True):
    pass


class CommonAnswer(Answer, kw_only=True):
    model: Annotated[str, Meta(description="The model name that the request gave.")]
    created_at: Annotated[str, Meta(description="When this line was made.")]
    done: Annotated[bool, Meta(description="Whether the answer has ended.")]
    done_reason: Annotated[str | None, Meta(description="`stop`, `length`, `load` or `abort`.")] = None
    total_duration: Annotated[int | None, Meta(description="Nanoseconds since the request came.")] = None
    load_duration: Annotated[int | None, Meta(description="0: the model was there.")] = None
    prompt_eval_count: Annotated[int | None, Meta(description="Tokens of the prompt.")] = None
    prompt_eval_duration: Annotated[int | None, Meta(description="Nanoseconds to the first token.")] = None
    eval_count: Annotated[int | None, Meta(description="Generated tokens.")] = None
    eval_duration: Annotated[int | None, Meta(description="Nanoseconds from the first token to the last.")] = None
    logprobs: Annotated[list[dict[str, Any]] | None, Meta(description="Of the tokens in this line.")] = None


class OllamaChatAnswer(CommonAnswer, kw_only=True):
    message: Annotated[dict[str, Any], Meta(description="role, content, thinking, tool_calls.")]


class OllamaGenerateAnswer(CommonAnswer, kw_only=True):
    response: Annotated[str, Meta(description="The answer; in a stream text to append.")]
    thinking: Annotated[str | None, Meta(description="The thinking; in a stream text to append.")] = None


class TagsAnswer(Answer, kw_only=True):
    models: Annotated[list[dict[str, Any]], Meta(description="The loaded model.")]


class ShowAnswer(Answer, kw_only=True):
    details: Annotated[dict[str, Any], Meta(description="Format, family, size.")]
    model_info: Annotated[dict[str, Any], Meta(description="What the model's header says.")]
    capabilities: Annotated[list[str], Meta(description="completion, tools, thinking, embedding.")]
    template: Annotated[str, Meta(description="The chat template.")]
    parameters: Annotated[str, Meta(description="Sampling defaults.")]
    modified_at: Annotated[str, Meta(description="When the file was changed.")]
    license: Annotated[str, Meta(description="Empty: not known.")]
    modelfile: Annotated[str, Meta(description="Where the model comes from.")]


class VersionAnswer(Answer, kw_only=True):
    version: Annotated[str, Meta(description="Version of this server.")]
