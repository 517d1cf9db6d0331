"""A client that consumes, produces and acknowledges in transactions, carefully or not.

It commits only what was receipted and acknowledged, as official clients do.  It also pauses past
its timeout and continues, repeats requests, requests both ends at once, writes after the end, and
leaves transactions to their deadline.
"""

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.protocol import pulsar_pb2 as pb
from tests.simulation.actors import QUEUE, Sender
from tests.simulation.client import GONE, SimulatedClient
from tests.simulation.history import Transaction, Txn
from tests.simulation.loop import Host
from tests.support.batch_acks import partial_id, permits_of
from tests.support.raw_client import BrokerError, Delivery, RawConsumer

if TYPE_CHECKING:
    from tests.simulation.world import World

COORDINATORS = 2
LANES = 3
"""Transactions that one client has open beside each other."""


@dataclass
class Work:
    """What was asked for in a transaction, and how much of it was answered well."""

    record: Transaction
    wanted: "pb.TxnAction"
    asked: int = 0
    done: int = 0

    @property
    def end(self) -> "pb.TxnAction":
        """Only what is whole is committed."""
        return self.wanted if self.asked == self.done else pb.ABORT

    def receipted(self, outcome: "asyncio.Future[str]") -> None:
        self.done += not outcome.cancelled() and not outcome.result()


class Transactor(Sender):
    """See the module's docstring."""

    adds = 0.9
    """Of topics, how many are added to a transaction before the first SEND."""

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topics: list[str]
    ) -> None:
        super().__init__(world, name, host, rng, topics)
        self.coordinator = rng.randrange(COORDINATORS)
        self.consumers: dict[str, RawConsumer] = {}
        self._open: dict[Txn, Work] = {}
        """What is to be ended, after a new connection too."""

    async def session(self, client: SimulatedClient) -> None:
        await self.open(client)
        await self.connect(client)
        self.consumers = {}
        left, self._open = self._open, {}
        resumed = []
        for txn, work in left.items():
            if self.world.plan.resumed and self.rng.random() < self.world.plan.resumed:
                self._open[txn] = work
                resumed.append(work)
            elif self.rng.random() < 0.8:
                await self._end(client, work)
        lanes = [asyncio.create_task(self._lane(client)) for _ in range(LANES)]
        lanes += [asyncio.create_task(self._resume(client, work)) for work in resumed]
        try:
            while not self.stopping and client.alive:
                await self._attach(client)
                await asyncio.sleep(0.3)
        finally:
            for lane in lanes:
                lane.cancel()

    async def connect(self, client: SimulatedClient) -> None:
        """To its coordinator."""
        await client.connect_coordinator(self.coordinator)

    async def _lane(self, client: SimulatedClient) -> None:
        """One transaction after the other."""
        while not self.stopping and client.alive:
            try:
                await self._transaction(client)
            except GONE as error:
                self.note(f"lane: {type(error).__name__} {error}")
            await asyncio.sleep(self.rng.expovariate(1 / self.world.plan.pause_s))

    async def _resume(self, client: SimulatedClient, work: Work) -> None:
        """More of what was begun on an earlier connection, and its end."""
        try:
            await self._work(client, work)
            await asyncio.sleep(self.rng.expovariate(1))
            await self._end(client, work)
            self._open.pop(work.record.txn, None)
        except GONE as error:
            self.note(f"resumed: {type(error).__name__} {error}")

    async def _attach(self, client: SimulatedClient) -> None:
        for segment, consumer in list(self.consumers.items()):
            if not consumer.events.empty():
                del self.consumers[segment]
        for topic, layout in self.layouts.items():
            if topic == self.topics[0] or topic in self.world.plain_topics:
                layout.refresh()
                for segment in layout.all():
                    await self._attach_to(client, segment)

    async def _attach_to(self, client: SimulatedClient, segment: str) -> None:
        if segment in self.consumers:
            return
        try:
            self.consumers[segment] = await client.attach(
                segment, QUEUE, self.world.queue_kind, self.name, 5
            )
        except BrokerError as error:
            self.note(f"cannot attach to {segment}: {error}")

    async def _transaction(self, client: SimulatedClient) -> None:
        rng = self.rng
        timeout_ms = rng.choice((300, 5000, 20_000, 20_000))
        record = await client.begin_recorded(timeout_ms, self.coordinator)
        txn = record.txn
        work = self._open[txn] = Work(record, self._wanted())
        await self._work(client, work)
        if rng.random() < 0.1:
            del self._open[txn]
            return
        if rng.random() < 0.1:
            await asyncio.sleep(timeout_ms / 1000 * rng.uniform(0.9, 1.5))
        elif rng.random() < 0.4:
            await asyncio.sleep(rng.expovariate(1))
        await self._end(client, work)
        self._open.pop(txn, None)
        if rng.random() < 0.1:
            await self._send(client, txn)
            for taken in self._take(1):
                await self._ack(client, work, taken, {})

    def _wanted(self) -> "pb.TxnAction":
        return pb.ABORT if self.rng.random() < self.world.plan.aborted else pb.COMMIT

    async def _work(self, client: SimulatedClient, work: Work) -> None:
        """Sends and acknowledgements, beside each other."""
        rng = self.rng
        partitions: dict[str, None] = {}
        subscribed: dict[str, None] = {}
        taken = self._take(rng.randrange(4))
        sends = rng.randrange(self.world.plan.most_sends + 1)
        steps = [*(("ack", each) for each in taken), *(("send", None),) * sends]
        rng.shuffle(steps)
        outcomes = []
        for kind, what in steps:
            work.asked += 1
            try:
                if kind == "send":
                    outcomes.append(await self._begin_send(client, work, partitions))
                else:
                    await self._ack(client, work, what, subscribed)  # type: ignore[arg-type]
            except BrokerError as error:
                self.note(f"{work.record.txn} {kind}: {error}")
            if rng.random() < 0.1:
                await asyncio.sleep(rng.expovariate(2))
        if work.wanted == pb.ABORT and rng.random() < self.world.plan.hasty:
            return
        for outcome in outcomes:
            await client.wait(outcome)

    def _take(self, count: int) -> list[tuple[RawConsumer, Delivery]]:
        found: list[tuple[RawConsumer, Delivery]] = []
        for consumer in self.consumers.values():
            while len(found) < count and not consumer.messages.empty():
                found.append((consumer, consumer.messages.get_nowait()))
                consumer.flow(permits_of(found[-1][1]))
        return found

    async def _begin_send(
        self, client: SimulatedClient, work: Work, partitions: dict[str, None]
    ) -> "asyncio.Future[str]":
        txn = work.record.txn
        messages = self.batch_by_luck(self.new_message(awaited=False, txn=txn))
        layout = self.layouts[messages[0].topic]
        layout.refresh()
        segment = layout.route(messages[0].key)
        if segment not in partitions and self.rng.random() < self.adds:
            await client.add_partition(txn, [segment])
            partitions[segment] = None
        outcome = self.begin_send(await self.producer_on(client, segment), *messages)
        outcome.add_done_callback(work.receipted)
        return outcome

    async def _send(self, client: SimulatedClient, txn: Txn) -> None:
        """A write after the end: refused, or it shares the fate of its transaction."""
        message = self.new_message(awaited=False, txn=txn)
        producer = await self.producer_for(client, message)
        await client.wait(self.begin_send(producer, message))

    async def _ack(
        self,
        client: SimulatedClient,
        work: Work,
        what: tuple[RawConsumer, Delivery],
        subscribed: dict[str, None],
    ) -> None:
        (consumer, delivery), txn = what, work.record.txn
        seen = client.seen(consumer, delivery)
        if seen[0].segment not in subscribed:
            await client.add_subscription(txn, seen[0].segment, QUEUE)
            subscribed[seen[0].segment] = None
        indexes = [index for each in seen for index in each.position[2:]]
        if indexes and self.rng.random() < 0.5:
            indexes = self.rng.sample(indexes, self.rng.randrange(1, len(indexes) + 1))
            seen = [each for each in seen if each.position[2] in indexes]
        acks = self.acking(seen, txn)
        named = partial_id(delivery, indexes)
        await self.answered(acks, client.transactional_ack(consumer, [named], txn))
        work.done += 1

    async def _end(self, client: SimulatedClient, work: Work) -> None:
        record, action, luck = work.record, work.end, self.rng.random()
        asked = [action]
        if luck < 0.1:
            asked = [action, action]
        elif luck < 0.2:
            asked = [pb.COMMIT, pb.ABORT] if action == pb.COMMIT else [pb.ABORT, pb.ABORT]
        await asyncio.gather(
            *(self._end_once(client, record, each) for each in asked), return_exceptions=True
        )
        if not client.alive:
            raise ConnectionError("the connection ended before END_TXN was answered")

    async def _end_once(
        self, client: SimulatedClient, record: Transaction, action: "pb.TxnAction"
    ) -> None:
        if self.rng.random() >= self.world.plan.other_connection:
            await self.end_at(client, record, action)
            return
        # On a connection of its own it may overtake what was sent before it.
        other = await SimulatedClient.of(
            self.world.history, self.name, self.world.port, version=self.client_version
        )
        try:
            await self.connect(other)
            await self.end_at(other, record, action)
        finally:
            other.drop()

    async def end_at(
        self, client: SimulatedClient, record: Transaction, action: "pb.TxnAction"
    ) -> None:
        """END_TXN on this connection."""
        await client.end_recorded(record, action)
