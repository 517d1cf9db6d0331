"""The two stores of a broker: those of its data directory, or shared ones."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import structlog

from config.bounds import LEDGER_IDS_LEFT_OUT, LEDGER_IDS_LEFT_OUT_PER_S
from config.settings import Settings
from storage.clock import Clock
from storage.damage import DamageKind, DamagePolicy, DamageReport
from storage.data_directory import COPIED_FILE, DataDirectory, DataDirectoryUnusable, copied_s
from storage.durable_mark import DurableMark
from storage.ledger.local.disk import RealDisk
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.local_store import LocalLedgerStore
from storage.ledger.store import LedgerStore
from storage.managed_ledger.orphans import streams_on
from storage.managed_ledger.records import NAMES_INDEX
from storage.managed_ledger.types import Limits
from storage.metadata.keys import LAST
from storage.metadata.open import open_metadata_store
from storage.metadata.sqlite import SqliteMetadataStore
from storage.metadata.store import MetadataError, MetadataStore

if TYPE_CHECKING:
    # A single broker starts without the parts of a cluster.
    from storage.ledger.bookkeeper.store import BookKeeperLedgerStore

log = structlog.get_logger(__name__)


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
    damage: DamageReport = field(default_factory=DamageReport)
    """Damage of the data directory."""
    check_later: Callable[[], Awaitable[None]] | None = None
    """Checks that take long, for the time after the start."""


async def open_stores(settings: Settings, clock: Clock, rng: random.Random) -> Stores:
    """Open the stores that the settings name, or lock the data directory and open what is in it.

    Raises `DataDirectoryError`, `MetadataError`, `LedgerError`, and `DamagedData` if data was lost
    and the settings refuse to start then.
    """
    if settings.in_cluster:
        return await _open_shared(settings, clock, rng)
    directory = DataDirectory.open(settings.data_dir)
    damage = DamageReport(DamagePolicy(settings.damaged_data))
    async with AsyncExitStack() as opened:
        opened.callback(directory.close)
        metadata = await open_metadata_store(f"sqlite:{directory.metadata_path}", clock)
        opened.push_async_callback(metadata.close)
        if isinstance(metadata, SqliteMetadataStore):
            await _report_metadata_damage(metadata, damage)
        check_later = partial(_check_later, metadata, damage)
        if damage.policy is DamagePolicy.REFUSE_START:
            await check_later()
        ledgers = LocalLedgerStore(
            RealDisk(directory.ledgers_path),
            metadata,
            clock,
            limits=LedgerLimits(file_bytes=settings.log_file_size_bytes),
            rng=rng,
            guard=directory.deletion_guard,
            damage=damage,
            mark=DurableMark.open(directory.mark_path),
        )
        opened.push_async_callback(ledgers.close)
        await ledgers.start()
        await _leave_out_ids(directory, ledgers, clock)
        if isinstance(metadata, SqliteMetadataStore) and ledgers.lost_records is not None:
            await _keep_lost_records(metadata, ledgers.lost_records)
        opened.pop_all()
    return Stores(
        metadata,
        ledgers,
        directory.close,
        damage=damage,
        check_later=None if damage.policy is DamagePolicy.REFUSE_START else check_later,
    )


async def _leave_out_ids(directory: DataDirectory, ledgers: LocalLedgerStore, clock: Clock) -> None:
    """In a copy of a data directory, give no id that another broker can have given since then.

    Positions of messages then do not come twice, so that other clusters take new messages for new.
    """
    try:
        made_s = copied_s(directory.path)
        if made_s is None:
            return
        age_s = max(0, clock.now_ms() // 1000 - made_s)
        await ledgers.leave_out_ids(LEDGER_IDS_LEFT_OUT + age_s * LEDGER_IDS_LEFT_OUT_PER_S)
        directory.forget_copied()
    except OSError as error:
        raise DataDirectoryUnusable(
            f"{directory.path / COPIED_FILE} cannot be read or removed ({error}): let the broker's "
            "user do that."
        ) from error
    log.info("backup_started", age_s=age_s)


async def _report_metadata_damage(metadata: SqliteMetadataStore, damage: DamageReport) -> None:
    """Report what the opening of the metadata file found, and the topics in damaged pages."""
    found = metadata.damage
    if found.blocks:
        try:
            names = [hit.index_key for hit in await metadata.scan_index(NAMES_INDEX, "", LAST)]
        except MetadataError as error:
            # Topics whose records cannot be read refuse by themselves.
            names = []
            found.sentences.append(f"Not all topics can be listed: {error}")
        found.streams = sorted({*found.streams, *streams_on(found.blocks, names)})
        found.blocks.clear()
        await asyncio.to_thread(metadata.keep_damage)
    for sentence in found.sentences:
        damage.note(DamageKind.METADATA, sentence)
    damage.streams = frozenset(found.streams)
    damage.metadata_is_behind = found.is_behind


async def _keep_lost_records(metadata: SqliteMetadataStore, sentence: str) -> None:
    """Keep the finding: ids that are given out from now on hide it from the next start."""
    found = metadata.damage
    if sentence not in found.sentences:
        found.is_behind = True
        found.sentences.append(sentence)
        await asyncio.to_thread(metadata.keep_damage)


async def _check_later(metadata: MetadataStore, damage: DamageReport) -> None:
    """Check a metadata file that is too large to be checked before the start."""
    if isinstance(metadata, SqliteMetadataStore):
        problems = await metadata.check_structure()
        for sentence in problems:
            damage.note(DamageKind.METADATA, sentence)
        if problems:
            metadata.damage.sentences += problems
            await asyncio.to_thread(metadata.keep_damage)


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
