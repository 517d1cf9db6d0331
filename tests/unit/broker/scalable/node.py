"""Scalable topics over real topics and managed ledgers, without sockets.

A `World` is what outlives processes: the two stores and a clock.  A `Node` is one process on it:
everything of a broker but its ports.  `Peer` stands for a connection and keeps what it was sent.
`Mortal` stops a process for good at a chosen write: the write takes effect, the process never hears
of it, and nothing of it has any effect from then on.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from broker.app.service import Broker
from broker.placement import OneBroker
from broker.policies.namespaces import Namespaces
from broker.policies.policies_in_force import PoliciesInForce
from broker.policies.topic_policies import TopicPolicies
from broker.scalable.assignment_record import StoredAssignment
from broker.scalable.group_controller import GroupController
from broker.scalable.live_topics import LiveTopic
from broker.scalable.records import SubscriptionKind, namespace_path, segment_of
from broker.scalable.segment_requests import SegmentRequest
from broker.scalable.service import ScalableTopics
from broker.topics.consumer import Consumer, SubscribeRequest, SubscriptionType
from broker.topics.offloading import Offloads
from broker.topics.producer import Producer, ProducerRequest
from broker.topics.producer_names import ProducerNames
from broker.topics.publish_limits import PublishLimits
from broker.topics.registry import TopicRegistry
from broker.topics.schemas import SchemaRegistry
from broker.topics.subscription_positions import PositionsTold, SubscriptionsLeft
from broker.topics.topic import Topic
from broker.topics.topic_counts import TopicCounts
from broker.transactions.service import Transactions
from broker.wire.connection import Connection
from config.settings import Settings
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.protocol.message import build_entry
from magnetar.protocol.names import TopicName, parse_topic_name, segment_name
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.records import ledger_key
from storage.managed_ledger.types import Limits
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import (
    IndexEntry,
    MetadataError,
    MetadataStore,
    PutResult,
    Session,
    Version,
)
from tests.support.clocks import FakeClock
from tests.unit.broker.scalable.stored import noted_steps, stored_segments
from tests.unit.storage.managed_ledger.fakes import (
    FakeLedgerStore,
    Process,
    ProcessLedgers,
    ProcessMetadata,
)

TOPIC = parse_topic_name("topic://public/default/t")
A = TypeVar("A")
LIMITS = Limits(cursor_flush_ms=1)


class Mortal(ProcessMetadata):
    """The metadata store as one process sees it."""

    def __init__(self, process: Process, store: MemoryMetadataStore) -> None:
        super().__init__(process, store)
        self.writes: list[str] = []
        self.dies_at: int | None = None
        self._last_write = ""
        self.faults: dict[str, bool] = {}
        """Part of a key to whether the put that fails there was applied; each fails once."""

    async def _written(self, what: str) -> None:
        self.writes.append(what)
        if self.dies_at is not None and len(self.writes) >= self.dies_at:
            self.process.dead = True
        if self._last_write and what.endswith(self._last_write):
            self.process.dead = True
        await self.process.alive()

    def dies_after(self, key: str) -> None:
        """Stop the process after its next write of this key."""
        self._last_write = f" {key}"

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        partition: str | None = None,
        expect: Version | None = None,
        session: Session | None = None,
        sequence: bool = False,
        indexes: Sequence[IndexEntry] = (),
    ) -> PutResult:
        await self.process.alive()
        fault = next((part for part in self.faults if part in key), None)
        applied = self.faults.pop(fault) if fault is not None else True
        if not applied:
            raise MetadataError("the test says no: try again.")
        result = await super().put(
            key,
            value,
            partition=partition,
            expect=expect,
            session=session,
            sequence=sequence,
            indexes=indexes,
        )
        await self._written(f"put {key}")
        if fault is not None:
            raise MetadataError("the answer was lost: try again.")
        return result

    async def delete(
        self, key: str, *, partition: str | None = None, expect: Version | None = None
    ) -> bool:
        deleted = await super().delete(key, partition=partition, expect=expect)
        await self._written(f"delete {key}")
        return deleted

    async def close(self) -> None:
        """The store outlives the process."""


class World:
    """What outlives processes."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.metadata = MemoryMetadataStore(self.clock)
        self.ledgers = FakeLedgerStore(self.clock)

    async def stored_segments(self, topic: TopicName = TOPIC) -> list[str]:
        """Descriptors of the segments of a topic that have a ledger."""
        return await stored_segments(self.metadata, topic)

    async def steps(self) -> list[str]:
        """What was begun and not ended."""
        return await noted_steps(self.metadata)


LAYOUT_UPDATE = pb.BaseCommand(type=pb.BaseCommand.SCALABLE_TOPIC_UPDATE).SerializeToString()


class Peer:
    """A connection, as far as topics and scalable topics look at it."""

    def __init__(self, broker: "Node", client_version: str = "Pulsar-Java-v5.0.0-M1") -> None:
        self.broker = broker
        self.client_version = client_version
        self.remote = "127.0.0.1:1"
        self.tls = False
        self.own_transactions = None
        self.connected_ms = 0
        self.closing = False
        self.silent = False
        self._unwritable = False
        self._on_writable: list[Callable[[], None]] = []
        self.closed_because: str | None = None
        self.sent: list[pb.BaseCommand] = []
        self.consumers: dict[int, object] = {}
        self.producers: dict[int, object] = {}
        self.inflight_bytes = 0
        self.next_id = 0
        self._on_close: dict[object, Callable[[], None]] = {}

    def as_connection(self) -> Connection:
        return cast("Connection", self)

    def send(self, command: pb.BaseCommand) -> None:
        if not self.closing:
            self.sent.append(pb.BaseCommand.FromString(command.SerializeToString()))

    def send_encoded(self, *buffers: bytes) -> None:
        """Take layouts; messages are no concern of these tests."""
        for buffer in buffers:
            if buffer[8:].startswith(LAYOUT_UPDATE):
                self.send(pb.BaseCommand.FromString(buffer[8:]))

    def put(self, buffer: bytes) -> None:
        """Receipts are no concern of these tests."""

    def forget_producer(self, producer_id: int, producer: object) -> None:
        if self.producers.get(producer_id) is producer:
            del self.producers[producer_id]

    def forget_consumer(self, consumer_id: int, consumer: object) -> None:
        if self.consumers.get(consumer_id) is consumer:
            del self.consumers[consumer_id]

    @property
    def writable(self) -> bool:
        return not self._unwritable

    @writable.setter
    def writable(self, writable: bool) -> None:
        self._unwritable = not writable
        if writable:
            callbacks, self._on_writable = self._on_writable, []
            for callback in callbacks:
                callback()

    def on_writable(self, callback: Callable[[], None]) -> None:
        if self.writable:
            callback()
        else:
            self._on_writable.append(callback)

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        if self.closing:
            asyncio.get_running_loop().call_soon(callback)
            return lambda: None
        token = object()
        self._on_close[token] = callback
        return lambda: (self._on_close.pop(token, None), None)[1]

    def close(self, why: str = "the test") -> None:
        self.closing = True
        self.closed_because = why
        callbacks = list(self._on_close.values())
        self._on_close.clear()
        for callback in callbacks:
            callback()

    abort = close

    async def is_alive(self) -> bool:
        return not self.closing and not self.silent

    async def echo(self) -> None:
        """All that a test's client wrote is served at once."""

    # What it was sent

    def taken(self, kind: int) -> list[pb.BaseCommand]:
        """The commands of one kind so far; they are not seen again."""
        found = [command for command in self.sent if command.type == kind]
        self.sent = [command for command in self.sent if command.type != kind]
        return found

    def layouts(self) -> list[pb.CommandScalableTopicUpdate]:
        return [
            command.scalable_topic_update
            for command in self.taken(pb.BaseCommand.SCALABLE_TOPIC_UPDATE)
        ]

    def assignments(self) -> list[tuple[int, list[int]]]:
        """(consumer id, segments) of each ASSIGNMENT_UPDATE."""
        updates = [
            command.scalable_topic_assignment_update
            for command in self.taken(pb.BaseCommand.SCALABLE_TOPIC_ASSIGNMENT_UPDATE)
        ]
        return [(u.consumer_id, [s.segment_id for s in u.assignment.segments]) for u in updates]

    # What its client does

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    async def watch(self, topic: str | TopicName = TOPIC, *, create: bool = True) -> int:
        session_id = self.new_id()
        await self.broker.scalable.sessions.open(
            self.as_connection(), session_id, str(topic), create_if_missing=create
        )
        return session_id

    async def register(
        self,
        name: str,
        subscription: str = "s",
        *,
        topic: str | TopicName = TOPIC,
        kind: pb.ScalableConsumerType = pb.STREAM,
        consumer_id: int | None = None,
    ) -> tuple[int, pb.CommandScalableTopicSubscribeResponse]:
        consumer_id = self.new_id() if consumer_id is None else consumer_id
        await self.broker.scalable.controllers.subscribe(
            self.as_connection(),
            pb.CommandScalableTopicSubscribe(
                request_id=consumer_id,
                topic=str(topic),
                subscription=subscription,
                consumer_name=name,
                consumer_id=consumer_id,
                consumer_type=kind,
            ),
        )
        (answer,) = self.taken(pb.BaseCommand.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE)
        return consumer_id, answer.scalable_topic_subscribe_response

    async def attach(
        self,
        segment_id: int,
        name: str,
        subscription: str = "s",
        *,
        start: Position = LATEST,
        durable: bool = True,
        topic: TopicName = TOPIC,
    ) -> Consumer:
        """SUBSCRIBE to a segment as the consumer `<name>-seg-<id>`."""
        segment = await self.broker.segment(segment_id, topic)
        if durable and await self.broker.scalable.inherits_subscription(
            segment_name(segment.name), subscription
        ):
            start = EARLIEST
        return await segment.subscribe(
            SubscribeRequest(
                connection=self.as_connection(),
                consumer_id=self.new_id(),
                subscription=subscription,
                type=SubscriptionType.EXCLUSIVE,
                consumer_name=f"{name}-seg-{segment_id}",
                durable=durable,
                start=start,
            )
        )

    async def produce(self, segment_id: int, topic: TopicName = TOPIC) -> Producer:
        segment = await self.broker.segment(segment_id, topic)
        request = ProducerRequest(self.as_connection(), self.new_id())
        return await segment.add_producer(request)


def group_of(topics: ScalableTopics, subscription: str = "s") -> GroupController:
    """The group of a subscription that has ordered consumers."""
    group = topics.controllers.group(TOPIC, subscription)
    assert group is not None
    return group


class NoOtherClusters:
    """The other clusters of a node: none."""

    async def tell_positions(
        self, cluster: str, topic: TopicName, told: PositionsTold
    ) -> SubscriptionsLeft:
        raise AssertionError("no topic here is replicated")


class Node:
    """One process: what `Broker` puts together, but for ports."""

    def __init__(self, world: World, *, seed: int = 1, **settings: object) -> None:
        self.world = world
        self.clock = world.clock
        self.process = Process()
        self.mortal = Mortal(self.process, world.metadata)
        self.metadata: MetadataStore = self.mortal
        given = {
            "scalable_consumer_grace_period_s": 0,
            "unsubscribed_retention_minutes": 0,
            # Most tests split and merge by hand.
            "scalable_topic_auto_scale_enabled": False,
        }
        self.settings = Settings(**(given | settings))  # type: ignore[arg-type]
        self.random = random.Random(seed)
        self.placement = OneBroker("127.0.0.1")
        self.replications = NoOtherClusters()
        self.placement.listening(port=6650, http_port=8080)
        self.publish_limits = PublishLimits(connection_bytes=2**20, total_bytes=2**22)
        self.managed_ledgers = ManagedLedgerFactory(
            self.metadata, ProcessLedgers(self.process, world.ledgers), self.clock, LIMITS
        )
        self.namespaces = Namespaces(self.metadata, self.settings)
        self.topic_policies = TopicPolicies(self.metadata)
        self.policies = PoliciesInForce(self.namespaces, self.topic_policies, self.settings)
        self.topic_counts = TopicCounts(
            self.metadata,
            self.namespaces,
            self.settings,
            ledgers_of=ledger_key,
            scalable_of=namespace_path,
        )
        self.schemas = SchemaRegistry(self.metadata, self.clock)
        self.offloads = Offloads(cast("Broker", self), asyncio.get_running_loop().time)
        self.transactions: Transactions
        self.topics: TopicRegistry
        self.scalable: ScalableTopics
        self.session: Session
        self.producer_names: ProducerNames

    @property
    def broker_id(self) -> str:
        return self.placement.broker_id

    async def start(self) -> "Node":
        self.session = await self.metadata.open_session(timeout_ms=60_000, identity="node")
        await self.namespaces.start()
        self.producer_names = await ProducerNames.open(self.metadata, "standalone")
        self.transactions = Transactions(cast("Broker", self))
        await self.transactions.start()
        self.topics = TopicRegistry(cast("Broker", self))
        self.scalable = ScalableTopics(cast("Broker", self))
        await self.scalable.start()
        return self

    async def stop(self) -> None:
        """A clean end, unless there was another one."""
        if self.process.dead:
            return
        await self.scalable.stop()
        await self.topics.close()
        await self.transactions.stop()
        await self.managed_ledgers.close()
        await self.topic_policies.stop()
        await self.namespaces.stop()
        await self.session.close()

    async def kill(self) -> "Node":
        """The process is gone (its calls never return); the next one starts over what it left."""
        self.process.dead = True
        await self.session.close()
        return await Node(self.world, **self.settings.model_dump(exclude_unset=True)).start()

    def peer(self) -> Peer:
        return Peer(self)

    async def segment(self, segment_id: int, topic: TopicName = TOPIC) -> Topic:
        record = await self.scalable.get(topic)
        name = segment_of(topic, record.layout.segments[segment_id])
        return await self.topics.get(name.topic_name, create=True)

    async def fill(self, segment_id: int, count: int, topic: TopicName = TOPIC) -> list[Position]:
        """Publish so many messages of the producer `p` to a segment."""
        segment = await self.segment(segment_id, topic)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        positions: list[Position] = []
        sent: list[pb.MessageMetadata] = []

        def done(position: Position | None, error: Exception | None) -> None:
            if error is not None or position is None:
                written.set_exception(error or AssertionError("no position"))
                return
            segment.sequences.replay(sent[len(positions)], position, self.clock.now_ms())
            positions.append(position)
            if len(positions) == count:
                written.set_result(None)

        for number in range(count):
            metadata = pb.MessageMetadata(
                producer_name="p", sequence_id=number, publish_time=self.clock.now_ms()
            )
            sent.append(metadata)
            segment.ledger.append(build_entry(metadata, b"m"), done)
        await written
        return positions

    async def drain(self, segment_id: int, subscription: str = "s") -> None:
        """Acknowledge everything a subscription has on a segment."""
        segment = await self.segment(segment_id)
        found = segment.subscriptions[subscription]
        found.cursor.acknowledge_up_to(segment.ledger.last_confirmed)
        found.report_end_if_reached()

    async def backlog(self, segment_id: int, subscription: str = "s") -> int:
        return (await self.segment(segment_id)).subscriptions[subscription].backlog

    async def states(self, topic: TopicName = TOPIC) -> dict[int, str]:
        segments = (await self.scalable.get(topic)).layout.segments
        return {segment_id: s.state.value for segment_id, s in segments.items()}

    async def ask(self, request: SegmentRequest[A]) -> A:
        """Have the owner of a segment carry out a request."""
        return await self.scalable._segments.ask(request)

    async def live(self, topic: TopicName = TOPIC) -> LiveTopic:
        """The topic in memory."""
        return await self.scalable._topics.get(topic)

    def group(self, subscription: str = "s") -> GroupController:
        """The group of a subscription that has ordered consumers."""
        return group_of(self.scalable, subscription)

    async def kind_of(self, subscription: str) -> SubscriptionKind | None:
        return await self.scalable._store.subscription(TOPIC, subscription)

    async def assignment(self, subscription: str = "s") -> StoredAssignment | None:
        """The assignment of a subscription that is stored when all changes of it are."""
        group = self.scalable.controllers.group(TOPIC, subscription)
        if group is not None:
            await group.stored()
        record = await self.scalable._store.subscription_record(TOPIC, subscription)
        return None if record is None else record.assignment

    def give_up_waiting(self, subscription: str = "s") -> None:
        """Have all segments free that consumers were never seen at."""
        group = self.group(subscription)
        group._tell(group.group.give_up_waiting(group.group.awaited()))
