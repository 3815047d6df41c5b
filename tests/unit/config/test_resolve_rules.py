"""Rules between flags, and choices that explain themselves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from machine_facts import QWEN3_8B, SMOLLM2, cpu, gpu

from ceiba.config.choose import attention_backend, overlap_allowed, requested_device, schedule_policy
from ceiba.config.env import Env
from ceiba.config.flags import Flags, make_flags
from ceiba.config.records import Config, DeviceFacts, ModelFacts
from ceiba.config.resolve import resolve
from ceiba.core.errors import ConfigError


def build(
    line: dict[str, Any], *, model: ModelFacts = SMOLLM2, device: DeviceFacts | None = None, env: Env | None = None
) -> Config:
    flags = make_flags(list(line.items()))
    return resolve(flags, model, device or cpu(), env or Env(), path="/models/m", name="m")


@pytest.mark.parametrize(
    ("device", "asked", "expected", "reason"),
    [
        (cpu(), None, "cpu", "compiled kernels"),
        (cpu(), "intel_amx", "cpu", "intel_amx is its other name"),
        (cpu(), "torch_native", "torch_native", "asked for"),
        (gpu(79.6, (9, 0)), None, "triton", "fa3"),
        (gpu(179, (10, 0)), None, "triton", "trtllm_mha"),
        (gpu(79.2, (8, 0)), None, "triton", "flashinfer"),
        (gpu(79.2, (8, 0)), "torch_native", "torch_native", "asked for"),
        (DeviceFacts(kind="hip"), None, "triton", "aiter"),
        (DeviceFacts(kind="mps"), None, "torch_native", "mps"),
    ],
)
def test_attention_choice(device: DeviceFacts, asked: str | None, expected: str, reason: str) -> None:
    name, why = attention_backend(asked, device, compiled=True)
    assert name == expected
    assert reason in why


def test_attention_without_compiled_kernels() -> None:
    name, reason = attention_backend(None, cpu(), compiled=False)
    assert name == "cpu"
    assert "plain torch" in reason


@pytest.mark.parametrize(("asked", "device"), [("triton", cpu()), ("cpu", gpu(79.6)), ("fa3", gpu(79.6))])
def test_an_attention_refusal_lists_every_candidate(asked: str, device: DeviceFacts) -> None:
    with pytest.raises(ConfigError) as caught:
        attention_backend(asked, device, compiled=True)
    assert caught.value.message.startswith(f"Attention backend {asked}: ")
    for name in ("cpu: ", "torch_native: ", "triton: "):
        assert name in caught.value.message


def test_the_attention_choice_is_in_the_notes() -> None:
    assert any(note.startswith("attention backend cpu: ") for note in build({}).notes)


@pytest.mark.parametrize(
    ("policy", "cache", "priority", "expected"),
    [
        ("fcfs", True, False, "fcfs"),
        ("fcfs", False, True, "fcfs"),
        ("lof", True, True, "lof"),
        ("lpm", True, False, "lpm"),
        ("lpm", False, False, "fcfs"),
        ("dfs-weight", False, False, "fcfs"),
        ("hrrn", False, False, "fcfs"),
        ("random", False, False, "random"),
        ("priority", True, False, "fcfs"),
        ("lpm", True, True, None),
        ("random", True, True, None),
        ("hrrn", True, True, None),
        ("shortest-prefill-first", True, False, "shortest-prefill-first"),
        ("shortest-prefill-first", False, False, None),
    ],
)
def test_policy_cache_priority(policy: str, cache: bool, priority: bool, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match=policy):
            schedule_policy(policy, cache=cache, priority=priority)
        return
    found, line = schedule_policy(policy, cache=cache, priority=priority)
    assert found == expected
    assert (line is None) == (found == policy)


def test_lpm_without_cache_says_so_in_the_notes() -> None:
    found = build({"--schedule-policy": "lpm", "--disable-radix-cache": True})
    assert found.scheduler.policy == "fcfs"
    assert found.scheduler.disable_radix_cache
    assert any("lpm looks into the prefix cache" in note for note in found.notes)


@pytest.mark.parametrize(
    ("flags", "chunk", "prefill"),
    [
        ({}, 2048, 16384),
        ({"--chunked-prefill-size": -1}, -1, 16384),
        ({"--chunked-prefill-size": 17}, 17, 16384),
        ({"--max-prefill-tokens": 100}, 2048, 8192),
        ({"--max-num-batched-tokens": 1000}, 1000, 1000),
        ({"--max-num-batched-tokens": 4000}, 2048, 4000),
        ({"--max-num-batched-tokens": 99999}, 2048, 16384),
        ({"--max-num-batched-tokens": 1000, "--chunked-prefill-size": -1}, 1000, 1000),
        ({"--max-num-batched-tokens": 1000, "--page-size": 64}, 960, 1000),
    ],
)
def test_chunk_and_prefill_budgets(flags: dict[str, Any], chunk: int, prefill: int) -> None:
    scheduler = build(flags).scheduler
    assert (scheduler.chunked_prefill_size, scheduler.max_prefill_tokens) == (chunk, prefill)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"--chunked-prefill-size": 0}, "makes no progress"),
        ({"--chunked-prefill-size": 100, "--page-size": 64}, "no multiple of --page-size 64"),
        ({"--max-num-batched-tokens": 8, "--page-size": 64}, "below --page-size"),
        ({"--max-total-tokens": 8, "--page-size": 64}, "below --page-size"),
        ({"--context-length": 8193}, "made for 8192 tokens"),
        ({"--dtype": "float16"}, "float32 or bfloat16"),
        ({"--attention-backend": "triton"}, "Candidates here"),
        ({"--decode-attention-backend": "triton"}, "Candidates here"),
        ({"--api-key": ""}, "empty"),
        ({"--api-key": "a b"}, "without spaces"),
        ({"--admin-api-key": "schlüssel"}, "printable ASCII"),
        ({"--metric-port": 30000}, "server's own port"),
        ({"--fastapi-root-path": "api"}, "/api"),
        ({"--preferred-sampling-params": [1]}, "expected a JSON object"),
        ({"--default-chat-template-kwargs": "x"}, "expected a JSON object"),
        ({"--mem-fraction-static": 0.5, "--gpu-memory-utilization": 0.6}, "give one"),
    ],
)
def test_refusals(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(flags)
    assert message in caught.value.message


def test_a_quantization_that_is_not_the_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="weights are plain"):
        build({"--quantization": "gguf"}, model=QWEN3_8B, device=gpu(79.6))
    with pytest.raises(ConfigError, match="packed as awq"):
        build({}, model=msgspec.structs.replace(QWEN3_8B, quantized="awq"), device=gpu(79.6))
    with pytest.raises(ConfigError, match=r"not available yet\. Instead: BertModel"):
        build({}, model=msgspec.structs.replace(SMOLLM2, is_generation=False))


def test_eight_bit_floats_are_for_cuda() -> None:
    fp8, line = msgspec.structs.replace(QWEN3_8B, quantized="fp8"), {"--quantization": "fp8"}
    plain = build({}, model=QWEN3_8B, device=gpu(79.6))
    for flags, model in ((line, QWEN3_8B), ({}, fp8), (line, fp8)):
        found = build(flags, model=model, device=gpu(79.6))
        assert found.model.quantization == "fp8"
        assert found.model.dtype == "bfloat16"
        # Half the bytes of all but embedding and head are free for the cache.
        saved = QWEN3_8B.num_params - 2 * QWEN3_8B.vocab_size * QWEN3_8B.hidden_size
        gained = found.scheduler.max_total_tokens - plain.scheduler.max_total_tokens
        assert gained * QWEN3_8B.kv_bytes_per_token(2) == pytest.approx(saved, rel=0.05)
    for flags, model, device, message in (
        (line, QWEN3_8B, gpu(79.6, (8, 0)), "needs compute capability 8.9.* has 8.0"),
        (line, QWEN3_8B, cpu(64), "built for CUDA, not for cpu"),
        ({}, fp8, cpu(64), "The checkpoint's weights are FP8.*built for CUDA"),
        (line, SMOLLM2, gpu(79.6), "quantized already .gguf."),
        ({"--quantization": "gguf"}, fp8, gpu(79.6), "the weights are fp8"),
        ({"--kv-cache-dtype": "fp8_e5m2"}, QWEN3_8B, gpu(79.6, (8, 0)), "needs compute capability 8.9"),
        ({"--kv-cache-dtype": "int8"}, QWEN3_8B, gpu(79.6), "int8: only on a CPU"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(flags, model=model, device=device)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_an_eight_bit_cache_holds_twice_as_much_and_says_what_it_costs(kind: str) -> None:
    plain = build({}, model=QWEN3_8B, device=gpu(79.6))
    found = build({"--kv-cache-dtype": kind}, model=QWEN3_8B, device=gpu(79.6))
    assert found.runner.kv_cache_dtype == kind
    assert found.scheduler.max_total_tokens > 1.8 * plain.scheduler.max_total_tokens
    assert any(f"KV cache {kind} at scale 1.0" in note for note in found.notes)


def test_gpu_memory_utilization_says_how_the_meanings_differ() -> None:
    found = build({"--gpu-memory-utilization": 0.7}, model=QWEN3_8B, device=gpu(79.6))
    assert found.runner.mem_fraction_static == 0.7
    assert any("--gpu-memory-utilization" in note and "weights and KV pool only" in note for note in found.notes)


@pytest.mark.parametrize(
    ("model_dtype", "quantized", "device", "expected"),
    [
        ("bfloat16", None, cpu(), "bfloat16"),
        ("bfloat16", "gguf", cpu(), "bfloat16"),
        ("bfloat16", None, cpu(compiled=False), "float32"),
        ("bfloat16", None, cpu(compiled=False, isa=("avx2", "avx512", "bf16", "amx")), "bfloat16"),
        ("float16", None, cpu(compiled=False, isa=("bf16",)), "float32"),
        ("bfloat16", "gguf", cpu(compiled=False, isa=("bf16",)), "float32"),
        ("bfloat16", None, gpu(79.6), "bfloat16"),
        ("float16", None, gpu(79.6), "float16"),
        ("bfloat16", None, gpu(14.7, (7, 5)), "float16"),
        ("float32", None, gpu(79.6), "bfloat16"),
    ],
)
def test_dtype_auto(model_dtype: str, quantized: str | None, device: DeviceFacts, expected: str) -> None:
    model = msgspec.structs.replace(SMOLLM2, dtype=model_dtype, quantized=quantized)
    found = build({}, model=model, device=device)
    assert found.model.dtype == expected
    assert found.runner.kv_cache_dtype == expected


def test_kv_cache_dtype_is_final() -> None:
    line = {"--dtype": "float32"}
    small, large = build({**line, "--kv-cache-dtype": "bfloat16"}, device=cpu(4)), build(line, device=cpu(4))
    assert small.scheduler.max_total_tokens == pytest.approx(2 * large.scheduler.max_total_tokens, abs=1)


def test_overlap() -> None:
    assert build({}).scheduler.overlap
    assert not build({"--disable-overlap-schedule": True}).scheduler.overlap
    assert overlap_allowed(DeviceFacts(kind="mps"), False)[0] is False
    found = build({}, env=Env(disable_consecutive_prefill_overlap=True))
    assert found.scheduler.overlap
    assert not found.scheduler.consecutive_prefill_overlap
    assert build({}).scheduler.consecutive_prefill_overlap


def test_what_changes_nothing_on_this_device_is_refused_or_said() -> None:
    with pytest.raises(ConfigError, match="runs on the CPU"):
        build({"--base-gpu-id": 1})
    found = build({"--threads": 4, "--disable-cpu-kernels": True}, model=QWEN3_8B, device=gpu(79.6))
    for flag in ("--threads", "--disable-cpu-kernels"):
        assert any(note.startswith(f"{flag} changes nothing") for note in found.notes)
    assert any("raised to 8192" in note for note in build({"--max-prefill-tokens": 100}).notes)


def test_environment_gives_way_to_flags() -> None:
    env = Env(log_level="debug", timeout_keep_alive=77, in_batch_check_threshold=0)
    found = build({}, env=env)
    assert (found.obs.log_level, found.server.timeout_keep_alive) == ("debug", 77)
    assert found.scheduler.in_batch_check_threshold == 0
    assert found.scheduler.in_batch_deprioritize_threshold == 32
    found = build({"--log-level": "error", "--timeout-keep-alive": 5}, env=env)
    assert (found.obs.log_level, found.server.timeout_keep_alive) == ("error", 5)


def test_lines_of_the_environment_reach_the_log() -> None:
    found = build({}, env=Env(notes=("SGLANG_USE_MLX has no effect",), warnings=("CEIBA_X is unknown",)))
    assert {"SGLANG_USE_MLX has no effect", "CEIBA_X is unknown"} <= set(found.notes)


@pytest.mark.parametrize(
    ("host", "keys", "lines"),
    [
        ("127.0.0.1", {}, 0),
        ("localhost", {}, 0),
        ("0.0.0.0", {}, 1),
        ("0.0.0.0", {"--api-key": "k"}, 0),
        ("0.0.0.0", {"--admin-api-key": "k"}, 1),
    ],
)
def test_an_open_address_without_a_key_is_said(host: str, keys: dict[str, str], lines: int) -> None:
    found = build({"--host": host, **keys})
    assert sum("open to everyone" in note for note in found.notes) == lines


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (None, 0)),
        ({"--device": "cpu"}, ("cpu", 0)),
        ({"--device": "cuda"}, ("cuda", 0)),
        ({"--device": "cuda:3"}, ("cuda", 3)),
        ({"--base-gpu-id": 2}, (None, 2)),
        ({"--device": "cuda:2", "--base-gpu-id": 2}, ("cuda", 2)),
    ],
)
def test_device_flag(flags: dict[str, Any], expected: tuple[str | None, int]) -> None:
    assert requested_device(make_flags(list(flags.items()))) == expected


@pytest.mark.parametrize("flags", [{"--device": "tpu"}, {"--device": "cpu:1"}, {"--device": "mps"},
                                   {"--device": "cuda:1", "--base-gpu-id": 2}])  # fmt: skip
def test_device_refusals(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--device"):
        requested_device(make_flags(list(flags.items())))


def test_every_value_reaches_its_record() -> None:
    found = build(
        {
            "--port": 1234, "--served-model-name": "shown", "--stream-interval": 3, "--max-queued-requests": 7,
            "--max-running-requests": 5, "--prefill-max-requests": 2, "--schedule-conservativeness": 0.5,
            "--random-seed": 11, "--threads": 3, "--decode-log-interval": 9, "--log-requests": True,
            "--log-requests-level": 1, "--log-requests-format": "json", "--metric-port": 9090,
            "--weight-version": "v2", "--allow-auto-truncate": True, "--sampling-defaults": "openai",
            "--preferred-sampling-params": {"top_k": 3}, "--default-chat-template-kwargs": {"a": 1},
            "--skip-server-warmup": True, "--enable-mixed-chunk": True, "--watchdog-timeout": 60.0,
            "--restart-on-failure": True, "--detokenizer": "thread", "--tokenizer-path": "/t",
            "--fastapi-root-path": "/v/", "--queue-timeout": 2.5,
        }
    )  # fmt: skip
    scheduler, server, obs = found.scheduler, found.server, found.obs
    assert (server.port, found.model.name, scheduler.stream_interval) == (1234, "shown", 3)
    assert (scheduler.max_queued_requests, scheduler.max_running_requests, scheduler.prefill_max_requests) == (7, 5, 2)
    assert (scheduler.conservativeness, scheduler.random_seed, found.runner.threads) == (0.5, 11, 3)
    assert scheduler.decode_log_interval == obs.decode_log_interval == 9
    assert (obs.log_requests, obs.log_requests_level, obs.log_requests_format) == (True, 1, "json")
    assert (obs.metric_port, obs.enable_metrics) == (9090, True)
    assert (server.weight_version, server.allow_auto_truncate, server.sampling_defaults) == ("v2", True, "openai")
    assert (server.preferred_sampling_params, server.default_chat_template_kwargs) == ({"top_k": 3}, {"a": 1})
    assert (server.skip_server_warmup, server.root_path) == (True, "/v")
    assert scheduler.enable_mixed_chunk
    assert (found.launch.watchdog_timeout, found.launch.restart_on_failure) == (60.0, True)
    assert (found.launch.detokenizer, found.model.tokenizer_path, scheduler.queue_timeout) == ("thread", "/t", 2.5)


def test_names_and_paths() -> None:
    found = build({})
    assert (found.model.path, found.model.name, found.model.tokenizer_path) == ("/models/m", "m", "/models/m")
    found = resolve(Flags({"model_path": "/x"}), SMOLLM2, cpu(), Env())
    assert (found.model.path, found.model.name) == ("/x", "/x")


def test_a_configuration_travels_to_child_processes() -> None:
    found = build({"--api-key": "k"})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Config) == found


def test_deterministic_inference_runs_where_sums_have_a_fixed_order_and_is_refused_elsewhere() -> None:
    line = {"--enable-deterministic-inference": True}
    config = build(line)
    assert config.runner.deterministic
    assert config.scheduler.shared_prefix  # groups end where spans of positions end
    for device, more, reason in (
        (gpu(79.6, (9, 0)), {}, "cuBLAS"),
        (cpu(), {"--disable-cpu-kernels": True}, "compiled CPU kernels"),
        (cpu(), {"--attention-backend": "torch_native"}, "only cpu"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            build({**line, **more}, device=device)
        assert caught.value.message.startswith("--enable-deterministic-inference")


PLAIN_SMOLLM2 = msgspec.structs.replace(SMOLLM2, quantized=None, weight_bytes=269_030_016)


def test_online_quantization_leaves_more_room_for_the_cache() -> None:
    tokens = []
    for flags in ({}, {"--quantization": "int8"}, {"--quantization": "int4"}):
        found = build(flags, model=PLAIN_SMOLLM2)
        assert found.model.quantization == flags.get("--quantization")
        tokens.append(found.scheduler.max_total_tokens)
    assert tokens[0] < tokens[1] < tokens[2]


def test_online_quantization_is_refused_where_it_cannot_apply() -> None:
    for options, why in (
        ({"model": SMOLLM2}, "quantized already"),
        ({"model": PLAIN_SMOLLM2, "device": gpu(79.6)}, "compiled kernels of a CPU"),
        ({"model": PLAIN_SMOLLM2, "flags": {"--disable-cpu-kernels": True}}, "compiled kernels of a CPU"),
    ):
        with pytest.raises(ConfigError, match=why):
            build({"--quantization": "int4", **options.pop("flags", {})}, **options)


def test_speculation_is_resolved() -> None:
    found = build({"--speculative-algorithm": "NGRAM"}).scheduler
    assert (found.speculative_algorithm, found.num_draft_tokens, found.ngram_longest) == ("NGRAM", 16, 18)
    line = {"--speculative-num-draft-tokens": 5, "--speculative-ngram-max-trie-depth": 7}
    found = build({"--speculative-algorithm": "NGRAM", **line}).scheduler
    assert (found.num_draft_tokens, found.ngram_longest) == (5, 7)
    assert build({}).scheduler.speculative_algorithm is None


@pytest.mark.parametrize(
    ("line", "device", "named"),
    [
        ({"--speculative-num-draft-tokens": 5}, cpu(), "without --speculative-algorithm"),
        ({"--speculative-ngram-max-trie-depth": 5}, cpu(), "without --speculative-algorithm"),
        ({"--speculative-algorithm": "NGRAM"}, gpu(80), "on cuda a step samples each request once"),
        ({"--speculative-algorithm": "EAGLE"}, cpu(), "needs a draft model"),
        ({"--speculative-algorithm": "NGRAMS"}, cpu(), "Did you mean NGRAM"),
        ({"--speculative-algorithm": "NGRAM", "--speculative-num-draft-tokens": 1}, cpu(), "from 2 to 256"),
        ({"--speculative-algorithm": "NGRAM", "--speculative-ngram-match-type": "PROB"}, cpu(), "one chain of tokens"),
    ],
)
def test_speculation_that_cannot_be_is_refused(line: dict[str, Any], device: DeviceFacts, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(line, device=device)
