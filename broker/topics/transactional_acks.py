"""What a durable subscription keeps of transactions: acknowledgements that wait for their end.

Rules:

- Messages that an open transaction acknowledged are skipped by dispatch, and not acknowledged; of
  a batch the others are delivered.  Its consumers do not count them as unacknowledged any more.
- An abort, or the end of a transaction without header, delivers them again at once: to Shared and
  Key_Shared with a redelivery more, to Exclusive and Failover by reading again from the first
  message that is not acknowledged.
- What comes back does so in the order of its positions and when all of it is released, a slice in
  each turn of the loop: a half of an abort would change the order that is kept for keys.  What was
  asked for again, or read again, meanwhile is with whoever got it and does not come once more.
- To Exclusive and Failover nothing is delivered that comes after what a transaction of another
  consumer acknowledged, until that has ended (A9): acknowledging it cumulatively would, if it
  aborts, acknowledge what comes back and was never seen.  A transaction in which the consumer
  acknowledged something too is its own: it knows it, and gets what follows.
- A consumer that tells its incarnation is the same one on a new connection and after a load, for
  the record of an acknowledgement says whose it is.  Any other one is another one each time that it
  attaches: a process that was started again with the name of an earlier one knows nothing of that
  one's transactions.
- What the ledger does not have is refused: a transaction must not commit what was passed over.
- Subscriptions that are not durable take no acknowledgements in transactions: nobody would keep
  them.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, Self

from broker.topics.consumer import Consumer
from broker.topics.dispatch.dispatcher import Dispatcher
from broker.topics.dispatch.errors import ConsumerNotAllowed, SubscriptionUnavailable
from broker.topics.dispatch.source import ReadableTopic
from config.bounds import TXN_SLICE_POSITIONS
from magnetar.protocol.ids import Position
from magnetar.protocol.incarnation import INCARNATION
from magnetar.protocol.txn_id import TxnId
from storage.managed_ledger.cursor import Cursor
from txn import ack_records
from txn.errors import TransactionConflict
from txn.pending_ack import PendingAck, bits_of
from txn.pending_acks import PendingAcks
from txn.records import AckedPosition
from txn.segment_owner import SegmentOwner


class AckedTopic(ReadableTopic, Protocol):
    """The topic of a subscription that takes acknowledgements in transactions."""

    @property
    def owner(self) -> SegmentOwner:
        """Who may write records of transactions for the topic."""
        ...


class AckedSubscription(Protocol):
    """What transactions acknowledge messages of."""

    @property
    def name(self) -> str:
        """Of the subscription."""
        ...

    @property
    def topic(self) -> AckedTopic:
        """Whose messages they are."""
        ...

    @property
    def cursor(self) -> Cursor:
        """What is acknowledged."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it takes nothing any more."""
        ...

    @property
    def dispatcher(self) -> Dispatcher | None:
        """Who sends; None while nobody consumes."""
        ...

    def wake(self) -> None:
        """Something may be sent."""
        ...

    def look_at_end(self) -> None:
        """Report the end of a sealed topic, when it is so far."""
        ...


_IDENTITY_BYTES = 12
_COMMON_BATCH = 4096
"""Bits are made for batches of this size whatever the peer sent; larger ones must send words."""


class TransactionalAcks:
    """Acknowledgements of one durable subscription that wait for the end of their transactions.

    Listens to the pending acknowledgements of one subscription.
    """

    pending_acks_class: ClassVar[type[PendingAcks]] = PendingAcks

    pending: PendingAcks

    def __init__(self, subscription: AckedSubscription) -> None:
        self._subscription = subscription
        self._kept = False
        """Whether a consumer got nothing because of another one's transaction."""

    @classmethod
    async def load(cls, subscription: AckedSubscription) -> Self:
        """What earlier owners left.  Raises as `PendingAcks.load`."""
        topic = subscription.topic
        loaded = cls(subscription)
        loaded.pending = await cls.pending_acks_class.load(
            str(topic.name),
            subscription.name,
            subscription.cursor,
            topic.owner,
            topic.context.transactions,
            loaded,
        )
        return loaded

    # Taking

    def acknowledge(
        self,
        consumer: Consumer,
        txn: TxnId,
        acks: Sequence[tuple[Position, Sequence[int], int]],
        *,
        cumulative: bool,
    ) -> asyncio.Task[None]:
        """Take what a consumer acknowledges; the task ends when it may be answered.

        Raises `SubscriptionUnavailable`, and as `PendingAcks.acknowledge`.
        """
        subscription = self._subscription

        def require_consumer() -> None:
            # Checked again after a wait: the next consumer may have these messages by then.
            if consumer.closed or subscription.closed:
                raise SubscriptionUnavailable("The consumer was closed: subscribe again.")

        require_consumer()
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
        task = self.pending.acknowledge(
            txn,
            named,
            cumulative=cumulative,
            consumer=self._identity(consumer),
            require=require_consumer,
        )
        consumer.acknowledged_total += len(named)
        if self._kept:
            subscription.wake()
        return task

    def keeps_from(self, consumer: Consumer, txns: Iterable[TxnId]) -> bool:
        """Whether one of these is another one's and has to end before a consumer gets more (A9).

        Remembers it, so that the dispatcher runs again when that may have changed.
        """
        identity, is_of = self._identity(consumer), self.pending.core.is_of
        self._kept = any(not is_of(txn, identity) for txn in txns)
        return self._kept

    def open_of(self, consumer: Consumer) -> list[TxnId]:
        """Transactions in which a consumer acknowledged, and whose end is not known."""
        identity, core = self._identity(consumer), self.pending.core
        return [txn for txn in core.open_transactions if core.is_of(txn, identity)]

    def _identity(self, consumer: Consumer) -> str:
        if not consumer.identity:
            incarnation = consumer.metadata.get(INCARNATION)
            if incarnation is None:
                bits = self._subscription.topic.context.random.getrandbits(8 * _IDENTITY_BYTES)
                consumer.identity = f"{bits:0{2 * _IDENTITY_BYTES}x}"
            else:
                told = f"{consumer.name}\0{incarnation}".encode()
                consumer.identity = hashlib.blake2b(told, digest_size=_IDENTITY_BYTES).hexdigest()
        return consumer.identity

    # What becomes of it

    def held(self, acks: Sequence[PendingAck]) -> None:
        """See `AckListener`."""
        dispatcher = self._subscription.dispatcher
        if dispatcher is not None:
            for each in _individual(acks):
                dispatcher.held(each.position, bits_of(each))
            if self._kept:
                dispatcher.wake()

    def refused(self, acks: Sequence[PendingAck]) -> None:
        """See `AckListener`."""
        self._released(acks, again=False)

    def applied(self, acks: Sequence[PendingAck]) -> None:
        """See `AckListener`."""
        subscription = self._subscription
        dispatcher, cursor = subscription.dispatcher, subscription.cursor
        if dispatcher is not None:
            for each in _individual(acks):
                if cursor.is_acknowledged(each.position):
                    dispatcher.settled(None, each.position, 0)
                else:
                    dispatcher.held(each.position, bits_of(each))
            dispatcher.wake()
        self._bring_back_whole()
        subscription.look_at_end()

    def released(self, acks: Sequence[PendingAck]) -> None:
        """See `AckListener`."""
        self._released(acks, again=True)

    def _released(self, acks: Sequence[PendingAck], *, again: bool) -> None:
        subscription = self._subscription
        dispatcher = subscription.dispatcher
        if dispatcher is not None:
            positions = {each.position for each in _individual(acks)}
            if any(ack.cumulative for ack in acks):
                positions.add(subscription.cursor.mark_delete)
            if again:
                dispatcher.coming_back |= positions
            else:
                dispatcher.released(sorted(positions), again=False)
        self._bring_back_whole()
        subscription.look_at_end()

    def _bring_back_whole(self) -> None:
        """Bring back what was released, once every end that is known is carried out."""
        dispatcher = self._subscription.dispatcher
        if dispatcher is not None and dispatcher.coming_back and not self.pending.core.ending:
            positions = sorted(dispatcher.coming_back)
            dispatcher.coming_back.clear()
            self._bring_back(dispatcher, positions)

    def _bring_back(self, dispatcher: Dispatcher, positions: Sequence[Position]) -> None:
        """Bring them back in slices; a dispatcher that took over meanwhile reads them by itself."""
        if dispatcher is not self._subscription.dispatcher:
            return
        slice_size = len(positions) if dispatcher.reads_again else TXN_SLICE_POSITIONS
        dispatcher.released(positions[:slice_size], again=True)
        rest = positions[slice_size:]
        if rest:
            asyncio.get_running_loop().call_soon(self._bring_back, dispatcher, rest)


async def forget_subscription(topic: ReadableTopic, subscription: str) -> None:
    """Delete the records of a subscription whose cursor is gone, or not made yet."""
    store = topic.context.transactions.store
    await ack_records.forget_subscription(store, str(topic.name), subscription)


def _individual(acks: Sequence[PendingAck]) -> list[AckedPosition]:
    return [each for ack in acks if not ack.cumulative for each in ack.acks]


def _batch_size(batch_size: int, words: Sequence[int]) -> int:
    """The peer's, but not much more than the bits that it sent."""
    enough = max(len(words) * 64 + 1, _COMMON_BATCH)
    return min(batch_size, enough) if batch_size > 0 else len(words) * 64
