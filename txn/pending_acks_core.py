"""Pure: the acknowledgements of open transactions on one subscription, from taking to forgetting.

Rules:

- Messages are held by the acknowledgement that names them, from the moment it is taken until its
  transaction ends or it fails (`HeldMessages` says what conflicts).  Held messages are not
  delivered, after a load neither (A4).
- A seek changes nothing about what is held: open transactions keep it, and apply it when they
  commit.
- A transaction without header is void: nothing of it is applied (A5).
- Only records that were put or loaded here are deleted, each by its key (A2, W6), and those of a
  commit after the cursor is durable.
- What is in flight when its transaction ends shares the outcome.
- An end is carried out with the decision if it is one slice of TXN_SLICE_POSITIONS, else in slices
  after it; what waits stays held, so nobody sees a half of a commit.
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
    """They are durable: whoever has these messages is relieved of them."""

    acks: Sequence[PendingAck]


@dataclass(frozen=True, slots=True)
class Apply:
    """Committed: acknowledge them in the cursor."""

    acks: Sequence[PendingAck]


@dataclass(frozen=True, slots=True)
class Release:
    """Aborted or void: deliver these messages again, at once."""

    acks: Sequence[PendingAck]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Failed: the messages stay with whoever has them."""

    acks: Sequence[PendingAck]


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing of the transaction is left here: follow it no longer."""

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

    Methods that are named by what happened (`stored`, `decided`) are events; they return effects.
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
        """How many positions are named by what is not forgotten."""
        self.commits = 0
        """Transactions with acknowledgements here that committed, since this was loaded."""
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

    # What is asked about it

    def knows(self, record: AckRecord) -> bool:
        """Whether the record was put or loaded here and is not deleted yet."""
        return _identity(record) in self._known

    def has(self, txn: TxnId) -> bool:
        """Whether anything of the transaction is here."""
        return txn in self._transactions

    def is_open(self, txn: TxnId) -> bool:
        """Whether something of the transaction is here, and its end is not known."""
        known = self._transactions.get(txn)
        return known is not None and not known.ended

    def is_of(self, txn: TxnId, consumer: str) -> bool:
        """Whether a consumer acknowledged something here in the transaction (A9)."""
        known = self._transactions.get(txn)
        return known is not None and consumer in known.consumers

    @property
    def transactions(self) -> Sequence[TxnId]:
        """Those of which anything is here, ended or not."""
        return list(self._transactions)

    @property
    def open_transactions(self) -> Mapping[TxnId, int]:
        """The transactions that hold something, with how many records of each."""
        return {txn: len(each.acks) for txn, each in self._transactions.items() if not each.ended}

    @property
    def finishing(self) -> bool:
        """Whether something of an ended transaction is left (A7)."""
        return any(each.ended for each in self._transactions.values())

    @property
    def ending(self) -> bool:
        """Whether something of an ended transaction is to be applied or released: `end_some`."""
        return bool(self._ending)

    @property
    def to_clean(self) -> bool:
        """Whether the cursor is to be made durable for something, or a record to be deleted."""
        return bool(self._applying or self._deletable)

    @property
    def applying(self) -> Sequence[PendingAck]:
        """In the cursor, and not known to be durable there."""
        return list(self._applying)

    @property
    def deletable(self) -> Sequence[PendingAck]:
        """Return the acknowledgements whose records may be deleted."""
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
        """This record is put now."""
        ack.record = record
        self._known.add(_identity(record))
        ack.move(AckState.PUTTING)

    def stored(self, acks: Iterable[PendingAck]) -> None:
        """Their records are durable."""
        for ack in acks:
            ack.move(AckState.CONFIRMING)

    def confirmed(self, acks: Sequence[PendingAck]) -> list[Effect]:
        """The records were followed by a proof of ownership (A1).  `end_late` comes next."""
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
        """Their records, or the proof, failed.  What was put may be stored and is deleted."""
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
        """A record that an earlier owner left (A3)."""
        ack = PendingAck(
            record.txn, record.cumulative, record.acks, AckState.LOADED, record, record.consumer
        )
        self._known.add(_identity(record))
        self._add(ack)

    def opened(self, txn: TxnId) -> None:
        """The header of a loaded transaction says OPEN."""
        known = self._transactions.get(txn)
        for ack in () if known is None else known.acks:
            if ack.state is AckState.LOADED:
                ack.move(AckState.HELD)

    # Ends

    def decided(self, txn: TxnId, outcome: TxnState | None) -> list[Effect]:
        """The transaction ended; None: it has no header (A5).  A second call changes nothing."""
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
        """Apply or release what waits for it longest: one record, or as many as a slice takes."""
        ending, effects = self._ending, list[Effect]()
        positions = 0
        while ending and positions < TXN_SLICE_POSITIONS:
            txn = ending[0].txn
            part: list[PendingAck] = []
            while ending and ending[0].txn == txn and positions < TXN_SLICE_POSITIONS:
                part.append(ending.popleft())
                positions += len(part[-1].acks)
            committed = self._transactions[txn].outcome is TxnState.COMMITTED
            effects.append(self._apply(part) if committed else self._release(part))
        return effects

    def durable(self, acks: Iterable[PendingAck]) -> None:
        """The cursor has them durably (A2)."""
        for ack in acks:
            ack.move(AckState.APPLIED)
            del self._applying[ack]
            self._deletable[ack] = None

    def deleted(self, ack: PendingAck) -> list[Effect]:
        """Its record is deleted."""
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
    """Split into records of so many positions and words at most."""
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
