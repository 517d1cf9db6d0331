"""Pure: the messages that open transactions hold on one subscription, and conflicts (PIP-31)."""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from magnetar.protocol.ack_set import from_words, pending_all, to_words
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from txn.errors import HeldByTransactions, TransactionConflict
from txn.pending_ack import ALL_MESSAGES, AckState, PendingAck, bits_of
from txn.records import AckedPosition


class Acknowledged(Protocol):
    """The part of a cursor that conflicts are decided by."""

    @property
    def mark_delete(self) -> Position:
        """The mark-delete position: all entries up to it are acknowledged."""
        ...

    def is_acknowledged(self, position: Position) -> bool:
        """Whether the whole entry is acknowledged."""
        ...

    def ack_set(self, position: Position) -> list[int] | None:
        """The ack set of a partly acknowledged batch, with bits for what remains; else None."""
        ...


class HeldMessages:
    """The messages of one subscription that open transactions hold, by entry.

    A plain acknowledgement of a held message counts at once, as in Pulsar: the commit then adds
    nothing, and an abort does not bring the message back.
    """

    def __init__(self, cursor: Acknowledged) -> None:
        self.any = False
        """Whether anything is held."""
        self._cursor = cursor
        self._individual: dict[Position, tuple[tuple[PendingAck, int, int], ...]] = {}
        """The holders of an entry, each with the bits of its messages and the batch size or 0."""
        self._cumulative: dict[TxnId, dict[PendingAck, None]] = {}
        self._top: PendingAck | None = None

    @property
    def cumulative_transactions(self) -> Collection[TxnId]:
        """The transactions with a cumulative acknowledgement."""
        return self._cumulative.keys()

    @property
    def cumulative(self) -> AckedPosition | None:
        """How far transactions acknowledged cumulatively; None if none did."""
        return None if self._top is None else self._top.acks[0]

    def transactions_at(self, position: Position) -> set[TxnId]:
        """The transactions that hold messages of an entry."""
        found = {ack.txn for ack, _, _ in self._individual.get(position, ())}
        top = self._top
        if top is not None and position <= top.acks[0].position:
            found.add(top.txn)
            for txn, acks in self._cumulative.items():
                if txn not in found and any(position <= ack.acks[0].position for ack in acks):
                    found.add(txn)
        return found

    def cumulative_position_of(self, txn: TxnId) -> Position | None:
        """How far a transaction acknowledged cumulatively; None if it did not."""
        acks = self._cumulative.get(txn)
        return None if not acks else max(acks, key=lambda ack: ack.rank).acks[0].position

    def holds(self, position: Position, index: int | None = None) -> bool:
        """Whether anything of an entry is held, or the message with that index in its batch."""
        bits, _ = self._held_of(position)
        return bool(bits if index is None else bits >> index & 1)

    def is_acknowledged(self, position: Position, index: int | None = None) -> bool:
        """Whether an entry is acknowledged, or the message with that index in its batch."""
        if self._cursor.is_acknowledged(position):
            return True
        words = None if index is None else self._cursor.ack_set(position)
        if words is None or index is None:
            return False
        return not from_words(words, 64 * len(words)) >> index & 1

    def is_pending(self, position: Position) -> bool:
        """Whether all messages of an entry that are not acknowledged are held."""
        bits, size = self._held_of(position)
        return bits == ALL_MESSAGES or (bool(bits) and not self._left(position, size) & ~bits)

    def remaining(
        self, position: Position, ack_set: list[int] | None, batch_size: int
    ) -> list[int] | None:
        """`ack_set` (None: the whole batch) without held messages; empty when none is left."""
        bits, _ = self._held_of(position)
        if not bits:
            return ack_set
        left = from_words(ack_set, batch_size) if ack_set else pending_all(batch_size)
        return to_words(left & ~bits)

    def _held_of(self, position: Position) -> tuple[int, int]:
        """The bits of an entry's held messages, and the size of its batch, at least 1."""
        bits, size = 0, 1
        if self._top is not None:
            (last,) = self._top.acks
            if position < last.position:
                return ALL_MESSAGES, size
            if position == last.position:
                bits, size = bits_of(last), last.batch_size or size
        for _, part, batch_size in self._individual.get(position, ()):
            bits |= part
            size = max(size, batch_size)
        return bits, size

    def add(self, ack: PendingAck) -> None:
        """Hold the messages of an acknowledgement, without a check for conflicts.

        Loaded records may overlap, as those of failed acknowledgements do.
        """
        self.any = True
        if ack.cumulative:
            self._cumulative.setdefault(ack.txn, {})[ack] = None
            if self._top is None or self._top.rank < ack.rank:
                self._top = ack
            return
        for each in ack.acks:
            others = self._individual.get(each.position, ())
            self._individual[each.position] = (
                *others,
                (ack, bits_of(each), each.batch_size),
            )

    def remove(self, ack: PendingAck) -> None:
        """Hold the messages of an acknowledgement no longer."""
        if ack.cumulative:
            mine = self._cumulative[ack.txn]
            del mine[ack]
            if not mine:
                del self._cumulative[ack.txn]
            if ack is self._top:
                held = (each for acks in self._cumulative.values() for each in acks)
                self._top = max(held, key=lambda each: each.rank, default=None)
        else:
            for each in ack.acks:
                holders = self._individual.pop(each.position, ())
                left = tuple(holder for holder in holders if holder[0] is not ack)
                if left:
                    self._individual[each.position] = left
        self.any = bool(self._individual or self._cumulative)

    # Conflicts

    def require_individual(self, acks: Sequence[AckedPosition]) -> None:
        """Raise `TransactionConflict` if any message is acknowledged already, or held (L5).

        Holds of the same transaction conflict too.  In batches single messages count.
        """
        named: dict[Position, int] = {}
        for ack in acks:
            position, bits = ack.position, bits_of(ack)
            if self._cursor.is_acknowledged(position):
                raise _conflict(position, "is acknowledged already")
            if bits != ALL_MESSAGES and bits & ~self._left(position, ack.batch_size):
                raise _conflict(position, "is acknowledged in part already")
            if bits & named.get(position, 0):
                raise _conflict(position, "is named twice")
            held, _ = self._held_of(position)
            if bits & held:
                raise _held(position, "is held by a transaction", self.transactions_at(position))
            named[position] = named.get(position, 0) | bits

    def require_cumulative(self, txn: TxnId, ack: AckedPosition) -> None:
        """Raise `TransactionConflict` unless the transaction may hold all up to `ack` (L5).

        It may raise its own cumulative acknowledgement.  It conflicts at or below the mark-delete
        position, and with messages below it that other transactions hold.
        """
        position, bits, mark = ack.position, bits_of(ack), self._cursor.mark_delete
        if position <= mark or not bits:
            raise _conflict(position, f"is not after {mark}, up to where all is acknowledged")
        others = self._cumulative.keys() - {txn}
        if others:
            raise _held(position, "meets a hold of another transaction", others)
        wanted = PendingAck(txn, True, (ack,), AckState.RESERVED)
        if self._top is not None and wanted.rank <= self._top.rank:
            raise _conflict(position, "is not after what the transaction acknowledged before")
        for other, holders in self._individual.items():
            if mark < other <= position:
                covered = bits if other == position else ALL_MESSAGES
                against = {
                    held.txn for held, part, _ in holders if held.txn != txn and covered & part
                }
                if against:
                    raise _held(other, "is held by another transaction", against)

    def _left(self, position: Position, size: int) -> int:
        """The bits of a batch's messages that are not acknowledged."""
        if self._cursor.is_acknowledged(position):
            return 0
        words = self._cursor.ack_set(position)
        return from_words(words, size) if words else pending_all(size)


def _conflict(position: Position, why: str) -> TransactionConflict:
    return TransactionConflict(f"Message {position.text} {why}: abort the transaction.")


def _held(position: Position, why: str, holders: Iterable[TxnId]) -> HeldByTransactions:
    return HeldByTransactions(
        f"Message {position.text} {why}: abort the transaction.", frozenset(holders)
    )
