"""Checks of one request against ``core.limits`` and the model, before any fan-out or allocation.

Owns every refusal that depends on values alone. Must never know HTTP; a protocol's own field names come with the
request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np

from ceiba.config.records import SchedulerConfig
from ceiba.core import limits
from ceiba.core.errors import BadRequest
from ceiba.core.sampling import LogprobSpec, SamplingParams
from ceiba.grammar.fields import constraint_of
from ceiba.server.request import ChatPrompt, EngineRequest, Input, TextPrompt

MAX_SEED = 2**63 - 1
_FLOATS: tuple[tuple[str, float, float, bool], ...] = (
    # field, lowest, highest, whether the lowest itself is allowed
    ("temperature", 0.0, limits.MAX_TEMPERATURE, True),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, True),
    ("frequency_penalty", -limits.MAX_PENALTY, limits.MAX_PENALTY, True),
    ("presence_penalty", -limits.MAX_PENALTY, limits.MAX_PENALTY, True),
    ("repetition_penalty", limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY, True),
)


def check_request(request: EngineRequest, vocab_size: int, capacity: int, scheduler: SchedulerConfig) -> None:
    """All that can be said before tokenizing. ``capacity``: tokens that prompt and answer may have together."""
    _check_id(request.rid, request.name("rid"))
    for name, value in (("extra_key", request.extra_key), ("cache_salt", request.cache_salt)):
        if value is not None:
            _check_id(value, name, empty=True)
    _check_id(request.routing_key, "routing_key", empty=True)
    if request.priority is not None:
        _check_priority(request.priority, scheduler)
    if not request.inputs:
        raise BadRequest("the request holds no prompt: give at least one.", param=request.name("prompt"))
    if len(request.inputs) > limits.MAX_BATCH:
        raise BadRequest(
            f"{len(request.inputs)} prompts in one request; the limit is {limits.MAX_BATCH}: split it.",
            param=request.name("prompt"),
        )
    for entry in request.inputs:
        n_name = request.name("n")
        if not 1 <= entry.n <= limits.MAX_N:
            raise BadRequest(f"{n_name} is {entry.n}; it must lie in 1..{limits.MAX_N}.", param=n_name)
        if entry.rid is not None:
            _check_id(entry.rid, request.name("rid"))
        _check_prompt(entry, request)
        check_sampling(entry.sampling, request, vocab_size, capacity, entry.length != "exact")
        _check_logprob(entry.logprob, request, vocab_size)
    if request.num_choices > limits.MAX_BATCH:
        raise BadRequest(
            f"prompts × {request.name('n')} is {request.num_choices}; the limit is {limits.MAX_BATCH}: split it.",
            param=request.name("n"),
        )


def _check_id(value: str, name: str, empty: bool = False) -> None:
    if len(value) > limits.MAX_ID_CHARS:
        raise BadRequest(f"{name} has {len(value)} characters; the limit is {limits.MAX_ID_CHARS}.", param=name)
    if not value.isprintable():
        raise BadRequest(f"{name} holds a control character; use printable text.", param=name)
    if not value and not empty:
        raise BadRequest(f"{name} is empty: leave it out or give it a value.", param=name)


def _check_priority(priority: int, scheduler: SchedulerConfig) -> None:
    ranks = "priority" in {scheduler.radix_eviction_policy, scheduler.retraction_policy}
    if not ranks and not scheduler.enable_priority_scheduling:
        raise BadRequest(
            f"priority {priority} would change nothing: this server schedules by {scheduler.policy}. Leave it out, or "
            "start the server with --enable-priority-scheduling.",
            param="priority",
        )
    if not -(2**31) < priority < 2**31:
        raise BadRequest("priority must fit 32 bits.", param="priority")


def _check_prompt(entry: Input, request: EngineRequest) -> None:
    prompt = entry.prompt
    if isinstance(prompt, ChatPrompt):
        name = request.name("messages")
        if not prompt.messages:
            raise BadRequest(f"{name} is empty: give at least one message.", param=name)
        if len(prompt.messages) > limits.MAX_MESSAGES:
            raise BadRequest(f"{len(prompt.messages)} messages; the limit is {limits.MAX_MESSAGES}.", param=name)
        return
    name = request.name("prompt")
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            raise BadRequest(f"{name} is empty: give at least one character.", param=name)
        if len(prompt.text) > limits.MAX_PROMPT_CHARS:
            raise BadRequest(
                f"{name} has {len(prompt.text)} characters; the limit is {limits.MAX_PROMPT_CHARS}.", param=name
            )
    elif prompt.size == 0:
        raise BadRequest(f"{name} holds no token: give at least one.", param=name)


def check_ids(ids: Iterable[int] | np.ndarray, vocab_size: int, name: str) -> None:
    """Every id must be one of the model's."""
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        bad = next(int(x) for x in array.ravel().tolist() if not 0 <= x < vocab_size)
        raise BadRequest(f"{name} holds token id {bad}; this model's ids are 0..{vocab_size - 1}.", param=name)


def as_ids(values: list[int], vocab_size: int, name: str) -> np.ndarray:
    """A checked int32 array of ids that came as JSON integers of any size."""
    try:
        array = np.asarray(values, dtype=np.int64)
    except OverflowError:
        raise BadRequest(f"{name} holds a token id that is not one of 0..{vocab_size - 1}.", param=name) from None
    check_ids(array, vocab_size, name)
    return array.astype(np.int32)


def check_sampling(
    sampling: SamplingParams, request: EngineRequest, vocab_size: int, capacity: int, may_shorten: bool = False
) -> None:
    """Ranges of every sampling field. Names in errors are the protocol's."""
    for field, low, high, closed in _FLOATS:
        value, name = getattr(sampling, field), request.name(field)
        above = value >= low if closed else value > low
        if not (math.isfinite(value) and above and value <= high):
            bracket = "[" if closed else "("
            raise BadRequest(f"{name} is {value}; it must lie in {bracket}{low:g}, {high:g}].", param=name)
    top_k = request.name("top_k")
    if sampling.top_k != -1 and not 1 <= sampling.top_k < 2**31:
        raise BadRequest(f"{top_k} is {sampling.top_k}; it must be -1 (all tokens) or at least 1.", param=top_k)
    longest, shortest = request.name("max_new_tokens"), request.name("min_new_tokens")
    if sampling.max_new_tokens < 0 or (sampling.max_new_tokens > capacity and not may_shorten):
        raise BadRequest(
            f"{longest} is {sampling.max_new_tokens}; it must lie in 0..{capacity} (this server's context).",
            param=longest,
        )
    if not 0 <= sampling.min_new_tokens <= capacity:
        raise BadRequest(f"{shortest} is {sampling.min_new_tokens}; it must lie in 0..{capacity}.", param=shortest)
    if sampling.min_new_tokens > sampling.max_new_tokens and not may_shorten:
        raise BadRequest(
            f"{shortest} {sampling.min_new_tokens} is more than {longest} {sampling.max_new_tokens}.", param=shortest
        )
    if sampling.seed is not None and not 0 <= sampling.seed <= MAX_SEED:
        name = request.name("seed")
        raise BadRequest(f"{name} must fit 64 bits.", param=name)
    interval = sampling.stream_interval
    if interval is not None and not 1 <= interval <= capacity:
        raise BadRequest(f"stream_interval is {interval}; it must lie in 1..{capacity}.", param="stream_interval")
    _check_stops(sampling, request, vocab_size)
    _check_bias(sampling, request, vocab_size)
    constraint_of(sampling)


def _check_stops(sampling: SamplingParams, request: EngineRequest, vocab_size: int) -> None:
    for field, patterns in (("stop", sampling.stop), ("stop_regex", sampling.stop_regex)):
        name = request.name(field)
        most = limits.MAX_STOP_EXPRESSIONS if field == "stop_regex" else limits.MAX_STOP_STRINGS
        if len(patterns) > most:
            raise BadRequest(f"{len(patterns)} entries in {name}; the limit is {most}.", param=name)
        for pattern in patterns:
            if not pattern:
                raise BadRequest(f"{name} holds an empty string, which would stop everything.", param=name)
            if len(pattern) > limits.MAX_STOP_CHARS:
                raise BadRequest(
                    f"{name} holds {len(pattern)} characters; the limit is {limits.MAX_STOP_CHARS}.", param=name
                )
            if any("\ud800" <= c <= "\udfff" for c in pattern):  # from Python; JSON cannot carry one
                raise BadRequest(f"{name} holds a lone surrogate, which is not Unicode text.", param=name)
    name = request.name("stop_token_ids")
    if len(sampling.stop_token_ids) > limits.MAX_STOP_TOKEN_IDS:
        raise BadRequest(
            f"{len(sampling.stop_token_ids)} entries in {name}; the limit is {limits.MAX_STOP_TOKEN_IDS}.", param=name
        )
    check_ids(sampling.stop_token_ids, vocab_size, name)


def _check_bias(sampling: SamplingParams, request: EngineRequest, vocab_size: int) -> None:
    name, bias = request.name("logit_bias"), sampling.logit_bias
    if not bias:
        return
    if len(bias) > limits.MAX_LOGIT_BIAS:
        raise BadRequest(f"{len(bias)} entries in {name}; the limit is {limits.MAX_LOGIT_BIAS}.", param=name)
    check_ids(bias.keys(), vocab_size, name)
    worst = max(bias.values(), key=lambda v: math.inf if math.isnan(v) else abs(v))
    if not abs(worst) <= limits.MAX_LOGIT_BIAS_VALUE:
        raise BadRequest(
            f"{name} holds {worst}; values lie in ±{limits.MAX_LOGIT_BIAS_VALUE:g}.",
            param=name,
        )


def _check_logprob(spec: LogprobSpec, request: EngineRequest, vocab_size: int) -> None:
    name = request.name("top_logprobs_num")
    if not 0 <= spec.top <= min(limits.MAX_TOP_LOGPROBS, vocab_size):
        raise BadRequest(
            f"{name} is {spec.top}; it must lie in 0..{min(limits.MAX_TOP_LOGPROBS, vocab_size)}.", param=name
        )
    if len(spec.token_ids) > limits.MAX_LOGPROB_TOKEN_IDS:
        raise BadRequest(
            f"{len(spec.token_ids)} entries in token_ids_logprob; the limit is {limits.MAX_LOGPROB_TOKEN_IDS}.",
            param="token_ids_logprob",
        )
    check_ids(spec.token_ids, vocab_size, "token_ids_logprob")
    if spec.prompt_start < -1:
        raise BadRequest(
            f"logprob_start_len is {spec.prompt_start}; it must be -1 (none) or a prompt position.",
            param="logprob_start_len",
        )


def check_length(text: str, entry: Input, request: EngineRequest, capacity: int, longest: int) -> None:
    """Refuse a text that ``capacity`` tokens of at most ``longest`` bytes cannot hold; twice that, because some
    tokenizers compose characters first."""
    if len(text) > 2 * capacity * max(longest, 1):
        name = request.name("messages" if isinstance(entry.prompt, ChatPrompt) else "prompt")
        raise BadRequest(
            f"This model's maximum context length is {capacity} tokens, and {name} has {len(text)} characters, more "
            "than these can hold: shorten it.",
            param=name,
            code="context_length_exceeded",
        )


def fit(entry: Input, ids: np.ndarray, request: EngineRequest, capacity: int, truncate: bool) -> np.ndarray:
    """Make prompt and answer fit ``capacity`` tokens, or refuse. May shorten ``entry.sampling.max_new_tokens``.

    ``truncate``: the operator allows cutting what is too long (--allow-auto-truncate) instead of refusing it.
    """
    name = request.name("messages" if isinstance(entry.prompt, ChatPrompt) else "prompt")
    if len(ids) == 0:
        raise BadRequest(f"{name} gives no token: give at least one character.", param=name)
    if len(ids) >= capacity:
        if not truncate:
            raise BadRequest(
                f"This model's maximum context length is {capacity} tokens, and {name} alone has {len(ids)}: "
                "shorten it so that at least one token can follow.",
                param=name,
                code="context_length_exceeded",
            )
        ids = ids[: capacity - 1]
    room = capacity - len(ids)
    wanted = room if entry.length == "fill" else entry.sampling.max_new_tokens
    if wanted > room and entry.length == "exact" and not truncate:
        longest = request.name("max_new_tokens")
        raise BadRequest(
            f"This model's maximum context length is {capacity} tokens; {len(ids)} in {name} and {longest} {wanted} "
            f"make {len(ids) + wanted}: shorten the prompt or ask for at most {room}.",
            param=longest,
            code="context_length_exceeded",
        )
    wanted = min(wanted, room)
    if entry.sampling.min_new_tokens > wanted:
        shortest = request.name("min_new_tokens")
        raise BadRequest(
            f"{shortest} is {entry.sampling.min_new_tokens}, but only {wanted} tokens can follow this prompt.",
            param=shortest,
        )
    if wanted != entry.sampling.max_new_tokens:
        entry.sampling = msgspec.structs.replace(entry.sampling, max_new_tokens=wanted)
    if entry.logprob.prompt_start > len(ids):
        raise BadRequest(
            f"logprob_start_len is {entry.logprob.prompt_start}, but the prompt has {len(ids)} tokens.",
            param="logprob_start_len",
        )
    return ids
