"""`Client`, which opens producers, consumers and transactions, and `connect`, which makes one."""

import asyncio
import enum
import math
import random
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar, Unpack, overload
from weakref import WeakSet

from magnetar.bounds import CLOSE_FLUSH_S, READ_BYTES
from magnetar.checkpoint import Checkpoint
from magnetar.consume.checkpoint_consumer import CheckpointConsumer
from magnetar.consume.namespace_consumer import NamespaceQueueConsumer, NamespaceStreamConsumer
from magnetar.consume.queue_consumer import QueueConsumer
from magnetar.consume.settings import (
    CheckpointOptions,
    CheckpointSettings,
    QueueOptions,
    QueueSettings,
    StreamOptions,
    StreamSettings,
)
from magnetar.consume.stream_consumer import StreamConsumer
from magnetar.context import ClientContext, check_loop
from magnetar.errors import AlreadyClosed, InvalidArgument, MagnetarError
from magnetar.identity import FIRST_REQUESTS, Identities
from magnetar.layout import Layout
from magnetar.layout_watch import LayoutWatch
from magnetar.opening import ClosedAfterwards, Openable, Opening, completed, finished
from magnetar.options import ProducerOptions
from magnetar.produce.producer import Producer
from magnetar.produce.producer_settings import ProducerSettings
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import PlanLimits, RangePlan
from magnetar.reads.segment_reads import SegmentReads
from magnetar.schema.choose import schema_for
from magnetar.schema.plain import BYTES
from magnetar.schema.schema import Schema
from magnetar.settings import ClientOptions, ClientSettings, check_flag, check_positive
from magnetar.transactions.attached_transaction import AttachedTransaction
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.keys import TransactionKey
from magnetar.transactions.transaction import Transaction
from magnetar.wire.pool import ConnectionPool

__all__ = ["Client", "connect"]

T = TypeVar("T")
_NO_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType({})
O = TypeVar("O", bound=Openable)  # noqa: E741 - what is opened


class _TopicSource(NamedTuple):
    """A consumer's topic and subscription."""

    topic: str
    subscription: str


class _NamespaceSource(NamedTuple):
    """A consumer's namespace and subscription."""

    namespace: str
    subscription: str


def _check_topic(topic: str) -> None:
    """Raises `InvalidArgument` if it is not text.  Opening checks whether it is a topic's name."""
    if not isinstance(topic, str):
        raise InvalidArgument(f"The topic is {topic!r}; give its name as text.")


def _source(
    topic: str | None,
    namespace: str | None,
    subscription: str | None,
    properties: Mapping[str, str],
) -> _TopicSource | _NamespaceSource:
    """The topic or the namespace of a consumer.  Raises `InvalidArgument`."""
    if not subscription:
        raise InvalidArgument("The subscription has no name; give one.")
    if (topic is None) == (namespace is None):
        raise InvalidArgument("A consumer is of a topic or of a namespace; give one of them.")
    if namespace is not None:
        return _NamespaceSource(namespace, subscription)
    if properties:
        raise InvalidArgument("Properties choose topics of a namespace; give a namespace.")
    name = topic or ""
    _check_topic(name)
    return _TopicSource(name, subscription)


class _CloseStep(enum.IntEnum):
    """The steps of closing, in order; everything of one step closes at the same time."""

    TRANSACTIONS = 0
    PRODUCERS = 1
    CONSUMERS = 2
    KEYS = 3


def connect(url: str, **settings: Unpack[ClientOptions]) -> Opening["Client"]:
    """A client of the brokers at `url`: `pulsar://host:6650,host:6650` or `pulsar+ssl://...`.

    To be awaited, or entered by `async with`: this connects to one of the hosts.  Raises
    `InvalidArgument` at once, and when it is awaited `ConnectionLost` if no host can be reached,
    and `AuthenticationFailed`.

    Settings:
        operation_timeout_s = 30.0: How long a request to a broker may take, retries included.
        connect_timeout_s = 10.0: How long a connection may take, TLS and handshake included.
        keep_alive_s = 30.0: Silence after which the client sends a PING; after as much again the
            connection is closed.
        close_timeout_s = 10.0: How long each step of `close` may take, such as flushing producers.
        token = None: Authenticates by token: text, `file:///PATH`, or a function; the file is read,
            and the function called, again whenever a broker wants a new token.
        basic = None: Authenticates by a user's name and password.
        oauth2 = None: Authenticates by tokens that an OAuth 2.0 issuer gives to this client.
        tls_trust_file = None: PEM of the authorities that sign brokers' certificates; by default
            those of the system.
        tls_certificate_file = None: PEM of this client's certificate, with which it authenticates
            unless it has credentials of another kind.
        tls_key_file = None: PEM of the certificate's key.
        tls_check_certificate = True: Whether the broker's certificate must be trusted. False is for
            tests.
        tls_check_hostname = True: Whether the broker's certificate must be for the host to which
            the client connects.
        listener_name = None: The listener whose addresses brokers return (`advertisedListeners`).
        description = '': Text that brokers' statistics show beside the client's version; 64
            characters at most.
    """
    client = Client(url, ClientSettings(**settings))
    return Opening(lambda: client)


class Client(ClosedAfterwards):
    """A client of one cluster: opens producers, consumers and transactions, and closes them.

    Made by `connect`; belongs to the loop that it is opened on.

    Methods that open something raise `InvalidArgument` at once for invalid settings, and
    `AlreadyClosed` on a closed client.  Other errors, also those of an invalid name, are raised
    when the result is awaited or entered.
    """

    def __init__(
        self, url: str, settings: ClientSettings, *, rng: random.Random | None = None
    ) -> None:
        luck = rng or random.Random()
        ids = Identities(luck.randrange(*FIRST_REQUESTS))
        pool = ConnectionPool(url, settings, ids, luck)
        self.context = ClientContext(pool, settings, ids, luck)
        self._url: Final = url
        self._opened: dict[_CloseStep, WeakSet[Openable]] = {step: WeakSet() for step in _CloseStep}
        self._coordinators: Coordinators | None = None
        self._reads: SegmentReads | None = None
        self._closing: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        """Connect to a broker.  Raises the reason if none can be reached."""
        self._check_open()
        self._loop = self.context.loop
        await self.context.pool.any()

    async def close(self) -> None:
        """Close everything that the client has opened, then its connections.

        Open transactions are aborted, then producers send the messages they have, then consumers
        send their acknowledgements, then transaction keys are closed.  Each step takes
        `close_timeout_s` at most.  Cancelling it does not stop it.  Raises `WrongLoop`.
        """
        self._check_loop()
        if self._closing is None:
            self._closing = self.context.loop.create_task(self._close())
        await completed(finished(self._closing))

    def __del__(self) -> None:
        if getattr(self, "_loop", None) is not None and self._closing is None:
            warnings.warn(
                f"The client of {self._url} was never closed: what it had yet to send "
                "is lost. Use `async with`, or await close().",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    # Openings

    @overload
    def producer(
        self, topic: str, **settings: Unpack[ProducerOptions]
    ) -> Opening[Producer[bytes]]: ...
    @overload
    def producer(
        self, topic: str, *, schema: Schema[T] | type[T], **settings: Unpack[ProducerOptions]
    ) -> Opening[Producer[T]]: ...
    def producer(
        self,
        topic: str,
        *,
        schema: Schema[Any] | type[Any] = BYTES,
        **settings: Unpack[ProducerOptions],
    ) -> Opening[Producer[Any]]:
        """Open a producer, which writes to a topic.

        `topic` is `topic://tenant/namespace/name`, or a short name as brokers resolve it.  A topic
        that is missing is created if the broker allows it.  `schema` is a schema, or a type that
        chooses it: `bytes`, `str`, a dataclass, a pydantic model, a protobuf message.

        Settings:
            name = None: The producer's name, the same over restarts if messages are to be
                deduplicated.
            access_mode = 'shared': Whether other producers may write to the topic: 'shared',
                'exclusive', 'wait_for_exclusive' or 'exclusive_with_fencing' (see `AccessMode`).
            batching = True: Whether messages that are sent at about the same time share an entry.
            batch_max_messages = 1000: The most messages in a batch.
            batch_max_bytes = 131_072: The most bytes in a batch, before compression; less if the
                broker's maximum message size is smaller. A larger message is sent alone.
            batch_max_delay_ms = 1.0: How long a message may wait for others while earlier ones of
                its segment have no receipt yet; without such messages it is sent at once.
            compression = 'none': The compression of entries: 'none', 'lz4', 'zlib', 'zstd' or
                'snappy'.
            chunking = False: Whether a message larger than the broker's maximum is sent in chunks;
                else it is refused.
            max_pending_messages = 10_000: Messages without receipt; at this number `send` waits and
                `send_nowait` raises.
            max_pending_bytes = 67_108_864: Bytes of the messages without receipt, with the same
                effect.
            send_timeout_s = 30.0: Time without receipt after which a message fails; it may be
                stored all the same.
            properties = {}: Properties that brokers show in the producer's statistics.
        """
        _check_topic(topic)
        checked = ProducerSettings(**settings)
        coder = schema_for(schema)
        return self._opening(
            _CloseStep.PRODUCERS, lambda: Producer(self.context, topic, coder, checked)
        )

    @overload
    def queue_consumer(
        self, topic: str, subscription: str, **settings: Unpack[QueueOptions]
    ) -> Opening[QueueConsumer[bytes]]: ...
    @overload
    def queue_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        schema: Schema[T] | type[T],
        **settings: Unpack[QueueOptions],
    ) -> Opening[QueueConsumer[T]]: ...
    @overload
    def queue_consumer(
        self,
        *,
        namespace: str,
        subscription: str,
        properties: Mapping[str, str] = ...,
        **settings: Unpack[QueueOptions],
    ) -> Opening[NamespaceQueueConsumer[bytes]]: ...
    @overload
    def queue_consumer(
        self,
        *,
        namespace: str,
        subscription: str,
        schema: Schema[T] | type[T],
        properties: Mapping[str, str] = ...,
        **settings: Unpack[QueueOptions],
    ) -> Opening[NamespaceQueueConsumer[T]]: ...
    def queue_consumer(
        self,
        topic: str | None = None,
        subscription: str | None = None,
        *,
        namespace: str | None = None,
        properties: Mapping[str, str] = _NO_PROPERTIES,
        schema: Schema[Any] | type[Any] = BYTES,
        **settings: Unpack[QueueOptions],
    ) -> Opening[Any]:
        """Open a consumer that shares a topic's messages with others of its subscription.

        The messages come in no order.  With a `namespace` ("tenant/namespace") instead of a topic,
        it consumes all scalable topics of it that have these `properties`, also those created
        later.  `schema` is as for `producer`.

        Settings:
            consumer_name = None: The name in the broker's statistics, on each segment as
                `<name>-seg-<id>`. A consumer of a stream, or of a group, that comes back under its
                name gets its segments again.
            consumer_properties = {}: Properties of this consumer in the broker's statistics.
            receiver_queue_size = 1000: Messages of each segment that are requested ahead.
            receiver_queue_bytes = 67_108_864: Bytes of all segments above which no more messages
                are requested.
            max_pending_chunked_messages = 10: Chunked messages of each segment that may be
                incomplete at a time.
            max_pending_chunked_bytes = 268_435_456: Bytes of the incomplete messages of a segment;
                one alone may have more.
            expire_chunked_after_ms = 60_000: Time after which an incomplete chunked message is
                dropped; 0 for never.
            initial_position = 'latest': The position at which the subscription begins if it is new:
                'latest' or 'earliest'.
            ack_grouping_ms = 100: How long an acknowledgement may wait for others; with 0 it is
                sent at once.
            subscription_properties = {}: Properties that are stored with the subscription if it is
                new.
            replicate_subscription_state = False: Whether the subscription moves in all clusters of
                the topic's list together.
            nack_delay = NackDelay(min_ms=1000, max_ms=60000, multiplier=2.0): The delay before a
                negatively acknowledged message comes again.
            processing_timeout_s = None: Time after which a message comes again that was handed out
                and is neither acknowledged nor negatively acknowledged; None or 0 for never (the
                Java client's `processingTimeout`).
            dead_letters = None: The treatment of messages that are delivered too often; None
                delivers them again and again.
            priority_level = 0: Consumers with a lower level get messages first.
        """
        checked = QueueSettings(**settings)
        coder = schema_for(schema)
        source = _source(topic, namespace, subscription, properties)
        if isinstance(source, _TopicSource):
            return self._opening(
                _CloseStep.CONSUMERS, lambda: QueueConsumer(self.context, *source, coder, checked)
            )
        return self._opening(
            _CloseStep.CONSUMERS,
            lambda: NamespaceQueueConsumer(
                self.context, source.namespace, source.subscription, coder, checked, properties
            ),
        )

    @overload
    def stream_consumer(
        self, topic: str, subscription: str, **settings: Unpack[StreamOptions]
    ) -> Opening[StreamConsumer[bytes]]: ...
    @overload
    def stream_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        schema: Schema[T] | type[T],
        **settings: Unpack[StreamOptions],
    ) -> Opening[StreamConsumer[T]]: ...
    @overload
    def stream_consumer(
        self,
        *,
        namespace: str,
        subscription: str,
        properties: Mapping[str, str] = ...,
        **settings: Unpack[StreamOptions],
    ) -> Opening[NamespaceStreamConsumer[bytes]]: ...
    @overload
    def stream_consumer(
        self,
        *,
        namespace: str,
        subscription: str,
        schema: Schema[T] | type[T],
        properties: Mapping[str, str] = ...,
        **settings: Unpack[StreamOptions],
    ) -> Opening[NamespaceStreamConsumer[T]]: ...
    def stream_consumer(
        self,
        topic: str | None = None,
        subscription: str | None = None,
        *,
        namespace: str | None = None,
        properties: Mapping[str, str] = _NO_PROPERTIES,
        schema: Schema[Any] | type[Any] = BYTES,
        **settings: Unpack[StreamOptions],
    ) -> Opening[Any]:
        """Open a consumer that reads its share of a topic's segments.

        The messages of each key come in order.  With a `namespace` ("tenant/namespace") instead of
        a topic, it consumes all scalable topics of it that have these `properties`, also those
        created later.  `schema` is as for `producer`.

        Settings:
            consumer_name = None: The name in the broker's statistics, on each segment as
                `<name>-seg-<id>`. A consumer of a stream, or of a group, that comes back under its
                name gets its segments again.
            consumer_properties = {}: Properties of this consumer in the broker's statistics.
            receiver_queue_size = 1000: Messages of each segment that are requested ahead.
            receiver_queue_bytes = 67_108_864: Bytes of all segments above which no more messages
                are requested.
            max_pending_chunked_messages = 10: Chunked messages of each segment that may be
                incomplete at a time.
            max_pending_chunked_bytes = 268_435_456: Bytes of the incomplete messages of a segment;
                one alone may have more.
            expire_chunked_after_ms = 60_000: Time after which an incomplete chunked message is
                dropped; 0 for never.
            initial_position = 'latest': The position at which the subscription begins if it is new:
                'latest' or 'earliest'.
            ack_grouping_ms = 100: How long an acknowledgement may wait for others; with 0 it is
                sent at once.
            subscription_properties = {}: Properties that are stored with the subscription if it is
                new.
            replicate_subscription_state = False: Whether the subscription moves in all clusters of
                the topic's list together.
            hand_over_timeout_s = None: How long a segment that goes to another consumer waits for
                acknowledgements of the messages handed out; the other consumer gets the rest again.
                None for no limit.
        """
        checked = StreamSettings(**settings)
        coder = schema_for(schema)
        source = _source(topic, namespace, subscription, properties)
        if isinstance(source, _TopicSource):
            return self._opening(
                _CloseStep.CONSUMERS, lambda: StreamConsumer(self.context, *source, coder, checked)
            )
        return self._opening(
            _CloseStep.CONSUMERS,
            lambda: NamespaceStreamConsumer(
                self.context, source.namespace, source.subscription, coder, checked, properties
            ),
        )

    @overload
    def checkpoint_consumer(
        self,
        topic: str,
        *,
        start: Checkpoint = Checkpoint.EARLIEST,
        group: str | None = None,
        **settings: Unpack[CheckpointOptions],
    ) -> Opening[CheckpointConsumer[bytes]]: ...
    @overload
    def checkpoint_consumer(
        self,
        topic: str,
        *,
        schema: Schema[T] | type[T],
        start: Checkpoint = Checkpoint.EARLIEST,
        group: str | None = None,
        **settings: Unpack[CheckpointOptions],
    ) -> Opening[CheckpointConsumer[T]]: ...
    def checkpoint_consumer(
        self,
        topic: str,
        *,
        schema: Schema[Any] | type[Any] = BYTES,
        start: Checkpoint = Checkpoint.EARLIEST,
        group: str | None = None,
        **settings: Unpack[CheckpointOptions],
    ) -> Opening[CheckpointConsumer[Any]]:
        """Open a consumer that reads a topic from a checkpoint on.

        The application stores its checkpoints.  With a `group` it reads its share of the segments,
        else all of them.  `schema` is as for `producer`.

        Settings:
            consumer_name = None: The name in the broker's statistics, on each segment as
                `<name>-seg-<id>`. A consumer of a stream, or of a group, that comes back under its
                name gets its segments again.
            consumer_properties = {}: Properties of this consumer in the broker's statistics.
            receiver_queue_size = 1000: Messages of each segment that are requested ahead.
            receiver_queue_bytes = 67_108_864: Bytes of all segments above which no more messages
                are requested.
            max_pending_chunked_messages = 10: Chunked messages of each segment that may be
                incomplete at a time.
            max_pending_chunked_bytes = 268_435_456: Bytes of the incomplete messages of a segment;
                one alone may have more.
            expire_chunked_after_ms = 60_000: Time after which an incomplete chunked message is
                dropped; 0 for never.
        """
        _check_topic(topic)
        if not isinstance(start, Checkpoint):
            raise InvalidArgument(
                f"The start is {start!r}; give a Checkpoint: Checkpoint.EARLIEST, "
                "Checkpoint.LATEST, or Checkpoint.from_bytes(...) of what was kept."
            )
        checked = CheckpointSettings(**settings)
        coder = schema_for(schema)
        return self._opening(
            _CloseStep.CONSUMERS,
            lambda: CheckpointConsumer(self.context, topic, coder, checked, start, group),
        )

    def transaction(
        self, *, timeout_s: float = 60.0, key: TransactionKey | None = None
    ) -> Opening[Transaction]:
        """Open a transaction: all that is sent and acknowledged in it takes effect, or nothing.

        `async with` commits it, or aborts it on an error.  The broker aborts it after `timeout_s`.
        With a transaction `key`, holders of older epochs of that key can no longer commit.  Opening
        it raises `NotSupported` and `NotAllowed` where there are no transactions, and
        `TransactionKeyFenced`.
        """
        return self._opening(
            _CloseStep.TRANSACTIONS,
            lambda: Transaction(self.context, self._transactions(), timeout_s, key),
        )

    async def begin_transaction(self, *, timeout_s: float = 60.0) -> TxnId:
        """Begin a transaction that any process can use and end by its id, which is returned.

        For work that one process does and another one decides about (`attach_transaction`,
        `end_transaction`).  The broker aborts it after `timeout_s`; the client never does.  Raises
        `NotSupported` and `NotAllowed` where there are no transactions.
        """
        check_positive("timeout_s", timeout_s)
        self._check_usable()
        return await self._transactions().begin(math.ceil(timeout_s * 1000))

    def attach_transaction(self, id: TxnId) -> AttachedTransaction:
        """Use a running transaction by its id, also one that another process began.

        This asks no broker.  Sending in it fails if it is no longer open.
        """
        self._check_usable()
        return AttachedTransaction(self.context, self._transactions(), TxnId(*id))

    async def end_transaction(self, id: TxnId, *, commit: bool) -> None:
        """Commit or abort a transaction by its id, also one that another process began.

        Calling it again is safe.  Other processes must have their receipts and acknowledgements of
        it before it is committed.  Raises `InvalidTransactionStatus` if it ended the other way,
        `TransactionNotFound` if the broker no longer knows it or it belongs to another client, and
        `OperationTimedOut` if the broker did not answer: call it again to learn how it ended.
        """
        check_flag("commit", commit)
        self._check_usable()
        await self._transactions().end_for_sure(TxnId(*id), commit=commit)

    def transaction_key(self, name: str, *, epoch: int = -1) -> Opening[TransactionKey]:
        """Open a transaction key (Magnetar's own), which fences its earlier holder.

        `epoch` is the last known one, or -1.  Raises `NotSupported` where there are no keys.
        """
        return self._opening(
            _CloseStep.KEYS,
            lambda: TransactionKey(self.context, self._transactions(), name, epoch),
        )

    def attach_transaction_key(self, name: str, epoch: int) -> Opening[TransactionKey]:
        """Use a transaction key that another process of the same program has opened.

        Raises `TransactionKeyFenced` if `epoch` is not its newest, `NotSupported` where there are
        no keys.
        """
        return self._opening(
            _CloseStep.KEYS,
            lambda: TransactionKey(self.context, self._transactions(), name, epoch, attach=True),
        )

    # Reads

    async def layout(self, topic: str) -> Layout:
        """The segments of a topic now, active and sealed.

        Raises `TopicNotFound`, `NotSupported` where there are no scalable topics, and the last
        error after the operation timeout.
        """
        _check_topic(topic)
        self._check_usable()
        watch = LayoutWatch(self.context, topic, create_if_missing=False)
        try:
            await watch.open(self.context.settings.operation_timeout_s)
            return watch.layout
        finally:
            await watch.close()

    async def plan_range(
        self,
        segment_topic: str,
        start: Position | None = None,
        *,
        end: Position | None = None,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        from_publish_time_ms: int | None = None,
        before_publish_time_ms: int | None = None,
    ) -> RangePlan:
        """Plan a range of a segment to read, from `start` (None: its first entry) on.

        `segment_topic` is `Segment.topic` of a layout.  The range ends at `end`, at the max read
        position, or where a bound is reached, whichever is first.  It has at least one entry if
        there is one.  `from_publish_time_ms` moves its start to the first entry published then or
        later; `before_publish_time_ms` ends it before the first such entry.

        Brokers without segment reads count nothing, ignore `max_messages` and `max_bytes`, and the
        call raises `NotSupported` for times.  Raises `TopicNotFound` for a segment that no longer
        exists, and `InvalidArgument`.
        """
        _check_topic(segment_topic)
        limits = PlanLimits(max_messages, max_bytes, from_publish_time_ms, before_publish_time_ms)
        return await self._segment_reads().plan(segment_topic, start, end, limits)

    def read_range(
        self,
        segment_topic: str,
        start: Position,
        end: Position,
        *,
        raw: bool = False,
        max_bytes: int = READ_BYTES,
    ) -> AsyncGenerator[list[StoredEntry], None]:
        """The stored entries of a segment from `start` up to, and without, `end`.

        Each list has at most `max_bytes`, or one entry, and at most the size of the broker's
        largest message; the next list is requested before one is handed out.  The iteration ends at
        `end`, or where no more can be read now.  `raw` adds entries that consumers do not get
        (aborted, beyond the max read position, markers), as each entry's `visibility` says; it
        needs a broker with segment reads.

        Iterating raises `TopicNotFound` for a segment that no longer exists, and the last error
        after the operation timeout without an answer.
        """
        _check_topic(segment_topic)
        check_flag("raw", raw)
        check_positive("max_bytes", max_bytes)
        return self._segment_reads().read(
            segment_topic, Position(*start), Position(*end), raw=raw, max_bytes=max_bytes
        )

    # Parts

    def _segment_reads(self) -> SegmentReads:
        self._check_usable()
        if self._reads is None:
            self._reads = SegmentReads(self.context)
        return self._reads

    def _check_usable(self) -> None:
        self._check_loop()
        self._check_open()

    def _transactions(self) -> Coordinators:
        """The coordinators, made with the first transaction or key."""
        if self._coordinators is None:
            self._coordinators = Coordinators(self.context)
        return self._coordinators

    def _check_open(self) -> None:
        if self._closing is not None:
            raise AlreadyClosed("The client is closed; connect anew with magnetar.connect.")

    def _check_loop(self) -> None:
        if self._loop is not None:
            check_loop(self._loop)

    def _opening(self, step: _CloseStep, make: Callable[[], O]) -> Opening[O]:
        """An opening of the object that `make` makes, which closes with this client."""
        self._check_open()

        def made() -> O:
            self._check_loop()
            self._check_open()
            opened = make()
            self._opened[step].add(opened)
            return opened

        return Opening(made)

    async def _close(self) -> None:
        late: set[asyncio.Task[None]] = set()
        for step in _CloseStep:
            live = list(self._opened[step])
            if live:
                late |= await self._close_all([each.close() for each in live])
        if self._coordinators is not None:
            late |= await self._close_all([self._coordinators.close()])
        await self.context.pool.close()
        if late:  # These end soon: they have no connection any more.
            await asyncio.wait(late, timeout=CLOSE_FLUSH_S)

    async def _close_all(
        self, closings: Sequence[Coroutine[Any, Any, None]]
    ) -> set[asyncio.Task[None]]:
        """Run these closings together; cancels and returns those that take too long."""
        tasks = [self.context.loop.create_task(_ignore_errors(each)) for each in closings]
        _, late = await asyncio.wait(tasks, timeout=self.context.settings.close_timeout_s)
        for task in late:
            task.cancel()
        return late


async def _ignore_errors(closing: Coroutine[Any, Any, None]) -> None:
    """Close, and ignore a broker that cannot be reached any more."""
    try:
        await closing
    except MagnetarError:
        pass
