"""Services and state that the ledgers of one BookKeeper store share."""

import asyncio
import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import structlog

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import BookieClient
from storage.ledger.bookkeeper.digest import Digest, master_key
from storage.ledger.bookkeeper.ensemble_choice import choose_ensemble, choose_replacements
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata
from storage.ledger.bookkeeper.metadata_store import LedgerMetadataStore
from storage.ledger.bookkeeper.quarantine import Quarantine
from storage.ledger.store import LedgerClosed, NoSuchLedger

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class LedgerCounters:
    """Counters of ledgers since the store was made."""

    adds: int = 0
    """Entries confirmed."""
    add_bytes: int = 0
    failed_adds: int = 0
    """Entries whose callers got an error."""
    ensemble_changes: int = 0
    fenced: int = 0
    """Writers that another owner fenced."""
    recoveries: int = 0
    """Ledgers that were recovered and closed."""
    failed_recoveries: int = 0
    read_retries: int = 0
    """Answers to reads without the entry, after which another replica was read."""
    bookie_failures: int = 0
    """Ensemble places whose bookie failed."""
    quarantines: int = 0
    """Bookies that were put into quarantine."""


@dataclass(slots=True)
class PendingAppends:
    """Appends in flight of all writers of a store, which share connections and one bound."""

    entries: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class LedgerServices:
    """Metadata store, bookies, counters and quarantine of one ledger store."""

    metadata: LedgerMetadataStore
    bookies: BookieClient
    rng: random.Random
    quarantine: Quarantine = field(default_factory=Quarantine)
    counters: LedgerCounters = field(default_factory=LedgerCounters)
    pending: PendingAppends = field(default_factory=PendingAppends)
    closed: bool = False

    def choose_ensemble(self, ensemble_size: int, write_quorum: int) -> tuple[BookieId, ...]:
        """Bookies for a new ledger.  Raises `NotEnoughBookies`."""
        return choose_ensemble(
            self.metadata.bookies, self._quarantined(), ensemble_size, write_quorum, self.rng
        )

    def choose_replacements(
        self,
        write_quorum: int,
        ensemble: Sequence[BookieId],
        places: Sequence[int],
        failed: Set[BookieId],
    ) -> Mapping[int, BookieId]:
        """Bookies for places of an ensemble, as far as there are any."""
        return choose_replacements(
            self.metadata.bookies,
            self._quarantined(),
            ensemble,
            places,
            failed,
            write_quorum,
            self.rng,
        )

    def note_failures(self, bookies: Sequence[BookieId]) -> None:
        """Count failures of an ensemble's bookies, and put bookies into quarantine."""
        now_s = asyncio.get_running_loop().time()
        self.counters.bookie_failures += len(bookies)
        for bookie in bookies:
            if self.quarantine.failed(bookie, now_s):
                self.counters.quarantines += 1
                _log.warning("bookie_in_quarantine", bookie=bookie)

    def _quarantined(self) -> Set[BookieId]:
        return self.quarantine.quarantined(asyncio.get_running_loop().time())


class LedgerCell:
    """State that all handles of one ledger in this process share.

    `deleted` tells them that the ledger was deleted; `lock` lets one call at a time open or delete
    it.
    """

    __slots__ = ("__weakref__", "deleted", "ledger_id", "lock")

    def __init__(self, ledger_id: LedgerId) -> None:
        self.ledger_id = ledger_id
        self.deleted = False
        self.lock = asyncio.Lock()


class EntrySeal:
    """Digest and master key of one ledger."""

    __slots__ = ("digest", "ledger_id", "master_key")

    def __init__(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> None:
        self.ledger_id = ledger_id
        self.digest = Digest(metadata.digest_type, metadata.password)
        self.master_key = master_key(metadata.password)

    def seal(
        self, entry_id: int, last_add_confirmed: int, length: int, data: bytes
    ) -> Sequence[bytes]:
        """The body of an entry, in pieces."""
        return self.digest.seal(self.ledger_id, entry_id, last_add_confirmed, length, data)


def no_such_ledger(ledger_id: int) -> NoSuchLedger:
    """The error for a ledger that this process deleted."""
    return NoSuchLedger(
        f"Ledger {ledger_id} does not exist or was deleted: reload the topic that names it."
    )


def store_closed() -> LedgerClosed:
    """The error for calls after `close`."""
    return LedgerClosed("The ledger store is closed because the broker is stopping: reconnect.")
