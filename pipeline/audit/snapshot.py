"""What the brokers' records say at one moment, for the audit to hold the entries against.

Pure.  Rules:

- It is taken in this order: headers that have ended (`ended_before`); the cut, with each segment's
  raw end; claims and aborted sets; headers (`transactions`); keys; then the scan.  So what had
  ended before the cut is in the scan as a whole, whatever ends afterwards, and whoever has a claim
  has a header: that is stored before it, and collected after it.
- What retention takes while the scan runs may be in it or not: earliest positions are asked for
  again behind it (`trimmed_to`), and nothing before them is judged.
- An attempt is judged by the header of its group: its id tells which (`group_of`).
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from magnetar.transactions.txn_id import TxnId
from protocol.ids import Position

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
    """What a header says; MISSING: there is none (any more)."""

    OPEN = "OPEN"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"
    MISSING = "MISSING"


def group_of(txn: str) -> str:
    """The transaction whose header decides about `txn`: its group if it is an attempt."""
    return str(TxnId.parse(txn).group)


def index_of(txn: str) -> int:
    """Which attempt of its group it is; 0: none."""
    return TxnId.parse(txn).attempt_index


@dataclass(frozen=True, slots=True)
class Commit:
    """What a group committed.

    `winners`: by index of the attempt, messages and hash sum by segment topic; `totals` in place of
    them where the header would have been too large.
    """

    query: str
    batch: int
    positions: str | None
    winners: Mapping[int, Mapping[str, tuple[int, int]]]
    totals: Mapping[str, tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class TransactionState:
    """One header."""

    txn: str
    state: State
    finalized_ms: int | None = None
    key: str | None = None
    epoch: int | None = None
    is_group: bool = False
    commit: Commit | None = None
    kept_until_ms: int | None = None
    """Until when it, and each that ended later, is surely there; None: that is not known."""
    owner: str = ""
    """Whose key it is; keys of one name may be of several."""

    def state_of(self, txn: str) -> State:
        """Of this transaction, or of an attempt of this group."""
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
    """One segment at the cut."""

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
    """Positions are of the next entry."""
    entries_of: Mapping[int, int] = field(default_factory=dict)
    """By ledger, of those that have ended."""
    claims: tuple[Claim, ...] = ()
    aborted: Mapping[str, Position] = field(default_factory=dict)
    """Transactions whose entries are to be skipped, up to the position named."""
    offloaded_ledgers: int = 0
    trimmed: bool = False
    """Whether retention has taken its first entries."""
    trimmed_to: Position | None = None
    """What lies before it was taken after the cut was made; None: nothing was."""
    claimed: frozenset[str] = field(init=False, repr=False, compare=False)
    """Transactions that have a claim."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "claimed", frozenset(claim.txn for claim in self.claims))


@dataclass(frozen=True, slots=True)
class KeyState:
    """One transaction key."""

    key: str
    owner: str
    epoch: int
    last: Commit | None = None
    last_group: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """See the module's rules."""

    topic: str
    taken_ms: int
    segments: Mapping[int, SegmentState]
    ended_before: frozenset[str]
    transactions: Mapping[str, TransactionState]
    keys: tuple[KeyState, ...] = ()

    def state_of(self, txn: str) -> State:
        """Of a transaction or attempt."""
        found = self.transactions.get(group_of(txn))
        return State.MISSING if found is None else found.state_of(txn)

    def was_over(self, txn: str) -> bool:
        """Whether it had ended when the cut was made."""
        return group_of(txn) in self.ended_before
