"""What a durable subscription keeps of transactions: acknowledgements that wait for their end.

Rules:

- Messages that an open transaction acknowledged are skipped by dispatch, and not acknowledged; of
  a batch the others are delivered.  Its consumers do not count them as unacknowledged any more.
- An abort, or the end of a transaction without header, delivers them again at once: to Shared and
  Key_Shared with a redelivery more, to Exclusive and Failover by reading again from the first
  message that is not acknowledged.
- What comes back does so in the order of its positions and when all of it is released, a slice in
  each turn of the loop: a half of an abort would change the order that is kept for keys.
- To Exclusive and Failover nothing is delivered that comes after what a transaction of another
  consumer acknowledged cumulatively, until that has ended: acknowledging it cumulatively would, if
  it aborts, acknowledge what comes back and was never seen.  The same consumer, which knows its
  transaction, gets what follows also on a new connection: it has the same name, and the same
  incarnation if it tells one.  After a load nobody is known to be that consumer.
- What the ledger does not have is refused: a transaction must not commit what was passed over.
- Subscriptions that are not durable take no acknowledgements in transactions: nobody would keep
  them.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from broker.dispatch.errors import ConsumerNotAllowed, SubscriptionUnavailable
from config.bounds import TXN_SLICE_POSITIONS
from protocol.ack_set import from_words
from protocol.incarnation import INCARNATION
from txn import ack_records
from txn.errors import TransactionConflict
from txn.pending_acks import PendingAcks
from txn.records import AckedPosition

if TYPE_CHECKING:
    from broker.consumer import Consumer
    from broker.dispatch.dispatcher import Dispatcher
    from broker.subscription import Subscription
    from broker.topic import Topic
    from protocol.ids import Position
    from txn.pending_ack import PendingAck
    from txn.txn_id import TxnId

_Identity = tuple[str, str | None]
_COMMON_BATCH = 4096
"""Bits are made for batches of this size whatever the peer sent; larger ones must send words."""


class TransactionalAcks:
    """See the module's rules.  Listens to the pending acknowledgements of one subscription."""

    pending_acks_class: ClassVar[type[PendingAcks]] = PendingAcks

    pending: PendingAcks

    def __init__(self, subscription: "Subscription") -> None:
        self._subscription = subscription
        self._coming_back: list[Position] = []
        self._reader: tuple[TxnId, _Identity] | None = None
        """Whose cumulative acknowledgement was taken last."""

    @classmethod
    async def load(cls, subscription: "Subscription") -> Self:
        """What earlier owners left.  Raises as `PendingAcks.load`."""
        topic = subscription.topic
        loaded = cls(subscription)
        loaded.pending = await cls.pending_acks_class.load(
            str(topic.name),
            subscription.name,
            subscription.cursor,
            topic.owner,
            topic.broker.transactions.parts,
            loaded,
        )
        return loaded

    # Taking

    def acknowledge(
        self,
        consumer: "Consumer",
        txn: "TxnId",
        acks: "Sequence[tuple[Position, Sequence[int], int]]",
        *,
        cumulative: bool,
    ) -> "asyncio.Task[None]":
        """Take what a consumer acknowledges; the task ends when it may be answered.

        Raises `SubscriptionUnavailable`, and as `PendingAcks.acknowledge`.
        """
        subscription = self._subscription
        if consumer.closed or subscription.closed:
            raise SubscriptionUnavailable("The consumer was closed: subscribe again.")
        if not acks or (cumulative and len(acks) != 1):
            raise ConsumerNotAllowed(
                f"An acknowledgement came with {len(acks)} message ids: send one or, if it is not "
                "cumulative, more."
            )
        end = subscription.topic.ledger.last_confirmed
        for position, _, _ in acks:
            if position > end or position.entry_id < 0:
                raise TransactionConflict(
                    f"There is no message {position.text} to be "
                    "acknowledged: abort the transaction."
                )
        named = [
            AckedPosition(position, tuple(words), _batch_size(batch_size, words))
            if words
            else AckedPosition(position)
            for position, words, batch_size in acks
        ]
        task = self.pending.acknowledge(txn, named, cumulative=cumulative)
        if cumulative and self._reader != (reader := (txn, _identity(consumer))):
            self._reader = reader
            subscription.wake()
        consumer.acknowledged_total += len(named)
        return task

    def keeps_from(self, consumer: "Consumer") -> bool:
        """Whether a transaction of another one has to end before a consumer gets anything."""
        txn = self.pending.core.held.up_to
        return txn is not None and self._reader != (txn, _identity(consumer))

    # What becomes of it

    def held(self, acks: "Sequence[PendingAck]") -> None:
        """See `AckListener`."""
        dispatcher = self._subscription.dispatcher
        if dispatcher is not None:
            for each in _individual(acks):
                dispatcher.held(each.position, self._remaining(each))

    def refused(self, acks: "Sequence[PendingAck]") -> None:
        """See `AckListener`."""
        self._released(acks, again=False)

    def applied(self, acks: "Sequence[PendingAck]") -> None:
        """See `AckListener`."""
        subscription = self._subscription
        dispatcher, cursor = subscription.dispatcher, subscription.cursor
        if dispatcher is not None:
            for each in _individual(acks):
                if cursor.is_acknowledged(each.position):
                    dispatcher.settled(None, each.position, 0)
                else:
                    dispatcher.held(each.position, self._remaining(each))
            dispatcher.wake()
        subscription.look_at_end()

    def released(self, acks: "Sequence[PendingAck]") -> None:
        """See `AckListener`."""
        self._released(acks, again=True)

    def _released(self, acks: "Sequence[PendingAck]", *, again: bool) -> None:
        subscription = self._subscription
        if subscription.dispatcher is not None:
            positions = [each.position for each in _individual(acks)]
            if any(ack.cumulative for ack in acks):
                positions.append(subscription.cursor.mark_delete)
            if again:
                self._coming_back += positions
                if not self.pending.core.ending:
                    positions, self._coming_back = sorted(self._coming_back), []
                    self._bring_back(subscription.dispatcher, positions)
            else:
                subscription.dispatcher.released(positions, again=False)
        else:
            self._coming_back.clear()
        subscription.look_at_end()

    def _bring_back(self, dispatcher: "Dispatcher", positions: "Sequence[Position]") -> None:
        """Bring them back in slices; a dispatcher that took over meanwhile reads them by itself."""
        if dispatcher is not self._subscription.dispatcher:
            return
        slice_size = len(positions) if dispatcher.reads_again else TXN_SLICE_POSITIONS
        dispatcher.released(positions[:slice_size], again=True)
        rest = positions[slice_size:]
        if rest:
            asyncio.get_running_loop().call_soon(self._bring_back, dispatcher, rest)

    def _remaining(self, ack: AckedPosition) -> int:
        """Messages of the entry that are neither acknowledged nor held."""
        cursor = self._subscription.cursor
        if not ack.ack_set or cursor.is_acknowledged(ack.position):
            return 0
        words = cursor.ack_set(ack.position)
        left = self.pending.core.held.remaining(ack.position, words, ack.batch_size)
        if left is None:
            return ack.batch_size
        return from_words(left, ack.batch_size).bit_count()


async def forget_subscription(topic: "Topic", subscription: str) -> None:
    """Delete the records of a subscription whose cursor is gone, or not made yet."""
    store = topic.broker.transactions.parts.store
    await ack_records.forget_subscription(store, str(topic.name), subscription)


def _identity(consumer: "Consumer") -> _Identity:
    return consumer.name, consumer.metadata.get(INCARNATION)


def _individual(acks: "Sequence[PendingAck]") -> "list[AckedPosition]":
    return [each for ack in acks if not ack.cumulative for each in ack.acks]


def _batch_size(batch_size: int, words: Sequence[int]) -> int:
    """The peer's, but not much more than the bits that it sent."""
    enough = max(len(words) * 64 + 1, _COMMON_BATCH)
    return min(batch_size, enough) if batch_size > 0 else len(words) * 64
