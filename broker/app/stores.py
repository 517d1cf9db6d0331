"""The two stores of a broker: those of its data directory, or shared ones."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from config.settings import Settings
from storage.clock import Clock
from storage.data_directory import DataDirectory
from storage.ledger.local.disk import RealDisk
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.local_store import LocalLedgerStore
from storage.ledger.store import LedgerStore
from storage.managed_ledger.types import Limits
from storage.metadata.open import open_metadata_store
from storage.metadata.store import MetadataStore

if TYPE_CHECKING:
    from storage.ledger.bookkeeper.store import BookKeeperLedgerStore


@dataclass(frozen=True, slots=True)
class Stores:
    """The metadata store and the ledger store; call `release` after both are closed.

    `shared` stores are used by other processes too, which may own a topic before or after this one.
    """

    metadata: MetadataStore
    ledgers: LedgerStore
    release: Callable[[], None] = lambda: None
    shared: bool = False
    bookkeeper: "BookKeeperLedgerStore | None" = None
    """The ledger store again, if it is on bookies."""


async def open_stores(settings: Settings, clock: Clock, rng: random.Random) -> Stores:
    """Open the stores that the settings name, or lock the data directory and open what is in it.

    Raises `DataDirectoryError`, `MetadataError`, `LedgerError`.
    """
    if settings.in_cluster:
        return await _open_shared(settings, clock, rng)
    directory = DataDirectory.open(settings.data_dir)
    try:
        metadata = await open_metadata_store(f"sqlite:{directory.metadata_path}", clock)
    except BaseException:
        directory.close()
        raise
    ledgers = LocalLedgerStore(
        RealDisk(directory.ledgers_path),
        metadata,
        clock,
        limits=LedgerLimits(file_bytes=settings.log_file_size_bytes),
        rng=rng,
        guard=directory.deletion_guard,
    )
    try:
        await ledgers.start()
    except BaseException:
        await ledgers.close()
        await metadata.close()
        directory.close()
        raise
    return Stores(metadata, ledgers, directory.close)


async def _open_shared(settings: Settings, clock: Clock, rng: random.Random) -> Stores:
    # Not imported at the top: a single broker does without the clients of shared stores.
    from broker.app.shared_stores import open_shared_stores  # noqa: PLC0415

    metadata, ledgers = await open_shared_stores(settings, clock, rng)
    return Stores(metadata, ledgers, shared=True, bookkeeper=ledgers)


def limits_of(settings: Settings, *, shared: bool = False) -> Limits:
    """Limits of managed ledgers, from the settings; `shared` as in `Stores`."""
    return Limits(
        ledger_max_entries=settings.ledger_max_entries,
        ledger_max_size_bytes=settings.ledger_max_size_bytes,
        ledger_min_age_ms=settings.ledger_min_age_s * 1000,
        ledger_max_age_ms=settings.ledger_max_age_s * 1000,
        cursor_flush_ms=settings.cursor_flush_ms,
        entry_cache_bytes=settings.entry_cache_bytes,
        unsubscribed_retention_ms=settings.unsubscribed_retention_minutes * 60_000,
        offload_deletion_lag_ms=(
            -1 if settings.offload_deletion_lag_s < 0 else settings.offload_deletion_lag_s * 1000
        ),
        claim_on_open=shared,
    )
