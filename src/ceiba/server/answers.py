"""The form of every answer, for the OpenAPI document; tests decode real answers with these structs.

Owns names, types and descriptions of response fields. Serving does not go through here: answers are built as bytes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class ErrorDetail(Answer):
    message: Annotated[str, Meta(description="What is wrong, the limit, and the way out.")]
    type: Annotated[str, Meta(description="Family of the error, such as `invalid_request_error`.")]
    param: Annotated[str | None, Meta(description="The field at fault.")]
    code: Annotated[str | None, Meta(description="Machine-readable reason.")]


class ErrorAnswer(Answer):
    error: Annotated[ErrorDetail, Meta(description="Every error has this shape, in the middle of a stream too.")]


class AnthropicErrorDetail(Answer):
    type: Annotated[str, Meta(description="Anthropic's name of the kind of error.")]
    message: Annotated[str, Meta(description="What is wrong, the limit, and the way out.")]


class AnthropicErrorAnswer(Answer):
    type: Annotated[str, Meta(description="`error`.")]
    error: Annotated[AnthropicErrorDetail, Meta(description="Errors of the routes of Anthropic's protocol.")]
    request_id: Annotated[str | None, Meta(description="Null: nothing is kept of requests.")]


class OllamaErrorAnswer(Answer):
    error: Annotated[str, Meta(description="What is wrong, the limit, and the way out: Ollama's form.")]


class PromptDetails(Answer):
    cached_tokens: Annotated[int, Meta(description="Prompt tokens that the prefix cache held.")]
    cached_tokens_by_tier: Annotated[dict[str, int], Meta(description="The same by where they lay: device, …")]
    pinned_tokens: Annotated[int, Meta(description="Tokens that `cache_control` keeps cached; missing if none.")] = 0


class CompletionDetails(Answer):
    reasoning_tokens: Annotated[int, Meta(description="Tokens of thinking; 0 without --reasoning-parser.")]


class UsageAnswer(Answer):
    prompt_tokens: Annotated[int, Meta(description="Each prompt once, however many choices it has.")]
    completion_tokens: Annotated[int, Meta(description="Generated tokens of all choices.")]
    total_tokens: Annotated[int, Meta(description="The sum of both.")]
    prompt_tokens_details: Annotated[
        PromptDetails | None, Meta(description="Null when the server does not report its cache.")
    ]
    completion_tokens_details: Annotated[CompletionDetails, Meta(description="Kinds of generated tokens.")]


class TopLogprob(Answer):
    token: Annotated[str, Meta(description="Text; U+FFFD where the bytes are no whole character.")]
    bytes: Annotated[list[int], Meta(description="The token's bytes.")]
    logprob: Annotated[float | None, Meta(description="Log-probability; -9999 stands for minus infinity.")]


class TokenLogprob(TopLogprob):
    top_logprobs: Annotated[list[TopLogprob], Meta(description="The likeliest tokens at this position.")]


class ChatLogprobs(Answer):
    content: Annotated[list[TokenLogprob], Meta(description="One entry per token.")]
    refusal: Annotated[None, Meta(description="Always null.")] = None


Matched = Annotated[int | str | None, Meta(description="The stop string or token id that ended the choice.")]
Reason = Annotated[str | None, Meta(description="`stop`, `length`, `tool_calls` or `abort`; null before the end.")]
Index = Annotated[int, Meta(description="Number of the choice.")]
Id = Annotated[str, Meta(description="The request's id; /abort_request takes it.")]
Created = Annotated[int, Meta(description="Unix time of the request.")]
Model = Annotated[str, Meta(description="The model name that the request gave.")]


class FunctionAnswer(Answer):
    arguments: Annotated[str, Meta(description="JSON text of an object; in a stream text to append.")]
    name: Annotated[str | None, Meta(description="The function; in a stream only in a call's first chunk.")] = None


class ToolCallAnswer(Answer):
    function: Annotated[FunctionAnswer, Meta(description="What to call with what.")]
    id: Annotated[str | None, Meta(description="Id of the call; in a stream only in its first chunk.")] = None
    type: Annotated[str | None, Meta(description="`function`.")] = None
    index: Annotated[int | None, Meta(description="In a stream: which call.")] = None


class ChatMessage(Answer):
    role: Annotated[str, Meta(description="`assistant`.")]
    content: Annotated[str | None, Meta(description="The answer; null where there are only calls.")]
    refusal: Annotated[None, Meta(description="Always null.")] = None
    reasoning_content: Annotated[str | None, Meta(description="The thinking, with --reasoning-parser.")] = None
    tool_calls: Annotated[list[ToolCallAnswer] | None, Meta(description="Calls of the request's tools.")] = None


class ChatChoice(Answer):
    index: Index
    message: Annotated[ChatMessage, Meta(description="The answer.")]
    logprobs: Annotated[ChatLogprobs | None, Meta(description="When `logprobs` was set.")]
    finish_reason: Reason
    matched_stop: Matched = None


class ChatCompletion(Answer):
    id: Id
    object: Annotated[str, Meta(description="`chat.completion`.")]
    created: Created
    model: Model
    choices: Annotated[list[ChatChoice], Meta(description="`n` answers.")]
    usage: Annotated[UsageAnswer, Meta(description="Token counts.")]


class ChatDelta(Answer):
    role: Annotated[str | None, Meta(description="In the first chunk of a choice.")] = None
    content: Annotated[str | None, Meta(description="Text to append.")] = None
    reasoning_content: Annotated[str | None, Meta(description="Thinking to append.")] = None
    tool_calls: Annotated[list[ToolCallAnswer] | None, Meta(description="A call, or more of its arguments.")] = None


class ChatChunkChoice(Answer):
    index: Index
    delta: Annotated[ChatDelta, Meta(description="What this chunk adds.")]
    logprobs: Annotated[ChatLogprobs | None, Meta(description="Of the tokens in this chunk.")]
    finish_reason: Reason
    matched_stop: Matched = None


class ChatCompletionChunk(Answer):
    id: Id
    object: Annotated[str, Meta(description="`chat.completion.chunk`.")]
    created: Created
    model: Model
    choices: Annotated[list[ChatChunkChoice], Meta(description="One, or none in the chunk that carries usage.")]
    usage: Annotated[UsageAnswer | None, Meta(description="As `stream_options` asked.")] = None


class LegacyLogprobsAnswer(Answer):
    tokens: Annotated[list[str], Meta(description="Texts; `bytes:…` where they are no whole character.")]
    token_logprobs: Annotated[list[float | None], Meta(description="Null for the first token of a prompt.")]
    top_logprobs: Annotated[
        list[dict[str, float | None] | None] | None, Meta(description="Likeliest tokens per position.")
    ]
    text_offset: Annotated[list[int], Meta(description="Where each token begins in the text, in characters.")]


class CompletionChoice(Answer):
    index: Index
    text: Annotated[str, Meta(description="The answer (in a stream: text to append).")]
    logprobs: Annotated[LegacyLogprobsAnswer | None, Meta(description="When `logprobs` was set.")]
    finish_reason: Reason
    matched_stop: Matched = None


class Completion(Answer):
    id: Id
    object: Annotated[str, Meta(description="`text_completion`.")]
    created: Created
    model: Model
    choices: Annotated[list[CompletionChoice], Meta(description="Prompt by prompt, `n` each.")]
    usage: Annotated[UsageAnswer | None, Meta(description="Token counts; in streams as `stream_options` asked.")] = None


class GenerateMeta(Answer):
    id: Id
    finish_reason: Annotated[dict[str, Any] | None, Meta(description="`type` and what belongs to it; null before.")]
    prompt_tokens: Annotated[int, Meta(description="Tokens of this prompt.")]
    completion_tokens: Annotated[int, Meta(description="Tokens generated so far.")]
    cached_tokens: Annotated[int, Meta(description="Prompt tokens that the prefix cache held.")]
    cached_tokens_details: Annotated[dict[str, int], Meta(description="The same by where they lay: device, …")]
    pinned_tokens: Annotated[int, Meta(description="Tokens that stay cached for `cache_control` or a session.")]
    weight_version: Annotated[str, Meta(description="Name of the weights that answered.")]
    queue_time: Annotated[float, Meta(description="Seconds before admission.")]
    e2e_latency: Annotated[float, Meta(description="Seconds since arrival.")]
    input_token_logprobs: Annotated[
        list[Any], Meta(description="[log-probability, id, text] per prompt position from `logprob_start_len`.")
    ] = []
    output_token_logprobs: Annotated[list[Any], Meta(description="The same per generated token.")] = []
    input_top_logprobs: Annotated[list[Any], Meta(description="Alternatives per prompt position.")] = []
    output_top_logprobs: Annotated[list[Any], Meta(description="Alternatives per generated token.")] = []
    input_token_ids_logprobs: Annotated[list[Any], Meta(description="Of `token_ids_logprob`, per position.")] = []
    output_token_ids_logprobs: Annotated[list[Any], Meta(description="Of `token_ids_logprob`, per token.")] = []


class GenerateAnswer(Answer):
    text: Annotated[str, Meta(description="The whole answer so far.")]
    output_ids: Annotated[list[int], Meta(description="Its token ids.")]
    meta_info: Annotated[GenerateMeta, Meta(description="Counts, times, reasons and log-probabilities.")]
    index: Annotated[int | None, Meta(description="In streams of several choices: which one.")] = None


class TokenizeAnswer(Answer):
    tokens: Annotated[list[int | list[int]], Meta(description="Token ids (of each text).")]
    count: Annotated[int | list[int], Meta(description="How many.")]
    max_model_len: Annotated[int, Meta(description="Tokens that fit in the context.")]
    text: Annotated[str | None, Meta(description="With `return_text`: what the chat template made.")] = None


class DetokenizeAnswer(Answer):
    text: Annotated[str | list[str], Meta(description="The text (of each list).")]


class ModelCard(Answer):
    id: Annotated[str, Meta(description="Name of the model.")]
    object: Annotated[str, Meta(description="`model`.")]
    created: Created
    owned_by: Annotated[str, Meta(description="`ceiba`.")]
    root: Annotated[str, Meta(description="Name of the base model.")]
    parent: Annotated[None, Meta(description="Always null.")]
    max_model_len: Annotated[int, Meta(description="Tokens of prompt and answer together.")]


class ModelList(Answer):
    object: Annotated[str, Meta(description="`list`.")]
    data: Annotated[list[ModelCard], Meta(description="The loaded model.")]


class HealthAnswer(Answer):
    status: Annotated[str, Meta(description="`ok`, `starting`, `stuck`, `failed` or `stopping`.")]
    reason: Annotated[str | None, Meta(description="Why it is not ok.")] = None


class AbortAnswer(Answer):
    aborted: Annotated[int, Meta(description="Choices that were still open.")]


class FlushAnswer(Answer):
    success: Annotated[bool, Meta(description="true.")]
    message: Annotated[str, Meta(description="What happened.")]
    detail: Annotated[Any, Meta(description="What the scheduler said.")] = None
