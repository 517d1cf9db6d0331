"""One acknowledgement record of a transaction: its messages and its state.  Pure."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from config.bounds import TXN_PENDING_POSITIONS
from magnetar.protocol.ack_set import from_words, pending_all
from magnetar.protocol.ids import Position
from magnetar.protocol.state_table import StateTable
from magnetar.protocol.txn_id import TxnId
from txn.errors import TransactionAssertion
from txn.records import AckedPosition, AckRecord

ALL_MESSAGES: Final = -1
"""The bits of a whole entry: all that there are."""


class AckState(enum.Enum):
    """The state of one acknowledgement record; it moves only as `_MOVES` says."""

    RESERVED = "holds its messages; has no record yet"
    PUTTING = "its record is being made durable"
    CONFIRMING = "its record is durable; that this is still the owner is being proven (A1)"
    LOADED = "found at load; the header is not read yet"
    HELD = "answered, or loaded, and its transaction is open"
    APPLYING = "committed: in the cursor, and not known to be durable there"
    APPLIED = "committed, and durable in the cursor: its record may go (A2)"
    RELEASED = "of no effect: its record may go"
    GONE = "forgotten"


_S = AckState
_MOVES: StateTable[AckState] = StateTable(
    {
        _S.RESERVED: frozenset({_S.PUTTING, _S.GONE}),
        _S.PUTTING: frozenset({_S.CONFIRMING, _S.RELEASED}),
        _S.CONFIRMING: frozenset({_S.HELD, _S.RELEASED}),
        _S.LOADED: frozenset({_S.HELD, _S.APPLYING, _S.RELEASED}),
        _S.HELD: frozenset({_S.APPLYING, _S.RELEASED}),
        _S.APPLYING: frozenset({_S.APPLIED}),
        _S.APPLIED: frozenset({_S.GONE}),
        _S.RELEASED: frozenset({_S.GONE}),
        _S.GONE: frozenset(),
    },
    defect=TransactionAssertion,
)


@dataclass(slots=True, eq=False)
class PendingAck:
    """The acknowledgements of one record.  `record` is set from PUTTING on."""

    txn: TxnId
    cumulative: bool
    acks: tuple[AckedPosition, ...]
    state: AckState
    record: AckRecord | None = None
    consumer: str = ""
    """Identity of the consumer that acknowledged, as in `AckRecord`."""

    @property
    def rank(self) -> tuple[Position, int]:
        """How far a cumulative acknowledgement reaches; a whole entry is above any part of it."""
        (last,) = self.acks
        bits = bits_of(last)
        return last.position, TXN_PENDING_POSITIONS if bits == ALL_MESSAGES else bits.bit_count()

    def move(self, to: AckState) -> None:
        """Change the state.  Raises `TransactionAssertion` for a move that is not in the table."""
        self.state = _MOVES.move(self.state, to, "An acknowledgement of {}", self.txn)


@dataclass(frozen=True, slots=True)
class WantedAck:
    """A requested acknowledgement.  `require` raises if the request is no longer valid."""

    txn: TxnId
    acks: Sequence[AckedPosition]
    cumulative: bool
    consumer: str
    require: Callable[[], None]


def bits_of(ack: AckedPosition) -> int:
    """The messages that an acknowledgement names; -1 for a whole entry."""
    if not ack.ack_set:
        return ALL_MESSAGES
    return pending_all(ack.batch_size) & ~from_words(ack.ack_set, ack.batch_size)
