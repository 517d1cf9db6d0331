"""The client for threads: an asyncio client on a thread of its own.

Generated from magnetar/client.py by `make sync`: edit that file.
"""

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, TypeVar, Unpack, overload

import magnetar
from magnetar.bounds import READ_BYTES
from magnetar.checkpoint import Checkpoint
from magnetar.consume.settings import CheckpointOptions, QueueOptions, StreamOptions
from magnetar.errors import AlreadyClosed
from magnetar.layout import Layout
from magnetar.opening import Openable, Opening
from magnetar.options import ProducerOptions
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import RangePlan
from magnetar.schema.plain import BYTES
from magnetar.schema.schema import Schema
from magnetar.settings import ClientOptions
from magnetar.sync.bridge import Bridge, ClosedAfterwards
from magnetar.sync.consumers import CheckpointConsumer, QueueConsumer, StreamConsumer
from magnetar.sync.producer import Producer
from magnetar.sync.transaction import AttachedTransaction, Transaction
from magnetar.sync.transaction_key import TransactionKey

__all__ = ["Client", "connect"]

T = TypeVar("T")
O = TypeVar("O", bound=Openable)  # noqa: E741 - what is opened
_NO_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType({})


def connect(url: str, **settings: Unpack[ClientOptions]) -> "Client":
    """Connect to the brokers at `url`; see `magnetar.connect`.

    To be used by `with`, or closed.

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
    bridge = Bridge()
    try:
        core = bridge.run(lambda: magnetar.connect(url, **settings))
    except BaseException:
        bridge.close()
        raise
    return Client(bridge, core)


class Client(ClosedAfterwards):
    """A `magnetar.Client` for threads; any thread may use it. Made by `connect`.

    Objects that it returns are open, and are closed with the client at the latest. If the caller is
    interrupted while one is opened (by Ctrl-C, say), it is closed again.
    """

    def __init__(self, bridge: Bridge, core: magnetar.Client) -> None:
        self._bridge = bridge
        self._core = core
        bridge.at_end(core.close)

    @overload
    def producer(self, topic: str, **settings: Unpack[ProducerOptions]) -> Producer[bytes]: ...
    @overload
    def producer(
        self, topic: str, *, schema: Schema[T] | type[T], **settings: Unpack[ProducerOptions]
    ) -> Producer[T]: ...
    def producer(
        self,
        topic: str,
        *,
        schema: Schema[Any] | type[Any] = BYTES,
        **settings: Unpack[ProducerOptions],
    ) -> Producer[Any]:
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
        opening = self._core.producer(topic, schema=schema, **settings)
        return Producer(self._bridge, self._opened(opening))

    @overload
    def queue_consumer(
        self, topic: str, subscription: str, **settings: Unpack[QueueOptions]
    ) -> QueueConsumer[bytes]: ...
    @overload
    def queue_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        schema: Schema[T] | type[T],
        **settings: Unpack[QueueOptions],
    ) -> QueueConsumer[T]: ...
    @overload
    def queue_consumer(
        self,
        *,
        namespace: str,
        subscription: str,
        properties: Mapping[str, str] = ...,
        **settings: Unpack[QueueOptions],
    ) -> QueueConsumer[bytes]: ...
    @overload
    def queue_consumer(
        self,
        *,
        namespace: str,
        subscription: str,
        schema: Schema[T] | type[T],
        properties: Mapping[str, str] = ...,
        **settings: Unpack[QueueOptions],
    ) -> QueueConsumer[T]: ...
    def queue_consumer(
        self,
        topic: str | None = None,
        subscription: str | None = None,
        *,
        namespace: str | None = None,
        properties: Mapping[str, str] = _NO_PROPERTIES,
        schema: Schema[Any] | type[Any] = BYTES,
        **settings: Unpack[QueueOptions],
    ) -> QueueConsumer[Any]:
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
        opening = self._core.queue_consumer(  # type: ignore[call-overload]
            topic,
            subscription,
            namespace=namespace,
            properties=properties,
            schema=schema,
            **settings,
        )
        return QueueConsumer(self._bridge, self._opened(opening))

    @overload
    def stream_consumer(
        self, topic: str, subscription: str, **settings: Unpack[StreamOptions]
    ) -> StreamConsumer[bytes]: ...
    @overload
    def stream_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        schema: Schema[T] | type[T],
        **settings: Unpack[StreamOptions],
    ) -> StreamConsumer[T]: ...
    @overload
    def stream_consumer(
        self,
        *,
        namespace: str,
        subscription: str,
        properties: Mapping[str, str] = ...,
        **settings: Unpack[StreamOptions],
    ) -> StreamConsumer[bytes]: ...
    @overload
    def stream_consumer(
        self,
        *,
        namespace: str,
        subscription: str,
        schema: Schema[T] | type[T],
        properties: Mapping[str, str] = ...,
        **settings: Unpack[StreamOptions],
    ) -> StreamConsumer[T]: ...
    def stream_consumer(
        self,
        topic: str | None = None,
        subscription: str | None = None,
        *,
        namespace: str | None = None,
        properties: Mapping[str, str] = _NO_PROPERTIES,
        schema: Schema[Any] | type[Any] = BYTES,
        **settings: Unpack[StreamOptions],
    ) -> StreamConsumer[Any]:
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
        opening = self._core.stream_consumer(  # type: ignore[call-overload]
            topic,
            subscription,
            namespace=namespace,
            properties=properties,
            schema=schema,
            **settings,
        )
        return StreamConsumer(self._bridge, self._opened(opening))

    @overload
    def checkpoint_consumer(
        self,
        topic: str,
        *,
        start: Checkpoint = Checkpoint.EARLIEST,
        group: str | None = None,
        **settings: Unpack[CheckpointOptions],
    ) -> CheckpointConsumer[bytes]: ...
    @overload
    def checkpoint_consumer(
        self,
        topic: str,
        *,
        schema: Schema[T] | type[T],
        start: Checkpoint = Checkpoint.EARLIEST,
        group: str | None = None,
        **settings: Unpack[CheckpointOptions],
    ) -> CheckpointConsumer[T]: ...
    def checkpoint_consumer(
        self,
        topic: str,
        *,
        schema: Schema[Any] | type[Any] = BYTES,
        start: Checkpoint = Checkpoint.EARLIEST,
        group: str | None = None,
        **settings: Unpack[CheckpointOptions],
    ) -> CheckpointConsumer[Any]:
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
        opening = self._core.checkpoint_consumer(
            topic, schema=schema, start=start, group=group, **settings
        )
        return CheckpointConsumer(self._bridge, self._opened(opening))

    def transaction(
        self, *, timeout_s: float = 60.0, key: TransactionKey | None = None
    ) -> Transaction:
        """Open a transaction: all that is sent and acknowledged in it takes effect, or nothing.

        `with` commits it, or aborts it on an error.  The broker aborts it after `timeout_s`.
        With a transaction `key`, holders of older epochs of that key can no longer commit.  Opening
        it raises `NotSupported` and `NotAllowed` where there are no transactions, and
        `TransactionKeyFenced`.
        """
        opening = self._core.transaction(timeout_s=timeout_s, key=None if key is None else key.core)
        return Transaction(self._bridge, self._opened(opening))

    def begin_transaction(self, *, timeout_s: float = 60.0) -> TxnId:
        """Begin a transaction that any process can use and end by its id, which is returned.

        For work that one process does and another one decides about (`attach_transaction`,
        `end_transaction`).  The broker aborts it after `timeout_s`; the client never does.  Raises
        `NotSupported` and `NotAllowed` where there are no transactions.
        """
        return self._bridge.run(self._core.begin_transaction, timeout_s=timeout_s)

    def attach_transaction(self, id: TxnId) -> AttachedTransaction:
        """Use a running transaction by its id, also one that another process began.

        This asks no broker.  Sending in it fails if it is no longer open.
        """
        core = self._bridge.call(self._core.attach_transaction, id)
        return AttachedTransaction(self._bridge, core)

    def end_transaction(self, id: TxnId, *, commit: bool) -> None:
        """Commit or abort a transaction by its id, also one that another process began.

        Calling it again is safe.  Other processes must have their receipts and acknowledgements of
        it before it is committed.  Raises `InvalidTransactionStatus` if it ended the other way,
        `TransactionNotFound` if the broker no longer knows it or it belongs to another client, and
        `OperationTimedOut` if the broker did not answer: call it again to learn how it ended.
        """
        self._bridge.run(self._core.end_transaction, id, commit=commit)

    def transaction_key(self, name: str, *, epoch: int = -1) -> TransactionKey:
        """Open a transaction key (Magnetar's own), which fences its earlier holder.

        `epoch` is the last known one, or -1.  Raises `NotSupported` where there are no keys.
        """
        opening = self._core.transaction_key(name, epoch=epoch)
        return TransactionKey(self._bridge, self._opened(opening))

    def attach_transaction_key(self, name: str, epoch: int) -> TransactionKey:
        """Use a transaction key that another process of the same program has opened.

        Raises `TransactionKeyFenced` if `epoch` is not its newest, `NotSupported` where there are
        no keys.
        """
        opening = self._core.attach_transaction_key(name, epoch)
        return TransactionKey(self._bridge, self._opened(opening))

    def layout(self, topic: str) -> Layout:
        """The segments of a topic now, active and sealed.

        Raises `TopicNotFound`, `NotSupported` where there are no scalable topics, and the last
        error after the operation timeout.
        """
        return self._bridge.run(self._core.layout, topic)

    def plan_range(
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
        return self._bridge.run(
            self._core.plan_range,
            segment_topic,
            start,
            end=end,
            max_messages=max_messages,
            max_bytes=max_bytes,
            from_publish_time_ms=from_publish_time_ms,
            before_publish_time_ms=before_publish_time_ms,
        )

    def read_range(
        self,
        segment_topic: str,
        start: Position,
        end: Position,
        *,
        raw: bool = False,
        max_bytes: int = READ_BYTES,
    ) -> Generator[list[StoredEntry], None, None]:
        """The stored entries of a segment from `start` up to, and without, `end`.

        Each list has at most `max_bytes`, or one entry, and at most the size of the broker's
        largest message; the next list is requested before one is handed out.  The iteration ends at
        `end`, or where no more can be read now.  `raw` adds entries that consumers do not get
        (aborted, beyond the max read position, markers), as each entry's `visibility` says; it
        needs a broker with segment reads.

        Iterating raises `TopicNotFound` for a segment that no longer exists, and the last error
        after the operation timeout without an answer.
        """
        return self._lists_of(
            self._bridge.call(
                self._core.read_range, segment_topic, start, end, raw=raw, max_bytes=max_bytes
            )
        )

    def close(self) -> None:
        """Close all that the client has opened, its connections and its thread. Idempotent."""
        self._bridge.close()

    def _opened(self, opening: Opening[O]) -> O:
        return self._bridge.run_or_hand(self._close_unclaimed, lambda: opening)

    def _close_unclaimed(self, opened: Openable) -> None:
        # Its caller was interrupted, so no one else closes it.
        self._bridge.run(opened.close)

    def _lists_of(
        self, reading: AsyncGenerator[list[StoredEntry], None]
    ) -> Generator[list[StoredEntry], None, None]:
        try:
            while entries := self._bridge.run(anext, reading, []):
                yield entries
        finally:
            with suppress(AlreadyClosed):
                self._bridge.run(reading.aclose)
