"""The client: what producers, consumers and transactions are made by.

Rules:

- `connect` reaches one host of the service URL before it returns, and fails at once if none is
  there.
- `close` ends whatever the client has opened and still lives, in this order: transactions abort,
  producers send what they have, consumers acknowledge what they were told, transaction keys and
  coordinators are left, then the connections go; each step has `close_timeout_s` at most.  A
  closed client opens nothing more.
- What makes something raises `InvalidArgument` at once for settings that cannot be, and
  `AlreadyClosed` on a closed client; awaiting or entering it raises what its making (a name that
  cannot be) and its `open` do.
"""

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
from magnetar.identity import Identities
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
from magnetar.settings import ClientOptions, ClientSettings, check_positive
from magnetar.transactions.attached_transaction import AttachedTransaction
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.keys import TransactionKey
from magnetar.transactions.transaction import Transaction
from magnetar.wire.pool import ConnectionPool

__all__ = ["Client", "connect"]

T = TypeVar("T")
_NO_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType({})
O = TypeVar("O", bound=Openable)  # noqa: E741 - what is opened


class _Topic(NamedTuple):
    """Whose messages are consumed."""

    topic: str
    subscription: str


class _Namespace(NamedTuple):
    """Whose topics' messages are consumed."""

    namespace: str
    subscription: str


def _check_topic(topic: str) -> None:
    """Raises `InvalidArgument` for what is no text; whether it is a name shows at the opening."""
    if not isinstance(topic, str):
        raise InvalidArgument(f"The topic is {topic!r}; give its name as text.")


def _source(
    topic: str | None,
    namespace: str | None,
    subscription: str | None,
    properties: Mapping[str, str],
) -> _Topic | _Namespace:
    """What a consumer is of.  Raises `InvalidArgument`."""
    if not subscription:
        raise InvalidArgument("The subscription has no name; give one.")
    if (topic is None) == (namespace is None):
        raise InvalidArgument("A consumer is of a topic or of a namespace; give one of them.")
    if namespace is not None:
        return _Namespace(namespace, subscription)
    if properties:
        raise InvalidArgument("Properties choose topics of a namespace; give a namespace.")
    name = topic or ""
    _check_topic(name)
    return _Topic(name, subscription)


class _Step(enum.IntEnum):
    """What is closed together; in this order."""

    TRANSACTIONS = 0
    PRODUCERS = 1
    CONSUMERS = 2
    KEYS = 3


def connect(url: str, **settings: Unpack[ClientOptions]) -> Opening["Client"]:
    """A client of the brokers at `url`: `pulsar://host:6650,host:6650` or `pulsar+ssl://...`.

    To be awaited, or entered by `async with`.  Settings are those of `ClientSettings`.  Raises
    `InvalidArgument` at once, and when it is awaited `ConnectionLost`, `AuthenticationFailed`.
    """
    client = Client(url, ClientSettings(**settings))
    return Opening(lambda: client)


class Client(ClosedAfterwards):
    """A client of one cluster: opens producers, consumers and transactions, and closes them.

    Made by `connect`; belongs to the loop that it is opened on.
    """

    def __init__(
        self, url: str, settings: ClientSettings, *, rng: random.Random | None = None
    ) -> None:
        ids = Identities()
        luck = rng or random.Random()
        pool = ConnectionPool(url, settings, ids, luck)
        self.context = ClientContext(pool, settings, ids, luck)
        self._url: Final = url
        self._opened: dict[_Step, WeakSet[Openable]] = {step: WeakSet() for step in _Step}
        self._coordinators: Coordinators | None = None
        self._reads: SegmentReads | None = None
        self._closing: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        """Reach a broker.  Raises why none can be."""
        self._check_open()
        self._loop = self.context.loop
        await self.context.pool.any()

    async def close(self) -> None:
        """Close all that the client has opened, then its connections.

        Cancelling it does not stop it.  Raises `WrongLoop`.
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

    # What it makes

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
        """Writes to a topic.  Settings are those of `ProducerSettings`.

        `topic` is `topic://tenant/namespace/name`, or a short name as brokers resolve it; what is
        missing is made if the broker may.  `schema` is one, or a type that chooses it: `bytes`,
        `str`, a dataclass, a pydantic model, a protobuf message.
        """
        _check_topic(topic)
        how = ProducerSettings(**settings)
        what = schema_for(schema)
        return self._opening(_Step.PRODUCERS, lambda: Producer(self.context, topic, what, how))

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
        """Shares the messages of a topic with others of its subscription, in no order.

        With a `namespace` ("tenant/namespace") instead of a topic: of all its scalable topics that
        have these `properties`, also of those that are made later.  Settings are those of
        `QueueSettings`; `schema` is as for `producer`.
        """
        how = QueueSettings(**settings)
        what = schema_for(schema)
        who = _source(topic, namespace, subscription, properties)
        if isinstance(who, _Topic):
            return self._opening(
                _Step.CONSUMERS, lambda: QueueConsumer(self.context, *who, what, how)
            )
        return self._opening(
            _Step.CONSUMERS,
            lambda: NamespaceQueueConsumer(
                self.context, who.namespace, who.subscription, what, how, properties
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
        """Reads its share of a topic's segments, the messages of each key in order.

        With a `namespace` ("tenant/namespace") instead of a topic: of all its scalable topics that
        have these `properties`, also of those that are made later.  Settings are those of
        `StreamSettings`; `schema` is as for `producer`.
        """
        how = StreamSettings(**settings)
        what = schema_for(schema)
        who = _source(topic, namespace, subscription, properties)
        if isinstance(who, _Topic):
            return self._opening(
                _Step.CONSUMERS, lambda: StreamConsumer(self.context, *who, what, how)
            )
        return self._opening(
            _Step.CONSUMERS,
            lambda: NamespaceStreamConsumer(
                self.context, who.namespace, who.subscription, what, how, properties
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
        """Reads a topic from a checkpoint on; where it is, the application keeps.

        With a `group` it reads its share of the segments, else all of them.  Settings are those of
        `CheckpointSettings`; `schema` is as for `producer`.
        """
        _check_topic(topic)
        if not isinstance(start, Checkpoint):
            raise InvalidArgument(
                f"The start is {start!r}; give a Checkpoint: Checkpoint.EARLIEST, "
                "Checkpoint.LATEST, or Checkpoint.from_bytes(...) of what was kept."
            )
        how = CheckpointSettings(**settings)
        what = schema_for(schema)
        return self._opening(
            _Step.CONSUMERS,
            lambda: CheckpointConsumer(self.context, topic, what, how, start, group),
        )

    def transaction(
        self, *, timeout_s: float = 60.0, key: TransactionKey | None = None
    ) -> Opening[Transaction]:
        """What is sent and acknowledged in it happens as one, or not at all.

        `async with` commits it, or aborts it on an error.  The broker aborts it by itself after
        `timeout_s`.  `key`: under which nobody with an older epoch can have one any more.  Opening
        it raises `NotSupported` and `NotAllowed` where there are no transactions, and
        `TransactionKeyFenced`.
        """
        return self._opening(
            _Step.TRANSACTIONS,
            lambda: Transaction(self.context, self._transactions(), timeout_s, key),
        )

    async def begin_transaction(self, *, timeout_s: float = 60.0) -> TxnId:
        """A transaction that belongs to nobody: whoever knows its id uses it, and ends it.

        For work that one process does and another one decides about (`attach_transaction`,
        `end_transaction`).  The broker aborts it by itself after `timeout_s`; nothing here does.
        Raises `NotSupported` and `NotAllowed` where there are no transactions.
        """
        check_positive("timeout_s", timeout_s)
        self._check_usable()
        return await self._transactions().begin(math.ceil(timeout_s * 1000))

    def attach_transaction(self, id: TxnId) -> AttachedTransaction:
        """Send and acknowledge in a transaction that runs, whoever began it.

        Nothing is asked for it: whether it is still open shows with what is sent in it.
        """
        self._check_usable()
        return AttachedTransaction(self.context, self._transactions(), TxnId(*id))

    async def end_transaction(self, id: TxnId, *, commit: bool) -> None:
        """Commit or abort a transaction by its id, whoever began it; asking again is fine.

        What other processes have in it must be settled before it is committed.  Raises
        `InvalidTransactionStatus` if it has the other end, `TransactionNotFound` where its end is
        forgotten (or it is somebody else's), and `OperationTimedOut` if the broker has not said how
        it ended: asking again tells.
        """
        self._check_usable()
        await self._transactions().end_for_sure(TxnId(*id), commit=commit)

    def transaction_key(self, name: str, *, epoch: int = -1) -> Opening[TransactionKey]:
        """Open a transaction key (Magnetar's own): whoever had it before is fenced.

        `epoch` is the last one known, -1: none.  Raises `NotSupported` where there are no keys.
        """
        return self._opening(
            _Step.KEYS,
            lambda: TransactionKey(self.context, self._transactions(), name, epoch),
        )

    def attach_transaction_key(self, name: str, epoch: int) -> Opening[TransactionKey]:
        """Use a transaction key that another process of the same program has opened.

        Raises `TransactionKeyFenced` if `epoch` is not its newest, `NotSupported` where there are
        no keys.
        """
        return self._opening(
            _Step.KEYS,
            lambda: TransactionKey(self.context, self._transactions(), name, epoch, attach=True),
        )

    # What it reads by itself

    async def layout(self, topic: str) -> Layout:
        """The segments of a topic now, active and sealed.

        Raises `TopicNotFound`, `NotSupported` where there are no scalable topics, and after the
        operation timeout why it could not be told.
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
        """How far a segment may be read from `start` (None: its first entry) on.

        `segment_topic` is `Segment.topic` of a layout.  The range ends at `end`, the horizon, or
        where a bound is reached, whichever is first, and has one entry at least if there is one.
        The publish times move its start, to the first entry that was published then or later, and
        bound its end, before the first such entry.

        Brokers without segment reads count nothing, heed no budget, and raise `NotSupported` for
        times.  Raises `TopicNotFound` for a segment that is gone, `InvalidArgument`.
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
        """The entries of a segment from `start` up to, and without, `end`, as they are stored.

        In lists of `max_bytes` at most, or of one entry, and not more than the broker's largest
        message has room for; the next list is on its way when one is handed out.  It ends at `end`,
        or where nothing may be read any more now.  `raw`: also what may not be read (aborted,
        beyond the horizon, markers), as each entry's `visibility` says; only where the broker has
        segment reads.

        Raises, when it is iterated over, `TopicNotFound` for a segment that is gone, and after the
        operation timeout without an answer why there was none.
        """
        _check_topic(segment_topic)
        check_positive("max_bytes", max_bytes)
        return self._segment_reads().read(
            segment_topic, Position(*start), Position(*end), raw=raw, max_bytes=max_bytes
        )

    # How it is done

    def _segment_reads(self) -> SegmentReads:
        self._check_usable()
        if self._reads is None:
            self._reads = SegmentReads(self.context)
        return self._reads

    def _check_usable(self) -> None:
        self._check_loop()
        self._check_open()

    def _transactions(self) -> Coordinators:
        """The coordinators, of which nothing is asked before the first transaction."""
        if self._coordinators is None:
            self._coordinators = Coordinators(self.context)
        return self._coordinators

    def _check_open(self) -> None:
        if self._closing is not None:
            raise AlreadyClosed("The client is closed; connect anew with magnetar.connect.")

    def _check_loop(self) -> None:
        if self._loop is not None:
            check_loop(self._loop)

    def _opening(self, step: _Step, make: Callable[[], O]) -> Opening[O]:
        """What `make` makes, opened, and closed with this client."""
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
        for step in _Step:
            live = list(self._opened[step])
            if live:
                late |= await self._close_all([each.close() for each in live])
        if self._coordinators is not None:
            late |= await self._close_all([self._coordinators.close()])
        await self.context.pool.close()
        if late:  # has no connection any more to wait for
            await asyncio.wait(late, timeout=CLOSE_FLUSH_S)

    async def _close_all(
        self, closings: Sequence[Coroutine[Any, Any, None]]
    ) -> set[asyncio.Task[None]]:
        """Close what goes together; returns what takes too long, and is cancelled."""
        tasks = [self.context.loop.create_task(_quietly(each)) for each in closings]
        _, late = await asyncio.wait(tasks, timeout=self.context.settings.close_timeout_s)
        for task in late:
            task.cancel()
        return late


async def _quietly(closing: Coroutine[Any, Any, None]) -> None:
    """What cannot be said to the broker any more is no matter for who closes."""
    try:
        await closing
    except MagnetarError:
        pass
