"""The brokers' records at one moment, with which the audit compares the entries.  Pure."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId

__all__ = [
    "Claim",
    "Commit",
    "KeyState",
    "SegmentState",
    "Snapshot",
    "State",
    "TransactionState",
    "group_of",
    "index_of",
]


class State(enum.Enum):
    """The state in a transaction's header; MISSING: there is no header (any more)."""

    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"
    MISSING = "MISSING"


def group_of(txn: str) -> str:
    """The transaction whose header decides about `txn`: its group if it is an attempt."""
    return str(TxnId.parse(txn).group)


def index_of(txn: str) -> int:
    """The number of an attempt in its group; 0 for a transaction that is no attempt."""
    return TxnId.parse(txn).attempt_index


@dataclass(frozen=True, slots=True)
class Commit:
    """The record of a group's commit.

    `winners` has, by index of the attempt, messages and hash sum by segment topic.  A header that
    would be too large has `totals` by segment topic in place of these counts.
    """

    query: str
    batch: int
    positions: str | None
    winners: Mapping[int, Mapping[str, tuple[int, int]]]
    totals: Mapping[str, tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class TransactionState:
    """The header of one transaction."""

    txn: str
    state: State
    finalized_ms: int | None = None
    key: str | None = None
    epoch: int | None = None
    is_group: bool = False
    commit: Commit | None = None
    kept_until_ms: int | None = None
    """Brokers collect neither it nor a header that ended later before then; None: not known."""
    owner: str = ""
    """The owner of the key; several owners may have keys of the same name."""

    def state_of(self, txn: str) -> State:
        """The state of this transaction, or of an attempt of this group."""
        index = index_of(txn)
        if index == 0 or self.state is not State.COMMITTED:
            return self.state
        won = self.commit is not None and index in self.commit.winners
        return State.COMMITTED if won else State.ABORTED


@dataclass(frozen=True, slots=True)
class Claim:
    """A record that a segment has entries of a transaction, or may have."""

    txn: str
    epoch: int
    floor: Position


@dataclass(frozen=True, slots=True)
class SegmentState:
    """The records of one segment, at the cut."""

    segment_id: int
    topic: str
    parent_ids: tuple[int, ...]
    child_ids: tuple[int, ...]
    hash_start: int
    hash_end: int
    sealed: bool
    earliest: Position
    horizon: Position
    raw_end: Position
    """The position after the last stored entry; `horizon` is the one after the last readable."""
    entries_of: Mapping[int, int] = field(default_factory=dict)
    """Number of entries, by ledger, of ledgers that have ended."""
    claims: tuple[Claim, ...] = ()
    aborted: Mapping[str, Position] = field(default_factory=dict)
    """The aborted set: by transaction, the position up to which its entries are skipped."""
    offloaded_ledgers: int = 0
    trimmed: bool = False
    """Whether retention has taken its first entries."""
    trimmed_to: Position | None = None
    """Retention deleted entries before it after the cut was made; None: it deleted none.

    The scan may or may not have seen them, so nothing before this position is judged.
    """
    claimed: frozenset[str] = field(init=False, repr=False, compare=False)
    """Transactions that have a claim."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "claimed", frozenset(claim.txn for claim in self.claims))


@dataclass(frozen=True, slots=True)
class KeyState:
    """The record of one transaction key."""

    key: str
    owner: str
    epoch: int
    last: Commit | None = None
    last_group: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The brokers' records, taken before the scan of entries.

    They are read in this order: ended headers, the cut, claims and aborted sets, headers, keys.  So
    the scan sees all entries of a transaction that had ended before the cut.  And a transaction
    with a claim has a header here: a header is stored before the claim, and collected after it.
    """

    topic: str
    taken_ms: int
    segments: Mapping[int, SegmentState]
    ended_before: frozenset[str]
    """Transactions that had ended before the cut was made."""
    transactions: Mapping[str, TransactionState]
    keys: tuple[KeyState, ...] = ()

    def state_of(self, txn: str) -> State:
        """The state of a transaction or an attempt; an attempt's is in its group's header."""
        found = self.transactions.get(group_of(txn))
        return State.MISSING if found is None else found.state_of(txn)

    def was_over(self, txn: str) -> bool:
        """Whether a transaction had ended when the cut was made."""
        return group_of(txn) in self.ended_before
