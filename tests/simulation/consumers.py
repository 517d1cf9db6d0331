"""Clients that consume: of a queue, ordered, again and again from the start."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import to_wire
from tests.simulation.actors import COMMITTER, QUEUE, SEEKER, STREAM, Actor, Layout
from tests.simulation.client import GONE, JAVA_V4, Kind, SimulatedClient
from tests.simulation.history import Delivered, Place, Transaction, Txn
from tests.simulation.loop import Host
from tests.support.batch_acks import partial_id, permits_of
from tests.support.raw_client import BrokerError, Delivery, RawConsumer, Session

if TYPE_CHECKING:
    from tests.simulation.world import World

FOR_EVER_S = 10_000_000.0
_ENDED = (pb.InvalidTxnStatus, pb.TransactionNotFound)
"""Said of a transaction that has ended otherwise than asked for."""


class Receiver(Actor):
    """What consumers share: one pump for each segment that they are attached to."""

    subscription: str
    permits = 20
    partial = 0.5
    """Of batches, how many are acknowledged in part."""

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

    async def receive(self, client: SimulatedClient, going_on: Callable[[], bool]) -> None:
        raise NotImplementedError

    async def look_again_after(self, seconds: float) -> None:
        """When all is quiet there is less to be seen."""
        await asyncio.sleep(seconds * (20 if self.world.draining else 1))

    async def attach(
        self,
        client: SimulatedClient,
        segment: str,
        kind: "pb.CommandSubscribe.SubType",
        name: str,
        buckets: Sequence[pb.IntRange] = (),
    ) -> None:
        try:
            consumer = await client.attach(
                segment, self.subscription, kind, name, self.permits, buckets=buckets
            )
        except GONE as error:
            if not client.alive:
                raise
            self.note(f"cannot attach to {segment}: {error}")
            self.refused(segment, error)
            return
        pump = asyncio.get_running_loop().create_task(self._pump(client, consumer))
        self.attached[segment] = (consumer, pump)

    def refused(self, segment: str, error: Exception) -> None:
        """Called when it could not attach to a segment: report a violation if that is one."""

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
                consumer.flow(permits_of(delivery))
                await self.handle(client, consumer, delivery)
            except GONE as error:
                self.note(f"pump: {type(error).__name__} {error}")
                if not client.alive:
                    return

    async def handle(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery
    ) -> None:
        """Work on it for a while, then acknowledge it in one way or another, or not now."""
        if not self.world.draining:
            await asyncio.sleep(self.rng.expovariate(1 / self.world.plan.work_s))
        luck = self.rng.random()
        chosen, named = self.choose(client, consumer, delivery)
        if self.world.draining or luck < 0.5:
            acks = self.acking(chosen)
            await self.answered(acks, consumer.ack_answered(named))
        elif luck < 0.9:
            self.acking(chosen)
            consumer.ack(named)
        elif luck < 0.9 + 0.1 * self.world.plan.negative:
            await asyncio.sleep(self.rng.expovariate(2))
            for each in client.seen(consumer, delivery):
                each.returned = True
            consumer.redeliver(delivery.message_id)

    def choose(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery
    ) -> tuple[list[Delivered], pb.MessageIdData]:
        """What of a delivery is acknowledged: all of it, or messages of its batch."""
        seen = client.seen(consumer, delivery)
        batch = len(seen[0].position) > 2 and not self.world.draining
        if batch and self.rng.random() < self.partial:
            seen = self.rng.sample(seen, self.rng.randrange(1, len(seen) + 1))
        return seen, partial_id(delivery, [index for each in seen for index in each.position[2:]])


class QueueConsumer(Receiver):
    """Shared or Key_Shared on every segment of the layout, sealed ones too."""

    subscription = QUEUE

    async def receive(self, client: SimulatedClient, going_on: Callable[[], bool]) -> None:
        while self.world.plan.late_queues and not self.world.draining and going_on():
            await self.look_again_after(1.0)
        layout = await Layout.watch(client, self.topic)
        while going_on():
            layout.refresh()
            await self.forget_closed()
            wanted = layout.all()
            for segment in [each for each in self.attached if each not in wanted]:
                await self.detach(segment, close=False)
            for segment in wanted:
                if segment not in self.attached:
                    await self.attach(client, segment, self.world.queue_kind, self.name)
            await self.look_again_after(self.rng.uniform(0.05, 0.3))


class StreamConsumer(Receiver):
    """Ordered: has the segments that the controller gives it."""

    subscription = STREAM
    assignments: Session

    async def receive(self, client: SimulatedClient, going_on: Callable[[], bool]) -> None:
        session, assignment = await client.subscribe_scalable(
            self.topic, self.subscription, self.name
        )
        self.assignments = session
        while going_on():
            while not session.updates.empty():
                update = session.updates.get_nowait()
                assignment = update.scalable_topic_assignment_update.assignment
            await self.forget_closed()
            self.check(assignment)
            wanted = {each.segment_topic: each for each in assignment.segments}
            for segment in list(self.attached):
                if self.loses(segment, wanted.get(segment)):
                    await self.detach(segment, close=True)
            for segment, assigned in wanted.items():
                if segment not in self.attached:
                    await self.take_up(client, assigned)
            await self.look_again_after(self.rng.uniform(0.02, 0.1))

    def check(self, assignment: pb.ScalableConsumerAssignment) -> None:
        """B5: this client ignores buckets, and would subscribe Exclusive beside others."""
        shared = [each.segment_id for each in assignment.segments if each.bucket_ranges]
        if shared:
            self.world.history.violated(f"{self.name} cannot share, and is to share {shared}")

    def loses(self, segment: str, assigned: pb.ScalableAssignedSegment | None) -> bool:
        """Whether it has to detach from a segment."""
        return assigned is None

    async def take_up(self, client: SimulatedClient, assigned: pb.ScalableAssignedSegment) -> None:
        """Attach to a segment that it is given."""
        name, kind = f"{self.name}-seg-{assigned.segment_id}", pb.CommandSubscribe.Exclusive
        await self.attach(client, assigned.segment_topic, kind, name)

    async def handle(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery
    ) -> None:
        if self.world.draining or self.rng.random() >= self.world.plan.cumulative:
            await super().handle(client, consumer, delivery)
        elif self.rng.random() < 0.5:
            await self._up_to(client, consumer, delivery, None)
        else:
            await self._in_transaction(client, consumer, delivery)

    async def _up_to(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery, txn: Txn | None
    ) -> None:
        """Everything up to this entry, or to a message of its batch, that anybody ever got."""
        seen = client.seen(consumer, delivery)
        last = self.rng.choice(seen)
        named = partial_id(delivery, last.position[2:], cumulative=True)
        before = {
            each.position: each
            for each in self.world.history.deliveries
            if each.subscription == self.subscription
            and each.segment == last.segment
            and each.position <= last.position
        }
        acks = self.acking(before.values(), txn)
        if txn is None:
            await self.answered(acks, consumer.ack_answered(named, cumulative=True))
        else:
            work = client.transactional_ack(consumer, [named], txn, cumulative=True)
            await self.answered(acks, work)

    async def _in_transaction(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery
    ) -> None:
        segment = client.seen(consumer, delivery)[0].segment
        await client.connect_coordinator()
        record = await client.begin_recorded(20_000)
        txn = record.txn
        await client.add_subscription(txn, segment, self.subscription)
        action = pb.COMMIT
        for times in range(self.rng.randrange(1, 4)):
            if times:
                delivery = await consumer.receive(FOR_EVER_S)
                consumer.flow(permits_of(delivery))
            try:
                await self._up_to(client, consumer, delivery, txn)
            except BrokerError as error:
                self.note(f"cannot acknowledge in {txn}: {error}")
                action = pb.ABORT
        if self.rng.random() < self.world.plan.aborted:
            action = pb.ABORT
        await client.end_recorded(record, action)


class PlainConsumer(StreamConsumer):
    """Ordered, on a topic without segments; the next one takes over when it goes."""

    async def receive(self, client: SimulatedClient, going_on: Callable[[], bool]) -> None:
        while going_on():
            await self.forget_closed()
            if not self.attached:
                await self.attach(client, self.topic, pb.CommandSubscribe.Failover, self.name)
            await self.look_again_after(self.rng.uniform(0.05, 0.3))


class Committer(Receiver):
    """Works in order, and commits how far it is: a transaction, and cumulative acknowledgements.

    A11: after an abort it drops what it has and asks for everything again, drops what was sent
    before that was heard, and has one transaction at a time.  So what it acknowledges is what it
    got since, and nothing else.  Who does not know how a transaction ended begins a new life.
    """

    subscription = COMMITTER
    _lives = 1
    _epoch = 0
    _left: Transaction | None = None
    """Begun, and its end not asked for when the connection was lost."""

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topic: str
    ) -> None:
        super().__init__(world, name, host, rng, topic)
        if world.plan.v4_transactors:
            self.client_version = rng.choice(("", JAVA_V4))

    async def receive(self, client: SimulatedClient, going_on: Callable[[], bool]) -> None:
        await client.connect_coordinator()
        while going_on():
            await self.forget_closed()
            if not self.attached:
                await self._attach(client)
            await self.look_again_after(self.rng.uniform(0.01, 0.1))
            if not self.attached:
                continue
            consumer, _ = self.attached[self.topic]
            if self._left is not None:
                await self._end(client, consumer, self._left, pb.ABORT)
            elif self._hand:
                await self._work(client, consumer)

    async def _attach(self, client: SimulatedClient) -> None:
        self._epoch, self._hand = 0, list[tuple[Delivery, list[Delivered]]]()
        kind, life = pb.CommandSubscribe.Failover, f"{self.name}, life {self._lives}"
        try:
            consumer = await client.attach(
                self.topic, self.subscription, kind, self.name, self.permits, incarnation=life
            )
        except GONE as error:
            if not client.alive:
                raise
            self.note(f"cannot attach: {error}")
            return
        pump = asyncio.get_running_loop().create_task(self._pump(client, consumer))
        self.attached[self.topic] = (consumer, pump)

    async def handle(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery
    ) -> None:
        if delivery.command.consumer_epoch >= self._epoch:
            self._hand.append((delivery, client.seen(consumer, delivery)))

    async def _work(self, client: SimulatedClient, consumer: RawConsumer) -> None:
        record = self._left = await client.begin_recorded(5_000)
        action = pb.COMMIT
        await client.add_subscription(record.txn, self.topic, self.subscription)
        for _ in range(self.rng.randrange(1, 3)):
            hand, self._hand = self._hand, []
            if not hand:
                break
            acks = self.acking([each for _, seen in hand for each in seen], record.txn)
            named = [hand[-1][0].message_id]
            work = client.transactional_ack(consumer, named, record.txn, cumulative=True)
            try:
                await self.answered(acks, work)
            except BrokerError as error:
                self._judge(record, error)
                action = pb.ABORT
            await asyncio.sleep(self.rng.choice((0, self.rng.expovariate(20))))
        if not self.world.draining and self.rng.random() < self.world.plan.aborted:
            action = pb.ABORT
        await self._end(client, consumer, record, action)

    def _judge(self, record: Transaction, error: BrokerError) -> None:
        """Whoever is alone and has one transaction at a time is in nobody's way."""
        self.note(f"cannot acknowledge in {record.txn}: {error}")
        if error.code == pb.TransactionConflict and self.world.plan.committers == 1:
            self.world.history.violated(f"false conflict: {self.name} in {record.txn}: {error}")

    async def _end(
        self,
        client: SimulatedClient,
        consumer: RawConsumer,
        record: Transaction,
        action: "pb.TxnAction",
    ) -> None:
        self._left = None
        try:
            await client.end_recorded(record, action)
        except GONE as error:
            if not isinstance(error, BrokerError) or error.code not in _ENDED:
                self._lives += 1
                raise
            action = pb.ABORT
        if action == pb.ABORT:
            self._epoch += 1
            self._hand = []
            consumer.redeliver(epoch=self._epoch)


class Seeker(Receiver):
    """Reads a plain topic, acknowledges in transactions, and goes back to where it was before."""

    subscription = SEEKER
    transaction: Transaction | None = None

    async def receive(self, client: SimulatedClient, going_on: Callable[[], bool]) -> None:
        await client.connect_coordinator()
        while going_on():
            await self.forget_closed()
            if not self.attached:
                await self.attach(client, self.topic, pb.CommandSubscribe.Exclusive, self.name)
            await self.look_again_after(self.rng.uniform(0.05, 0.3))
            if self.attached and not self.world.draining and self.rng.random() < 0.1:
                await self._seek(self.attached[self.topic][0])

    async def _seek(self, consumer: RawConsumer) -> None:
        seen = [each for each in self.world.history.deliveries if each.subscription == SEEKER]
        target: Place = (-1, -1)
        if seen and self.rng.random() < 0.7:
            target = self.rng.choice(seen).position[:2]
        sought = self.world.history.seeking(self.name, SEEKER, self.topic, target)
        ledger_id, entry_id = map(to_wire, target)
        try:
            await consumer.seek(pb.MessageIdData(ledger_id=ledger_id, entry_id=entry_id))
        except BrokerError as error:
            self.note(f"seek: {error}")
            return
        self.world.history.seek_answered(self.name, sought)

    async def handle(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery
    ) -> None:
        if self.world.draining or self.rng.random() < 0.5:
            await super().handle(client, consumer, delivery)
            return
        record, self.transaction = self.transaction, None
        if record is None:
            record = await client.begin_recorded(5_000)
        await client.add_subscription(record.txn, self.topic, self.subscription)
        chosen, named = self.choose(client, consumer, delivery)
        acks = self.acking(chosen, record.txn)
        await self.answered(acks, client.transactional_ack(consumer, [named], record.txn))
        if self.rng.random() < 0.4:
            action = pb.ABORT if self.rng.random() < self.world.plan.aborted else pb.COMMIT
            await client.end_recorded(record, action)
        else:
            self.transaction = record


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
            await asyncio.sleep(self.rng.expovariate(0.1 if self.world.draining else 1))

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
