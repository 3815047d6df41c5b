"""Choices that need few facts and explain themselves: the device, the attention backend, the schedule policy, overlap.
Pure functions; each returns its reason or raises a ConfigError that lists what would work.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NoReturn

from ceiba.config.available import (
    ATTENTION_ALIASES,
    ATTENTION_BACKENDS,
    CACHE_AWARE_POLICIES,
    EVICTION_OPTIONS,
    PRIORITY_POLICIES,
)
from ceiba.config.flags import Flags
from ceiba.config.records import DeviceFacts
from ceiba.core.errors import ConfigError
from ceiba.core.tenants import key_digest

CPU_KERNELS: Final = "ceiba-cpu-kernels"
"""Stands in ``DeviceFacts.packages`` where the compiled CPU kernels are installed."""


DRAFT_TOKENS: Final = 16
"""Verified in a step where nothing is said."""


def refuse(param: str, message: str) -> NoReturn:
    raise ConfigError(message, param=param)


def requested_device(flags: Flags) -> tuple[str | None, int]:
    """(device kind or None for automatic, GPU index) that the flags ask for."""
    text = (flags.get("device") or "").lower()
    kind, _, index = text.partition(":")
    if kind == "auto":
        kind = ""
    if kind not in {"", "cpu", "cuda", "hip", "mps", "xpu"} or (index and not (kind == "cuda" and index.isdigit())):
        refuse("--device", f"--device {text}: no such device. Instead: cpu, cuda or cuda:N.")
    if kind in {"hip", "mps", "xpu"}:
        refuse("--device", f"--device {text}: not available yet. Instead: cpu or cuda.")
    gpu = int(flags.get("base_gpu_id"))
    if index:
        if flags.given("base_gpu_id") and gpu != int(index):
            refuse("--device", f"--device {text} and --base-gpu-id {gpu} name different GPUs: give one of them.")
        gpu = int(index)
    return kind or None, gpu


def speculative(flags: Flags, device: DeviceFacts, generates: bool) -> dict[str, Any]:
    """Fields of SchedulerConfig for speculative decoding. Raises ConfigError where the device cannot verify drafts."""
    name = flags.get("speculative_algorithm")
    given = [dest for dest in ("num_draft_tokens", "ngram_max_trie_depth") if flags.given(f"speculative_{dest}")]
    if name is None:
        for dest in given:
            flag = f"--speculative-{dest.replace('_', '-')}"
            refuse(flag, f"{flag} changes nothing without --speculative-algorithm: give both, or neither.")
        return {}
    flag = f"--speculative-algorithm {name}"
    if device.kind != "cpu":
        refuse(
            "--speculative-algorithm",
            f"{flag}: on {device.kind} a step samples each request once, behind its last token; verifying drafts is "
            "built for the CPU. Instead: --device cpu, or leave it out (answers are the same).",
        )
    if not generates:
        refuse("--speculative-algorithm", f"{flag}: this model generates no text. Leave it out.")
    return {
        "speculative_algorithm": name,
        "num_draft_tokens": flags.get("speculative_num_draft_tokens") or DRAFT_TOKENS,
        "ngram_longest": flags.get("speculative_ngram_max_trie_depth"),
    }


def attention_backend(asked: str | None, device: DeviceFacts, compiled: bool = True) -> tuple[str, str]:
    """(backend, reason). ``asked`` as typed, None for the automatic choice. Raises ConfigError listing every candidate
    and why it is out."""
    runs = {name: attention_obstacle(name, device) for name in ATTENTION_BACKENDS}
    if asked is not None:
        name = ATTENTION_ALIASES.get(asked, asked)
        obstacle = runs.get(name, "not available yet")
        if obstacle:
            candidates = "; ".join(f"{other}: {why or 'works'}" for other, why in runs.items())
            refuse("--attention-backend", f"Attention backend {asked}: {obstacle}. Candidates here: {candidates}.")
        alias = f" ({asked} is its other name)" if asked != name else ""
        return name, f"asked for{alias}"
    first, why = attention_preference(device, compiled)
    for name in dict.fromkeys((first, "triton", "torch_native")):
        if name in runs and runs[name] is None:
            reason = why if name == first else f"{first} ({why}) is not available here"
            return name, reason
    refuse("--attention-backend", f"No attention backend runs on {device.kind}: use --device cpu.")


def attention_preference(device: DeviceFacts, compiled: bool = True) -> tuple[str, str]:
    """(first choice for the device, reason), whether or not it is available here."""
    match device.kind:
        case "cpu":
            return "cpu", "compiled kernels for the CPU" if compiled else "made for CPUs, here in plain torch"
        case "hip":
            return "aiter", "first choice on ROCm"
        case "mps" | "xpu":
            return "torch_native", f"the only one for {device.kind}"
    if device.capability[0] == 9:
        return "fa3", "first choice on Hopper"
    if device.capability[0] == 10:
        return "trtllm_mha", "first choice on Blackwell"
    return "flashinfer", "first choice on other NVIDIA GPUs"


def attention_obstacle(name: str, device: DeviceFacts) -> str | None:
    """Why an existing backend cannot run on ``device``; None where it can."""
    if device.kind not in ATTENTION_BACKENDS[name]:
        return f"runs on {' and '.join(ATTENTION_BACKENDS[name])}, not on {device.kind}"
    return None


def schedule_policy(policy: str, *, cache: bool, priority: bool) -> tuple[str, str | None]:
    """(policy, line for the log or None). Raises ConfigError for pairs that cannot work together. Policy ``priority``
    is fcfs with ``priority`` on, which is the caller's to set."""
    if priority and policy not in PRIORITY_POLICIES:
        refuse(
            "--enable-priority-scheduling",
            f"--enable-priority-scheduling with --schedule-policy {policy}: priorities go with "
            "fcfs and lof only. Change one of them.",
        )
    if policy == "priority":
        return "fcfs", "--schedule-policy priority is fcfs with priorities on."
    if cache or policy not in CACHE_AWARE_POLICIES:
        return policy, None
    if policy == "shortest-prefill-first":
        refuse(
            "--schedule-policy",
            "--schedule-policy shortest-prefill-first needs the prefix cache: leave --disable-radix-cache out.",
        )
    return (
        "fcfs",
        f"schedule policy fcfs: {policy} looks into the prefix cache, which --disable-radix-cache turned off.",
    )


def overlap_allowed(device: DeviceFacts, disabled: bool) -> tuple[bool, str | None]:
    """(whether steps overlap, line for the log or None)."""
    if disabled:
        return False, None
    if device.kind == "mps":
        return False, "overlap off: it does not work on Apple MPS."
    return True, None


GRAMMAR_PACKAGES: Final[dict[str, str]] = {"xgrammar": "xgrammar", "outlines": "outlines_core"}
"""Grammar backend -> the optional package behind it; llguidance is always installed."""


def grammar_backend(asked: str | None, packages: tuple[str, ...]) -> str:
    """--grammar-backend, with its default decided. Raises ConfigError for one that is not installed."""
    if asked is None:
        return "xgrammar" if "xgrammar" in packages else "llguidance"
    package = GRAMMAR_PACKAGES.get(asked)
    if package is not None and package not in packages:
        refuse(
            "--grammar-backend",
            f"--grammar-backend {asked}: {package.replace('_', '-')} is not installed. Instead: pip install 'ceiba["
            f"{asked}]', or --grammar-backend llguidance.",
        )
    return asked


def fair_share(flags: Flags, priority: bool) -> tuple[Literal["off", "routing-key", "api-key"], dict[str, float]]:
    """(what tells tenants apart, tenant -> weight). API keys are replaced by their digests here and nowhere kept."""
    kind, given = flags.get("fair_share"), flags.get("fair_share_weights")
    if kind == "off":
        if given is not None:
            refuse("--fair-share-weights", "--fair-share-weights changes nothing without --fair-share.")
        return "off", {}
    if priority:
        refuse(
            "--fair-share",
            f"--fair-share {kind} with priorities: a high priority would take more than its tenant's share. "
            "Give one of them.",
        )
    if given is not None and not isinstance(given, dict):
        refuse("--fair-share-weights", "--fair-share-weights: expected a JSON object, tenant to number.")
    weights: dict[str, float] = {}
    for tenant, weight in (given or {}).items():
        if type(weight) not in {int, float} or not 0.001 <= weight <= 1000:
            refuse("--fair-share-weights", f"--fair-share-weights: {weight!r} is no number from 0.001 to 1000.")
        weights[key_digest(tenant) if kind == "api-key" else tenant] = float(weight)
    return kind, weights


def deterministic(flags: Flags, device: DeviceFacts, *, compiled: bool, generates: bool) -> bool:
    """--enable-deterministic-inference, refused where some sum would depend on the batch."""
    flag = "--enable-deterministic-inference"
    if not flags.get("enable_deterministic_inference"):
        return False
    if not generates:
        refuse(flag, f"{flag}: models that give vectors are computed by torch, whose sums depend on the batch.")
    if device.kind != "cpu":
        refuse(
            flag,
            f"{flag} on {device.kind}: matrix products (cuBLAS) and the split of long contexts take their order from "
            "the batch, and ones in a fixed order are not built. Instead: --device cpu, or a seed with each request.",
        )
    if not compiled:
        refuse(
            flag,
            f"{flag}: torch's products depend on the batch; the compiled CPU kernels are needed. Instead: leave "
            "--disable-cpu-kernels out, or install a C++17 compiler and reinstall.",
        )
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        asked = flags.get(name)
        if asked is not None and ATTENTION_ALIASES.get(asked, asked) != "cpu":
            refuse(flag, f"{flag} with --{name.replace('_', '-')} {asked}: only cpu sums in a fixed order.")
    return True


def eviction_options(policy: str, given: object) -> dict[str, int]:
    """Options of the eviction policy, checked against ``available``."""
    if given is None:
        return {}
    known = EVICTION_OPTIONS.get(policy, ())
    flag = "--radix-eviction-policy-config"
    if not isinstance(given, dict):
        refuse(flag, f"{flag}: expected a JSON object.")
    for name, value in given.items():
        if name not in known:
            have = f"it has {' and '.join(known)}" if known else "it has none"
            refuse(flag, f"{flag}: {policy} has no option {name!r}; {have}.")
        if type(value) is not int or value < 0:
            refuse(flag, f"{flag}: {name} wants a whole number from 0 up, not {value!r}.")
    return dict(given)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on ``host``."""
    return host in {"localhost", "::1", "[::1]"} or host.startswith("127.")
