"""Pages in a Mooncake store: memory of several machines behind one master, through the package's own client.

Owns the translation of its numeric answers. The package is imported when the store is opened and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ceiba.memory.storage.base import Buffer, StoreError, StoreFull

DEFAULTS: Final[dict[str, Any]] = {
    "local_hostname": "127.0.0.1",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:50051",
    "protocol": "tcp",
    "device_name": "",
    "global_segment_size": 1 << 30,
    "local_buffer_size": 128 << 20,
}
"""Options and what they are if not given; sizes in bytes."""
_NO_SPACE = -200
_MISSING = -704


class MooncakeStore:
    """``prefix`` keeps models apart. ``client``: a connected one, for tests."""

    def __init__(self, options: Mapping[str, Any], prefix: str, client: Any = None) -> None:
        self._options = {**DEFAULTS, **options}
        self._prefix = f"ceiba-{prefix}-"
        self._client = self._connect() if client is None else client

    def exists(self, keys: Sequence[str]) -> int:
        found = self._client.batch_is_exist([self._name(key) for key in keys]) if keys else []
        if any(code < 0 for code in found):
            raise StoreError(f"mooncake answers {min(found)} to a look-up: is its master still there?")
        return next((i for i, code in enumerate(found) if code != 1), len(found))

    def get(self, key: str) -> Buffer | None:
        data = self._client.get(self._name(key))
        if data:
            return bytes(data)
        code = self._client.is_exist(self._name(key))
        if code < 0:
            raise StoreError(f"mooncake answers {code} to a read: is its master still there?")
        return None

    def put(self, key: str, parts: Sequence[Buffer]) -> int:
        name = self._name(key)
        if self._client.is_exist(name) == 1:
            return 0
        code = self._client.put_parts(name, *parts)
        if code == _NO_SPACE:
            raise StoreFull("mooncake has no room (global_segment_size of all its clients together)")
        if code:
            raise StoreError(f"mooncake answers {code} to a write: is its master still there?")
        return sum(memoryview(part).nbytes for part in parts)

    def delete(self, key: str) -> None:
        code = self._client.remove(self._name(key), True)  # although it was just read, and so is leased
        if code not in {0, _MISSING}:
            raise StoreError(f"mooncake answers {code} to a removal")

    def clear(self) -> int:
        count = int(self._client.remove_by_regex(f"^{self._prefix}.*", True))
        if count < 0:
            raise StoreError(f"mooncake answers {count} to a removal")
        return count

    def stats(self) -> dict[str, object]:
        return {name: self._options[name] for name in ("master_server_address", "metadata_server", "protocol")}

    def close(self) -> None:
        self._client.close()

    def _name(self, key: str) -> str:
        return self._prefix + key

    def _connect(self) -> Any:
        from mooncake.store import MooncakeDistributedStore

        options = self._options
        client = MooncakeDistributedStore()
        code = client.setup(
            options["local_hostname"],
            options["metadata_server"],
            int(options["global_segment_size"]),
            int(options["local_buffer_size"]),
            options["protocol"],
            options["device_name"],
            options["master_server_address"],
        )
        if code:
            raise StoreError(
                f"mooncake answers {code}: no master at {options['master_server_address']} (start mooncake_master), or "
                f"no metadata server at {options['metadata_server']}"
            )
        return client
