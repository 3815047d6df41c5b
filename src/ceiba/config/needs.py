"""Why a known flag is refused and what to do instead, by area. It owns the words of refusals; which flag belongs to
which area is a column of ``flags.tsv``. An area leaves this file on the day its feature works.
"""

from __future__ import annotations

from typing import Final

NEEDS: Final[dict[str, tuple[str, str]]] = {
    "api_options": ("this option of the API is not built", "ask for what you need in the request itself"),
    "apple": ("it needs an Apple GPU and the MLX backend, which is not built", "run on a CPU (--device cpu)"),
    "batch_overlap": (
        "overlapping two half batches needs expert parallelism over several GPUs",
        "the overlap of scheduling and computing is on already",
    ),
    "cache_options": ("this layout or tuning of the cache is not built", "the default cache works"),
    "collectives": (
        "collectives between GPUs belong to tensor parallelism, which is not built",
        "run on one GPU, or one server per GPU",
    ),
    "compile": ("compiling the model with torch is not built", "run without it: the kernels are compiled already"),
    "context_parallel": ("context parallelism needs several GPUs and is not built", "lower --context-length"),
    "continuous_decode": (
        "planning a step costs nothing here: it is hidden behind the step before it",
        "--prefill-decode-interval keeps prefills apart",
    ),
    "debugging": ("this debugging aid is not built", "use --log-level debug and --log-requests"),
    "delayer": (
        "delaying prefills serves to keep the ranks of data-parallel attention in step, which is not built",
        "--prefill-decode-interval keeps prefills apart",
    ),
    "diffusion_lm": ("diffusion language models are not built", "serve an autoregressive model"),
    "disaggregation": (
        "separating prefill from decode needs two servers and a KV transfer, which are not built",
        "run one server: it does both",
    ),
    "dp_attention": (
        "data-parallel attention (--attn-dp-size) needs several GPUs and is not built",
        "run on one GPU, or one server per GPU",
    ),
    "embedding": ("vectors from a generative model are not built", "serve an encoder (BERT, RoBERTa): it is detected"),
    "encoder": ("a separate encoder needs multimodal models, which are not built", "serve a text model"),
    "experts": (
        "experts on several GPUs and a choice of their kernels are not built",
        "leave it out: mixture-of-experts models run on one GPU",
    ),
    "external_cache": (
        "an external KV store in place of the prefix cache is not built",
        "--enable-hierarchical-cache with --hicache-storage-backend puts one below it",
    ),
    "graphs": (
        "this choice of CUDA graphs is not built",
        "--cuda-graph-backend-decode, -prefill and --cuda-graph-max-bs-decode, -prefill work",
    ),
    "grpc": ("gRPC is not built", "use HTTP"),
    "hidden_states": ("returning inner states is not built", "ask for logprobs"),
    "host_tuning": ("this tuning of the host process is not built", "--watchdog-timeout works"),
    "http": ("this option of the HTTP server is not built", "put a proxy in front: HTTP/1.1 works"),
    "kernels": ("this choice of kernels is not built", "--attention-backend works; the rest is chosen for you"),
    "loading": (
        "this way of loading weights is not built",
        "give a local directory or GGUF file and leave --load-format auto",
    ),
    "logging": ("this option of the log is not built", "redirect stderr, or set --log-level-http"),
    "logit_processor": ("custom logit processors would run code from requests and are not built", "use logit_bias"),
    "lora": ("LoRA adapters are not built", "merge the adapter into the weights"),
    "metrics": ("this option of the metrics is not built", "--enable-metrics serves /metrics with the default ones"),
    "mis": ("scoring several items in one sequence is not built", "send one request per item"),
    "multimodal": ("multimodal models are not built", "serve a text model"),
    "ngram": (
        "NGRAM guesses one chain of tokens from the request's text and the prefix cache, and keeps no trie or corpus",
        "--speculative-num-draft-tokens and --speculative-ngram-max-trie-depth work",
    ),
    "nodes": ("serving over several machines is not built", "run one server per machine behind a load balancer"),
    "numa": ("binding to NUMA nodes is not built", "start the server under numactl"),
    "offload": ("offloading weights is not built", "use a smaller or a quantized (GGUF) model"),
    "overrides": ("overriding the model's configuration is not built", "edit config.json in a copy of the model"),
    "parsers": ("this option of the parsers is not built", "--tool-call-parser and --reasoning-parser work"),
    "pdmux": ("sharing one GPU between prefill and decode streams is not built", "use --chunked-prefill-size"),
    "pipeline": ("pipeline parallelism needs several GPUs and is not built", "run on one GPU"),
    "quantization": ("this kind of quantization is not built", "serve a GGUF file, or plain weights"),
    "ray": ("starting through Ray is not built", "start `ceiba serve` on the machine itself"),
    "recurrent": ("recurrent (Mamba, linear-attention) models are not built", "serve a Llama or Qwen2 model"),
    "replicas": (
        "several replicas in one server are not built",
        "start one server per replica behind a load balancer",
    ),
    "responses": ("tools that the server runs itself are not built", "run tools on the client"),
    "rl": ("handing memory and weights over to a trainer is not built", "restart the server with the new weights"),
    "several_models": ("several models behind one port are not built", "start one server per model"),
    "sessions": (
        "sessions that stream input are not built",
        "POST /open_session works: each turn is a request of its own and its KV stays pinned",
    ),
    "skip_tokenizer": ("running without a tokenizer is not built", "send token ids as the prompt: that works"),
    "sliding_window": ("a pool of its own for sliding-window layers is not built", "leave it out"),
    "sparse": ("sparse and latent (MLA) attention are not built", "serve a Llama or Qwen2 model"),
    "speculative": (
        "speculative decoding with a draft model is not built",
        "--speculative-algorithm NGRAM needs none, or leave it out: answers are the same",
    ),
    "templates": (
        "this choice of template is not built",
        "--chat-template takes a file or a name among the model's own; templates from requests are never accepted",
    ),
    "tensor": (
        "tensor parallelism needs several GPUs and is not built",
        "run on one GPU, or one server per GPU",
    ),
    "tls": ("TLS is not built", "put a TLS proxy in front"),
    "tokenizer_backend": ("only the default tokenizer is built", "leave it out"),
    "tokenizer_processes": (
        "tokenizing in further processes or in batches is not built",
        "leave it out: long texts are tokenized in threads",
    ),
    "tracing": ("traces are not built", "--enable-metrics and --log-requests work"),
    "watermark": ("watermarks are not built", "leave it out"),
    "workers": (
        "servers do not take lists of workers",
        "several machines will be started with --nnodes, --node-rank and --dist-init-addr, which are not built yet",
    ),
}


_DRAFT_MODEL: Final = "it needs a draft model or trained draft heads, which are not built"

VALUES_NEED: Final[dict[str, dict[str, str]]] = {
    "--speculative-algorithm": dict.fromkeys(
        ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH", "DSPARK", "UNO"), _DRAFT_MODEL
    ),
    "--hicache-storage-backend": {
        "hf3fs": "it needs a 3FS cluster and its client (hf3fs_fuse), for which there is no package to build against",
        "aibrix": "it needs an AIBrix KV cluster and its package (aibrix-kvcache), which brings a CUDA build of torch",
        "npu_memcache": "it needs Ascend NPUs and MemCache",
        "eic": "it needs the EIC service and its closed client",
        "simm": "it needs a SiMM cluster and its client",
        "mori": "it needs AMD GPUs and MORI",
        "tensorcast": "it needs a TensorCast service and its client",
        "seaweedfs": "mount the file system and use the file backend on it",
        "shm": "the host tier is in memory already; the file backend on /dev/shm survives a restart",
        "sim": "it stands for a storage in simulations",
    },
    "--hicache-host-memory-mode": {"buffer_only": "host memory as a mere buffer of the storage is not built"},
    "--hicache-io-backend": {"kernel_ascend": "it needs an Ascend NPU"},
    "--hicache-mem-layout": {
        "page_head": "it serves to share pages between servers of different tensor parallelism, which is not built",
        "page_first_kv_split": "it needs an Ascend NPU",
    },
}
"""Flag -> choice that does not work -> what it would take, where that says more than "not available yet"."""


def refusal(flag: str, value: object, area: str) -> str:
    """The one line that refuses ``flag``."""
    why, instead = NEEDS[area]
    shown = flag if value is True or value is None else f"{flag} {value}"
    return f"{shown}: not available yet: {why}. Instead: {instead}."
