"""The client for threads.

Rules: it is a client of the core on a thread of its own; what it opens is open when the call
returns, and closed at the latest with the client.  What was opened for a caller who is interrupted
is closed again.
"""

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, TypeVar, Unpack, overload

import magnetar
from magnetar.bounds import READ_BYTES
from magnetar.checkpoint import Checkpoint
from magnetar.consume.consumer_settings import QueueOptions
from magnetar.consume.ordered_settings import CheckpointOptions, StreamOptions
from magnetar.errors import AlreadyClosed
from magnetar.layout import Layout
from magnetar.opening import Openable, Opening
from magnetar.options import ProducerOptions
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import RangePlan
from magnetar.schema.plain import BYTES
from magnetar.schema.schema import Schema
from magnetar.settings import ClientOptions
from magnetar.sync.bridge import Bridge, ClosedAfterwards
from magnetar.sync.consumers import CheckpointConsumer, QueueConsumer, StreamConsumer
from magnetar.sync.producer import Producer
from magnetar.sync.transaction import AttachedTransaction, Transaction, TransactionKey
from magnetar.transactions.txn_id import TxnId
from protocol.ids import Position

__all__ = ["Client", "connect"]

T = TypeVar("T")
O = TypeVar("O", bound=Openable)  # noqa: E741 - what is opened
_NO_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType({})


def connect(url: str, **settings: Unpack[ClientOptions]) -> "Client":
    """As `magnetar.connect`, connected when it returns: a context manager, or to be closed."""
    bridge = Bridge()
    try:
        core = bridge.run(lambda: magnetar.connect(url, **settings))
    except BaseException:
        bridge.close()
        raise
    return Client(bridge, core)


class Client(ClosedAfterwards):
    """See the module's rules.  Any thread may use it."""

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
        """As `magnetar.Client.producer`."""
        core = self._opened(self._core.producer(topic, schema=schema, **settings))
        return Producer(self._bridge, core)

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
        """As `magnetar.Client.queue_consumer`."""
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
        """As `magnetar.Client.stream_consumer`."""
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
        start: Checkpoint = ...,
        group: str | None = ...,
        **settings: Unpack[CheckpointOptions],
    ) -> CheckpointConsumer[bytes]: ...
    @overload
    def checkpoint_consumer(
        self,
        topic: str,
        *,
        schema: Schema[T] | type[T],
        start: Checkpoint = ...,
        group: str | None = ...,
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
        """As `magnetar.Client.checkpoint_consumer`."""
        core = self._opened(
            self._core.checkpoint_consumer(
                topic, schema=schema, start=start, group=group, **settings
            )
        )
        return CheckpointConsumer(self._bridge, core)

    def transaction(
        self, *, timeout_s: float = 60.0, key: TransactionKey | None = None
    ) -> Transaction:
        """As `magnetar.Client.transaction`; it has begun when this returns."""
        core_key = None if key is None else key.core
        core = self._opened(self._core.transaction(timeout_s=timeout_s, key=core_key))
        return Transaction(self._bridge, core)

    def begin_transaction(self, *, timeout_s: float = 60.0) -> TxnId:
        """As `magnetar.Client.begin_transaction`."""
        return self._bridge.run(self._core.begin_transaction, timeout_s=timeout_s)

    def attach_transaction(self, id: TxnId) -> AttachedTransaction:
        """As `magnetar.Client.attach_transaction`."""
        core = self._bridge.call(self._core.attach_transaction, id)
        return AttachedTransaction(self._bridge, core)

    def end_transaction(self, id: TxnId, *, commit: bool) -> None:
        """As `magnetar.Client.end_transaction`."""
        self._bridge.run(self._core.end_transaction, id, commit=commit)

    def transaction_key(self, name: str, *, epoch: int = -1) -> TransactionKey:
        """As `magnetar.Client.transaction_key`."""
        core = self._opened(self._core.transaction_key(name, epoch=epoch))
        return TransactionKey(self._bridge, core)

    def attach_transaction_key(self, name: str, epoch: int) -> TransactionKey:
        """As `magnetar.Client.attach_transaction_key`."""
        core = self._opened(self._core.attach_transaction_key(name, epoch))
        return TransactionKey(self._bridge, core)

    def layout(self, topic: str) -> Layout:
        """As `magnetar.Client.layout`."""
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
        """As `magnetar.Client.plan_range`."""
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
        """As `magnetar.Client.read_range`; the next list comes while one is worked on."""
        reading = self._bridge.call(
            self._core.read_range, segment_topic, start, end, raw=raw, max_bytes=max_bytes
        )
        return self._read(reading)

    def _read(
        self, reading: AsyncGenerator[list[StoredEntry], None]
    ) -> Generator[list[StoredEntry], None, None]:
        try:
            while entries := self._bridge.run(anext, reading, []):
                yield entries
        finally:
            with suppress(AlreadyClosed):
                self._bridge.run(reading.aclose)

    def close(self) -> None:
        """As `magnetar.Client.close`; then the thread ends.  Idempotent."""
        self._bridge.close()

    def _opened(self, opening: Opening[O]) -> O:
        return self._bridge.run_or_hand(self._let_go, lambda: opening)

    def _let_go(self, opened: Openable) -> None:
        """Nobody has it: whoever asked for it was interrupted."""
        self._bridge.run(opened.close)
