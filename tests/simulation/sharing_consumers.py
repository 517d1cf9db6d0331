"""Ordered consumers that come and go, and share segments by entry buckets if they can (PIP-486)."""

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from magnetar.protocol import pulsar_pb2 as pb
from tests.simulation.client import SimulatedClient
from tests.simulation.consumers import Receiver, StreamConsumer
from tests.simulation.loop import Host
from tests.simulation.programs import LATER_CLIENT
from tests.support.raw_client import BrokerError, Delivery, RawConsumer

if TYPE_CHECKING:
    from tests.simulation.world import World

Ranges = list[tuple[int, int]]
MORE_S = 0.3
"""How long a transaction waits for another message."""


class TransientConsumer(StreamConsumer):
    """A client of 5.0.0-M1 that leaves after a while, in one of three ways, and comes back.

    It ignores entry buckets.
    """

    stays = False

    async def receive(self, client: SimulatedClient, going_on: Callable[[], bool]) -> None:
        loop, every_s = asyncio.get_running_loop(), self.world.plan.leave_every_s
        leaves_at = loop.time() + self.rng.expovariate(1 / every_s) if every_s else float("inf")
        await super().receive(
            client, lambda: going_on() and (self.stays or loop.time() < leaves_at)
        )
        if going_on():
            await self._leave(client)

    def refused(self, segment: str, error: Exception) -> None:
        """B3: a client of M1 never tries again after ConsumerBusy."""
        if isinstance(error, BrokerError) and error.code == pb.ConsumerBusy:
            self.world.history.violated(f"{self.name} is given {segment}, and refused: {error}")

    async def _leave(self, client: SimulatedClient) -> None:
        """Unsubscribe; or only close the segment consumers, as M1 does; or drop the connection."""
        way = self.rng.choice(("unsubscribes", "closes", "drops"))
        self.note(f"leaves: {way}")
        if way == "unsubscribes":
            await client.unsubscribe_scalable(self.assignments)
        if way == "drops":
            client.drop()
        else:
            for segment in list(self.attached):
                await self.detach(segment, close=True)
        until = asyncio.get_running_loop().time() + self.rng.choice((0.1, 1.0, 6.0))
        while asyncio.get_running_loop().time() < until and not self.stays:
            await asyncio.sleep(0.1)


class SharingConsumer(TransientConsumer):
    """A client after M1: it shares the segments whose buckets its assignment has."""

    client_version = LATER_CLIENT

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topic: str
    ) -> None:
        super().__init__(world, name, host, rng, topic)
        self._shared: dict[str, Ranges] = {}
        """The buckets of each segment to which it is attached; none if it has it alone."""

    def refused(self, segment: str, error: Exception) -> None:
        """Report nothing: it tries again."""

    def check(self, assignment: pb.ScalableConsumerAssignment) -> None:
        """Report nothing: it may share every segment that it is given."""

    def loses(self, segment: str, assigned: pb.ScalableAssignedSegment | None) -> bool:
        return assigned is None or _ranges(assigned) != self._shared[segment]

    async def take_up(self, client: SimulatedClient, assigned: pb.ScalableAssignedSegment) -> None:
        ranges = self._shared[assigned.segment_topic] = _ranges(assigned)
        if not ranges:
            await super().take_up(client, assigned)
            return
        name, kind = f"{self.name}-seg-{assigned.segment_id}", pb.CommandSubscribe.Key_Shared
        await self.attach(client, assigned.segment_topic, kind, name, assigned.bucket_ranges)

    async def detach(self, segment: str, *, close: bool) -> None:
        """Detach, in half of the cases after a while in which it handles the messages it has."""
        if close and self.rng.random() < 0.5:
            await asyncio.sleep(self.rng.expovariate(5))
        if segment in self.attached:
            await super().detach(segment, close=close)

    async def handle(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery
    ) -> None:
        _, segment = client.subscriptions[consumer.consumer_id]
        if not self._shared.get(segment):
            await super().handle(client, consumer, delivery)
        elif self.world.draining or self.rng.random() >= self.world.plan.held:
            await Receiver.handle(self, client, consumer, delivery)
        else:
            await self._acknowledge_in_transaction(client, consumer, delivery, segment)

    async def _acknowledge_in_transaction(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery, segment: str
    ) -> None:
        """Acknowledge some messages one by one; after an abort ask for them again."""
        await client.connect_coordinator()
        record = await client.begin_recorded(5_000)
        await client.add_subscription(record.txn, segment, self.subscription)
        action = pb.COMMIT
        for times in range(self.rng.randrange(1, 4)):
            if times:
                try:
                    delivery = await consumer.receive(MORE_S)
                except TimeoutError:
                    break
                consumer.flow(max(1, delivery.metadata.num_messages_in_batch))
            chosen, named = self.choose(client, consumer, delivery)
            acks = self.acking(chosen, record.txn)
            try:
                work = client.transactional_ack(consumer, [named], record.txn)
                await self.answered(acks, work)
            except BrokerError as error:
                self.note(f"cannot acknowledge in {record.txn}: {error}")
                action = pb.ABORT
            await asyncio.sleep(self.rng.choice((0, self.rng.expovariate(5))))
        if self.rng.random() < self.world.plan.aborted:
            action = pb.ABORT
        await client.end_recorded(record, action)
        if action == pb.ABORT:
            self.world.history.returned(client.attachments[consumer.consumer_id])
            consumer.redeliver()


def _ranges(assigned: pb.ScalableAssignedSegment) -> Ranges:
    return [(each.start, each.end) for each in assigned.bucket_ranges]
