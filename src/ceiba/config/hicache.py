"""The cache tiers below the device's memory: their sizes, their rules and the options of a storage. Pure functions of
flags and numbers; what is attached at run time goes through the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ceiba.config import sizing
from ceiba.config.choose import refuse
from ceiba.config.flags import Flags
from ceiba.config.records import HiCacheConfig
from ceiba.core.errors import ConfigError

DEFAULT_RATIO: Final = 2.0
STORAGE_PAGE: Final = 64
"""Tokens of a storage page: smaller ones cost more per byte, larger ones lose more at the end of a match."""
GB: Final = 10**9
EXTRA: Final = "--hicache-storage-backend-extra-config"
_DESTS: Final = (
    "hicache_ratio", "hicache_size", "hicache_host_memory_mode", "hicache_host_memory_fraction",
    "hicache_write_policy", "hicache_io_backend", "hicache_mem_layout", "hicache_storage_backend",
    "hicache_storage_prefetch_policy", "hicache_storage_backend_extra_config",
    "hicache_storage_prefetch_retry_poll_interval", "hicache_storage_prefetch_retry_max_attempts",
)  # fmt: skip
PACKAGES: Final = {
    "mooncake": "pip install 'ceiba[mooncake]' (it needs Debian's libibverbs1 and librdmacm1)",
    "nixl": "pip install --no-deps nixl nixl-cu12 (or nixl-cu13)",
}
"""Storage -> how its package, of the same name, is installed."""
_KNOBS: Final[dict[str, tuple[float, float]]] = {
    "prefetch_threshold": (1, 2**31 - 1),
    "prefetch_timeout_base": (0, 30),
    "prefetch_timeout_per_ki_token": (0, 30),
    "page_tokens": (1, 4096),
}
"""What the extra configuration says about prefetching, for every storage, and its limits."""


@dataclass(frozen=True, slots=True)
class HostRoom:
    free_bytes: int
    """Of host memory, once weights and device pool that lie there are taken off."""
    kv_bytes: int
    """Of one token."""
    pool_tokens: int
    """Slots of the device pool."""


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """The extra configuration, taken apart."""

    options: dict[str, object]
    """The store's own."""
    knobs: dict[str, float]


def storage_options(backend: str | None, given: object, folder: Path) -> StorageOptions:
    """Take apart what the user gave for ``backend``. Raises ConfigError naming the option and its limit.

    ``folder``: where files go if nothing else is said.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{EXTRA}: expected a JSON object, not {type(given).__name__}.", param=EXTRA)
    options: dict[str, object] = dict(given or {})
    knobs: dict[str, float] = {}
    for name, (low, high) in _KNOBS.items():
        value = options.pop(name, None)
        if value is None:
            continue
        whole = name in {"prefetch_threshold", "page_tokens"}
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            raise ConfigError(f"{EXTRA}: {name} must be {kind} from {low:g} to {high:g}, not {value!r}.", param=EXTRA)
        knobs[name] = value
    if backend in {"file", "nixl"}:
        options.setdefault("path", str(folder))
    return StorageOptions(options, knobs)


def hicache(
    flags: Flags, room: HostRoom, *, cached: bool, generates: bool, folder: Path, packages: tuple[str, ...] = ()
) -> tuple[HiCacheConfig | None, list[str]]:
    """(configuration or None where it is off, lines for the log). Raises ConfigError for what cannot work together."""
    if not flags.get("enable_hierarchical_cache"):
        idle = [f"--{dest.replace('_', '-')}" for dest in _DESTS if flags.given(dest)]
        if idle:
            refuse(idle[0], f"{idle[0]} changes nothing by itself: add --enable-hierarchical-cache.")
        return None, []
    if not cached:
        refuse(
            "--enable-hierarchical-cache",
            "--enable-hierarchical-cache extends the prefix cache, which --disable-radix-cache turns off. Leave one "
            "of them out.",
        )
    if not generates:
        refuse("--enable-hierarchical-cache", "--enable-hierarchical-cache: this model has no KV cache. Leave it out.")
    page = flags.get("page_size") or 1
    notes: list[str] = []
    io, layout = _layout(flags, notes)
    backend = flags.get("hicache_storage_backend")
    given = flags.get("hicache_storage_backend_extra_config")
    if given is not None and backend is None:
        refuse(EXTRA, f"{EXTRA} changes nothing without --hicache-storage-backend: give both.")
    if backend in PACKAGES and backend not in packages:
        refuse(
            "--hicache-storage-backend",
            f"--hicache-storage-backend {backend}: the package is not installed. Instead: {PACKAGES[backend]}.",
        )
    storage = storage_options(backend, given, folder)
    asked = storage.knobs.get("page_tokens", STORAGE_PAGE)
    storage_page = -(-int(asked) // page) * page
    knobs = {name: value for name, value in storage.knobs.items() if name != "page_tokens"}
    return HiCacheConfig(
        host_tokens=_host_tokens(flags, room, page, notes),
        write_policy=flags.get("hicache_write_policy"),
        io_backend=io,
        mem_layout=layout,
        storage_backend=backend,
        storage_options=storage.options if backend else {},
        storage_folder=str(folder),
        storage_page=storage_page,
        prefetch_policy=flags.get("hicache_storage_prefetch_policy"),
        prefetch_retry_interval=flags.get("hicache_storage_prefetch_retry_poll_interval"),
        prefetch_retry_attempts=flags.get("hicache_storage_prefetch_retry_max_attempts"),
        **knobs,  # type: ignore[arg-type]
    ), notes


def _layout(flags: Flags, notes: list[str]) -> tuple[Any, Any]:
    """(io backend, layout): a token that is contiguous through all layers needs gathering; plain copies want the
    pages of one layer together."""
    io, layout = flags.get("hicache_io_backend"), flags.get("hicache_mem_layout")
    if io == "direct" and layout == "page_first":
        if flags.given("hicache_mem_layout"):
            refuse(
                "--hicache-mem-layout",
                "--hicache-mem-layout page_first with --hicache-io-backend direct: plain copies would be a few hundred "
                "bytes each. Instead: page_first_direct or layer_first, or --hicache-io-backend kernel.",
            )
        notes.append("hicache_mem_layout page_first_direct: --hicache-io-backend direct copies whole pages of a layer.")
        return io, "page_first_direct"
    if io == "kernel" and layout == "page_first_direct":
        if flags.given("hicache_io_backend"):
            refuse(
                "--hicache-mem-layout",
                "--hicache-mem-layout page_first_direct is for plain copies: --hicache-io-backend direct. Change one.",
            )
        notes.append("hicache_io_backend direct: it goes with --hicache-mem-layout page_first_direct.")
        return "direct", layout
    return io, layout


def _host_tokens(flags: Flags, room: HostRoom, page: int, notes: list[str]) -> int:
    fraction = flags.get("hicache_host_memory_fraction")
    most = int(max(0, room.free_bytes) * fraction)
    free = f"{fraction:g} of {sizing.human(max(0, room.free_bytes))} free host memory (--hicache-host-memory-fraction)"
    size, ratio = flags.get("hicache_size"), flags.get("hicache_ratio")
    name, value = ("--hicache-size", size) if size else ("--hicache-ratio", ratio)
    wanted = size * GB if size else int(room.pool_tokens * (ratio or DEFAULT_RATIO)) * room.kv_bytes
    if size and ratio is not None:
        notes.append(f"--hicache-ratio {ratio:g} changes nothing: --hicache-size {size} wins.")
    if wanted > most:
        if size or ratio is not None:
            refuse(
                name,
                f"{name} {value:g} takes {sizing.human(wanted)} of host memory, more than {free} allows: "
                f"{sizing.human(most)}. Instead: lower it, or the device pool where that lies in host memory "
                "(--max-total-tokens).",
            )
        notes.append(f"The host tier is limited to {sizing.human(most)}: {free}.")
        wanted = most
    tokens = wanted // room.kv_bytes // page * page
    if tokens < max(page, STORAGE_PAGE):
        refuse(
            "--enable-hierarchical-cache",
            f"--enable-hierarchical-cache: {sizing.human(wanted)} of host memory hold {tokens} tokens, too few to be "
            f"of use ({free}). Instead: give it more with --hicache-size, lower --max-total-tokens, or leave it out.",
        )
    return int(tokens)
