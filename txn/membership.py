"""The states of one transaction on one owner's segment, and their moves.  Pure."""

import enum
from dataclasses import dataclass, field

from magnetar.protocol.ids import Position
from magnetar.protocol.state_table import StateTable
from magnetar.protocol.txn_id import TxnId
from txn.errors import TransactionAssertion
from txn.records import TxnState


class Membership(enum.Enum):
    """The state of a transaction, as the owner knows it; it moves only as `MOVES` says."""

    SCANNED = "scanned"
    """Claims were found while the segment is loaded; the header was not read yet."""
    LOADED = "loaded"
    """Open, with claims of earlier owners: pins their floor, permits nothing."""
    CLAIMING = "claiming"
    """The own claim is being put."""
    CHECKING = "checking"
    """The own claim is durable, the header is being read."""
    UNPROVEN = "unproven"
    """The own claim may be there, but the put or the read failed: nothing was appended."""
    # W1, W2, W3: only this state takes appends.
    JOINED = "joined"
    """The own claim was durable, and then the header read as OPEN: appends need no metadata."""
    REFUSING = "refusing"
    """Ended, and this owner appended nothing: its own claim is being deleted."""
    JUDGING = "judging"
    """The header is gone: the aborted record is being read (W9)."""
    COMMITTED = "committed"
    """It committed; claims are being deleted."""
    ABORTED = "aborted"
    """It aborted; its appends, and then its aborted record, are waited for."""
    RECORDED = "recorded"
    """The aborted record is durable; claims are being deleted."""

    __hash__ = object.__hash__  # that of Enum is not written in C


_M = Membership
_ENDS = frozenset({_M.COMMITTED, _M.ABORTED, _M.JUDGING})
MOVES: StateTable[Membership] = StateTable(
    {
        _M.SCANNED: frozenset({_M.LOADED, _M.COMMITTED, _M.ABORTED}),
        _M.LOADED: _ENDS | {_M.CLAIMING},
        _M.CLAIMING: _ENDS | {_M.CHECKING, _M.LOADED, _M.UNPROVEN, _M.REFUSING},
        _M.CHECKING: _ENDS | {_M.JOINED, _M.LOADED, _M.UNPROVEN, _M.REFUSING},
        _M.UNPROVEN: frozenset({_M.CLAIMING, _M.REFUSING}),
        _M.JOINED: _ENDS | {_M.REFUSING},
        _M.JUDGING: frozenset({_M.COMMITTED, _M.ABORTED}),
        # W5: claims go only after the aborted record is durable.
        _M.ABORTED: frozenset({_M.RECORDED}),
        _M.RECORDED: frozenset(),
        _M.COMMITTED: frozenset(),
        _M.REFUSING: frozenset(),
    },
    defect=TransactionAssertion,
)
FORGETTABLE = frozenset({_M.RECORDED, _M.COMMITTED, _M.REFUSING})
"""A transaction in one of these states is forgotten once its claims are deleted."""
ENDED = frozenset({_M.REFUSING, _M.JUDGING, _M.COMMITTED, _M.ABORTED, _M.RECORDED})
"""In these states the end is known: writes are refused."""
PINNING = frozenset({_M.LOADED, _M.CLAIMING, _M.CHECKING, _M.JOINED, _M.JUDGING})
"""Only in these states a transaction may hold readers back."""
WAITING = frozenset({_M.CLAIMING, _M.CHECKING})
"""In these states the claim is being put, or the header read, and writes wait for it."""


@dataclass(slots=True)
class Member:
    """A transaction that has, or may have, claims here."""

    txn: TxnId
    state: Membership
    epochs: set[int] = field(default_factory=set)
    """The epochs of the claims that this owner wrote or loaded (W6)."""
    floor: Position | None = None
    """The lowest of loaded claims: entries of earlier owners come after it."""
    first: Position | None = None
    entries: int = 0
    issued: int = 0
    in_flight: int = 0
    end_known: bool = False
    """The end was decided while claim or header was under way; `end` then has it."""
    end: TxnState | None = None
