"""The resolved configuration, one frozen record per component. A component sees its own record and no flags.

Every value here is final: ``resolve()`` has replaced each "auto" with a decision. Field docs become the flag reference.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base: immutable, serializable to child processes with msgpack."""


class ModelConfig(Record, frozen=True, kw_only=True):
    path: str
    """Directory, GGUF file, or catalogue name, as resolved to a local path."""
    name: str
    """What /v1/models shows."""
    tokenizer_path: str
    load_format: Literal["auto", "safetensors", "gguf", "dummy", "pt"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    quantization: str | None = None
    context_len: int = 8192
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    override_args: dict[str, object] = {}
    loader_extra: dict[str, object] = {}
    skip_tokenizer: bool = False
    task: Literal["generate", "embed", "classify", "rerank"] = "generate"
    """What the model gives: text, a vector, logits of classes, or one logit for a pair of texts."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in order; empty where the checkpoint has none."""


class HiCacheConfig(Record, frozen=True, kw_only=True):
    """The tiers below the device's memory."""

    host_tokens: int
    """KV slots in host memory."""
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    io_backend: Literal["kernel", "direct"] = "kernel"
    mem_layout: Literal["layer_first", "page_first", "page_first_direct"] = "page_first"
    storage_backend: str | None = None
    storage_options: dict[str, object] = {}
    storage_folder: str = ""
    """Where the files of a storage go if its options do not say."""
    storage_page: int = 64
    """Tokens of one storage page, a multiple of the page size."""
    prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    prefetch_threshold: int = 256
    """Tokens that the storage must hold beyond host and device before they are read."""
    prefetch_timeout_base: float = 1.0
    """Seconds a request waits for the storage under ``timeout``, however little it asks for."""
    prefetch_timeout_per_ki_token: float = 0.25
    """And per 1,024 tokens on top."""
    prefetch_retry_interval: int = 8
    """Scheduler rounds between two attempts to find host memory for what was read."""
    prefetch_retry_attempts: int = 8


class SchedulerConfig(Record, frozen=True, kw_only=True):
    policy: str = "fcfs"
    max_running_requests: int = 64
    max_queued_requests: int | None = None
    max_total_tokens: int = 65536
    """KV slots of the pool."""
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = 2048
    """-1: prefill a prompt whole."""
    page_size: int = 1
    disable_radix_cache: bool = False
    radix_eviction_policy: str = "lru"
    eviction_options: dict[str, int] = {}
    cache_pin_budget: int = 0
    """KV slots that pins may hold together; 0: nothing can be pinned."""
    hicache: HiCacheConfig | None = None
    """None: cached KV lies on the device only."""
    overlap: bool = True
    consecutive_prefill_overlap: bool = True
    """Off: the result of a prefill is applied before another prefill is planned."""
    late_planning: bool = True
    """Whether an overlapped step is planned just before the device needs it; off: as soon as the one before begins."""
    enable_mixed_chunk: bool = False
    mixed_chunk_target: float = 0.0
    """Seconds that a mixed step should take, by which its prefill is cut; 0: chunks are always whole."""
    shared_prefix: bool = True
    """Whether plans name the decode rows that begin with the same KV slots."""
    conservativeness: float = 1.0
    prefill_max_requests: int | None = None
    stream_interval: int = 1
    decode_log_interval: int = 40
    retraction_policy: str = "length"
    queue_timeout: float | None = None
    enable_priority_scheduling: bool = False
    low_priority_first: bool = False
    default_priority: int = 0
    preemption_threshold: int | None = 10
    """How much higher a waiting request's priority must be than a running one's for that to give way; None: never."""
    fair_share: Literal["off", "routing-key", "api-key"] = "off"
    """What tells tenants apart."""
    fair_share_weights: dict[str, float] = {}
    """Tenant, as ``Generate.tenant`` names it -> share; 1 for those that are not named."""
    prefill_decode_interval: int = 0
    """Decode steps between two prefill steps, while enough requests decode."""
    prefill_decode_interval_min_bs: int = 0
    speculative_algorithm: Literal["NGRAM"] | None = None
    num_draft_tokens: int = 0
    """Tokens of a request that a step of speculative decoding verifies, its last known one among them."""
    ngram_longest: int = 18
    """Tokens by which NGRAM compares places of a text."""
    jump_forward: bool = True
    """Whether tokens that a grammar forces are computed together instead of one a step."""
    random_seed: int = 0
    in_batch_check_threshold: int = 32
    in_batch_deprioritize_threshold: int = 32


class RunnerConfig(Record, frozen=True, kw_only=True):
    device: str = "cpu"
    gpu_id: int = 0
    attention_backend: str = "cpu"
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    sampling_backend: str = "pytorch"
    kv_cache_dtype: str = "auto"
    mem_fraction_static: float = 0.85
    threads: int = 1
    """Compute threads of the CPU backend."""
    cpu_kernels: bool = True
    """Whether the compiled CPU kernels may be used (off: the pure torch reference)."""
    packed_cache: str = ""
    """Folder where weights are kept as the CPU kernels packed them; empty: they are packed at every start."""
    int8_activations: bool = False
    """CPU kernels: round activations to int8 where they meet quantized weights."""
    cuda_graph_backend_decode: str = "full"
    cuda_graph_backend_prefill: str = "breakable"
    cuda_graph_max_bs_decode: int = 0
    cuda_graph_max_bs_prefill: int = 0
    mixed_steps: bool = False
    """Whether steps will prefill and decode at once, so that graphs of them are worth capturing."""
    deterministic: bool = False


class ServerConfig(Record, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    admin_api_key: str | None = None
    root_path: str = ""
    tokenizer_worker_num: int = 1
    enable_cache_report: bool = True
    preferred_sampling_params: dict[str, object] = {}
    sampling_defaults: Literal["openai", "model"] = "model"
    allow_auto_truncate: bool = False
    default_chat_template_kwargs: dict[str, object] = {}
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_response_store: bool = False
    file_storage_path: str | None = None
    """Folder of /v1/files and /v1/batches; None: they are off."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may call the API (CORS)."""
    timeout_keep_alive: int = 5
    skip_server_warmup: bool = False
    disable_ui: bool = False
    weight_version: str = "default"


class ObsConfig(Record, frozen=True, kw_only=True):
    log_level: str = "info"
    log_level_http: str | None = None
    log_requests: bool = False
    log_requests_level: int = 2
    log_requests_format: Literal["text", "json"] = "text"
    enable_metrics: bool = False
    metric_port: int | None = None
    decode_log_interval: int = 40


class GrammarConfig(Record, frozen=True, kw_only=True):
    backend: Literal["xgrammar", "llguidance", "outlines", "none"] = "llguidance"
    whitespace_pattern: str | None = None
    """A regular expression for the space between the parts of JSON; None: any amount, of any kind."""
    any_whitespace: bool = True
    """Whether space may stand between the parts of JSON at all."""
    max_whitespace: int | None = None
    """Characters of space between two parts of JSON, at most; None: as many as the model likes."""


class LaunchConfig(Record, frozen=True, kw_only=True):
    detokenizer: Literal["process", "thread"] = "process"
    watchdog_timeout: float = 300.0
    restart_on_failure: bool = False


class Config(Record, frozen=True, kw_only=True):
    model: ModelConfig
    scheduler: SchedulerConfig
    runner: RunnerConfig
    server: ServerConfig = ServerConfig()
    obs: ObsConfig = ObsConfig()
    launch: LaunchConfig = LaunchConfig()
    grammar: GrammarConfig = GrammarConfig()
    notes: tuple[str, ...] = ()
    """Lines for the start-up log: decisions taken and hints that changed nothing."""


class ModelFacts(Record, frozen=True, kw_only=True):
    """What a checkpoint's header says, read without torch (``ceiba.checkpoint``)."""

    architecture: str
    """``LlamaForCausalLM``, ``Qwen2ForCausalLM``, …: the name in config.json, also for GGUF."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_len: int
    weight_bytes: int
    """As stored in the file."""
    num_params: int
    dtype: str = "bfloat16"
    """What ``--dtype auto`` means for this checkpoint."""
    quantized: str | None = None
    """``gguf``, ``fp8``, …: how the stored weights are packed, None for plain ones."""
    is_generation: bool = True
    num_labels: int = 2
    """Classes of a classifier; one: it judges pairs of texts."""
    labels: tuple[str, ...] = ()
    """Their names in order, where the config has them."""

    @property
    def task(self) -> Literal["generate", "embed", "classify", "rerank"]:
        """What the model gives."""
        if self.is_generation:
            return "generate"
        if self.architecture.endswith("ForSequenceClassification"):
            return "rerank" if self.num_labels == 1 else "classify"
        return "embed"

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


class DeviceFacts(Record, frozen=True, kw_only=True):
    """What the machine has, measured once in ``launch``."""

    kind: Literal["cpu", "cuda", "hip", "mps", "xpu"] = "cpu"
    name: str = ""
    count: int = 0
    memory_bytes: int = 0
    """Of one accelerator."""
    free_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    host_memory_bytes: int = 0
    host_free_bytes: int = 0
    cores: int = 1
    isa: tuple[str, ...] = ()
    """CPU instruction sets that count: avx2, avx512, vnni, bf16, amx."""
    packages: tuple[str, ...] = ()
    """Optional packages that are installed (flashinfer, xgrammar, …)."""
