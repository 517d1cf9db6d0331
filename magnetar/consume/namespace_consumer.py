"""Consumers of all topics of a namespace, and the watch of a namespace's topics."""

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from magnetar.background_tasks import BackgroundTasks
from magnetar.bounds import (
    NAMESPACE_BATCH,
    NAMESPACE_OPENINGS,
    NAMESPACE_QUIET_S,
    NAMESPACE_READY,
    NAMESPACE_RETRY_LIMIT_S,
    NAMESPACE_TOPICS,
)
from magnetar.consume.acknowledgements import DONE, AckTransaction, Outcomes, cannot_commit
from magnetar.consume.known_topics import Change, KnownTopics
from magnetar.consume.message import Message
from magnetar.consume.queue_consumer import QueueConsumer
from magnetar.consume.receiving import Consumer, check_message, random_name
from magnetar.consume.settings import QueueSettings, StreamSettings
from magnetar.consume.stream_consumer import StreamConsumer
from magnetar.context import ClientContext, check_loop
from magnetar.errors import (
    AlreadyClosed,
    BrokerError,
    ConnectionLost,
    InvalidArgument,
    MagnetarError,
    NotSupported,
    OperationTimedOut,
    TopicNotFound,
    TransactionConflict,
)
from magnetar.message_id import MessageId, Positions
from magnetar.opening import resolve
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.protocol.names import parse_namespace_name, parse_topic_name
from magnetar.refusals import Refusals
from magnetar.schema.schema import Schema
from magnetar.wire.attachment import Attachment
from magnetar.wire.connection import Connection, PeerKind
from magnetar.wire.requests import error_in

__all__ = [
    "NamespaceMessage",
    "NamespaceQueueConsumer",
    "NamespaceStreamConsumer",
    "NamespaceWatch",
]


T = TypeVar("T")
_log = logging.getLogger(__name__)
ChangeListener = Callable[[Change], None]
_NO_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType({})
_Vectors = Mapping[str, Positions]
_NO_VECTORS: Final[_Vectors] = MappingProxyType({})


class NamespaceWatch(Attachment):
    """Follows the scalable topics of a namespace, over reconnects.

    Any broker answers a WATCH_SCALABLE_TOPICS: it sends all topics with the requested properties,
    and then each change.  Once topics were received, an error is retried (`Refusals`).
    """

    def __init__(
        self,
        context: ClientContext,
        namespace: str,
        properties: Mapping[str, str] = _NO_PROPERTIES,
        *,
        changed: ChangeListener,
        ended: Callable[[MagnetarError], None],
        quiet_s: float = NAMESPACE_QUIET_S,
        max_topics: int = NAMESPACE_TOPICS,
    ) -> None:
        """Watch `tenant/namespace`.

        `changed` is called with each change as it arrives, also with the first snapshot; `ended` is
        called with the error if the watch fails.  Raises `InvalidNamespaceName`.
        """
        super().__init__(context)
        self._namespace: Final = str(parse_namespace_name(namespace))
        self._properties: Final = dict(properties)
        self._watch_id: Final = context.ids.session_id()
        self._changed: Final = changed
        self._ended: Final = ended
        self._quiet_s: Final = quiet_s
        self._max_topics: Final = max_topics
        self._known = KnownTopics()
        self._refusals = Refusals()
        self._first: asyncio.Future[None] | None = None

    @property
    def topics(self) -> frozenset[str]:
        """The names of the known topics: `topic://...`."""
        return self._known.names

    # Attachment

    def describe(self) -> str:
        """The name used in errors."""
        return f"The watch of the topics of {self._namespace}"

    async def find(self) -> Connection:
        """A connection to any broker."""
        return await self.context.pool.any()

    async def attach(self, connection: Connection) -> None:
        """Open the watch and wait for the first answer.

        Raises `NotSupported` if the broker has no scalable topics, and `OperationTimedOut`.
        """
        if not connection.features.supports_scalable_topics:
            raise NotSupported(
                f"The broker at {connection.address} has no scalable topics; switch them on there "
                "(Apache Pulsar: scalableTopicsEnabled), or use a broker of version 5."
            )
        connection.attach(PeerKind.NAMESPACE, self._watch_id, self)
        # After a reconnect the request has the hash of the known names.  A broker where nothing
        # changed sends nothing then, so silence is an answer.
        silence_is_answer = self._refusals.granted_before
        timeout_s = self.context.settings.operation_timeout_s
        self._first = first = self.context.loop.create_future()
        try:
            connection.send(self._watch())
            async with asyncio.timeout(self._quiet_s if silence_is_answer else timeout_s):
                await first
        except TimeoutError:
            if not silence_is_answer:
                raise OperationTimedOut(
                    f"The broker did not send the topics of {self._namespace} within "
                    f"{timeout_s:g} s; check whether it is overloaded, or raise "
                    "operation_timeout_s."
                ) from None
        except BrokerError as error:
            raise self._refusals.judge(error) from error
        finally:
            self._first = None

    async def leave(self, connection: Connection) -> None:
        """Close the watch; the broker does not answer that."""
        close = pb.CommandWatchScalableTopicsClose(watch_id=self._watch_id)
        connection.send(
            pb.BaseCommand(
                type=pb.BaseCommand.WATCH_SCALABLE_TOPICS_CLOSE, watch_scalable_topics_close=close
            )
        )

    def failed(self, error: MagnetarError) -> None:
        """Report the error of the watch."""
        self._ended(error)

    # Handler

    def received(self, frame: Frame) -> None:
        """Take topics, or an error in their place."""
        refusal = error_in(frame.command)
        if refusal is not None:
            self._refused(refusal)
            return
        self._refusals.granted()
        change = self._take(frame.command.watch_scalable_topics_update)
        if len(self.topics) > self._max_topics:
            self._refused(_too_many(self._namespace, len(self.topics)))
            return
        if change:
            self._changed(change)
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def connection_lost(self, error: ConnectionLost) -> None:
        """Lose the watch, and fail the first answer if it has not come."""
        super().connection_lost(error)
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    def _refused(self, error: BrokerError | NotSupported) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
        else:
            # `attach` may not have resumed since the first answer; `again` works then too.
            self.again(error if isinstance(error, NotSupported) else self._refusals.judge(error))

    def _take(self, update: pb.CommandWatchScalableTopicsUpdate) -> Change:
        if update.HasField("diff"):
            return self._known.apply(update.diff.added, update.diff.removed)
        return self._known.replace(update.snapshot.topics)

    def _watch(self) -> pb.BaseCommand:
        watch = pb.CommandWatchScalableTopics(watch_id=self._watch_id, namespace=self._namespace)
        for key, value in sorted(self._properties.items()):
            watch.property_filters.add(key=key, value=value)
        known = self._known.hash
        if known is not None:
            watch.current_hash = known
        return pb.BaseCommand(
            type=pb.BaseCommand.WATCH_SCALABLE_TOPICS, watch_scalable_topics=watch
        )


def _too_many(namespace: str, count: int) -> NotSupported:
    return NotSupported(
        f"Namespace {namespace} has {count} topics that match, and one consumer can have at most "
        f"{NAMESPACE_TOPICS}; choose among them by properties, or use consumers of topics."
    )


class TopicConsumer(Protocol):
    """The consumer of one topic."""

    async def open(self) -> None:
        """Subscribe."""

    async def close(self) -> None:
        """Close it."""


C = TypeVar("C", bound=TopicConsumer)


class _ReadyMessages(Generic[T, C]):
    """A bounded queue of the next messages of all topics."""

    def __init__(self) -> None:
        self._messages: deque[tuple[str, C, int, Message[T]]] = deque()
        self._arrived = asyncio.Event()
        self._not_full = asyncio.Event()
        self._error: MagnetarError | None = None

    async def put(
        self, topic: str, consumer: C, times_back: int, messages: list[Message[T]]
    ) -> None:
        """Append messages; waits while the queue is full."""
        while len(self._messages) >= NAMESPACE_READY:
            self._not_full.clear()
            await self._not_full.wait()
        self._messages.extend((topic, consumer, times_back, message) for message in messages)
        self._arrived.set()

    def take_nowait(self) -> tuple[str, C, int, Message[T]] | None:
        """Remove and return the next message, or None."""
        if not self._messages:
            return None
        self._not_full.set()
        return self._messages.popleft()

    async def arrival(self) -> None:
        """Wait until there may be a message.  Raises the error given to `fail`."""
        if self._error is not None:
            raise self._error
        self._arrived.clear()
        await self._arrived.wait()

    def fail(self, error: MagnetarError) -> None:
        """Raise the error in `arrival` from now on: no more messages will come."""
        self._error = self._error or error
        self._arrived.set()

    def clear(self) -> None:
        """Remove all messages."""
        self._messages.clear()


class _NamespaceConsumer(Consumer[T], Generic[T, C]):
    """A consumer of all topics of a namespace, or of those with certain properties.

    Each topic has a consumer of its own, named `<name>-<local name>`.  It creates no topics.
    Opening waits until all present topics are subscribed to.  A topic that fails later is retried
    with growing pauses for as long as it exists, while the others go on.  The messages of a topic
    are handed out in its order, and topics take turns.
    """

    def __init__(
        self, context: ClientContext, namespace: str, name: str, properties: Mapping[str, str]
    ) -> None:
        """Raises `InvalidNamespaceName`."""
        super().__init__()
        self.name: Final = name
        """The prefix of the names of the topics' consumers."""
        self._context = context
        self._watch = NamespaceWatch(
            context, namespace, properties, changed=self._changed, ended=self._failed
        )
        self._ready: _ReadyMessages[T, C] = _ReadyMessages()
        self._consumers: dict[str, C] = {}
        """The consumer of each topic that is subscribed to."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The task of each topic that has not gone."""
        self._consuming = BackgroundTasks()
        """Those, and the tasks that end because their topics have gone."""
        self._firsts: list[asyncio.Future[None]] | None = []
        """The outcomes of the topics that exist at the opening; None afterwards."""
        self._openings = asyncio.Semaphore(NAMESPACE_OPENINGS)

    @property
    def topics(self) -> frozenset[str]:
        """The topics that are consumed now."""
        return frozenset(self._consumers)

    async def open(self) -> None:
        """Subscribe to all present topics.  Raises the first error."""
        await self._watch.open(self._context.settings.operation_timeout_s)
        firsts, self._firsts = self._firsts or [], None
        await asyncio.gather(*firsts)

    async def _close(self) -> None:
        self._ready.clear()
        self._failed(AlreadyClosed(f"Consumer {self.name} is closed; open another one."))
        self._consuming.cancel()
        tasks = self._consuming.running
        await asyncio.gather(self._watch.close(), *tasks, return_exceptions=True)

    @abstractmethod
    def _consumer_of(self, topic: str, local_name: str) -> C:
        """A new consumer of a topic, not open; it must not create the topic."""

    @abstractmethod
    async def _next_of(self, consumer: C) -> list[Message[T]]:
        """The next messages of a topic."""

    @abstractmethod
    def _hand_out(self, topic: str, message: Message[T]) -> Message[T]:
        """The message for the user."""

    def _times_back(self, consumer: C) -> int:
        """The number of times that everything of a topic was handed out again."""
        return 0

    def _forget(self, topic: str) -> None:
        """Called when a topic no longer exists."""

    def _ended(self, topic: str, consumer: C) -> None:
        """Called when a topic's consumer has ended."""

    # Consumer

    def _take_nowait(self) -> Message[T] | None:
        while (found := self._ready.take_nowait()) is not None:
            topic, consumer, times_back, message = found
            if self._consumers.get(topic) is consumer and times_back == self._times_back(consumer):
                return self._hand_out(topic, message)
            # The message comes again: its consumer is closed, or hands out everything again.
        return None

    async def _next(self) -> Message[T]:
        while (message := self._take_nowait()) is None:
            await self._ready.arrival()
        return message

    # Topics

    def _failed(self, error: MagnetarError) -> None:
        self._ready.fail(error)

    def _changed(self, change: Change) -> None:
        if self._closing is not None:
            return
        for topic in change.removed:
            task = self._tasks.pop(topic, None)
            if task is not None:
                task.cancel()
            self._forget(topic)
        for topic in change.added:
            first: asyncio.Future[None] | None = None
            if self._firsts is not None:
                first = self._context.loop.create_future()
                self._firsts.append(first)
            self._tasks[topic] = self._consuming.start(self._consume(topic, first))

    async def _consume(self, topic: str, first: asyncio.Future[None] | None) -> None:
        """Consume a topic until the task is cancelled, as the topic no longer exists."""
        backoff = self._context.backoff(NAMESPACE_RETRY_LIMIT_S)
        local_name = parse_topic_name(topic).local_name
        while True:
            consumer = self._consumer_of(topic, local_name)
            try:
                async with self._openings:
                    await consumer.open()
                resolve(first, None)
                self._consumers[topic] = consumer
                backoff.reset()
                while True:
                    messages = await self._next_of(consumer)
                    await self._ready.put(topic, consumer, self._times_back(consumer), messages)
            except MagnetarError as error:
                # A topic that was deleted since the snapshot is no failure of the opening.
                resolve(first, None if isinstance(error, TopicNotFound) else error)
                _log.warning("topic_not_consumed topic=%s error=%s", topic, error)
            finally:
                resolve(first, None)
                if self._consumers.get(topic) is consumer:
                    del self._consumers[topic]
                    self._ended(topic, consumer)
                await consumer.close()
            await asyncio.sleep(backoff.pause_s())


class NamespaceQueueConsumer(_NamespaceConsumer[T, QueueConsumer[T]]):
    """Shares the messages of all topics of a namespace with other consumers, in no order.

    Opening waits until all present topics are subscribed to.  A topic that fails later is retried
    with growing pauses, while the others go on.
    """

    def __init__(
        self,
        context: ClientContext,
        namespace: str,
        subscription: str,
        schema: Schema[T],
        settings: QueueSettings,
        properties: Mapping[str, str] = _NO_PROPERTIES,
    ) -> None:
        """Raises `InvalidNamespaceName`, `InvalidArgument`."""
        name = settings.consumer_name or random_name(context, "queue-")
        super().__init__(context, namespace, name, properties)
        settings.of_segment(subscription, 0, None)
        self._subscription = subscription
        self._schema = schema
        self._settings = settings

    def _consumer_of(self, topic: str, local_name: str) -> QueueConsumer[T]:
        how = replace(self._settings, consumer_name=f"{self.name}-{local_name}")
        return QueueConsumer(
            self._context,
            topic,
            self._subscription,
            self._schema,
            how,
            create_if_missing=False,
            passes_on=True,
        )

    async def _next_of(self, consumer: QueueConsumer[T]) -> list[Message[T]]:
        return await consumer.receive_batch(NAMESPACE_BATCH)

    def _hand_out(self, topic: str, message: Message[T]) -> Message[T]:
        if self._settings.processing_timeout_s:
            self._consumers[topic].begin_processing(message)
        return NamespaceMessage(message, _NO_VECTORS)

    def ack(
        self,
        message: Message[T],
        *,
        transaction: AckTransaction | None = None,
        wait: bool = False,
    ) -> Awaitable[None]:
        """Acknowledge a message.  See `QueueConsumer.ack`."""
        check_loop(self._loop)
        if self._closing is not None:
            raise AlreadyClosed("The consumer is closed; other consumers get its messages.")
        consumer = self._consumer_for(message)
        if consumer is None:
            try:
                return _lost(message.topic, transaction)
            except AlreadyClosed as error:
                if transaction is not None:
                    cannot_commit(self._context, transaction, error)
                raise
        return consumer.ack(message, transaction=transaction, wait=wait)

    def nack(self, message: Message[T]) -> None:
        """Have a message delivered again later, as it could not be processed."""
        check_loop(self._loop)
        consumer = self._consumer_for(message)
        if consumer is not None:
            consumer.nack(message)

    def _consumer_for(self, message: Message[T]) -> QueueConsumer[T] | None:
        """The consumer of the message's topic, if there is one.  Raises `InvalidArgument`."""
        check_message(message, None)
        consumer = self._consumers.get(message.topic)
        if consumer is None and not isinstance(message, NamespaceMessage):
            raise InvalidArgument(
                f"{message.topic} is not read by {self.name}; pass the message to the consumer "
                "that received it."
            )
        return consumer


class NamespaceMessage(Message[T]):
    """A message with an id that has its topic, and the position vectors of all topics if any."""

    __slots__ = ("_positions_of_topics", "times_back")

    def __init__(
        self, message: Message[T], positions_of_topics: _Vectors, times_back: int = 0
    ) -> None:
        super().__init__(
            message.received,
            message._schema,
            message.topic,
            message.segment_id,
            message._positions,
        )
        self._positions_of_topics = positions_of_topics
        self.times_back = times_back
        """The number of redeliveries of everything before it was handed out."""

    @property
    def id(self) -> MessageId:
        """The id, with the topic and the position vectors of all topics."""
        vectors = self._positions_of_topics
        return replace(super().id, topic=self.topic, positions_of_topics=vectors)


class NamespaceStreamConsumer(_NamespaceConsumer[T, StreamConsumer[T]]):
    """Reads its share of the segments of all topics of a namespace, in order.

    Each message carries the position vectors of all topics: acknowledging it acknowledges
    everything that was handed out before it, also in a transaction.

    If a transaction that acknowledged does not commit, everything of all topics that is not
    acknowledged is handed out again (`StreamConsumer`).  Messages received before that can then not
    be acknowledged any more.

    If a topic's consumer ends before all its messages were acknowledged, no transaction can
    acknowledge until everything was handed out again.
    """

    def __init__(
        self,
        context: ClientContext,
        namespace: str,
        subscription: str,
        schema: Schema[T],
        settings: StreamSettings,
        properties: Mapping[str, str] = _NO_PROPERTIES,
    ) -> None:
        """Raises `InvalidNamespaceName`, `InvalidArgument`."""
        name = settings.consumer_name or random_name(context, "stream-")
        super().__init__(context, namespace, name, properties)
        settings.of_segment(subscription, "-", 0, None)
        self._subscription = subscription
        self._schema = schema
        self._settings = settings
        self._vectors: _Vectors = MappingProxyType({})
        self._acknowledged: dict[str, Positions] = {}
        """The last vector of each topic that was acknowledged without a transaction."""
        self._all_times_back = 0
        self._lost: str | None = None
        """A topic whose messages may be processed twice, until everything is handed out again."""

    def _consumer_of(self, topic: str, local_name: str) -> StreamConsumer[T]:
        how = replace(self._settings, consumer_name=f"{self.name}-{local_name}")
        consumer = StreamConsumer(
            self._context, topic, self._subscription, self._schema, how, create_if_missing=False
        )
        consumer.on_going_back = partial(self._redeliver_others, consumer)
        return consumer

    def _times_back(self, consumer: StreamConsumer[T]) -> int:
        return consumer.times_back

    def redeliver_unacknowledged(self) -> None:
        """Hand out again, of all topics, everything that is not acknowledged.

        See `StreamConsumer.redeliver_unacknowledged`.
        """
        check_loop(self._loop)
        self._redeliver_others(None)

    def _redeliver_others(self, consumer: StreamConsumer[T] | None) -> None:
        """Redeliver all topics but that of `consumer`, which is redelivered already."""
        # The position vectors of one topic are in the ids of the others.
        self._all_times_back += 1
        for each in self._consumers.values():
            if each is not consumer:
                each.redeliver_unacknowledged()
        vectors = {topic: each.positions for topic, each in self._consumers.items()}
        self._vectors = MappingProxyType(vectors)
        self._lost = None

    async def _next_of(self, consumer: StreamConsumer[T]) -> list[Message[T]]:
        return await consumer.receive_batch(NAMESPACE_BATCH)

    def _hand_out(self, topic: str, message: Message[T]) -> Message[T]:
        self._vectors = MappingProxyType({**self._vectors, topic: message.id.positions})
        return NamespaceMessage(message, self._vectors, self._all_times_back)

    def _ended(self, topic: str, consumer: StreamConsumer[T]) -> None:
        if not consumer.is_all_acknowledged:
            self._lost = topic

    def _forget(self, topic: str) -> None:
        if (consumer := self._consumers.get(topic)) is not None:
            self._ended(topic, consumer)
        kept = {each: vector for each, vector in self._vectors.items() if each != topic}
        self._vectors = MappingProxyType(kept)
        self._acknowledged.pop(topic, None)

    def ack(
        self,
        message: Message[T],
        *,
        transaction: AckTransaction | None = None,
        wait: bool = False,
    ) -> Awaitable[None]:
        """Acknowledge this message and all that were handed out before it, of all topics.

        See `StreamConsumer.ack`.
        """
        check_loop(self._loop)
        if self._closing is not None:
            raise AlreadyClosed("The consumer is closed; other consumers get its messages.")
        if not isinstance(message, Message) or not message.id.positions_of_topics:
            raise InvalidArgument(
                f"{message!r} was not received by an ordered consumer of a namespace; pass it to "
                "the consumer that received it."
            )
        try:
            self._check_not_from_before(message)
            outcomes = self._ack_all(message.id.positions_of_topics, transaction, wait=wait)
        except MagnetarError as error:
            if transaction is not None:
                for consumer in self._consumers.values():
                    consumer.follow(transaction)
                cannot_commit(self._context, transaction, error)
            raise
        return Outcomes(outcomes) if outcomes else DONE

    def _check_not_from_before(self, message: Message[T]) -> None:
        """Refuse a message from before a redelivery.

        It would acknowledge messages that are queued here to be handed out again.
        """
        if isinstance(message, NamespaceMessage) and message.times_back == self._all_times_back:
            return
        for topic, positions in message.id.positions_of_topics.items():
            consumer = self._consumers.get(topic)
            if consumer is not None and not consumer.is_acknowledged(positions):
                raise TransactionConflict(
                    f"Messages of {topic} up to this one are handed out again, as a transaction "
                    "did not commit or a redelivery was requested; acknowledge it when it is "
                    "received again."
                )

    def _ack_all(
        self, vectors: _Vectors, transaction: AckTransaction | None, *, wait: bool
    ) -> list[Awaitable[None]]:
        outcomes: list[Awaitable[None]] = []
        if transaction is not None and self._lost is not None:
            _lost(self._lost, transaction)
        for topic, positions in vectors.items():
            if self._acknowledged.get(topic) is positions:
                continue
            consumer = self._consumers.get(topic)
            outcome = (
                _lost(topic, transaction)
                if consumer is None
                else consumer.ack_positions(positions, transaction=transaction, wait=wait)
            )
            if outcome is not DONE:
                outcomes.append(outcome)
            if transaction is None and consumer is not None:
                self._acknowledged[topic] = positions
        return outcomes


def _lost(topic: str, transaction: AckTransaction | None) -> Awaitable[None]:
    """Skip a topic that is not consumed now, as its messages come again.

    Raises `AlreadyClosed` in a transaction.
    """
    if transaction is not None:
        raise AlreadyClosed(
            f"{topic} is not consumed any more; abort the transaction, and begin a new one."
        )
    return DONE
