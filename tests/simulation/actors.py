"""Clients of a workload: producers, consumers of a queue, ordered consumers.

Each lives on a host of its own, does what a careful client does, and begins again when its
connection or its broker goes.  What it sees goes into the history.
"""

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol import pulsar_pb2 as pb
from protocol.key_hash import segment_hash
from protocol.names import parse_topic_name
from tests.simulation.client import GONE, Kind, SimulatedClient, payload_for
from tests.simulation.history import Acked, Message, Txn
from tests.simulation.loop import Host
from tests.support.raw_client import Delivery, RawConsumer, RawProducer, Session

if TYPE_CHECKING:
    from tests.simulation.world import World

FOR_EVER_S = 10_000_000.0
QUEUE = "q"
STREAM = "s"


def segment_topic(topic: str, segment: pb.SegmentInfoProto) -> str:
    """The name under which clients attach to a segment."""
    name = parse_topic_name(topic)
    place = f"{segment.hash_start:04x}-{segment.hash_end:04x}-{segment.segment_id}"
    return f"segment://{name.tenant}/{name.namespace}/{name.local_name}/{place}"


@dataclass
class Layout:
    """A DAG session and the newest layout that it told."""

    topic: str
    session: Session
    dag: pb.ScalableTopicDAG

    @classmethod
    async def watch(cls, client: SimulatedClient, topic: str) -> "Layout":
        session, command = await client.watch_dag(topic, create_if_missing=True)
        if not command.HasField("dag"):
            raise ConnectionError(f"no layout: {command.message}")
        return cls(topic, session, command.dag)

    def refresh(self) -> None:
        while not self.session.updates.empty():
            update = self.session.updates.get_nowait().scalable_topic_update
            if not update.HasField("dag"):
                raise ConnectionError(f"the layout ended: {update.message}")
            self.dag = update.dag

    def route(self, key: str) -> str:
        place = segment_hash(key.encode())
        for segment in self.dag.segments:
            if segment.state == pb.ACTIVE and segment.hash_start <= place <= segment.hash_end:
                return segment_topic(self.topic, segment)
        raise ConnectionError(f"no segment of {self.topic} takes {place}")

    def all(self) -> list[str]:
        return [segment_topic(self.topic, each) for each in self.dag.segments]


class Actor:
    """A client process that connects again whenever it has to."""

    def __init__(self, world: "World", name: str, host: Host, rng: random.Random) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.rng = rng
        self.stopping = False
        self.client: SimulatedClient | None = None

    async def run(self) -> None:
        while not self.stopping:
            try:
                port = self.world.port
                self.client = await SimulatedClient.of(self.world.history, self.name, port)
                await self.session(self.client)
            except GONE as error:
                self.note(f"begins again: {type(error).__name__} {error}")
            finally:
                if self.client is not None:
                    self.client.drop()
            await asyncio.sleep(self.rng.uniform(0.02, 0.8))

    async def session(self, client: SimulatedClient) -> None:
        """What it does while connected; ends when it should begin again."""
        raise NotImplementedError

    def note(self, what: str) -> None:
        self.world.history.note(self.name, what)


class Sender(Actor):
    """Sends keyed messages to the segments of its topics."""

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topics: list[str]
    ) -> None:
        super().__init__(world, name, host, rng)
        self.topics = topics
        self.sent = 0
        self.layouts: dict[str, Layout] = {}
        self.producers: dict[str, RawProducer] = {}

    async def open(self, client: SimulatedClient) -> None:
        self.producers = {}
        self.layouts = {topic: await Layout.watch(client, topic) for topic in self.topics}

    def new_message(self, *, awaited: bool, txn: Txn | None = None) -> Message:
        self.sent += 1
        name = f"{self.name}-{self.sent}"
        key = f"{self.name}-k{self.rng.randrange(6)}"
        topic = self.rng.choice(self.topics)
        return Message(name, topic, key, self.name, self.sent, awaited, txn)

    async def producer_for(self, client: SimulatedClient, message: Message) -> RawProducer:
        layout = self.layouts[message.topic]
        layout.refresh()
        return await self.producer_on(client, layout.route(message.key))

    async def producer_on(self, client: SimulatedClient, segment: str) -> RawProducer:
        producer = self.producers.get(segment)
        if producer is not None and not producer.events.empty():
            del self.producers[segment]
            producer = None
        if producer is None:
            producer = await client.create_producer(segment)
            producer.segment = segment  # type: ignore[attr-defined]
            self.producers[segment] = producer
        return producer

    def begin_send(self, producer: RawProducer, message: Message) -> "asyncio.Future[str]":
        """SEND; the future has "" when it is receipted, else the refusal."""
        history, outcome = self.world.history, asyncio.get_running_loop().create_future()
        metadata = pb.MessageMetadata(partition_key=message.key)
        send = pb.CommandSend()
        if message.txn is not None:
            for part in (metadata, send):
                part.txnid_most_bits, part.txnid_least_bits = message.txn  # type: ignore[attr-defined]
        number, frame = producer.frame(
            payload_for(message.name, self.rng.choice((0, 10, 200, 3000))),
            metadata=metadata,
            send=send,
        )
        history.sending(message)

        def done(receipt: object) -> None:
            if isinstance(receipt, pb.CommandSendReceipt):
                place = (receipt.message_id.ledger_id, receipt.message_id.entry_id)
                history.receipt(message, producer.segment, place)  # type: ignore[attr-defined]
            else:
                history.refused(message, str(receipt))
            if not outcome.done():
                stored = isinstance(receipt, pb.CommandSendReceipt)
                outcome.set_result("" if stored else str(receipt))

        producer.send_frame(number, frame, done)
        return outcome


class Producer(Sender):
    """Awaits each message (and so has an order) or sends bursts; tries again, or gives up."""

    def __init__(
        self,
        world: "World",
        name: str,
        host: Host,
        rng: random.Random,
        topics: list[str],
        *,
        burst: int,
        pause_s: float,
    ) -> None:
        super().__init__(world, name, host, rng, topics)
        self.burst = burst
        self.pause_s = pause_s
        self._again: Message | None = None

    async def session(self, client: SimulatedClient) -> None:
        await self.open(client)
        while not self.stopping and client.alive:
            if self.burst > 1:
                await self._send_burst(client)
            else:
                await self._send_one(client)
            await asyncio.sleep(self.rng.expovariate(1 / self.pause_s))

    async def _send_one(self, client: SimulatedClient) -> None:
        message = self._again or self.new_message(awaited=True)
        self._again = message if self.rng.random() < 0.8 else None
        try:
            producer = await self.producer_for(client, message)
            refusal = await client.wait(self.begin_send(producer, message))
        except GONE as error:
            self.world.history.refused(message, f"{type(error).__name__} {error}")
            raise
        if refusal:
            self.producers.clear()
            raise ConnectionError(refusal)
        self._again = None

    async def _send_burst(self, client: SimulatedClient) -> None:
        outcomes: list[Awaitable[str]] = []
        for _ in range(self.burst):
            message = self.new_message(awaited=False)
            producer = await self.producer_for(client, message)
            outcomes.append(self.begin_send(producer, message))
        for outcome in outcomes:
            if await client.wait(outcome):
                raise ConnectionError("a SEND was refused")


class Receiver(Actor):
    """What consumers share: one pump for each segment that they are attached to."""

    subscription: str
    permits = 20

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topic: str
    ) -> None:
        super().__init__(world, name, host, rng)
        self.topic = topic
        self.attached: dict[str, tuple[RawConsumer, asyncio.Task[None]]] = {}

    async def session(self, client: SimulatedClient) -> None:
        self.attached = {}
        draining = self.world.draining
        try:
            await self.receive(client, lambda: client.alive and self.world.draining == draining)
        finally:
            for _, pump in self.attached.values():
                pump.cancel()

    async def receive(self, client: SimulatedClient, going_on) -> None:  # type: ignore[no-untyped-def]
        raise NotImplementedError

    async def look_again_after(self, seconds: float) -> None:
        """When all is quiet there is less to be seen."""
        await asyncio.sleep(seconds * (20 if self.world.draining else 1))

    async def attach(
        self, client: SimulatedClient, segment: str, kind: "pb.CommandSubscribe.SubType", name: str
    ) -> None:
        try:
            consumer = await client.attach(segment, self.subscription, kind, name, self.permits)
        except GONE as error:
            if not client.alive:
                raise
            self.note(f"cannot attach to {segment}: {error}")
            return
        pump = asyncio.get_running_loop().create_task(self._pump(client, consumer))
        self.attached[segment] = (consumer, pump)

    async def detach(self, segment: str, *, close: bool) -> None:
        consumer, pump = self.attached.pop(segment)
        pump.cancel()
        if close:
            await consumer.close()

    async def forget_closed(self) -> None:
        """What the broker closed is attached again when its turn comes."""
        for segment, (consumer, _) in list(self.attached.items()):
            while not consumer.events.empty():
                if consumer.events.get_nowait().type == Kind.CLOSE_CONSUMER:
                    await self.detach(segment, close=False)
                    break

    async def _pump(self, client: SimulatedClient, consumer: RawConsumer) -> None:
        while client.alive:
            try:
                delivery = await consumer.receive(FOR_EVER_S)
                await self.handle(client, consumer, delivery)
                consumer.flow(1)
            except GONE as error:
                self.note(f"pump: {type(error).__name__} {error}")
                if not client.alive:
                    return

    async def handle(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery
    ) -> None:
        """Work on it for a while, then acknowledge it in one way or another, or not now."""
        if not self.world.draining:
            await asyncio.sleep(self.rng.expovariate(200))
        luck = self.rng.random()
        if self.world.draining or luck < 0.5:
            await self.ack_answered(client, consumer, delivery)
        elif luck < 0.9:
            self.acking(client, consumer, delivery)
            consumer.ack(delivery.message_id)

    def acking(
        self,
        client: SimulatedClient,
        consumer: RawConsumer,
        delivery: Delivery,
        txn: Txn | None = None,
    ) -> Acked:
        place = (delivery.message_id.ledger_id, delivery.message_id.entry_id)
        seen = client.delivered[(consumer.consumer_id, *place)]
        return self.world.history.acking(seen, txn)

    async def ack_answered(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery
    ) -> None:
        ack = self.acking(client, consumer, delivery)
        try:
            await consumer.ack_answered(delivery.message_id)
        except GONE as error:
            self.world.history.ack_answered(ack, f"{type(error).__name__} {error}")
            raise
        self.world.history.ack_answered(ack, None)


class QueueConsumer(Receiver):
    """Shared on every segment of the layout, sealed ones too."""

    subscription = QUEUE

    async def receive(self, client: SimulatedClient, going_on) -> None:  # type: ignore[no-untyped-def]
        layout = await Layout.watch(client, self.topic)
        while going_on():
            layout.refresh()
            await self.forget_closed()
            wanted = layout.all()
            for segment in [each for each in self.attached if each not in wanted]:
                await self.detach(segment, close=False)
            for segment in wanted:
                if segment not in self.attached:
                    await self.attach(client, segment, pb.CommandSubscribe.Shared, self.name)
            await self.look_again_after(self.rng.uniform(0.05, 0.3))


class StreamConsumer(Receiver):
    """Ordered: has the segments that the controller gives it."""

    subscription = STREAM

    async def receive(self, client: SimulatedClient, going_on) -> None:  # type: ignore[no-untyped-def]
        session, assignment = await client.subscribe_scalable(
            self.topic, self.subscription, self.name
        )
        while going_on():
            while not session.updates.empty():
                update = session.updates.get_nowait()
                assignment = update.scalable_topic_assignment_update.assignment
            await self.forget_closed()
            wanted = {each.segment_topic: each.segment_id for each in assignment.segments}
            for segment in [each for each in self.attached if each not in wanted]:
                await self.detach(segment, close=True)
            for segment, number in wanted.items():
                if segment not in self.attached:
                    name = f"{self.name}-seg-{number}"
                    await self.attach(client, segment, pb.CommandSubscribe.Exclusive, name)
            await self.look_again_after(self.rng.uniform(0.02, 0.1))


class Rereader(Actor):
    """Reads all segments from their start, and again: whatever it is shown must be committed."""

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topics: list[str]
    ) -> None:
        super().__init__(world, name, host, rng)
        self.topics = topics
        self._times = 0

    async def session(self, client: SimulatedClient) -> None:
        layouts = [await Layout.watch(client, topic) for topic in self.topics]
        while not self.stopping and client.alive:
            for layout in layouts:
                layout.refresh()
                for segment in layout.all():
                    await self._read(client, segment)
            await asyncio.sleep(self.rng.expovariate(1))

    async def _read(self, client: SimulatedClient, segment: str) -> None:
        self._times += 1
        name = f"{self.name}-{self._times}"
        try:
            consumer = await client.attach(
                segment, name, pb.CommandSubscribe.Exclusive, name, 1000, durable=False
            )
            await asyncio.sleep(self.rng.uniform(0.01, 0.2))
            await consumer.close()
        except GONE as error:
            if not client.alive:
                raise
            self.note(f"cannot read {segment}: {error}")
