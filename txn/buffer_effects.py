"""The effects that the pure core of a segment's buffer asks for, and its reports.

The shell tries an effect as often as it takes, and finishes it by handing its event to the core.
"""

import enum
from dataclasses import dataclass
from typing import Protocol

from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from txn.membership import Membership


class Log(Protocol):
    """The part of a managed ledger that the core reads: its end, and the entries before one."""

    @property
    def last_confirmed(self) -> Position:
        """The newest durable entry."""
        ...

    def previous_position(self, position: Position) -> Position:
        """The last entry before it."""
        ...


class Admission(enum.Enum):
    """The answer to a write."""

    JOINED = "joined"
    """Append now."""
    WAITS = "waits"
    """`AdmitWrites` or `RefuseWrites` follows."""
    ENDED = "ended"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class PutClaim:
    """Take the epoch, ask the core for the claim, put it; then `claim_durable` or `_failed`."""

    txn: TxnId


@dataclass(frozen=True, slots=True)
class ReadHeader:
    """One read that began after the claim was durable; then `header_checked` or `_failed`."""

    txn: TxnId


@dataclass(frozen=True, slots=True)
class AdmitWrites:
    """Let the waiting writes append."""

    txn: TxnId


@dataclass(frozen=True, slots=True)
class RefuseWrites:
    """Refuse the waiting writes: the transaction ended, or (with an error) the store failed."""

    txn: TxnId
    error: MagnetarError | None


@dataclass(frozen=True, slots=True)
class ReadAborted:
    """Read the aborted record, with retries; then `aborted_read`."""

    txn: TxnId


@dataclass(frozen=True, slots=True)
class RecordAborted:
    """Raise the aborted record, with retries; then `aborted_recorded`."""

    txn: TxnId
    up_to: Position


@dataclass(frozen=True, slots=True)
class DeleteClaims:
    """Delete the claims of these epochs, with retries; then `claims_deleted`."""

    txn: TxnId
    epochs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForgetAborted:
    """Delete the aborted record: the ledgers of its entries are deleted."""

    txn: TxnId


@dataclass(frozen=True, slots=True)
class StopFollowing:
    """Stop following the transaction's header."""

    txn: TxnId


@dataclass(frozen=True, slots=True)
class MaxReadPositionMoved:
    """The max read position has moved: readers may go on."""


@dataclass(frozen=True, slots=True)
class StopOwner:
    """An append's outcome is unknown: this owner writes nothing more, the log is opened anew."""

    error: MagnetarError


Effect = (
    PutClaim
    | ReadHeader
    | AdmitWrites
    | RefuseWrites
    | ReadAborted
    | RecordAborted
    | DeleteClaims
    | ForgetAborted
    | StopFollowing
    | MaxReadPositionMoved
    | StopOwner
)


@dataclass(frozen=True, slots=True)
class OpenOnSegment:
    """A transaction that is not finished on a segment, for operators.

    `pin` is the last position that it leaves readable, None if it holds nothing back; `first` and
    `entries` are of this owner's appends; `loaded`: an earlier owner may have appended more.
    """

    txn: TxnId
    state: Membership
    pin: Position | None
    first: Position | None
    entries: int
    in_flight: int
    loaded: bool
