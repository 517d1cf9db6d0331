"""Entries, states, limits and errors of managed ledgers, as their callers see them."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from config import bounds
from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import (
    InternalError,
    MagnetarError,
    OperatorError,
    PeerError,
    ServerError,
)
from magnetar.protocol.state_table import StateTable
from storage.ledger.store import Copies, LedgerAssertion

MIB = 1024 * 1024
MINUTE_MS = 60_000


class Entry(NamedTuple):
    """One stored entry: its place and exactly the bytes that were appended."""

    position: Position
    data: bytes


PublishCallback = Callable[[Position | None, MagnetarError | None], None]
"""Called once with the position when durable, or with None and the error.

An error means that the entry is not stored.  After `AppendOutcomeUnknown` and
`ManagedLedgerFenced` it may be: the next opening decides.
"""


class ManagedLedgerState(enum.Enum):
    """State of a managed ledger; it changes only as `MOVES` allows.

    OPEN takes appends, ROLLING holds them back while the next ledger is made, TERMINATED is
    sealed for ever, FENCED lost its ownership, CLOSED was given up by its owner.  FENCED and
    CLOSED instances never serve again: open the name anew.
    """

    LOADING = "loading"
    OPEN = "open"
    ROLLING = "rolling"
    TERMINATED = "terminated"
    FENCED = "fenced"
    CLOSED = "closed"


_S = ManagedLedgerState
MOVES: StateTable[ManagedLedgerState] = StateTable(
    {
        _S.LOADING: frozenset({_S.OPEN, _S.TERMINATED, _S.FENCED, _S.CLOSED}),
        _S.OPEN: frozenset({_S.ROLLING, _S.TERMINATED, _S.FENCED, _S.CLOSED}),
        _S.ROLLING: frozenset({_S.OPEN, _S.FENCED, _S.CLOSED}),
        _S.TERMINATED: frozenset({_S.FENCED, _S.CLOSED}),
        _S.FENCED: frozenset({_S.CLOSED}),
        _S.CLOSED: frozenset(),
    },
    defect=LedgerAssertion,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of managed ledgers; the defaults of rolling over are Pulsar's.

    A ledger is rolled over at `ledger_max_entries` or `ledger_max_size_bytes`, but not younger
    than `ledger_min_age_ms`; and at `ledger_max_age_ms` in any case.
    """

    ledger_max_entries: int = 50_000
    ledger_max_size_bytes: int = 2048 * MIB
    ledger_min_age_ms: int = 10 * MINUTE_MS
    ledger_max_age_ms: int = 240 * MINUTE_MS
    cursor_flush_ms: int = 100
    """Acknowledgements are durable within this time."""
    entry_cache_bytes: int = 64 * MIB
    unsubscribed_retention_ms: int = 24 * 60 * MINUTE_MS
    """Time that ended ledgers stay without a durable cursor and without a retention policy."""
    offload_deletion_lag_ms: int = 240 * MINUTE_MS
    """Time that an offloaded ledger stays beside its copy; -1: until an operator deletes it."""
    roll_over_buffer_entries: int = bounds.ROLL_OVER_BUFFER_ENTRIES
    claim_on_open: bool = False
    """Write every record back when it is read, so that an earlier owner's next write conflicts.

    Needed only where several processes share the stores.
    """


@dataclass(frozen=True, slots=True)
class Retention:
    """Consumed ledgers stay until either bound is passed; -1 is no bound, 0 keeps nothing."""

    time_ms: int
    size_bytes: int


NO_RETENTION = Retention(0, 0)


@dataclass(frozen=True, slots=True)
class Persistence:
    """How a stream is stored."""

    copies: Copies | None = None
    """Copies of the entries of new ledgers; None: those that the ledger store is set to make."""
    cursor_writes_per_s: float = 0
    """How often the position of a cursor is written at most; 0: as often as `Limits` allow."""

    def cursor_pause_s(self, flush_s: float) -> float:
        """The time from a change of a cursor until it is written, `flush_s` by the limits.

        It is not above CURSOR_PAUSE_MAX_S, however small the rate is.
        """
        if self.cursor_writes_per_s <= 0:
            return flush_s
        return max(flush_s, min(1 / self.cursor_writes_per_s, bounds.CURSOR_PAUSE_MAX_S))


PersistenceSource = Callable[[str], Persistence]
"""Returns how the stream of a name is stored, by the current policies."""

RetentionSource = Callable[[], Retention | None]
"""Returns the current policy; None if none is set."""


class ManagedLedgerTerminated(PeerError):
    """The stream is sealed: write to its successors."""

    code: ClassVar[ServerError] = ServerError.TOPIC_TERMINATED_ERROR


class ManagedLedgerNotFound(PeerError):
    """There is no such stream."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND


class CursorNotFound(PeerError):
    """The stream has no such cursor."""

    code: ClassVar[ServerError] = ServerError.SUBSCRIPTION_NOT_FOUND


class CursorExists(InternalError):
    """A cursor of that name is open already: use it, or delete it first."""

    code: ClassVar[ServerError] = ServerError.CONSUMER_BUSY


class ManagedLedgerBusy(OperatorError):
    """Too many appends wait for the next ledger; this one was not taken."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


class ManagedLedgerFenced(InternalError):
    """Another owner has the stream: this instance has stopped for good."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class ManagedLedgerClosed(InternalError):
    """This instance was closed: open the stream again."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class AppendOutcomeUnknown(OperatorError):
    """A write failed and its ledger cannot be recovered now: the entry may turn up later."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


class StoresNotShared(OperatorError):
    """Orphaned ledgers are listed and deleted on request only where the stores are shared."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class CorruptRecord(OperatorError):
    """A stored record of a managed ledger or cursor cannot be decoded."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR
