"""Choices that need few facts and explain themselves: the device, the attention backend, the schedule policy, overlap.
Pure functions; each returns its reason or raises a ConfigError that lists what would work.
"""

from __future__ import annotations

from typing import Final, NoReturn

from ceiba.config.available import ATTENTION_ALIASES, ATTENTION_BACKENDS, CACHE_AWARE_POLICIES, PRIORITY_POLICIES
from ceiba.config.flags import Flags
from ceiba.config.records import DeviceFacts
from ceiba.core.errors import ConfigError

CPU_KERNELS: Final = "ceiba-cpu-kernels"
"""Stands in ``DeviceFacts.packages`` where the compiled CPU kernels are installed."""


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
    """(policy, line for the log or None). Raises ConfigError for pairs that cannot work together."""
    if priority and policy not in PRIORITY_POLICIES:
        refuse(
            "--enable-priority-scheduling",
            f"--enable-priority-scheduling with --schedule-policy {policy}: priorities go with "
            f"{' and '.join(PRIORITY_POLICIES)} only. Change one of them.",
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


def overlap_allowed(device: DeviceFacts, disabled: bool, between_prefills: bool = False) -> tuple[bool, str | None]:
    """(whether steps overlap, line for the log or None). ``between_prefills``: wanted off between two prefills, which
    turns it off everywhere, since the loop has one depth for all steps."""
    if disabled:
        return False, None
    if between_prefills:
        return False, "overlap off between all steps, not only prefills: DISABLE_CONSECUTIVE_PREFILL_OVERLAP is set."
    if device.kind == "mps":
        return False, "overlap off: it does not work on Apple MPS."
    return True, None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on ``host``."""
    return host in {"localhost", "::1", "[::1]"} or host.startswith("127.")
