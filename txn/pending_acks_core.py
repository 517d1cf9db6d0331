"""Pure: the acknowledgements of open transactions on one subscription.  Events in, effects out.

Rules (A, W: `docs/transactions.md`):

- A2: records of a commit are deleted after the cursor is durable.
- A4: a loaded record holds its messages again.
- A5: of a transaction without header nothing is applied.
- W6: only records that were put or loaded here are deleted, each by its key.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from config.bounds import (
    TXN_ACKS_OF_RECORD,
    TXN_ENDED_KEPT,
    TXN_PENDING_POSITIONS,
    TXN_SLICE_POSITIONS,
)
from magnetar.protocol.txn_id import TxnId
from txn.errors import InvalidTxnStatus, TooManyPendingAcks, TransactionNotFound
from txn.held_messages import Acknowledged, HeldMessages
from txn.pending_ack import AckState, PendingAck
from txn.records import AckedPosition, AckRecord, TxnState


@dataclass(frozen=True, slots=True)
class Hold:
    """The records are durable: the messages are no longer the consumers' to acknowledge."""

    acks: Sequence[PendingAck]


@dataclass(frozen=True, slots=True)
class Apply:
    """The transaction committed: acknowledge the messages in the cursor."""

    acks: Sequence[PendingAck]


@dataclass(frozen=True, slots=True)
class Release:
    """The transaction aborted, or is void: deliver the messages again, at once."""

    acks: Sequence[PendingAck]


@dataclass(frozen=True, slots=True)
class Refuse:
    """The acknowledgements failed: the messages stay with their consumers."""

    acks: Sequence[PendingAck]


@dataclass(frozen=True, slots=True)
class Forget:
    """No acknowledgement of the transaction is left here: stop following it."""

    txn: TxnId


Effect = Hold | Apply | Release | Refuse | Forget


@dataclass(slots=True)
class _Transaction:
    acks: dict[PendingAck, None] = field(default_factory=dict)
    consumers: set[str] = field(default_factory=set)
    ended: bool = False
    outcome: TxnState | None = None


class PendingAcksCore:
    """The state of a subscription's acknowledgements in transactions.

    An acknowledgement holds its messages from `reserve`, or `load`, until its transaction ends or
    it fails.  Held messages are not delivered.  A seek changes no hold.

    The end of a transaction is carried out in slices of TXN_SLICE_POSITIONS positions, the first at
    once if there is no other.  Messages stay held until their slice, so that no consumer sees half
    of a commit.

    Methods with a past participle as their name (`stored`, `decided`) are events; they return
    effects.
    """

    def __init__(
        self,
        cursor: Acknowledged,
        *,
        ended_kept: int = TXN_ENDED_KEPT,
        max_positions: int = TXN_PENDING_POSITIONS,
        record_positions: int = TXN_ACKS_OF_RECORD,
    ) -> None:
        self.held = HeldMessages(cursor)
        self.positions = 0
        """The number of positions in all acknowledgements that are not forgotten."""
        self.commits = 0
        """The number of transactions with acknowledgements here that committed since the load."""
        self.aborts = 0
        self._transactions: dict[TxnId, _Transaction] = {}
        self._applying: dict[PendingAck, None] = {}
        self._deletable: dict[PendingAck, None] = {}
        self._ending: deque[PendingAck] = deque()
        """Acknowledgements of ended transactions that are still to be applied or released."""
        self._known: set[tuple[TxnId, int, int]] = set()
        self._ended: OrderedDict[TxnId, TxnState | None] = OrderedDict()
        self._ended_kept = ended_kept
        self.max_positions = max_positions
        self.record_positions = record_positions

    # Queries

    def knows(self, record: AckRecord) -> bool:
        """Whether the record was put or loaded here and is not deleted yet."""
        return _identity(record) in self._known

    def has(self, txn: TxnId) -> bool:
        """Whether there are acknowledgements of the transaction."""
        return txn in self._transactions

    def is_open(self, txn: TxnId) -> bool:
        """Whether there are acknowledgements of the transaction, and its end is not known."""
        known = self._transactions.get(txn)
        return known is not None and not known.ended

    def is_of(self, txn: TxnId, consumer: str) -> bool:
        """Whether a consumer acknowledged something here in the transaction (A9)."""
        known = self._transactions.get(txn)
        return known is not None and consumer in known.consumers

    @property
    def transactions(self) -> Sequence[TxnId]:
        """All transactions with acknowledgements here, ended or not."""
        return list(self._transactions)

    @property
    def open_transactions(self) -> Mapping[TxnId, int]:
        """The open transactions with acknowledgements here, with the number of their records."""
        return {txn: len(each.acks) for txn, each in self._transactions.items() if not each.ended}

    @property
    def finishing(self) -> bool:
        """Whether acknowledgements of an ended transaction are left (A7)."""
        return any(each.ended for each in self._transactions.values())

    @property
    def ending(self) -> bool:
        """Whether acknowledgements wait to be applied or released by `end_some`."""
        return bool(self._ending)

    @property
    def to_clean(self) -> bool:
        """Whether the cursor has to be made durable, or a record to be deleted."""
        return bool(self._applying or self._deletable)

    @property
    def applying(self) -> Sequence[PendingAck]:
        """The acknowledgements that are in the cursor, and not known to be durable there."""
        return list(self._applying)

    @property
    def deletable(self) -> Sequence[PendingAck]:
        """The acknowledgements whose records may be deleted."""
        return list(self._deletable)

    # Taking

    def reserve(
        self, txn: TxnId, acks: Sequence[AckedPosition], *, cumulative: bool, consumer: str = ""
    ) -> list[PendingAck]:
        """Hold these messages, all or none, one `PendingAck` for each record to be put.

        Raises `TransactionConflict`, which is `HeldByTransactions` where others may end,
        `InvalidTxnStatus`, `TransactionNotFound`, `TooManyPendingAcks`.
        """
        self.require_not_ended(txn)
        if self.positions + len(acks) > self.max_positions:
            raise TooManyPendingAcks(
                f"Open transactions hold {self.positions} positions of the subscription: end some."
            )
        if cumulative:
            (last,) = acks
            self.held.require_cumulative(txn, last)
        else:
            self.held.require_individual(acks)
        taken = [
            PendingAck(txn, cumulative, part, AckState.RESERVED, consumer=consumer)
            for part in _split_into_records(acks, self.record_positions)
        ]
        for ack in taken:
            self._add(ack)
        return taken

    def require_not_ended(self, txn: TxnId) -> None:
        """Raise `InvalidTxnStatus` or `TransactionNotFound` if the end is known."""
        known = self._transactions.get(txn)
        if known is not None and known.ended:
            outcome = known.outcome
        elif txn in self._ended:
            outcome = self._ended[txn]
        elif not txn.is_ever_given:
            outcome = None
        else:
            return
        if outcome is None:
            raise TransactionNotFound(f"There is no transaction {txn} any more: begin another.")
        raise InvalidTxnStatus(f"Transaction {txn} is {outcome.value} already: begin another.")

    def putting(self, ack: PendingAck, record: AckRecord) -> None:
        """Note that this record is put now."""
        ack.record = record
        # W6: noted before the put, whose outcome may stay unknown.
        self._known.add(_identity(record))
        ack.move(AckState.PUTTING)

    def stored(self, acks: Iterable[PendingAck]) -> None:
        """The records are durable."""
        for ack in acks:
            ack.move(AckState.CONFIRMING)

    def confirmed(self, acks: Sequence[PendingAck]) -> list[Effect]:
        """Ownership was proven after the records were durable (A1).  Call `end_late` next."""
        for ack in acks:
            ack.move(AckState.HELD)
        return [Hold(acks)]

    def end_late(self, acks: Sequence[PendingAck]) -> list[Effect]:
        """Give acknowledgements confirmed just now the outcome of their transaction, if ended."""
        known = self._transactions[acks[0].txn]
        if not known.ended:
            return []
        committed = known.outcome is TxnState.COMMITTED
        return [self._apply(acks) if committed else self._release(acks)]

    def failed(self, acks: Sequence[PendingAck]) -> list[Effect]:
        """The records, or the proof, failed; records that may be stored are deleted."""
        gone: list[Effect] = []
        for ack in acks:
            self.held.remove(ack)
            if ack.state is AckState.RESERVED:
                gone += self._forget(ack)
            else:
                ack.move(AckState.RELEASED)
                self._deletable[ack] = None
        return [Refuse(acks), *gone]

    # Loading

    def load(self, record: AckRecord) -> None:
        """Load a record that an earlier owner left (A3); its messages are held again (A4)."""
        # A4: held, like one that was taken here.
        ack = PendingAck(
            record.txn, record.cumulative, record.acks, AckState.LOADED, record, record.consumer
        )
        self._known.add(_identity(record))
        self._add(ack)

    def opened(self, txn: TxnId) -> None:
        """The header of a loaded transaction was read as OPEN."""
        known = self._transactions.get(txn)
        for ack in () if known is None else known.acks:
            if ack.state is AckState.LOADED:
                ack.move(AckState.HELD)

    # Ends

    def decided(self, txn: TxnId, outcome: TxnState | None) -> list[Effect]:
        """The transaction ended; None: its header is gone (A5).  A second call changes nothing."""
        known = self._transactions.get(txn)
        if known is None:
            self._remember(txn, outcome)
            return []
        if known.ended:
            return []
        known.ended, known.outcome = True, outcome
        self.commits += outcome is TxnState.COMMITTED
        self.aborts += outcome is TxnState.ABORTED
        ending = [ack for ack in known.acks if ack.state in (AckState.HELD, AckState.LOADED)]
        alone = not self._ending
        self._ending.extend(ending)
        positions = sum(len(ack.acks) for ack in ending)
        return self.end_some() if alone and positions <= TXN_SLICE_POSITIONS else []

    def end_some(self) -> list[Effect]:
        """Apply or release one slice of the oldest acknowledgements whose transaction has ended."""
        ending, effects = self._ending, list[Effect]()
        positions = 0
        while ending and positions < TXN_SLICE_POSITIONS:
            txn = ending[0].txn
            part: list[PendingAck] = []
            while ending and ending[0].txn == txn and positions < TXN_SLICE_POSITIONS:
                part.append(ending.popleft())
                positions += len(part[-1].acks)
            # A5: without a header the outcome is None, and the messages are released.
            committed = self._transactions[txn].outcome is TxnState.COMMITTED
            effects.append(self._apply(part) if committed else self._release(part))
        return effects

    def durable(self, acks: Iterable[PendingAck]) -> None:
        """The acknowledgements are durable in the cursor (A2)."""
        for ack in acks:
            ack.move(AckState.APPLIED)
            # A2: only now its record may be deleted.
            del self._applying[ack]
            self._deletable[ack] = None

    def deleted(self, ack: PendingAck) -> list[Effect]:
        """The record of an acknowledgement is deleted."""
        del self._deletable[ack]
        return self._forget(ack)

    def _apply(self, acks: Sequence[PendingAck]) -> Apply:
        for ack in acks:
            self.held.remove(ack)
            ack.move(AckState.APPLYING)
            self._applying[ack] = None
        return Apply(acks)

    def _release(self, acks: Sequence[PendingAck]) -> Release:
        for ack in acks:
            self.held.remove(ack)
            ack.move(AckState.RELEASED)
            self._deletable[ack] = None
        return Release(acks)

    def _forget(self, ack: PendingAck) -> list[Effect]:
        ack.move(AckState.GONE)
        self.positions -= len(ack.acks)
        if ack.record is not None:
            self._known.discard(_identity(ack.record))
        known = self._transactions[ack.txn]
        del known.acks[ack]
        if known.acks:
            return []
        del self._transactions[ack.txn]
        if known.ended:
            self._remember(ack.txn, known.outcome)
        return [Forget(ack.txn)]

    def _remember(self, txn: TxnId, outcome: TxnState | None) -> None:
        self._ended[txn] = outcome
        self._ended.move_to_end(txn)
        if len(self._ended) > self._ended_kept:
            self._ended.popitem(last=False)

    def _add(self, ack: PendingAck) -> None:
        known = self._transactions.setdefault(ack.txn, _Transaction())
        known.acks[ack] = None
        if ack.consumer:
            known.consumers.add(ack.consumer)
        self.positions += len(ack.acks)
        self.held.add(ack)


def _split_into_records(
    acks: Sequence[AckedPosition], at_most: int
) -> Iterable[tuple[AckedPosition, ...]]:
    """Split acknowledgements into records of `at_most` positions and words."""
    part: list[AckedPosition] = []
    weight = 0
    for ack in acks:
        heavy = 1 + len(ack.ack_set)
        if part and weight + heavy > at_most:
            yield tuple(part)
            part, weight = [], 0
        part.append(ack)
        weight += heavy
    yield tuple(part)


def _identity(record: AckRecord) -> tuple[TxnId, int, int]:
    return record.txn, record.epoch, record.number
