"""One pure function from what was asked (flags, environment) and what there is (model, device) to the final ``Config``.
It owns every "auto" and every rule between flags; it must never read a file, a clock, a device or the environment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ceiba.config import sizing
from ceiba.config.available import (
    EIGHT_BIT_KV,
    GRAPH_BACKENDS,
    ONLINE_QUANTIZATIONS,
    POOLING_ARCHITECTURES,
    QUANTIZATIONS,
)
from ceiba.config.choose import (
    CPU_KERNELS,
    attention_backend,
    deterministic,
    eviction_options,
    fair_share,
    grammar_backend,
    is_loopback,
    overlap_allowed,
    refuse,
    requested_device,
    schedule_policy,
    speculative,
)
from ceiba.config.env import LOG_LEVELS, Env
from ceiba.config.flags import Flags
from ceiba.config.hicache import HostRoom, hicache
from ceiba.config.records import (
    Config,
    DeviceFacts,
    GrammarConfig,
    HiCacheConfig,
    LaunchConfig,
    ModelConfig,
    ModelFacts,
    ObsConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)

Dtype = Literal["float32", "bfloat16", "float16"]
MAX_WHITESPACE = 40
"""Characters of space between two parts of JSON where nothing is said: enough to indent, and a model that writes space
without end comes out of it."""
MIXED_TARGET_MS = 27
"""A mixed step on a GPU; one prompt may take twice that."""
CPU_FLAGS = ("--threads", "--disable-cpu-kernels", "--enable-int8-activations", "--disable-packed-weight-cache")
FP8_MAX = {"fp8_e4m3": 448, "fp8_e5m2": 57344}


def resolve(
    flags: Flags, model: ModelFacts, device: DeviceFacts, env: Env, *, path: str | None = None, name: str | None = None
) -> Config:
    """Decide everything. ``path``: the model as a local path; ``name``: how the user called it; both default to
    --model-path. Raises ConfigError naming the flag, the limit and what would work."""
    work = _Work(flags, model, device, env, notes=[*flags.notes, *env.notes, *env.warnings])
    local = path or flags.get("model_path") or ""
    dtype = compute_dtype(work)
    kv_dtype = kv_cache_dtype(work, dtype)
    memory = _memory(work, dtype, kv_dtype)
    return Config(
        model=_model(work, local, name, dtype, memory.context),
        scheduler=_scheduler(work, memory),
        runner=_runner(work, memory, kv_dtype),
        server=_server(work),
        obs=_obs(work),
        launch=LaunchConfig(
            detokenizer=flags.get("detokenizer"),
            watchdog_timeout=flags.get("watchdog_timeout"),
            restart_on_failure=flags.get("restart_on_failure"),
        ),
        grammar=_grammar(work),
        notes=tuple(dict.fromkeys(work.notes)),
    )


@dataclass(slots=True)
class _Work:
    """The inputs of one call and the lines it writes."""

    flags: Flags
    model: ModelFacts
    device: DeviceFacts
    env: Env
    notes: list[str] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        return self.device.kind == "cpu"

    @property
    def compiled(self) -> bool:
        """Whether the compiled CPU kernels are there and wanted."""
        return self.on_cpu and CPU_KERNELS in self.device.packages and not self.flags.get("disable_cpu_kernels")


@dataclass(frozen=True, slots=True)
class _Memory:
    """The sizes that depend on each other."""

    chunk: int
    prefill: int
    fraction: float
    tokens: int
    context: int
    kv_bytes: int
    """Of one token."""
    weights: int
    """Bytes."""


# --- model -----------------------------------------------------------------------------------------------------------


def context_length(work: _Work) -> int:
    asked = work.flags.get("context_length")
    if asked is None:
        return work.model.context_len
    if asked > work.model.context_len:
        refuse(
            "--context-length",
            f"--context-length {asked}: the model was made for {work.model.context_len} tokens. "
            f"Instead: at most {work.model.context_len} (stretching it needs --json-model-override-args, "
            "which is not available yet).",
        )
    return int(asked)


def compute_dtype(work: _Work) -> Dtype:
    """--dtype, with auto decided by checkpoint and device, and refused where the device cannot."""
    spelled = {"half": "float16", "float": "float32"}
    asked = spelled.get(work.flags.get("dtype"), work.flags.get("dtype"))
    device, model = work.device, work.model
    if asked != "auto":
        if asked == "float16" and work.on_cpu:
            refuse("--dtype", "--dtype float16: CPUs compute it slowly and inexactly. Instead: float32 or bfloat16.")
        if asked == "bfloat16" and device.kind == "cuda" and device.capability < (8, 0):
            refuse("--dtype", f"--dtype bfloat16: {device.name or 'this GPU'} has none. Instead: float16 or float32.")
        return cast(Dtype, asked)
    if not model.is_generation and work.on_cpu:
        return "float32"  # small models, whose vectors are compared: there is nothing to save
    if work.compiled:
        # The kernels keep weights as they are stored; this halves the KV cache.
        return "bfloat16"
    if work.on_cpu:
        native = bool({"bf16", "amx"} & set(device.isa))
        if model.quantized is None and model.dtype == "bfloat16" and native:
            return "bfloat16"
        if model.dtype != "float32" and model.quantized is None:
            work.notes.append(f"dtype float32: the checkpoint's {model.dtype} is slower than float32 on this CPU.")
        return "float32"
    wanted = "bfloat16" if model.quantized or model.dtype == "float32" else model.dtype
    if wanted == "bfloat16" and device.kind == "cuda" and device.capability < (8, 0):
        work.notes.append(f"dtype float16: {device.name or 'this GPU'} computes no bfloat16.")
        return "float16"
    return cast(Dtype, wanted)


def _model(work: _Work, path: str, name: str | None, dtype: Dtype, context: int) -> ModelConfig:
    flags, model = work.flags, work.model
    if not model.is_generation and model.architecture not in POOLING_ARCHITECTURES:
        refuse(
            "--model-path",
            f"{model.architecture}: this model is not available yet. Instead: {', '.join(POOLING_ARCHITECTURES)}.",
        )
    if model.quantized is not None and model.quantized not in QUANTIZATIONS:
        refuse(
            "--quantization",
            f"The checkpoint's weights are packed as {model.quantized}, which is not available yet. "
            f"Instead: plain weights or {', '.join(QUANTIZATIONS)}.",
        )
    return ModelConfig(
        path=path,
        task=model.task,
        labels=model.labels,
        name=flags.get("served_model_name") or name or flags.get("model_path") or path,
        tokenizer_path=flags.get("tokenizer_path") or path,
        load_format=flags.get("load_format"),
        dtype=dtype,
        quantization=quantization(work),
        context_len=context,
        revision=flags.get("revision"),
        trust_remote_code=flags.get("trust_remote_code"),
        chat_template=flags.get("chat_template"),
        skip_tokenizer=flags.get("skip_tokenizer_init"),
    )


def kv_cache_dtype(work: _Work, dtype: Dtype) -> str:
    """--kv-cache-dtype, with auto decided; what the eight-bit types cost is said in the log."""
    asked = work.flags.get("kv_cache_dtype")
    if asked == "int8" and not work.on_cpu:
        refuse("--kv-cache-dtype", "--kv-cache-dtype int8: only on a CPU. Instead: fp8_e4m3, auto or bf16.")
    if asked in EIGHT_BIT_KV and not work.on_cpu and (why := eight_bit_obstacle(work.device)):
        refuse("--kv-cache-dtype", f"--kv-cache-dtype {asked}: {why}. Instead: auto or bf16.")
    if asked in FP8_MAX:
        closer = "; int8 takes 4 bytes more for each head and is closer" if work.on_cpu else ""
        work.notes.append(
            f"KV cache {asked} at scale 1.0, uncalibrated: values past {FP8_MAX[asked]} saturate{closer}."
        )
    return {"auto": str(dtype), "bf16": "bfloat16"}.get(asked, asked)


def eight_bit_obstacle(device: DeviceFacts) -> str | None:
    """Why a device has no kernels for eight-bit floats; None where it has."""
    if device.kind != "cuda":
        return f"products and caches in eight-bit floats are built for CUDA, not for {device.kind}"
    if device.capability < (8, 9):
        major, minor = device.capability
        return f"it needs compute capability 8.9, and {device.name or 'this GPU'} has {major}.{minor}"
    return None


def quantization(work: _Work) -> str | None:
    """How the weights are held: as the checkpoint has them, or quantized while they are loaded (fp8, int8, int4)."""
    asked, model = work.flags.get("quantization"), work.model
    if "fp8" in {asked, model.quantized} and asked in {None, "fp8"}:
        why = eight_bit_obstacle(work.device)
        if model.quantized not in {None, "fp8"}:
            why = f"the weights are quantized already ({model.quantized})"
        elif not model.is_generation:
            why = f"{model.architecture} is an encoder, which stays as it is"
        if why and asked:
            refuse("--quantization", f"--quantization fp8: {why}. Instead: leave it out; on a CPU there is int8.")
        if why:
            refuse("--quantization", f"The checkpoint's weights are FP8: {why}. Instead: the model's plain weights.")
        return "fp8"
    if asked in ONLINE_QUANTIZATIONS:
        why = None
        if model.quantized is not None:
            why = f"the weights are quantized already ({model.quantized})"
        elif not model.is_generation:
            why = f"{model.architecture} is an encoder, which stays as it is"
        elif not work.compiled:
            why = "only the compiled kernels of a CPU multiply such weights"
        if why:
            refuse("--quantization", f"--quantization {asked}: {why}. Leave it out.")
        return str(asked)
    if asked and asked != model.quantized:
        refuse("--quantization", f"--quantization {asked}: the weights are {model.quantized or 'plain'}. Leave it out.")
    return model.quantized


# --- runner ----------------------------------------------------------------------------------------------------------


def _runner(work: _Work, memory: _Memory, kv_dtype: str) -> RunnerConfig:
    flags, device = work.flags, work.device
    gpu_id = requested_device(flags)[1]
    if work.on_cpu and gpu_id:
        refuse("--base-gpu-id", f"--base-gpu-id {gpu_id}: the server runs on the CPU. Leave it out, or --device cuda.")
    if not work.on_cpu:
        idle = [flag for flag in CPU_FLAGS if flags.given(flag[2:].replace("-", "_"))]
        work.notes += [
            f"{flag} changes nothing here: it is for the CPU, and the server runs on a GPU." for flag in idle
        ]
    name, reason = attention_backend(flags.get("attention_backend"), device, work.compiled)
    work.notes.append(f"attention backend {name}: {reason}.")
    phases: dict[str, str | None] = {}
    for phase in ("prefill", "decode"):
        asked = flags.get(f"{phase}_attention_backend")
        phases[phase] = attention_backend(asked, device, work.compiled)[0] if asked else None
    if work.on_cpu and not work.compiled and not flags.get("disable_cpu_kernels"):
        work.notes.append(
            "The compiled CPU kernels are missing: computing with plain torch, several times slower. "
            "Install a C++17 compiler and reinstall."
        )
    off = flags.get("disable_packed_weight_cache") or not work.model.is_generation
    return RunnerConfig(
        device=device.kind,
        gpu_id=gpu_id,
        attention_backend=name,
        prefill_attention_backend=phases["prefill"],
        decode_attention_backend=phases["decode"],
        sampling_backend=flags.get("sampling_backend") or "pytorch",
        kv_cache_dtype=kv_dtype,
        threads=flags.get("threads") or sizing.cpu_threads(device.cores),
        cpu_kernels=work.compiled,
        packed_cache=str(work.env.cache_dir / "packed") if work.compiled and not off else "",
        int8_activations=flags.get("enable_int8_activations"),
        deterministic=deterministic(flags, device, compiled=work.compiled, generates=work.model.is_generation),
        mem_fraction_static=memory.fraction,
        mixed_steps=_mixed(work),
        **_graphs(work),
    )


def _graphs(work: _Work) -> dict[str, Any]:
    """Graph settings: each phase's preferred mode on CUDA, and no sizes where nothing captures."""
    flags = work.flags
    modes: dict[str, Any] = {}
    defaults = {"decode": sizing.graph_max_bs(work.device.memory_bytes), "prefill": sizing.PREFILL_GRAPH_TOKENS}
    for phase, available in GRAPH_BACKENDS.items():
        asked = flags.get(f"cuda_graph_backend_{phase}")
        off = flags.get("disable_cuda_graph") or flags.get(f"disable_{phase}_cuda_graph")
        if off and asked not in {None, "disabled"}:
            refuse(
                f"--cuda-graph-backend-{phase}",
                f"--cuda-graph-backend-{phase} {asked} together with a flag that disables graphs: give one of them.",
            )
        if asked not in {None, "disabled"} and work.device.kind != "cuda":
            refuse(f"--cuda-graph-backend-{phase}", f"--cuda-graph-backend-{phase} {asked}: needs a CUDA device.")
        default = available[0] if work.device.kind == "cuda" and not off else "disabled"
        mode = modes[f"cuda_graph_backend_{phase}"] = asked or default
        size = flags.get(f"cuda_graph_max_bs_{phase}")
        if mode != "disabled":
            modes[f"cuda_graph_max_bs_{phase}"] = size or defaults[phase]
        elif size:
            work.notes.append(f"--cuda-graph-max-bs-{phase} {size} changes nothing: {phase} is not captured here.")
    return modes


# --- scheduler -------------------------------------------------------------------------------------------------------


def chunk_sizes(work: _Work) -> tuple[int, int]:
    """(chunked_prefill_size, max_prefill_tokens)."""
    flags = work.flags
    page = flags.get("page_size") or 1
    chunk = flags.get("chunked_prefill_size")
    if chunk == 0:
        refuse("--chunked-prefill-size", "--chunked-prefill-size 0 makes no progress: 1 or more, or -1 for no chunks.")
    if chunk is None:
        chunk = sizing.CPU_CHUNK if work.on_cpu else sizing.tier(work.device.memory_bytes).chunk
    elif chunk > 0 and chunk % page:
        refuse("--chunked-prefill-size", f"--chunked-prefill-size {chunk} is no multiple of --page-size {page}.")
    prefill = max(flags.get("max_prefill_tokens"), context_length(work))
    if flags.given("max_prefill_tokens") and prefill > flags.get("max_prefill_tokens"):
        work.notes.append(f"max_prefill_tokens raised to {prefill}: a batch must hold one prompt of full length.")
    cap = flags.get("max_num_batched_tokens")
    if cap is not None:
        if cap < page:
            refuse("--max-num-batched-tokens", f"--max-num-batched-tokens {cap} is below --page-size {page}.")
        prefill = min(prefill, cap)
        chunk = min(chunk, cap) if chunk > 0 else cap
        work.notes.append(
            f"--max-num-batched-tokens {cap}: max_prefill_tokens={prefill}, chunked_prefill_size={chunk}."
        )
    return (max(page, chunk - chunk % page) if chunk > 0 else -1), prefill


def memory_fraction(work: _Work, chunk: int, prefill: int) -> float:
    """--mem-fraction-static or its older spelling, else from the tier's reserve (on a CPU: a fixed share)."""
    flags = work.flags
    asked, older = flags.get("mem_fraction_static"), flags.get("gpu_memory_utilization")
    if older is not None:
        if asked is not None and asked != older:
            refuse(
                "--gpu-memory-utilization",
                f"--gpu-memory-utilization {older} and --mem-fraction-static {asked} set the same value: give one.",
            )
        work.notes.append(
            f"--gpu-memory-utilization {older} is taken as --mem-fraction-static {older}: that is weights and KV pool "
            "only, activations and graphs come on top (elsewhere the number covers all of them). Lower it if memory "
            "runs out."
        )
        asked = older
    if asked is not None:
        return float(asked)
    if work.on_cpu:
        return sizing.CPU_SHARE
    memory = work.device.memory_bytes
    reserve = sizing.reserve_bytes(memory, chunk if chunk > 0 else prefill, sizing.graph_max_bs(memory))
    return sizing.static_fraction(memory, reserve)


def pool_tokens(work: _Work, fraction: float, dtype: Dtype, kv_dtype: str) -> int:
    """KV slots: --max-total-tokens where given and possible, else what fits. A multiple of the page size."""
    flags, device, model = work.flags, work.device, work.model
    page = flags.get("page_size") or 1
    per_token = sizing.kv_bytes_per_token(model, kv_dtype)
    weights = _weights(work, dtype)
    if work.on_cpu:
        room = sizing.host_pool_bytes(device.host_free_bytes, fraction, weights)
        most = device.host_free_bytes - weights
        where = f"{fraction:g} of {sizing.human(device.host_free_bytes)} free host memory"
    else:
        room = sizing.accelerator_pool_bytes(device.memory_bytes, device.free_bytes, fraction, weights)
        most = device.free_bytes - weights
        where = f"{fraction:g} of {sizing.human(device.memory_bytes)} ({sizing.human(device.free_bytes)} free)"
    asked = flags.get("max_total_tokens")
    if asked is not None:
        if asked * per_token > most:
            fits = max(most, 0) // per_token
            refuse(
                "--max-total-tokens",
                f"--max-total-tokens {asked} takes {sizing.human(asked * per_token)}; beside the weights "
                f"({sizing.human(weights)}) there is room for {fits} tokens. Instead: at most that.",
            )
        if asked < page:
            refuse("--max-total-tokens", f"--max-total-tokens {asked} is below --page-size {page}.")
        return int(asked - asked % page)
    tokens = max(room, 0) // per_token
    if not work.on_cpu and tokens > 1:
        # The table that says which slot holds a position, for every request that may run.
        running = flags.get("max_running_requests") or sizing.accelerator_running(tokens, context_length(work))
        tokens = max(room - running * context_length(work) * 4, 0) // per_token
    if work.on_cpu:
        tokens = min(tokens, sizing.cpu_running(device.cores, tokens) * context_length(work))
    if tokens < max(page, sizing.MIN_POOL_TOKENS):
        refuse(
            "--mem-fraction-static",
            f"No room for a KV cache: weights take {sizing.human(weights)} of {where}, {sizing.human(per_token)} a "
            "token. Instead: free memory, raise --mem-fraction-static, lower --chunked-prefill-size, or take a "
            "smaller model.",
        )
    return int(tokens - tokens % page)


def _weights(work: _Work, dtype: Dtype) -> int:
    """Bytes in memory; without the compiled kernels, and on a GPU, quantized weights are unpacked at the start."""
    packed = work.on_cpu and work.compiled
    return sizing.weight_bytes(work.model, dtype, packed=packed, online=quantization(work))


def _memory(work: _Work, dtype: Dtype, kv_dtype: str) -> _Memory:
    chunk, prefill = chunk_sizes(work)
    fraction = memory_fraction(work, chunk, prefill)
    tokens = pool_tokens(work, fraction, dtype, kv_dtype)
    wanted = context_length(work)
    context = min(wanted, tokens)
    if context < wanted:
        work.notes.append(f"context_len lowered from {wanted} to {context}: the KV pool holds no more tokens.")
    per_token = sizing.kv_bytes_per_token(work.model, kv_dtype)
    return _Memory(chunk, prefill, fraction, tokens, context, per_token, _weights(work, dtype))


def _scheduler(work: _Work, memory: _Memory) -> SchedulerConfig:
    flags, env = work.flags, work.env
    cached = not flags.get("disable_radix_cache")
    asked = flags.get("schedule_policy")
    priority = flags.get("enable_priority_scheduling") or asked == "priority"
    policy, line = schedule_policy(asked, cache=cached, priority=priority)
    overlap, why = overlap_allowed(work.device, flags.get("disable_overlap_schedule"))
    work.notes += [text for text in (line, why) if text]
    _check_pairs(work, priority)
    shares, weights = fair_share(flags, priority)
    running = flags.get("max_running_requests") or (
        sizing.cpu_running(work.device.cores, memory.tokens)
        if work.on_cpu
        else sizing.accelerator_running(memory.tokens, context_length(work))
    )
    cap = flags.get("max_num_batched_tokens")
    if cap is not None and running > cap:
        running = cap
        work.notes.append(f"max_running_requests lowered to {cap}: each takes a token of --max-num-batched-tokens.")
    check, deprioritize = env.in_batch_check_threshold, env.in_batch_deprioritize_threshold
    return SchedulerConfig(
        policy=policy,
        max_running_requests=running,
        max_queued_requests=flags.get("max_queued_requests"),
        max_total_tokens=memory.tokens,
        max_prefill_tokens=memory.prefill,
        chunked_prefill_size=memory.chunk,
        page_size=flags.get("page_size") or 1,
        disable_radix_cache=not cached,
        radix_eviction_policy=flags.get("radix_eviction_policy"),
        eviction_options=eviction_options(
            flags.get("radix_eviction_policy"), flags.get("radix_eviction_policy_config")
        ),
        cache_pin_budget=_pin_budget(work, memory, cached),
        hicache=_hicache(work, memory, cached),
        overlap=overlap,
        consecutive_prefill_overlap=not env.disable_consecutive_prefill_overlap,
        late_planning=not flags.get("disable_late_planning"),
        enable_mixed_chunk=_mixed(work),
        mixed_chunk_target=_mixed_target(work),
        shared_prefix=not flags.get("disable_shared_prefix_attention"),
        conservativeness=flags.get("schedule_conservativeness"),
        prefill_max_requests=flags.get("prefill_max_requests"),
        stream_interval=flags.get("stream_interval"),
        decode_log_interval=flags.get("decode_log_interval"),
        retraction_policy=flags.get("retraction_policy"),
        queue_timeout=flags.get("queue_timeout"),
        enable_priority_scheduling=priority,
        low_priority_first=flags.get("schedule_low_priority_values_first"),
        default_priority=flags.get("default_priority_value") or 0,
        preemption_threshold=(
            None if flags.get("disable_priority_preemption") else flags.get("priority_scheduling_preemption_threshold")
        ),
        fair_share=shares,
        fair_share_weights=weights,
        prefill_decode_interval=flags.get("prefill_decode_interval") or 0,
        prefill_decode_interval_min_bs=flags.get("prefill_decode_interval_min_bs"),
        **speculative(flags, work.device, work.model.is_generation),
        jump_forward=not flags.get("disable_jump_forward"),
        random_seed=flags.get("random_seed") or 0,
        in_batch_check_threshold=32 if check is None else check,
        in_batch_deprioritize_threshold=32 if deprioritize is None else deprioritize,
    )


def _mixed(work: _Work) -> bool:
    """Whether prompts and running requests share steps: as asked, otherwise on a GPU."""
    flags = work.flags
    if flags.get("enable_mixed_chunk") or flags.get("disable_mixed_chunk"):
        return not flags.get("disable_mixed_chunk")
    return not work.on_cpu and not flags.get("prefill_decode_interval")


def _mixed_target(work: _Work) -> float:
    """Seconds that a mixed step should take; 0: chunks are not cut to a time."""
    asked = work.flags.get("mixed_chunk_target_ms")
    if not _mixed(work):
        if asked:
            refuse(
                "--mixed-chunk-target-ms",
                "--mixed-chunk-target-ms changes nothing without mixed steps: add --enable-mixed-chunk"
                " (and no --disable-mixed-chunk or --prefill-decode-interval).",
            )
        return 0.0
    return (MIXED_TARGET_MS if asked is None and not work.on_cpu else asked or 0) / 1000


def _grammar(work: _Work) -> GrammarConfig:
    flags = work.flags
    pattern, most = flags.get("constrained_json_whitespace_pattern"), flags.get("constrained_json_max_whitespace_cnt")
    compact = flags.get("constrained_json_disable_any_whitespace")
    given = [
        f"--constrained-json-{name}"
        for name, value in (("whitespace-pattern", pattern), ("disable-any-whitespace", compact or None),
                            ("max-whitespace-cnt", most))
        if value is not None
    ]  # fmt: skip
    if len(given) > 1:
        refuse(given[1], f"{given[0]} and {given[1]} exclude each other: both say what space JSON has. Give one.")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            refuse(given[0], f"{given[0]} {pattern}: not a regular expression ({error}).")
    backend = grammar_backend(flags.get("grammar_backend"), work.device.packages)
    if not given:
        most = MAX_WHITESPACE
    return GrammarConfig(
        backend=cast(Any, backend), whitespace_pattern=pattern, any_whitespace=not compact, max_whitespace=most
    )


def _check_pairs(work: _Work, priority: bool) -> None:
    """Scheduling flags that only mean something, or only work, beside others."""
    flags = work.flags
    ranks = priority or "priority" in {flags.get("radix_eviction_policy"), flags.get("retraction_policy")}
    for dest in ("default_priority_value", "schedule_low_priority_values_first"):
        if not ranks and flags.get(dest):
            name = f"--{dest.replace('_', '-')}"
            refuse(name, f"{name} changes nothing without priorities: add --enable-priority-scheduling.")
    for dest in ("disable_priority_preemption", "priority_scheduling_preemption_threshold"):
        if not priority and flags.given(dest) and flags.get(dest) is not False:
            name = f"--{dest.replace('_', '-')}"
            refuse(name, f"{name} changes nothing without priorities: add --enable-priority-scheduling.")
    if flags.get("enable_mixed_chunk") and flags.get("disable_mixed_chunk"):
        refuse("--disable-mixed-chunk", "--enable-mixed-chunk and --disable-mixed-chunk exclude each other. Give one.")
    if flags.get("enable_mixed_chunk") and flags.get("prefill_decode_interval"):
        refuse(
            "--prefill-decode-interval",
            "--prefill-decode-interval with --enable-mixed-chunk: mixed steps decode beside every prefill, so there is "
            "no interval. Give one of them.",
        )
    if flags.get("prefill_decode_interval_min_bs") and not flags.get("prefill_decode_interval"):
        refuse(
            "--prefill-decode-interval-min-bs",
            "--prefill-decode-interval-min-bs changes nothing without --prefill-decode-interval: give both.",
        )


def _hicache(work: _Work, memory: _Memory, cached: bool) -> HiCacheConfig | None:
    """The tiers below the device; on a CPU the pool itself lies in host memory, so they share what is free."""
    taken = memory.weights + memory.tokens * memory.kv_bytes if work.on_cpu else 0
    room = HostRoom(work.device.host_free_bytes - taken, memory.kv_bytes, memory.tokens)
    found, notes = hicache(
        work.flags,
        room,
        cached=cached,
        generates=work.model.is_generation,
        folder=work.env.cache_dir / "hicache",
        packages=work.device.packages,
    )
    work.notes += notes
    return found


def _pin_budget(work: _Work, memory: _Memory, cached: bool) -> int:
    asked = work.flags.get("cache_pin_budget")
    if not cached:
        if asked:
            refuse("--cache-pin-budget", "--cache-pin-budget needs the prefix cache: leave --disable-radix-cache out.")
        return 0
    if asked is None:
        return memory.tokens // 4
    if asked > memory.tokens:
        refuse("--cache-pin-budget", f"--cache-pin-budget {asked}: the KV pool holds {memory.tokens} tokens.")
    return int(asked)


# --- front -----------------------------------------------------------------------------------------------------------


def _key(flags: Flags, dest: str) -> str | None:
    """An API key that can stand in a header."""
    key = flags.get(dest)
    if key is None:
        return None
    name = f"--{dest.replace('_', '-')}"
    if not key:
        refuse(name, f"{name} is empty, which would let nobody in: give a key, or leave the flag out.")
    if not key.isascii() or not key.isprintable() or " " in key:
        refuse(name, f"{name} must be printable ASCII without spaces: it travels in an HTTP header.")
    return str(key)


def _object(flags: Flags, dest: str) -> dict[str, object]:
    value = flags.get(dest)
    if value is None:
        return {}
    if not isinstance(value, dict):
        name = f"--{dest.replace('_', '-')}"
        refuse(name, f"{name}: expected a JSON object, not {type(value).__name__}.")
    return value


def _server(work: _Work) -> ServerConfig:
    flags = work.flags
    key, admin = _key(flags, "api_key"), _key(flags, "admin_api_key")
    host = flags.get("host")
    if key is None and not is_loopback(host):
        open_to = "inference" if admin else "inference (admin routes answer on loopback only)"
        work.notes.append(f"No --api-key and --host {host}: {open_to} is open to everyone who reaches this address.")
    keep_alive = flags.get("timeout_keep_alive")
    if not flags.given("timeout_keep_alive") and work.env.timeout_keep_alive is not None:
        keep_alive = work.env.timeout_keep_alive
    root = flags.get("fastapi_root_path") or ""
    if root and not root.startswith("/"):
        refuse("--fastapi-root-path", f"--fastapi-root-path {root}: a path begins with a slash, like /{root}.")
    return ServerConfig(
        host=host,
        port=flags.get("port"),
        api_key=key,
        admin_api_key=admin,
        root_path=root.rstrip("/"),
        tokenizer_worker_num=flags.get("tokenizer_worker_num"),
        enable_cache_report=True,
        preferred_sampling_params=_object(flags, "preferred_sampling_params"),
        sampling_defaults=flags.get("sampling_defaults"),
        allow_auto_truncate=flags.get("allow_auto_truncate"),
        default_chat_template_kwargs=_object(flags, "default_chat_template_kwargs"),
        tool_call_parser=flags.get("tool_call_parser"),
        reasoning_parser=flags.get("reasoning_parser"),
        enable_response_store=flags.get("enable_response_store"),
        file_storage_path=flags.get("file_storage_path"),
        allowed_origins=_origins(flags),
        timeout_keep_alive=keep_alive,
        skip_server_warmup=flags.get("skip_server_warmup"),
        disable_ui=flags.get("disable_ui"),
        weight_version=flags.get("weight_version"),
    )


def _origins(flags: Flags) -> tuple[str, ...]:
    """Origins as browsers send them: a scheme and a host, no path; or ``*`` alone."""
    origins = tuple(flags.get("allowed_origins") or ())
    for origin in origins:
        scheme, _, host = origin.partition("://")
        if origin != "*" and (scheme not in {"http", "https"} or not host or "/" in host):
            refuse("--allowed-origins", f"--allowed-origins {origin}: write an origin like https://example.com, or *.")
    return origins


def _obs(work: _Work) -> ObsConfig:
    flags = work.flags
    level = flags.get("log_level")
    if not flags.given("log_level") and work.env.log_level:
        level = work.env.log_level
    assert level in LOG_LEVELS
    port = flags.get("metric_port")
    if port is not None and port == flags.get("port"):
        refuse("--metric-port", f"--metric-port {port} is the server's own port: --enable-metrics serves there.")
    return ObsConfig(
        log_level=level,
        log_level_http=flags.get("log_level_http"),
        log_requests=flags.get("log_requests"),
        log_requests_level=flags.get("log_requests_level"),
        log_requests_format=flags.get("log_requests_format"),
        enable_metrics=flags.get("enable_metrics") or port is not None,
        metric_port=port,
        decode_log_interval=flags.get("decode_log_interval"),
    )
