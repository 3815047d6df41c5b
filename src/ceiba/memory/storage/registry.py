"""Which stores there are, what each needs, and how one is opened from its options. Owns names and refusals."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

from ceiba.config.hicache import PACKAGES
from ceiba.core.errors import ConfigError
from ceiba.memory.storage.base import PageStore, StoreError
from ceiba.memory.storage.pages import identity_digest

FLAG: Final = "--hicache-storage-backend"
EXTRA: Final = "--hicache-storage-backend-extra-config"
MOST_THREADS: Final = 4
"""That read files at a time, and as many that write; one for every four processors, since others compute there."""
GB: Final = 10**9
DEFAULT_GB: Final = 16.0
OPTIONS: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    "file": {"path": (str,), "max_gb": (int, float)},
    "nixl": {"path": (str,), "max_gb": (int, float), "plugin": (str,)},
    "mooncake": {
        "local_hostname": (str,),
        "metadata_server": (str,),
        "master_server_address": (str,),
        "protocol": (str,),
        "device_name": (str,),
        "global_segment_size": (int,),
        "local_buffer_size": (int,),
    },
}
"""Store -> its options and their types. ``dynamic`` takes any beside its own two."""


def check(backend: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for a store that cannot be opened with these options here, without trying."""
    if backend == "dynamic":
        for name in ("module_path", "class_name"):
            if not isinstance(options.get(name), str) or not options[name]:
                raise ConfigError(
                    f'{FLAG} dynamic needs a class: {EXTRA} \'{{"module_path": "my.module", "class_name": "Store"}}\'.',
                    param=EXTRA,
                )
        return
    if backend not in OPTIONS:
        raise ConfigError(f"{FLAG} {backend}: not available. Instead: {', '.join(OPTIONS)}, dynamic.", param=FLAG)
    known = OPTIONS[backend]
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{EXTRA}: {backend} has no option {name!r}; it has: {', '.join(known)}.", param=EXTRA)
        if isinstance(value, bool) or not isinstance(value, known[name]):
            kind = "a text" if known[name] == (str,) else "a number"
            raise ConfigError(f"{EXTRA}: {name} of {backend} is {kind}, not {value!r}.", param=EXTRA)
    if backend in {"file", "nixl"}:
        if not options.get("path"):
            raise ConfigError(f'{FLAG} {backend} needs a folder: {EXTRA} \'{{"path": "/var/kv"}}\'.', param=EXTRA)
        if options.get("max_gb", DEFAULT_GB) <= 0:
            raise ConfigError(f"{EXTRA}: max_gb of {backend} must be more than 0.", param=EXTRA)
    if backend in PACKAGES and find_spec(backend) is None:
        raise ConfigError(f"{FLAG} {backend}: the package is not installed. Instead: {PACKAGES[backend]}.", param=FLAG)


def open_store(backend: str, options: Mapping[str, Any], identity: Mapping[str, Any]) -> PageStore:
    """Connect. Raises ConfigError with what is missing."""
    check(backend, options)
    model = identity_digest(identity).hex()[:16]
    try:
        return _open(backend, options, model)
    except (StoreError, ImportError) as error:
        raise ConfigError(f"{FLAG} {backend}: {error}", param=FLAG) from error


def _open(backend: str, options: Mapping[str, Any], model: str) -> PageStore:
    if backend == "dynamic":
        return _dynamic(options, model)
    if backend == "mooncake":
        from ceiba.memory.storage.mooncake import MooncakeStore

        return MooncakeStore(options, model)
    from ceiba.memory.storage.file import FileStore

    folder = Path(options["path"]).expanduser() / model
    budget = int(options.get("max_gb", DEFAULT_GB) * GB)
    if backend == "file":
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return FileStore(folder, budget, threads=max(1, min(MOST_THREADS, processors // 4)))
    from ceiba.memory.storage.nixl import PLUGINS, NixlIO

    plugin = str(options.get("plugin", PLUGINS[0]))
    if plugin not in PLUGINS:
        raise ConfigError(f"{EXTRA}: plugin {plugin!r} of nixl: choose from {', '.join(PLUGINS)}.", param=EXTRA)
    return FileStore(folder, budget, NixlIO(plugin))


def _dynamic(options: Mapping[str, Any], model: str) -> PageStore:
    """A class that the operator names; it gets the other options and the model's id. Its code runs in this process."""
    path, name = options["module_path"], options["class_name"]
    try:
        found = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{EXTRA}: {path}.{name} cannot be loaded: {error}", param=EXTRA) from error
    missing = [method for method in ("exists", "get", "put", "delete", "clear") if not hasattr(found, method)]
    if missing:
        raise ConfigError(f"{EXTRA}: {path}.{name} is no page store, it lacks {', '.join(missing)}.", param=EXTRA)
    rest = {key: value for key, value in options.items() if key not in {"module_path", "class_name"}}
    return cast(PageStore, found(rest, model))
