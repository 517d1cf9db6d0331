"""One topic: producers and subscriptions over one managed ledger.

Rules:

- States move only as `_MOVES` says.  SEALING takes no new producers and lets attached ones
  finish; SEALED is a terminated ledger, for ever; CLOSING answers nothing new.
- Receipts leave in SEND order of a producer, one each, and never for a producer that is closed.
- A ledger that failed so that its end is not known, or that was FENCED, is given up: the topic
  closes, and the next one who asks for it loads it anew.  So is a topic whose ownership was lost.
- Consumers read up to the horizon and never see an entry of an aborted transaction.
- What transactions left of a subscription that is gone is deleted before one of that name is made.
"""

import asyncio
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import structlog

from broker.background import Background
from broker.deduplication import Deduplication
from broker.dispatch.errors import ConsumerBusy
from broker.dispatch.last_message import LastMessage
from broker.publishing import Publishing
from broker.subscription import Subscription
from broker.topic_producers import TopicProducers
from broker.transactional_acks import forget_subscription
from config.bounds import SEAL_WAIT_S
from protocol.frames import FrameError
from protocol.ids import Position
from protocol.message import parse_metadata, transaction_named_by
from protocol.server_error import MagnetarError, PeerError, ServerError
from storage.ledger.store import LedgerError
from storage.managed_ledger_types import ManagedLedgerState
from storage.metadata.store import MetadataError
from txn.txn_id import TxnId

if TYPE_CHECKING:
    from broker.consumer import Consumer, SubscribeRequest
    from broker.producer import Producer, ProducerRequest
    from broker.sequence_store import SequenceStore
    from broker.service import Broker
    from protocol.names import TopicName
    from storage.managed_ledger import ManagedLedger
    from storage.managed_ledger_types import Entry
    from txn.buffer import SegmentBuffer

log = structlog.get_logger(__name__)


class TopicNotFound(PeerError):
    """There is no such topic and it may not be created."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND


class TopicTerminated(PeerError):
    """The topic is sealed: look the layout up again and write to its successors."""

    code: ClassVar[ServerError] = ServerError.TOPIC_TERMINATED_ERROR


class TopicUnavailable(PeerError):
    """The topic is being closed or loaded: try again at once."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class SubscriptionNotFound(PeerError):
    """The topic has no such subscription and it may not be made."""

    code: ClassVar[ServerError] = ServerError.SUBSCRIPTION_NOT_FOUND


class SubscriptionRefused(PeerError):
    """A subscription of that name exists and is of the other durability."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class TopicState(enum.Enum):
    """Where a topic stands in its life."""

    LOADING = "loading"
    OPEN = "open"
    SEALING = "sealing"
    SEALED = "sealed"
    CLOSING = "closing"
    CLOSED = "closed"


_S = TopicState
_MOVES: Mapping[TopicState, frozenset[TopicState]] = {
    _S.LOADING: frozenset({_S.OPEN, _S.SEALED, _S.CLOSING}),
    _S.OPEN: frozenset({_S.SEALING, _S.CLOSING}),
    _S.SEALING: frozenset({_S.SEALED, _S.CLOSING}),
    _S.SEALED: frozenset({_S.CLOSING}),
    _S.CLOSING: frozenset({_S.CLOSED}),
    _S.CLOSED: frozenset(),
}
_READABLE = (_S.OPEN, _S.SEALING, _S.SEALED)


class Topic:
    """See the module's rules.  Made by `TopicRegistry`, used by handlers and scalable topics."""

    def __init__(
        self,
        broker: "Broker",
        name: "TopicName",
        ledger: "ManagedLedger",
        store: "SequenceStore",
        buffer: "SegmentBuffer",
    ) -> None:
        """Over an open ledger, its loaded sequence ids and transactions."""
        self.broker = broker
        self.name = name
        self.ledger = ledger
        self.state = TopicState.LOADING
        self.uses = 0
        """How often it was asked for since it was loaded; see `broker.idle_topics`."""
        self.sequence_store = store
        self.buffer = buffer
        self.owner = buffer.owner
        self.last_message = LastMessage(self)
        self._producers = TopicProducers(self)
        self._publishing = Publishing(
            ledger, broker.publish_limits, store, buffer, self._ledger_failed
        )
        self._subscriptions: dict[str, Subscription] = {
            cursor_name: Subscription(self, cursor_name, cursor)
            for cursor_name, cursor in ledger.cursors.items()
        }
        self.entries_read_total = 0
        """Of bulk readers, which are no consumers, since the topic was loaded."""
        self.bytes_read_total = 0
        self._past_messages_out = 0
        self._past_bytes_out = 0
        self._subscription_change = asyncio.Lock()
        self._work = Background()
        self._sealing: asyncio.Task[Position] | None = None
        self._failure: MagnetarError | None = None
        self._forget_appends = ledger.on_append(store.appended)
        self._forget_horizon = buffer.on_horizon(self._horizon_moved)
        ledger.on_stop(self._ledger_failed)
        self.publish = self._publishing.publish
        self.refuse = self._publishing.refuse
        self.damaged = self._publishing.damaged

    async def load_transactions(self) -> None:
        """What is acknowledged in open transactions; before anybody consumes."""
        for subscription in self._subscriptions.values():
            await subscription.load_transactions()

    async def abandon(self) -> None:
        """Loading failed: let go of what was loaded.  The ledger and the buffer are others'."""
        self._forget_appends()
        self._forget_horizon()
        for subscription in self._subscriptions.values():
            await subscription.close(persist=False)

    def opened(self) -> None:
        """Loaded: serve."""
        if self.ledger.state is ManagedLedgerState.TERMINATED:
            self._move(TopicState.SEALED)
            for subscription in self.subscriptions.values():
                subscription.topic_sealed()
        else:
            self._move(TopicState.OPEN)
        failure = self._failure or self.owner.lost
        if failure is not None:
            # It came while nobody could give up what was not there yet.
            self._ledger_failed(failure)

    # What is asked about it

    @property
    def sealed(self) -> bool:
        """True once the ledger is terminated: nothing will ever be appended."""
        return self.state is TopicState.SEALED

    @property
    def idle(self) -> bool:
        """Whether nobody is attached and nothing is under way: closing it now disturbs nobody."""
        return (
            self.state in (TopicState.OPEN, TopicState.SEALED)
            and self.ledger.state in (ManagedLedgerState.OPEN, ManagedLedgerState.TERMINATED)
            and not self.producers
            and not self._publishing.in_flight
            and not self._work.busy
            and self.buffer.idle
            and not self._subscription_change.locked()
            and (self._sealing is None or self._sealing.done())
            and all(subscription.idle for subscription in self._subscriptions.values())
        )

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        """By name, durable and not."""
        return self._subscriptions

    @property
    def producers(self) -> Mapping[str, "Producer"]:
        """By name: attached, waiting, or with something still in flight."""
        return self._producers.by_name

    @property
    def sequences(self) -> Deduplication:
        """The last sequence id of each producer."""
        return self.sequence_store.sequences

    @property
    def deduplicates(self) -> bool:
        """Whether the policies want every send held against the last sequence id."""
        policy = self.broker.namespaces.known(self.name.namespace_name).deduplication
        return self.broker.settings.deduplication if policy is None else policy

    @property
    def messages_in_total(self) -> int:
        """Messages published since the topic was loaded."""
        now = sum(producer.messages_in for producer in self.producers.values())
        return self._producers.past_messages_in + now

    @property
    def bytes_in_total(self) -> int:
        """Bytes of entries published since the topic was loaded."""
        now = sum(producer.bytes_in for producer in self.producers.values())
        return self._producers.past_bytes_in + now

    @property
    def messages_out_total(self) -> int:
        """Messages sent to consumers since the topic was loaded, also of subscriptions now gone."""
        now = sum(each.messages_out_total for each in self._subscriptions.values())
        return self._past_messages_out + now

    @property
    def bytes_out_total(self) -> int:
        """Bytes of entries sent to consumers since the topic was loaded."""
        now = sum(each.bytes_out_total for each in self._subscriptions.values())
        return self._past_bytes_out + now

    def max_read_position(self) -> Position:
        """Up to where consumers may read: the horizon of transactions."""
        return self.buffer.horizon

    def is_aborted(self, entry: "Entry") -> bool:
        """Whether an entry at or before the horizon is never to be delivered."""
        if not self.buffer.anything_aborted:
            return False
        try:
            named = transaction_named_by(parse_metadata(entry.data))
        except FrameError:
            return False
        return named is not None and self.buffer.is_aborted(TxnId(*named))

    def _horizon_moved(self) -> None:
        for subscription in list(self._subscriptions.values()):
            subscription.wake()
            if self.sealed:
                subscription.look_at_end()

    def require_open(self) -> None:
        """Raise unless producers may come: `TopicTerminated`, `TopicUnavailable`."""
        if self.state in (TopicState.SEALING, TopicState.SEALED):
            raise TopicTerminated(
                f"{self.name} is sealed: look its topic up again and write to the successors."
            )
        if self.state is not TopicState.OPEN:
            raise self._unavailable()

    def require_readable(self) -> None:
        """Raise `TopicUnavailable` unless what is stored may be read."""
        if self.state not in _READABLE:
            raise self._unavailable()

    # Producers

    async def add_producer(self, request: "ProducerRequest") -> "Producer":
        """Attach a producer by its access mode; one that waits for others has `ready` set.

        Raises `ProducerBusy`, `ProducerFenced`, `TopicTerminated`, `TopicUnavailable`.
        """
        self.require_open()
        return await self._producers.add(request)

    def producer_gone(self, producer: "Producer") -> None:
        """A closed producer has nothing in flight any more."""
        self._producers.remove(producer)

    # Subscriptions

    async def subscribe(self, request: "SubscribeRequest") -> "Consumer":
        """Attach a consumer, making the subscription if need be.

        Raises `SubscriptionNotFound`, `SubscriptionRefused`, `ConsumerBusy` ...
        """
        self.require_readable()
        subscription = self._subscriptions.get(request.subscription)
        if subscription is None:
            subscription = await self._work.finish(self._subscription_for(request))
        if subscription.durable is not request.durable:
            kind = "durable" if subscription.durable else "not durable"
            raise SubscriptionRefused(
                f"Subscription {request.subscription!r} exists on {self.name} and is {kind}: "
                "use another name."
            )
        return await subscription.add_consumer(request)

    async def create_subscription(
        self, name: str, start: Position, *, properties: Mapping[str, str] | None = None
    ) -> Subscription:
        """The durable subscription `name`, made at `start` unless it exists (then untouched)."""
        return await self._work.finish(self._create_subscription(name, start, properties or {}))

    async def unsubscribe(self, name: str, *, force: bool) -> None:
        """Delete a subscription and its cursor.

        Raises `ConsumerBusy` while it has consumers unless `force`, `SubscriptionNotFound`.
        """
        await self._work.finish(self._unsubscribe(name, force=force))

    async def _create_subscription(
        self, name: str, start: Position, properties: Mapping[str, str]
    ) -> Subscription:
        async with self._subscription_change:
            self.require_readable()
            existing = self._subscriptions.get(name)
            if existing is not None and existing.durable:
                return existing
            return await self._make_durable(name, start, properties)

    async def _unsubscribe(self, name: str, *, force: bool) -> None:
        async with self._subscription_change:
            subscription = self._subscriptions.get(name)
            if subscription is None:
                raise SubscriptionNotFound(
                    f"{self.name} has no subscription {name!r}: see its list over REST."
                )
            if subscription.consumers and not force:
                raise ConsumerBusy(
                    f"Subscription {name!r} on {self.name} has consumers: close them, or force."
                )
            del self._subscriptions[name]
            await subscription.close(persist=False)
            self._past_messages_out += subscription.messages_out_total
            self._past_bytes_out += subscription.bytes_out_total
            try:
                await self.ledger.delete_cursor(name)
            except (MetadataError, LedgerError):
                await self._restore(Subscription(self, name, subscription.cursor))
                raise
            if subscription.durable:
                await self._forget_transactions_of(name)

    async def _restore(self, subscription: Subscription) -> None:
        """It could not be deleted, so it is still there."""
        try:
            await subscription.load_transactions()
        except MagnetarError as error:
            self._ledger_failed(error)
        else:
            self._keep(subscription)

    async def _forget_transactions_of(self, name: str) -> None:
        try:
            await forget_subscription(self, name)
        except MagnetarError as error:
            log.warning("acknowledgement_records_left", topic=str(self.name), error=str(error))

    async def _subscription_for(self, request: "SubscribeRequest") -> Subscription:
        name = request.subscription
        async with self._subscription_change:
            self.require_readable()
            existing = self._subscriptions.get(name)
            if existing is not None:
                return existing
            if not request.durable:
                reader = self.ledger.open_reader_cursor(name, request.start)
                return self._keep(Subscription(self, name, reader))
            if not request.create:
                raise SubscriptionNotFound(
                    f"{self.name} has no subscription {name!r}: create it first."
                )
            return await self._make_durable(name, request.start, request.properties)

    async def _make_durable(
        self, name: str, start: Position, properties: Mapping[str, str]
    ) -> Subscription:
        await forget_subscription(self, name)
        cursor = await self.ledger.open_cursor(name, start, properties=properties)
        subscription = Subscription(self, name, cursor)
        await subscription.load_transactions()
        return self._keep(subscription)

    def _keep(self, subscription: Subscription) -> Subscription:
        self._subscriptions[subscription.name] = subscription
        if self.sealed:
            subscription.topic_sealed()
        return subscription

    # The end of a segment

    def begin_seal(self) -> None:
        """OPEN -> SEALING: new producers get TopicTerminated, attached ones finish."""
        if self.state in (TopicState.SEALING, TopicState.SEALED):
            return
        if self.state is not TopicState.OPEN:
            raise self._unavailable()
        self._move(TopicState.SEALING)
        self._producers.refuse_waiting(TopicTerminated(f"{self.name} is being sealed."))

    async def seal(self) -> Position:
        """Wait (bounded) for attached producers, terminate, tell everybody.  The last position.

        Idempotent; after a failure it may be called again.
        """
        self.begin_seal()
        if self._sealing is None:
            self._sealing = asyncio.get_running_loop().create_task(self._seal())
        sealing = self._sealing
        try:
            return await asyncio.shield(sealing)
        finally:
            if sealing.done() and (sealing.cancelled() or sealing.exception() is not None):
                self._sealing = None

    async def _seal(self) -> Position:
        if self.state is TopicState.SEALING:
            gone = await self._producers.wait_gone(SEAL_WAIT_S)
            log.debug("segment_sealing", topic=str(self.name), producers_gone=gone)
        last = await self.ledger.terminate()
        if self.state is TopicState.SEALING:
            self._move(TopicState.SEALED)
            await self._producers.disconnect_all()
            for subscription in list(self._subscriptions.values()):
                subscription.topic_sealed()
            await self.sequence_store.end()
        return last

    # The end of this instance

    async def close(self) -> None:
        """Disconnect everybody, make cursors durable, release the ledger.

        Raises the first failure, after everything was tried.
        """
        if self.state in (TopicState.CLOSING, TopicState.CLOSED):
            return
        self._move(TopicState.CLOSING)
        if self._sealing is not None:
            self._sealing.cancel()
        await self._producers.disconnect_all()
        failures: list[MagnetarError] = []
        async with self._subscription_change:
            for subscription in list(self._subscriptions.values()):
                try:
                    await subscription.close(persist=True)
                except MagnetarError as error:
                    failures.append(error)
        await self._work.wait()
        self._forget_appends()
        self._forget_horizon()
        for close in (self.buffer.close, self.sequence_store.close, self.ledger.close):
            try:
                await close()
            except MagnetarError as error:
                failures.append(error)
        self._move(TopicState.CLOSED)
        if failures:
            raise failures[0]

    def ownership_lost(self, error: MagnetarError) -> None:
        """Another process owns the segment now."""
        self._ledger_failed(error)

    def _ledger_failed(self, error: MagnetarError) -> None:
        """The ledger must be opened anew; what is in flight may turn up later (W4)."""
        self._failure = error
        self.buffer.stop(error)
        if self.state in _READABLE:
            log.warning("topic_given_up", topic=str(self.name), error=str(error))
            self.broker.topics.give_up(self)

    def _unavailable(self) -> TopicUnavailable:
        return TopicUnavailable(f"{self.name} is {self.state.value}: try again at once.")

    def _move(self, to: TopicState) -> None:
        if to not in _MOVES[self.state]:
            raise RuntimeError(f"{self.name} cannot go from {self.state} to {to}.")
        self.state = to
