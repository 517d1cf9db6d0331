"""Clients of a scalable topic over several brokers, which behave as the official client does.

They look everything up, one connection for each broker, and come back when a connection or consumer
is closed.  A `Writer` sends numbers under each key, one after another; an `OrderedReader` registers
with the controller, attaches to what it is given, and notes what it gets.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import segment_hash
from magnetar.protocol.managed_clients import MANAGED_PROPERTY
from magnetar.protocol.names import parse_topic_name
from tests.support.raw_client import BrokerError, Delivery, RawClient, RawConsumer, RawProducer
from tests.unit.broker.placement.cluster import Cluster, Node

NAME = "topic://public/default/t"
TOPIC = parse_topic_name(NAME)
RETRY_S = 0.05
T = TypeVar("T")
LOST = (BrokerError, ConnectionError, TimeoutError, OSError)


class User:
    """The connections of one client."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        # Java clients count requests from a random number on, over all their connections.
        self._first_id = random.randrange(2**40, 2**50)
        self._clients: dict[str, RawClient] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._opening = asyncio.Lock()

    async def at(self, url: str) -> RawClient:
        """The connection to a broker, opened anew if it was lost."""
        async with self._opening:
            client = self._clients.get(url)
            if client is None or client.closed.done():
                host, _, port = url.removeprefix("pulsar://").rpartition(":")
                client = self._clients[url] = await RawClient.open(
                    host, int(port), first_id=self._first_id
                )
                client.timeout_s = 5
            return client

    async def anywhere(self) -> RawClient:
        """A broker that answers."""
        for node in self.cluster.nodes:
            if node.broker.serving:
                with contextlib.suppress(*LOST):
                    return await self.at(node.placement.broker_url)
        raise ConnectionError("no broker answers")

    async def owner(self, segment: str) -> RawClient:
        """Where LOOKUP leads."""
        client, authoritative = await self.anywhere(), False
        for _ in range(5):
            found = await client.lookup(segment, authoritative=authoritative)
            if found.response == pb.CommandLookupTopicResponse.Failed:
                raise BrokerError(found.error, found.message)
            client = await self.at(found.broker_service_url)
            if found.response == pb.CommandLookupTopicResponse.Connect:
                return client
            authoritative = found.authoritative
        raise ConnectionError("lookups lead nowhere")

    def go_on(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Do it again and again, whatever the brokers do to it."""

        async def run() -> None:
            while True:
                with contextlib.suppress(*LOST):
                    await work()
                await asyncio.sleep(RETRY_S)

        task = asyncio.create_task(run())
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            if not client.closed.done():
                await client.close()


class Watcher(User):
    """Keeps the newest layout."""

    def __init__(self, cluster: Cluster, name: str = NAME) -> None:
        super().__init__(cluster)
        self.topic = name
        self.dag = pb.ScalableTopicDAG()
        self.epochs: list[int] = []
        self.go_on(self._watch)

    async def _watch(self) -> None:
        client = await self.anywhere()
        session, first = await client.watch_dag(self.topic)
        self._take(first.dag)
        while True:
            update = await client.wait(session.updates.get(), 3600)
            self._take(update.scalable_topic_update.dag)

    def _take(self, dag: pb.ScalableTopicDAG) -> None:
        self.dag = dag
        self.epochs.append(dag.epoch)

    def segment_of(self, key: str) -> str:
        """The ACTIVE segment of a key."""
        place = segment_hash(key.encode())
        for segment in self.dag.segments:
            if segment.state == pb.ACTIVE and segment.hash_start <= place <= segment.hash_end:
                return name_of(segment)
        raise ConnectionError("no layout yet")


class Writer(Watcher):
    """Sends 0, 1, 2 ... under each key, each when the one before it is receipted."""

    def __init__(self, cluster: Cluster, keys: int, name: str = NAME) -> None:
        super().__init__(cluster, name)
        self.sent: dict[str, int] = {}
        self.stopped = False
        self._producers: dict[str, asyncio.Task[RawProducer]] = {}
        self._writing = [asyncio.create_task(self._write(f"k{n}")) for n in range(keys)]

    async def stop(self) -> None:
        """After what is being sent."""
        self.stopped = True
        await asyncio.gather(*self._writing)

    async def close(self) -> None:
        for task in self._writing:
            task.cancel()
        await super().close()

    async def _write(self, key: str) -> None:
        while not self.stopped:
            try:
                await self._send(key, self.sent.get(key, 0))
            except LOST:
                await asyncio.sleep(RETRY_S)
            else:
                self.sent[key] = self.sent.get(key, 0) + 1
                await asyncio.sleep(0.002)

    async def _send(self, key: str, number: int) -> None:
        segment = self.segment_of(key)
        opening = self._producers.get(segment)
        if opening is None or (opening.done() and opening.exception() is not None):
            opening = self._producers[segment] = asyncio.create_task(self._open(segment))
        producer = await opening
        if producer.client.closed.done() or producer.producer_id not in producer.client.producers:
            del self._producers[segment]
            raise ConnectionError("the producer is gone")
        try:
            metadata = pb.MessageMetadata(partition_key=key)
            await producer.send(f"{key}:{number}".encode(), metadata=metadata)
        except LOST:
            self._producers.pop(segment, None)
            raise

    async def _open(self, segment: str) -> RawProducer:
        options = pb.CommandProducer(metadata=managed(segment))
        producer = await (await self.owner(segment)).create_producer(segment, options)
        self._tasks.append(asyncio.create_task(self._forget_when_closed(segment, producer)))
        return producer

    async def _forget_when_closed(self, segment: str, producer: RawProducer) -> None:
        with contextlib.suppress(*LOST):
            await producer.client.wait(producer.events.get(), 3600)
        self._producers.pop(segment, None)

    def _take(self, dag: pb.ScalableTopicDAG) -> None:
        super()._take(dag)
        active = {name_of(each) for each in dag.segments if each.state == pb.ACTIVE}
        for gone in self._producers.keys() - active:
            self._tasks.append(asyncio.create_task(self._close(self._producers.pop(gone))))

    async def _close(self, opening: asyncio.Task[RawProducer]) -> None:
        """As the official client: what is on its way is answered first."""
        with contextlib.suppress(*LOST):
            producer = await opening
            while producer.pending:
                await asyncio.sleep(RETRY_S)
            await producer.close()


class OrderedReader(User):
    """One consumer of a STREAM subscription."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        subscription: str = "s",
        log: list[tuple[str, int]] | None = None,
    ) -> None:
        super().__init__(cluster)
        self.log = [] if log is None else log
        """What was received, in order; of several readers together if they share it."""
        self.name = name
        self.subscription = subscription
        self.got: dict[str, list[int]] = {}
        self.assigned: list[int] = []
        self.registrations = 0
        self.reading: dict[str, asyncio.Task[None]] = {}
        self.attached: set[str] = set()
        self.go_on(self._stay_registered)

    async def _stay_registered(self) -> None:
        anywhere = await self.anywhere()
        session, first = await anywhere.watch_dag(NAME)
        anywhere.close_dag(session)
        controller = await self.at(first.dag.controller_broker_url)
        updates, assignment = await controller.subscribe_scalable(
            NAME, self.subscription, self.name
        )
        self.registrations += 1
        await self._assign(assignment)
        while True:
            update = await controller.wait(updates.updates.get(), 3600)
            await self._assign(update.scalable_topic_assignment_update.assignment)

    async def _assign(self, assignment: pb.ScalableConsumerAssignment) -> None:
        wanted = {s.segment_topic: s.segment_id for s in assignment.segments}
        self.assigned = sorted(wanted.values())
        for gone in self.reading.keys() - wanted.keys():
            task = self.reading.pop(gone)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for name, segment_id in wanted.items():
            if name not in self.reading:
                self.reading[name] = self.go_on(self._reader_of(name, segment_id))

    def _reader_of(self, name: str, segment_id: int) -> Callable[[], Awaitable[None]]:
        async def read() -> None:
            opening = asyncio.ensure_future(self._subscribe(name, segment_id))
            try:
                consumer = await asyncio.shield(opening)
                self.attached.add(name)
                await self._read(consumer)
            except asyncio.CancelledError:
                # What is on its way is closed when it is there, as the official client does.
                with contextlib.suppress(*LOST):
                    await (await opening).close()
                raise
            finally:
                self.attached.discard(name)

        return read

    async def _subscribe(self, name: str, segment_id: int) -> RawConsumer:
        options = pb.CommandSubscribe(
            consumer_name=f"{self.name}-seg-{segment_id}",
            initial_position=pb.CommandSubscribe.Earliest,
            metadata=managed(name),
        )
        client = await self.owner(name)
        return await client.subscribe(name, self.subscription, options, permits=1000)

    async def _read(self, consumer: RawConsumer) -> None:
        closed = asyncio.ensure_future(self._closed(consumer))
        message: asyncio.Future[Delivery] | None = None
        try:
            while True:
                message = asyncio.ensure_future(consumer.messages.get())
                ends: list[asyncio.Future[Any]] = [message, closed, consumer.client.closed]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not message.done():
                    raise ConnectionError("the consumer was closed")
                key, _, number = message.result().payload.decode().partition(":")
                self.got.setdefault(key, []).append(int(number))
                self.log.append((key, int(number)))
                consumer.ack(message.result().message_id)
                consumer.flow(1)
        finally:
            closed.cancel()
            if message is not None:
                message.cancel()

    async def _closed(self, consumer: RawConsumer) -> None:
        while True:
            event = await consumer.events.get()
            if event.type == pb.BaseCommand.CLOSE_CONSUMER:
                return


def name_of(segment: pb.SegmentInfoProto) -> str:
    """The full name of a segment of the topic, or of the ordinary topic that it is."""
    if segment.legacy_topic_name:
        return segment.legacy_topic_name
    start, end = segment.hash_start, segment.hash_end
    return f"segment://public/default/t/{start:04x}-{end:04x}-{segment.segment_id}"


def managed(name: str) -> list[pb.KeyValue]:
    """What a v5 client says of itself where it attaches to an ordinary topic."""
    if name.startswith("segment://"):
        return []
    return [pb.KeyValue(key=MANAGED_PROPERTY, value="true")]


async def hold(node: Node, segment: str) -> None:
    """Have a broker own a segment: who is asked first takes it."""
    client = await node.client()
    await (await client.create_producer(segment)).close()
    assert node.owns(segment)


async def take_lead(node: Node) -> None:
    """Have a broker lead the topic."""
    await node.broker.scalable._leads.take(TOPIC)
    assert node.placement.owns(TOPIC)


async def give_up_lead(node: Node) -> None:
    """Have a broker lead the topic no longer."""
    await node.broker.scalable._leads.give_up(TOPIC)


def segment(start: int, end: int, segment_id: int) -> str:
    """The full name of a segment of the topic."""
    return f"segment://public/default/t/{start:04x}-{end:04x}-{segment_id}"
