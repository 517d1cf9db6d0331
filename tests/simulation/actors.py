"""Clients of a workload: what they share, and producers.

Each lives on a host of its own, does what a careful client does, and begins again when its
connection or its broker goes.  What it sees goes into the history.
"""

import asyncio
import random
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import segment_hash
from magnetar.protocol.message import build_batch
from magnetar.protocol.names import parse_topic_name
from tests.simulation.client import GONE, SimulatedClient, payload_for
from tests.simulation.history import Acked, Delivered, Message, Txn
from tests.simulation.loop import Host
from tests.support.raw_client import BrokerError, RawProducer, Session

if TYPE_CHECKING:
    from tests.simulation.world import World

QUEUE = "q"
STREAM = "s"
SEEKER = "k"
COMMITTER = "c"
PLAIN = "persistent://"
MIGRATED = "/migrated"
"""In the names of scalable topics that begin as ordinary ones; clients ask for those."""


def segment_topic(topic: str, segment: pb.SegmentInfoProto) -> str:
    """The name under which clients attach to a segment."""
    if segment.legacy_topic_name:
        return segment.legacy_topic_name
    name = parse_topic_name(topic)
    place = f"{segment.hash_start:04x}-{segment.hash_end:04x}-{segment.segment_id}"
    return f"segment://{name.tenant}/{name.namespace}/{name.local_name}/{place}"


@dataclass
class Layout:
    """A DAG session and the newest layout that it told.  A plain topic is its own only segment."""

    topic: str
    session: Session | None = None
    dag: pb.ScalableTopicDAG = field(default_factory=pb.ScalableTopicDAG)

    @classmethod
    async def watch(cls, client: SimulatedClient, topic: str) -> "Layout":
        if topic.startswith(PLAIN):
            return cls(topic)
        asked = topic.replace("topic://", PLAIN) if MIGRATED in topic else topic
        session, command = await client.watch_dag(asked, create_if_missing=True)
        if not command.HasField("dag"):
            raise ConnectionError(f"no layout: {command.message}")
        return cls(topic, session, command.dag)

    def refresh(self) -> None:
        while self.session is not None and not self.session.updates.empty():
            update = self.session.updates.get_nowait().scalable_topic_update
            if not update.HasField("dag"):
                raise ConnectionError(f"the layout ended: {update.message}")
            self.dag = update.dag

    def route(self, key: str) -> str:
        if self.session is None:
            return self.topic
        place = segment_hash(key.encode())
        for segment in self.dag.segments:
            if segment.state == pb.ACTIVE and segment.hash_start <= place <= segment.hash_end:
                return segment_topic(self.topic, segment)
        raise ConnectionError(f"no segment of {self.topic} takes {place}")

    def all_active(self) -> list[str]:
        if self.session is None:
            return [self.topic]
        return [segment_topic(self.topic, s) for s in self.dag.segments if s.state == pb.ACTIVE]

    def all(self) -> list[str]:
        if self.session is None:
            return [self.topic]
        return [segment_topic(self.topic, each) for each in self.dag.segments]


class Actor:
    """A client process that connects again whenever it has to."""

    client_version = ""
    """That of CONNECT; empty: that of an M1 client."""

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
                self.client = await SimulatedClient.of(
                    self.world.history, self.name, port, version=self.client_version
                )
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

    def acking(self, seen: Iterable[Delivered], txn: Txn | None = None) -> list[Acked]:
        return [self.world.history.acking(each, txn) for each in seen]

    async def answered(self, acks: Iterable[Acked], answer: Awaitable[object]) -> None:
        """Write down what the broker says to them."""
        try:
            await answer
        except GONE as error:
            for ack in acks:
                self.world.history.ack_answered(ack, f"{type(error).__name__} {error}")
            raise
        for ack in acks:
            self.world.history.ack_answered(ack, None)


class Sender(Actor):
    """Sends keyed messages to the segments of its topics."""

    names_transactions = True
    """Whether messages name their transactions; the SENDs of Pulsar's Go client alone do."""

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
            producer = await client.create_producer(segment, self.options())
            producer.segment = segment  # type: ignore[attr-defined]
            self.producers[segment] = producer
        return producer

    def options(self) -> pb.CommandProducer:
        """What is said of its producers."""
        return pb.CommandProducer()

    def batch_by_luck(self, message: Message) -> list[Message]:
        """The message, or a batch with it as the first."""
        batch = [message]
        while len(batch) < 4 and self.rng.random() < self.world.plan.batches:
            self.sent += 1
            name = f"{self.name}-{self.sent}"
            batch.append(replace(message, name=name, number=self.sent, refused=[]))
        return batch

    def begin_send(
        self, producer: RawProducer, *messages: Message, sequence_id: int | None = None
    ) -> "asyncio.Future[str]":
        """SEND; the future has "" when it is receipted, else the refusal."""
        history, outcome = self.world.history, asyncio.get_running_loop().create_future()
        metadata, send, payload = self._content(messages)
        number, frame = producer.frame(
            payload, metadata=metadata, send=send, sequence_id=sequence_id
        )
        for message in messages:
            history.sending(message)

        def done(receipt: object) -> None:
            for message in messages:
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

    def _content(
        self, messages: Sequence[Message]
    ) -> tuple[pb.MessageMetadata, pb.CommandSend, bytes]:
        """The one message, or a batch of these."""
        first = messages[0]
        metadata = pb.MessageMetadata(partition_key=first.key)
        send = pb.CommandSend(num_messages=len(messages))
        if first.txn is not None:
            for part in (metadata, send) if self.names_transactions else (send,):
                part.txnid_most_bits, part.txnid_least_bits = first.txn
        payloads = [
            payload_for(each.name, self.rng.choice((0, 10, 200, 3000))) for each in messages
        ]
        if len(messages) == 1:
            return metadata, send, payloads[0]
        metadata.num_messages_in_batch = len(messages)
        single = pb.SingleMessageMetadata(partition_key=first.key, payload_size=0)
        return metadata, send, build_batch((single, payload) for payload in payloads)


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
        self._again: list[Message] = []

    async def session(self, client: SimulatedClient) -> None:
        await self.open(client)
        while not self.stopping and client.alive:
            if self.burst > 1:
                await self._send_burst(client)
            else:
                await self._send_one(client)
            await asyncio.sleep(self.rng.expovariate(1 / self.pause_s))

    async def _send_one(self, client: SimulatedClient) -> None:
        messages = self._again or self.batch_by_luck(self.new_message(awaited=True))
        self._again = messages if self.rng.random() < 0.8 else []
        try:
            producer = await self.producer_for(client, messages[0])
            refusal = await client.wait(self.begin_send(producer, *messages))
        except GONE as error:
            for message in messages:
                self.world.history.refused(message, f"{type(error).__name__} {error}")
            raise
        if refusal:
            self.producers.clear()
            raise ConnectionError(refusal)
        self._again = []

    async def _send_burst(self, client: SimulatedClient) -> None:
        outcomes: list[Awaitable[str]] = []
        for _ in range(self.burst):
            message = self.new_message(awaited=False)
            producer = await self.producer_for(client, message)
            outcomes.append(self.begin_send(producer, message))
        for outcome in outcomes:
            if await client.wait(outcome):
                raise ConnectionError("a SEND was refused")


class NamedProducer(Sender):
    """Sends again, under its name and the same number, until it has a receipt.

    What it has no receipt for goes to the segment that may have it, sealed or not, until that says
    that it has not; unless the segment has been pruned, so that nobody can tell.
    """

    _message: Message | None = None
    _sent_to: str | None = None
    """The segment that may have it."""
    _epoch = -1

    async def session(self, client: SimulatedClient) -> None:
        await self.open(client)
        while not self.stopping and client.alive:
            await self._send_one(client)
            await asyncio.sleep(self.rng.expovariate(1 / self.world.plan.pause_s))

    def options(self) -> pb.CommandProducer:
        self._epoch += 1
        return pb.CommandProducer(producer_name=self.name, epoch=self._epoch)

    async def _send_one(self, client: SimulatedClient) -> None:
        if self._message is None:
            self._message = self.new_message(awaited=True)
            self._message.once = True
        message = self._message
        layout = self.layouts[message.topic]
        layout.refresh()
        segment = self._sent_to or layout.route(message.key)
        try:
            producer = await self.producer_on(client, segment)
        except BrokerError as error:
            self._refused(message, error.code)
            raise
        self._sent_to = segment
        sent = self.begin_send(producer, message, sequence_id=message.number)
        if refusal := await client.wait(sent):
            if refusal.startswith(pb.ServerError.Name(pb.TopicTerminatedError)):
                self._refused(message, pb.TopicTerminatedError)
            raise ConnectionError(refusal)
        self._message = self._sent_to = None

    def _refused(self, message: Message, code: int) -> None:
        """The segment has not got it, or nobody will ever know."""
        if code == pb.TopicNotFound and self._sent_to is not None:
            message.once = False
        if code in (pb.TopicNotFound, pb.TopicTerminatedError):
            self._sent_to = None
