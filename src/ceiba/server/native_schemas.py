"""The fields of the native routes: the source of both decoding and the OpenAPI document.

Owns names, types, defaults and descriptions. A field either works, is a hint, or is refused with its reason.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ceiba.core import limits


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``sampling_params`` of /generate."""

    max_new_tokens: Annotated[int | None, Meta(description="Most tokens of the answer. Default 128.")] = None
    min_new_tokens: Annotated[int | None, Meta(description="End tokens are held back until then. Default 0.")] = None
    temperature: Annotated[float | None, Meta(description="0 is greedy. Default 1.")] = None
    top_p: Annotated[float | None, Meta(description="Nucleus sampling. Default 1.")] = None
    top_k: Annotated[int | None, Meta(description="Only the k most likely tokens; -1 (default): all.")] = None
    min_p: Annotated[float | None, Meta(description="Least probability, relative to the likeliest token.")] = None
    frequency_penalty: Annotated[float | None, Meta(description="-2..2, per occurrence. Default 0.")] = None
    presence_penalty: Annotated[float | None, Meta(description="-2..2, once. Default 0.")] = None
    repetition_penalty: Annotated[
        float | None, Meta(description="0.01..100: divides seen tokens' logits. Default 1.")
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None, Meta(description="Token id (as text) to a number added to its logit.")
    ] = None
    stop: Annotated[str | list[str] | None, Meta(description="Strings that end the answer.")] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="Token ids that end the answer.")] = None
    stop_regex: Annotated[
        str | list[str] | None,
        Meta(description=f"Up to {limits.MAX_STOP_EXPRESSIONS} expressions whose match ends the answer."),
    ] = None
    n: Annotated[int | None, Meta(description=f"Choices per prompt, 1..{limits.MAX_N}. Default 1.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on past the model's own end tokens.")] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="Leave special tokens out. Default true.")] = None
    spaces_between_special_tokens: Annotated[
        bool | None, Meta(description="Spaces between special tokens that are shown. Default true.")
    ] = None
    no_stop_trim: Annotated[bool | None, Meta(description="Keep the stop string in the answer.")] = None
    stream_interval: Annotated[int | None, Meta(description="Tokens per streamed event, for this request.")] = None
    sampling_seed: Annotated[int | None, Meta(description="Same seed and prompt, same answer.")] = None
    seed: Annotated[int | None, Meta(description="Another name of `sampling_seed`.")] = None
    json_schema: Annotated[
        str | dict[str, Any] | bool | None, Meta(description="The answer is JSON that satisfies this schema.")
    ] = None
    regex: Annotated[str | None, Meta(description="The answer matches this expression.")] = None
    ebnf: Annotated[str | None, Meta(description="The answer follows this grammar.")] = None
    structural_tag: Annotated[
        str | dict[str, Any] | None, Meta(description="Free text whose marked parts have a shape.")
    ] = None
    choice: Annotated[list[str] | None, Meta(description="The answer is one of these strings.")] = None
    beam_width: Annotated[
        Any,
        Meta(description="Refused above 1: beam search is not available.", extra_json_schema={"enum": [None, 1]}),
    ] = None
    custom_params: Annotated[Any, Meta(description="Refused: nothing here reads it.")] = None


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /generate. Fields marked (batch) take one value for all prompts or a list with one for each."""

    text: Annotated[str | list[str] | None, Meta(description="A prompt or a list of prompts.")] = None
    input_ids: Annotated[
        list[int | list[int]] | None, Meta(description="Token ids instead of text: one list, or a list of lists.")
    ] = None
    add_special_tokens: Annotated[
        bool, Meta(description="Add the begin-of-text token where the model wants one. Default true; text only.")
    ] = True
    sampling_params: Annotated[
        SamplingFields | list[SamplingFields] | None, Meta(description="How tokens are chosen (batch).")
    ] = None
    rid: Annotated[str | list[str] | None, Meta(description="Your own id (batch); /abort_request takes it.")] = None
    stream: Annotated[
        bool, Meta(description="Server-sent events; each holds the whole answer so far of one choice.")
    ] = False
    return_logprob: Annotated[
        bool | list[bool] | None, Meta(description="Return log-probabilities of the answer's tokens (batch).")
    ] = None
    logprob_start_len: Annotated[
        int | list[int] | None,
        Meta(description="First prompt position with log-probabilities; -1 (default): none (batch)."),
    ] = None
    top_logprobs_num: Annotated[
        int | list[int] | None,
        Meta(description=f"Alternatives per position, 0..{limits.MAX_TOP_LOGPROBS} (batch)."),
    ] = None
    token_ids_logprob: Annotated[
        list[int | list[int]] | None, Meta(description="Ids whose log-probability each position reports (batch).")
    ] = None
    return_text_in_logprobs: Annotated[bool, Meta(description="Put each token's text beside its id.")] = False
    extra_key: Annotated[str | None, Meta(description="Requests with different keys share no cached prefix.")] = None
    cache_salt: Annotated[str | None, Meta(description="A secret per tenant that separates cached prefixes.")] = None
    priority: Annotated[int | None, Meta(description="Larger goes first; needs priority scheduling.")] = None
    routing_key: Annotated[str | None, Meta(description="Groups requests for routing.")] = None
    queue_timeout: Annotated[
        float | None, Meta(description="Seconds it may wait in the queue; then 504. Default: the server's limit.")
    ] = None
    cache_control: Annotated[
        dict[str, Any] | None,
        Meta(description='{"type": "ephemeral", "ttl": "5m" or "1h"}: keep this prompt cached, within the pin budget.'),
    ] = None
    model: Annotated[str | None, Meta(description="Any name: the one loaded model answers.")] = None
    log_metrics: Annotated[bool | None, Meta(description="Hint: every request is counted.")] = None
    background: Annotated[Any, Meta(description="Refused: background requests are not available yet.")] = None
    image_data: Annotated[Any, Meta(description="Refused: images are not available yet.")] = None
    video_data: Annotated[Any, Meta(description="Refused: videos are not available yet.")] = None
    audio_data: Annotated[Any, Meta(description="Refused: audio is not available yet.")] = None
    modalities: Annotated[Any, Meta(description="Refused: media are not available yet.")] = None
    input_embeds: Annotated[Any, Meta(description="Refused: embeddings as input are not available.")] = None
    lora_path: Annotated[Any, Meta(description="Refused: LoRA adapters are not available yet.")] = None
    session_params: Annotated[
        dict[str, Any] | None,
        Meta(description="A turn of a session: id, rid (the turn to continue), offset, replace, drop_previous_output."),
    ] = None
    custom_logit_processor: Annotated[Any, Meta(description="Refused: code from a request is never executed.")] = None
    return_hidden_states: Annotated[Any, Meta(description="Refused: hidden states are not available yet.")] = None
    return_routed_experts: Annotated[Any, Meta(description="Refused: expert routing is not available yet.")] = None
    bootstrap_host: Annotated[Any, Meta(description="Refused: prefill/decode separation is not available yet.")] = None
    bootstrap_port: Annotated[Any, Meta(description="Refused: prefill/decode separation is not available yet.")] = None
    bootstrap_room: Annotated[Any, Meta(description="Refused: prefill/decode separation is not available yet.")] = None
    data_parallel_rank: Annotated[Any, Meta(description="Refused: there is one replica.")] = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/tokenize and /tokenize: exactly one of ``prompt`` and ``messages``."""

    prompt: Annotated[str | list[str] | None, Meta(description="A text or a list of texts.")] = None
    messages: Annotated[
        list[dict[str, Any]] | None, Meta(description="A conversation, shown to the chat template first.")
    ] = None
    add_special_tokens: Annotated[
        bool, Meta(description="Add the begin-of-text token where the model wants one. Default true; prompt only.")
    ] = True
    add_generation_prompt: Annotated[
        bool, Meta(description="End the prompt where the assistant begins. Default true; messages only.")
    ] = True
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Variables for the chat template; messages only.")
    ] = None
    return_text: Annotated[bool, Meta(description="Give the text that the chat template made, too; messages only.")] = (
        False
    )
    model: Annotated[str | None, Meta(description="Any name: the one loaded model answers.")] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/detokenize and /detokenize."""

    tokens: Annotated[list[int | list[int]], Meta(description="Token ids: one list, or a list of lists.")]
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out. Default true.")] = True
    model: Annotated[str | None, Meta(description="Any name: the one loaded model answers.")] = None


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /abort_request: ``rid``, or ``abort_all``."""

    rid: Annotated[str, Meta(description="Id of the request, as sent or as its answer calls it.")] = ""
    abort_all: Annotated[bool, Meta(description="End every request.")] = False


_PD = "prefill/decode separation is not available yet"
REFUSED_SAMPLING: dict[str, tuple[str, tuple[Any, ...]]] = {
    "beam_width": ("beam search is not available: use n", (1,)),
    "custom_params": ("nothing here reads it", ()),
}
REFUSED_GENERATE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "background": ("background requests are not available yet", ()),
    "image_data": ("images are not available yet", ()),
    "video_data": ("videos are not available yet", ()),
    "audio_data": ("audio is not available yet", ()),
    "modalities": ("media are not available yet", ()),
    "input_embeds": ("embeddings as input are not available: send text or input_ids", ()),
    "lora_path": ("LoRA adapters are not available yet", ()),
    "custom_logit_processor": ("code from a request is never executed here; use logit_bias", ()),
    "return_hidden_states": ("hidden states are not available yet", ()),
    "return_routed_experts": ("expert routing is not available yet", ()),
    "bootstrap_host": (_PD, ()),
    "bootstrap_port": (_PD, ()),
    "bootstrap_room": (_PD, ()),
    "data_parallel_rank": ("there is one replica", (0,)),
}
