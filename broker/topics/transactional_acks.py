"""Acknowledgements of a durable subscription that wait for the end of their transactions."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import ClassVar, Protocol, Self, TypeVar
from weakref import ref

from broker.topics.batch_sizes import BatchSizes
from broker.topics.consumer import Consumer
from broker.topics.dispatch.dispatcher import Dispatcher
from broker.topics.dispatch.earlier_messages import EarlierMessages, name_of
from broker.topics.dispatch.errors import ConsumerNotAllowed, SubscriptionUnavailable
from broker.topics.dispatch.source import ReadableTopic
from broker.topics.weak_references import require_present
from config.bounds import ACKED_AT_ONCE, TXN_SLICE_POSITIONS
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

_T = TypeVar("_T")


class AckedTopic(ReadableTopic, Protocol):
    """The topic of a subscription that takes acknowledgements in transactions."""

    @property
    def owner(self) -> SegmentOwner:
        """The owner of the topic, which writes its records of transactions."""
        ...


class AckedSubscription(Protocol):
    """The subscription that transactions acknowledge messages of."""

    @property
    def name(self) -> str:
        """Name of the subscription."""
        ...

    @property
    def topic(self) -> AckedTopic:
        """The topic of the subscription."""
        ...

    @property
    def cursor(self) -> Cursor:
        """The acknowledged positions."""
        ...

    @property
    def batch_sizes(self) -> BatchSizes:
        """The batches that were delivered and not acknowledged."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it takes no acknowledgements any more."""
        ...

    @property
    def dispatcher(self) -> Dispatcher | None:
        """The dispatcher; None without consumers."""
        ...

    def now_ms(self) -> int:
        """The broker's clock."""
        ...

    def wake(self) -> None:
        """Run the dispatcher: something may be sent."""
        ...

    def note_progress(self) -> None:
        """Note the time if acknowledgements moved the mark-delete position."""
        ...

    def report_end_if_reached(self) -> None:
        """Report the end of a sealed topic, if it is reached."""
        ...


_RANDOM_BYTES = 8
_COMMON_BATCH = 4096
"""Bits are made for batches of this size whatever the peer sent; larger ones must send words."""


class TransactionalAcks:
    """Acknowledgements of one durable subscription that wait for the end of their transactions.

    Dispatch skips the messages that an open transaction acknowledged, and delivers the others of a
    batch.  The consumer no longer counts them as unacknowledged.  An abort, or the end of a
    transaction without header, delivers them again: to Shared and Key_Shared with a higher
    redelivery count, to Exclusive and Failover by reading again from the first message that is not
    acknowledged.

    It is the `AckListener` of the subscription's pending acknowledgements.
    """

    pending_acks_class: ClassVar[type[PendingAcks]] = PendingAcks

    pending: PendingAcks

    def __init__(self, subscription: AckedSubscription) -> None:
        self._subscription_reference = ref(subscription)
        self._waits = False
        """Whether dispatch waits for the end of another consumer's transaction (A9)."""
        self.earlier = EarlierMessages(subscription.cursor)

    @classmethod
    async def load(cls, subscription: AckedSubscription) -> Self:
        """Load the acknowledgements that earlier owners stored.  Raises as `PendingAcks.load`."""
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

    @property
    def _subscription(self) -> AckedSubscription:
        return require_present(self._subscription_reference)

    # Acknowledgements

    def acknowledge(
        self,
        consumer: Consumer,
        txn: TxnId,
        acks: Sequence[tuple[Position, Sequence[int], int]],
        *,
        cumulative: bool,
    ) -> asyncio.Task[None]:
        """Take acknowledgements of a consumer; the task ends when they may be answered.

        Raises `SubscriptionUnavailable`, and as `PendingAcks.acknowledge`.
        """
        subscription = self._subscription
        self._require_consumer(consumer)
        if not acks or (cumulative and len(acks) != 1):
            raise ConsumerNotAllowed(
                f"An acknowledgement came with {len(acks)} message ids: send one or, if it is not "
                "cumulative, more."
            )
        named = self._named(acks)
        last = named[0].position if cumulative else None
        task = self.pending.acknowledge(
            txn,
            named,
            cumulative=cumulative,
            consumer=self._identity(consumer),
            require=partial(self._require_consumer, consumer, last),
        )
        if cumulative:
            task.add_done_callback(partial(self._acknowledged, consumer, named[0]))
        consumer.acknowledged_total += self._messages_of(named, cumulative=cumulative)
        consumer.last_acked_ms = subscription.now_ms()
        if self._waits:
            subscription.wake()
        return task

    def _acknowledged(
        self, consumer: Consumer, last: AckedPosition, task: "asyncio.Task[None]"
    ) -> None:
        """Note that a consumer acknowledged cumulatively, if the task succeeded (L8)."""
        subscription = self._subscription_reference()
        if task.cancelled() or task.exception() or subscription is None:
            return
        self.earlier.has_none(consumer)
        if subscription.dispatcher is not None:
            subscription.dispatcher.acknowledged(consumer, last.position, last.ack_set)

    async def acknowledge_many(
        self, consumer: Consumer, txn: TxnId, acks: Sequence[tuple[Position, Sequence[int], int]]
    ) -> asyncio.Task[None]:
        """As `acknowledge` for individual ones, in slices; returns when all are held, or none."""
        named: list[AckedPosition] = []
        async for part in _slices_of(acks):
            self._require_consumer(consumer)
            named += self._named(part)
        task = await self.pending.acknowledge_many(
            txn,
            named,
            consumer=self._identity(consumer),
            require=partial(self._require_consumer, consumer),
        )
        if task.done() and task.exception() is not None:
            return task
        async for each in _slices_of(named):
            consumer.acknowledged_total += self._messages_of(each, cumulative=False)
        consumer.last_acked_ms = self._subscription.now_ms()
        if self._waits:
            self._subscription.wake()
        return task

    def _require_consumer(self, consumer: Consumer, up_to: Position | None = None) -> None:
        """Raise if a consumer may not acknowledge; `up_to` is that of a cumulative one."""
        # Checked again after a wait: the next consumer may have these messages by then.
        subscription = self._subscription
        if consumer.closed or subscription.closed:
            raise SubscriptionUnavailable("The consumer was closed: subscribe again.")
        dispatcher = subscription.dispatcher
        if up_to is not None and dispatcher is not None:
            # L8: what it was sent before another one was active may be used already.
            dispatcher.require_unused(consumer, up_to)
            # L9: so may what it was sent before it attached.
            self.earlier.require_unused(consumer, sent=dispatcher.was_sent(consumer, up_to))

    def _named(self, acks: Sequence[tuple[Position, Sequence[int], int]]) -> list[AckedPosition]:
        """What is to be held.  Raises `TransactionConflict` for messages that do not exist."""
        # A transaction must not commit an acknowledgement that would be passed over.
        end = self._subscription.topic.ledger.last_confirmed
        for position, _, _ in acks:
            if position > end or position.entry_id < 0:
                raise TransactionConflict(
                    f"There is no message {position.text} to be "
                    "acknowledged: abort the transaction."
                )
        return [
            AckedPosition(position, tuple(words), _batch_size(batch_size, words))
            if words
            else AckedPosition(position)
            for position, words, batch_size in acks
        ]

    def _messages_of(self, named: Sequence[AckedPosition], *, cumulative: bool) -> int:
        """The messages that are acknowledged, as far as the delivered batches tell."""
        sizes = self._subscription.batch_sizes
        if cumulative:
            return sizes.take_up_to(named[0].position, 1)
        return sum(
            sizes.take_all_but(each.position, each.ack_set)
            if each.ack_set
            else sizes.take(each.position)
            for each in named
        )

    def must_wait_for(self, consumer: Consumer, txns: Iterable[TxnId]) -> bool:
        """Whether one of these transactions must end before the consumer gets more (A9).

        Such a transaction has no acknowledgement of the consumer.  The dispatcher runs again when
        the answer may have changed.
        """
        # A9: a consumer that acknowledges cumulatively behind messages that it never got would
        # acknowledge them too, if their transaction aborts.  Transactions in which it acknowledged
        # something are its own: it knows what they hold.
        identity, is_of = self._identity(consumer), self.pending.core.is_of
        self._waits = any(not is_of(txn, identity) for txn in txns)
        return self._waits

    def open_of(self, consumer: Consumer) -> list[TxnId]:
        """Transactions without a known end in which a consumer acknowledged."""
        identity, core = self._identity(consumer), self.pending.core
        return [txn for txn in core.open_transactions if core.is_of(txn, identity)]

    def _identity(self, consumer: Consumer) -> str:
        # Stored with each acknowledgement.  A consumer with an incarnation is the same one on a new
        # connection and after a load.  Any other is a new one each time that it attaches: a process
        # with the name of an earlier one knows nothing of that one's transactions.
        if not consumer.identity:
            consumer.identity = name_of(consumer)
            if INCARNATION not in consumer.metadata:
                bits = self._subscription.topic.context.random.getrandbits(8 * _RANDOM_BYTES)
                consumer.identity += f"{bits:0{2 * _RANDOM_BYTES}x}"
        return consumer.identity

    # Events of pending acknowledgements

    def held(self, acks: Sequence[PendingAck]) -> None:
        """See `AckListener`."""
        dispatcher = self._subscription.dispatcher
        if dispatcher is not None:
            for each in _individual(acks):
                dispatcher.held(each.position, bits_of(each))
            if self._waits:
                dispatcher.wake()

    def refused(self, acks: Sequence[PendingAck]) -> None:
        """See `AckListener`."""
        self._released(acks, again=False)

    def applied(self, acks: Sequence[PendingAck]) -> None:
        """See `AckListener`."""
        subscription = self._subscription
        dispatcher, cursor = subscription.dispatcher, subscription.cursor
        for ack in acks:
            if ack.cumulative:
                # L9: others that come back may have these messages in hand.
                self.earlier.used(ack.consumer, ack.acks[0].position)
        if dispatcher is not None:
            for each in _individual(acks):
                if cursor.is_acknowledged(each.position):
                    dispatcher.settled(None, each.position, 0)
                else:
                    dispatcher.held(each.position, bits_of(each))
            dispatcher.wake()
        self._redeliver_released()
        subscription.note_progress()
        subscription.report_end_if_reached()

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
        self._redeliver_released()
        subscription.report_end_if_reached()

    def _redeliver_released(self) -> None:
        """Deliver released messages again, once all transactions of known end are finished."""
        # Half of an abort would change the order of messages of one key.
        dispatcher = self._subscription.dispatcher
        if dispatcher is not None and dispatcher.coming_back and not self.pending.core.ending:
            positions = sorted(dispatcher.coming_back)
            dispatcher.coming_back.clear()
            self._redeliver(dispatcher, positions)

    def _redeliver(self, dispatcher: Dispatcher, positions: Sequence[Position]) -> None:
        """Have a dispatcher deliver entries again, a slice in each turn of the loop."""
        if dispatcher is not self._subscription.dispatcher:
            return  # A later dispatcher reads them by itself.
        slice_size = len(positions) if dispatcher.reads_again else TXN_SLICE_POSITIONS
        dispatcher.released(positions[:slice_size], again=True)
        rest = positions[slice_size:]
        if rest:
            asyncio.get_running_loop().call_soon(self._redeliver, dispatcher, rest)


async def _slices_of(items: Sequence[_T]) -> AsyncIterator[Sequence[_T]]:
    """Parts of a sequence, one in each turn of the loop."""
    for first in range(0, len(items), ACKED_AT_ONCE):
        if first:
            await asyncio.sleep(0)
        yield items[first : first + ACKED_AT_ONCE]


async def forget_subscription(topic: ReadableTopic, subscription: str) -> None:
    """Delete the records of a subscription whose cursor is deleted, or not created yet."""
    store = topic.context.transactions.store
    await ack_records.forget_subscription(store, str(topic.name), subscription)


def _individual(acks: Sequence[PendingAck]) -> list[AckedPosition]:
    return [each for ack in acks if not ack.cumulative for each in ack.acks]


def _batch_size(batch_size: int, words: Sequence[int]) -> int:
    """The peer's batch size, but not much more than the bits that it sent."""
    enough = max(len(words) * 64 + 1, _COMMON_BATCH)
    return min(batch_size, enough) if batch_size > 0 else len(words) * 64
