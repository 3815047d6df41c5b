"""What the cache tiers moved, for metrics. Owns numbers; decides nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ceiba.core.tiers import CopyDone, StorageDone


@dataclass(slots=True)
class TierCounters:
    """Totals since start. ``…_ops`` and ``…_seconds`` are the count and the sum of a duration."""

    backup_tokens: int = 0
    backup_bytes: int = 0
    backup_seconds: float = 0.0
    backup_ops: int = 0
    load_back_tokens: int = 0
    load_back_bytes: int = 0
    load_back_seconds: float = 0.0
    load_back_ops: int = 0
    prefetched_tokens: int = 0
    """Read from the storage."""
    prefetch_pages: int = 0
    prefetch_bytes: int = 0
    prefetch_seconds: float = 0.0
    prefetch_ops: int = 0
    prefetch_hit_tokens: int = 0
    """The storage had them."""
    prefetch_unfulfilled_tokens: int = 0
    """It had them, and they did not come in time."""
    prefetch_deferred_tokens: int = 0
    """They came, and the host had no room yet."""
    backuped_tokens: int = 0
    """Written to the storage, or found there."""
    backup_pages: int = 0
    store_bytes: int = 0
    store_seconds: float = 0.0
    store_ops: int = 0
    storage_dropped_tokens: int = 0
    storage_errors: int = 0
    failed_copies: int = 0

    def backed_up(self, tokens: int, done: CopyDone) -> None:
        if not done.error:
            self.backup_tokens += tokens
            self.backup_bytes += done.size
            self.backup_seconds += done.seconds
            self.backup_ops += 1

    def restored(self, tokens: int, done: CopyDone) -> None:
        self.load_back_tokens += tokens
        self.load_back_bytes += done.size
        self.load_back_seconds += done.seconds
        self.load_back_ops += 1

    def fetched(self, news: StorageDone, page: int) -> None:
        self.prefetched_tokens += len(news.blobs) * page
        self.prefetch_pages += len(news.blobs)
        self.prefetch_bytes += news.size
        self.prefetch_seconds += news.seconds
        self.prefetch_ops += 1

    def stored(self, news: StorageDone, page: int) -> None:
        self.backuped_tokens += news.stored * page
        self.backup_pages += news.stored
        self.store_bytes += news.size
        self.store_seconds += news.seconds
        self.store_ops += 1
        self.storage_errors += bool(news.error)

    def as_dict(self) -> dict[str, float]:
        return {f"hicache.{name}": float(value) for name, value in asdict(self).items()}
