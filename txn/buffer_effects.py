"""What the pure core of a segment's buffer hands out, and what it says about transactions.

Rule: an effect is finished by handing its event to the core, however often it has to be tried.
"""

import enum
from dataclasses import dataclass
from typing import Protocol

from protocol.ids import Position
from protocol.server_error import MagnetarError
from txn.membership import Membership
from txn.txn_id import TxnId


class Log(Protocol):
    """What the core asks of a managed ledger: how far it is durable, and what lies before."""

    @property
    def last_confirmed(self) -> Position:
        """The newest durable entry."""
        ...

    def previous_position(self, position: Position) -> Position:
        """The last entry before it."""
        ...


class Admission(enum.Enum):
    """What is answered to a write."""

    JOINED = "joined"
    """Append now."""
    WAITS = "waits"
    """`Admitted` or `Refused` follows."""
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
class Admitted:
    """Who waits may append."""

    txn: TxnId


@dataclass(frozen=True, slots=True)
class Refused:
    """Who waits may not: the transaction ended, or (with an error) the store failed."""

    txn: TxnId
    error: MagnetarError | None


@dataclass(frozen=True, slots=True)
class ReadAborted:
    """Read the aborted record, until that worked; then `aborted_read`."""

    txn: TxnId


@dataclass(frozen=True, slots=True)
class RecordAborted:
    """Raise the aborted record, until that worked; then `aborted_recorded`."""

    txn: TxnId
    up_to: Position


@dataclass(frozen=True, slots=True)
class DeleteClaims:
    """Delete the claims of these epochs, until that worked; then `claims_deleted`."""

    txn: TxnId
    epochs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForgetAborted:
    """Delete the aborted record: the ledgers that it speaks of are gone."""

    txn: TxnId


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The transaction is not followed any more."""

    txn: TxnId


@dataclass(frozen=True, slots=True)
class HorizonMoved:
    """More may be read."""


@dataclass(frozen=True, slots=True)
class StopOwner:
    """An append's outcome is unknown: this owner writes nothing more, the log is opened anew."""

    error: MagnetarError


Effect = (
    PutClaim
    | ReadHeader
    | Admitted
    | Refused
    | ReadAborted
    | RecordAborted
    | DeleteClaims
    | ForgetAborted
    | Forgotten
    | HorizonMoved
    | StopOwner
)


@dataclass(frozen=True, slots=True)
class OpenOnSegment:
    """A transaction that is not finished on a segment, for people.

    `pin` is the last position it leaves readable, None if it holds nothing back; `first` and
    `entries` count what this owner appended; `loaded`: an earlier owner may have appended more.
    """

    txn: TxnId
    state: Membership
    pin: Position | None
    first: Position | None
    entries: int
    in_flight: int
    loaded: bool
