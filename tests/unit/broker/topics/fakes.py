"""A topic, ledger, cursor and connection in memory, just enough for the consuming side."""

import asyncio
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

from broker.policies.applied_policies import broker_policies
from broker.topics.closed_consumers import ClosedConsumers
from broker.topics.consumer import Consumer, KeySharedPolicy, SubscribeRequest, SubscriptionType
from broker.topics.dispatch.last_message import LastMessage
from broker.topics.replication import NoReplication
from broker.topics.subscription import Subscription
from broker.topics.throttle import RateLimit
from broker.topics.topic import Topic
from broker.wire.connection import Connection
from config.settings import load_settings
from magnetar.protocol.ack_set import from_words, pending_all, to_words
from magnetar.protocol.frames import Frame, FrameDecoder, encode_command
from magnetar.protocol.ids import LATEST, Position
from magnetar.protocol.message import build_entry
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.pulsar_pb2 import BaseCommand, MessageMetadata
from storage.managed_ledger.types import Entry


def entry_bytes(sequence_id: int, key: str | None = None, count: int = 1, **fields: int) -> bytes:
    metadata = MessageMetadata(
        **{"producer_name": "p", "sequence_id": sequence_id, "publish_time": 1000} | fields  # type: ignore[arg-type]
    )
    if key is not None:
        metadata.partition_key = key
    if count > 1:
        metadata.num_messages_in_batch = count
    return build_entry(metadata, b"x" * 10)


class FakeLedger:
    """Entries in a list; `cached_from` says from where on they need no read."""

    def __init__(self) -> None:
        self.name = "fake"
        self.entries: list[Entry] = []
        self.cached_from = 0
        self.reads = 0
        self.entries_read = 0
        self.read_errors: list[Exception] = []
        self.listeners: list[Callable[[], None]] = []

    @property
    def last_confirmed(self) -> Position:
        return Position(1, len(self.entries) - 1)

    def put(self, *datas: bytes) -> None:
        for data in datas:
            self.entries.append(Entry(Position(1, len(self.entries)), data))
        for listener in list(self.listeners):
            listener()

    def on_append(self, listener: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def next_position(self, position: Position) -> Position:
        return Position(1, max(position.entry_id, -1) + 1)

    def previous_position(self, position: Position) -> Position:
        return Position(1, max(position.entry_id - 1, -1))

    def entries_from(self, start: Position, count: int) -> list[Entry]:
        if start.ledger_id > 1:
            return []
        index = 0 if start.ledger_id < 1 else max(start.entry_id, 0)
        return self.entries[index : index + count]

    def read_cached(self, start: Position, max_entries: int, max_bytes: int) -> list[Entry] | None:
        found = self.entries_from(start, max_entries)
        if found and found[0].position.entry_id < self.cached_from:
            return None
        return found

    async def read(
        self,
        start: Position,
        *,
        max_entries: int,
        max_bytes: int,
        up_to: Position | None = None,
    ) -> list[Entry]:
        self.reads += 1
        await asyncio.sleep(0)
        if self.read_errors:
            raise self.read_errors.pop()
        found = self.entries_from(start, max_entries)
        self.entries_read += len(found)
        return [each for each in found if up_to is None or each.position <= up_to]


class FakeCursor:
    """Acknowledged positions in a set."""

    def __init__(self, ledger: FakeLedger, *, durable: bool = True) -> None:
        self.ledger = ledger
        self.durable = durable
        self.name = "s"
        self.properties: dict[str, str] = {}
        self.acked: set[Position] = set()
        self.partial: dict[Position, int] = {}
        self.mark_delete = Position(1, -1)
        self.unused_since_ms: int | None = None
        self.notes: tuple[int, ...] = ()
        self.persisted = 0

    @property
    def backlog(self) -> int:
        return sum(1 for entry in self.ledger.entries if not self.is_acknowledged(entry.position))

    def set_notes(self, notes: tuple[int, ...]) -> None:
        self.notes = notes

    def is_acknowledged(self, position: Position) -> bool:
        return position <= self.mark_delete or position in self.acked

    def ack_set(self, position: Position) -> list[int] | None:
        bits = self.partial.get(position)
        return to_words(bits) if bits else None

    def acknowledge(self, position: Position) -> bool:
        new = not self.is_acknowledged(position)
        self.acked.add(position)
        self.partial.pop(position, None)
        while Position(1, self.mark_delete.entry_id + 1) in self.acked:
            self.mark_delete = Position(1, self.mark_delete.entry_id + 1)
        return new

    def acknowledge_batch(self, position: Position, ack_set: Sequence[int], size: int) -> bool:
        if self.is_acknowledged(position):
            return False
        bits = self.partial.get(position, pending_all(size)) & from_words(ack_set, size)
        if bits:
            self.partial[position] = bits
            return False
        return self.acknowledge(position)

    def acknowledge_up_to(self, position: Position, ack_set: Sequence[int] = ()) -> None:
        last = position.entry_id - (1 if ack_set else 0)
        for entry_id in range(self.mark_delete.entry_id + 1, last + 1):
            self.acknowledge(Position(1, entry_id))
        if ack_set:
            self.acknowledge_batch(position, ack_set, len(ack_set) * 64)

    def first_unacknowledged(self, at_or_after: Position) -> Position:
        position = at_or_after
        while self.is_acknowledged(position):
            position = Position(1, position.entry_id + 1)
        return position

    def set_unused_since(self, ms: int | None) -> None:
        self.unused_since_ms = ms

    async def persist(self) -> None:
        self.persisted += 1

    async def reset(self, position: Position) -> None:
        self.acked.clear()
        self.partial.clear()
        index = len(self.ledger.entries) if position == LATEST else max(position.entry_id, 0)
        self.mark_delete = Position(1, index - 1)


class FakeTopic:
    """One ledger and its subscriptions; remembers what these tell, in order."""

    def __init__(self, name: str = "persistent://t/n/x") -> None:
        self.name = parse_topic_name(name)
        self.ledger = FakeLedger()
        self.sealed = False
        self.horizon: Position | None = None
        self.aborted: set[Position] = set()
        self.last_message = LastMessage(cast("Topic", self))
        self.subscriptions: dict[str, Subscription] = {}
        self.unsubscribed: list[str] = []
        self.events: list[tuple[object, ...]] = []
        self.now_ms = 10_000
        self.policies = broker_policies(load_settings())
        self.dispatch_limits: tuple[RateLimit, ...] = ()
        self.published_per_s = (0.0, 0.0)
        self.replication = NoReplication()
        self.context = SimpleNamespace(
            clock=SimpleNamespace(now_ms=lambda: self.now_ms),
            settings=load_settings(),
            random=random.Random(1),
        )

    @property
    def consumer_count(self) -> int:
        return sum(len(each.consumers) for each in self.subscriptions.values())

    def published_rates(self, now_s: float) -> tuple[float, float]:
        return self.published_per_s

    def max_read_position(self) -> Position:
        return self.ledger.last_confirmed if self.horizon is None else self.horizon

    def is_aborted(self, entry: Entry) -> bool:
        return entry.position in self.aborted

    def consumer_attached(self, subscription: str, consumer: Consumer) -> None:
        self.events.append(("attached", consumer.name))

    def consumer_closed(self, subscription: str, consumer: Consumer, *, by_command: bool) -> None:
        self.events.append(("closed", consumer.name, by_command))

    def subscription_drained(self, subscription: str) -> None:
        self.events.append(("drained", subscription))

    def subscription_rewound(self, subscription: str) -> None:
        self.events.append(("rewound", subscription))

    def note_unstamped_batch(self) -> None:
        self.events.append(("unstamped",))

    async def unsubscribe(self, name: str, *, force: bool) -> None:
        self.unsubscribed.append(name)
        self.subscriptions.pop(name, None)

    def subscription(
        self, name: str = "s", *, durable: bool = True, **bounds: float
    ) -> Subscription:
        cursor = FakeCursor(self.ledger, durable=durable)
        made = Subscription(cast("Topic", self), name, cursor, **bounds)  # type: ignore[arg-type]
        self.subscriptions[name] = made
        return made

    def seal(self) -> None:
        self.sealed = True
        for subscription in self.subscriptions.values():
            subscription.topic_sealed()


class FakeConnection:
    """Keeps what was sent, as frames."""

    def __init__(self) -> None:
        self.remote = "127.0.0.1:1"
        self.client_version = ""
        self.tls = False
        self.own_transactions = None
        self.consumers: dict[int, object] = {}
        self.closed_consumers = ClosedConsumers()
        self.alive = True
        self.closing = False
        self._writable = True
        self._waiting: list[Callable[[], None]] = []
        self._on_close: list[Callable[[], None]] = []
        self._bytes = bytearray()
        self._decoder = FrameDecoder(1 << 24)
        self._frames: list[Frame] = []
        self.writes = 0

    @property
    def writable(self) -> bool:
        return self._writable

    @writable.setter
    def writable(self, writable: bool) -> None:
        self._writable = writable
        if writable:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()

    def on_writable(self, callback: Callable[[], None]) -> None:
        self._waiting.append(callback)

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._on_close.append(callback)
        return lambda: self._on_close.remove(callback) if callback in self._on_close else None

    def send(self, command: BaseCommand) -> None:
        self.send_encoded(encode_command(command))

    def send_encoded(self, *buffers: bytes) -> None:
        if not self.closing:
            self.writes += 1
            for frame in self._decoder.feed(b"".join(buffers)):
                assert isinstance(frame, Frame)
                self._frames.append(frame)

    def forget_consumer(self, consumer_id: int, consumer: object) -> None:
        if self.consumers.get(consumer_id) is consumer:
            del self.consumers[consumer_id]

    async def is_alive(self) -> bool:
        await asyncio.sleep(0)
        return self.alive

    def abort(self, why: str) -> None:
        self.lose()

    def lose(self) -> None:
        self.closing = True
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            callback()

    @property
    def frames(self) -> list[Frame]:
        return self._frames

    def commands(self, kind: int) -> list[BaseCommand]:
        return [frame.command for frame in self._frames if frame.command.type == kind]

    def got(self) -> list[int]:
        """Entry ids of the MESSAGEs so far."""
        return [
            command.message.message_id.entry_id for command in self.commands(BaseCommand.MESSAGE)
        ]


async def attach(
    subscription: Subscription,
    kind: SubscriptionType,
    name: str = "c",
    *,
    permits: int = 0,
    connection: FakeConnection | None = None,
    consumer_id: int = 1,
    priority_level: int = 0,
    key_shared: KeySharedPolicy | None = None,
) -> tuple[Consumer, FakeConnection]:
    connection = connection or FakeConnection()
    consumer = await subscription.add_consumer(
        SubscribeRequest(
            connection=cast("Connection", connection),
            consumer_id=consumer_id,
            subscription=subscription.name,
            type=kind,
            consumer_name=name,
            priority_level=priority_level,
            key_shared=key_shared or KeySharedPolicy(),
        )
    )
    connection.consumers[consumer_id] = consumer
    consumer.opened()
    if permits:
        consumer.flow(permits)
    return consumer, connection


async def settle(turns: int = 20) -> None:
    """Let everything that is scheduled run: the fakes need no more turns than this."""
    for _ in range(turns):
        await asyncio.sleep(0)
