"""How many KV slots the device really holds once the weights lie on it. Pure arithmetic over measured bytes."""

from __future__ import annotations

from ceiba.core.errors import ConfigError

GIB = 1 << 30


def final_slots(
    *, total_bytes: int, free_bytes: int, fraction: float, bytes_per_token: int, planned: int, page_size: int
) -> int:
    """KV slots of the pool: what was planned, or fewer where the device has less room than the plan assumed.

    ``fraction`` (--mem-fraction-static) of ``total_bytes`` may hold weights and KV together; ``free_bytes`` is what is
    free after the weights were loaded. Whole pages. Raises ConfigError when not even one page fits.
    """
    used = total_bytes - free_bytes
    room = int(total_bytes * fraction) - used
    fits = max(0, room) // bytes_per_token
    slots = min(planned, fits) // page_size * page_size
    if slots < page_size:
        raise ConfigError(
            f"no room for a KV cache: {used / GIB:.2f} GiB of the device's {total_bytes / GIB:.2f} GiB are in use "
            f"after loading, and --mem-fraction-static {fraction} allows {total_bytes * fraction / GIB:.2f} GiB for "
            "weights and KV cache together; raise it, or use a smaller or quantized model"
        )
    return slots
