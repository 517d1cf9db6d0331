"""A client whose transactions touch what is deleted before they end, and made again."""

import asyncio
import random
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.simulation.actors import PLAIN, Sender
from tests.simulation.client import SimulatedClient
from tests.simulation.loop import Host
from tests.support.raw_client import BrokerError, RawConsumer

if TYPE_CHECKING:
    from tests.simulation.world import World

ANSWER_S = 20.0
SUBSCRIPTION = "d"


class Deleter(Sender):
    """See the module's docstring.  Its own topic is not judged, but for what must stay hidden."""

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topics: list[str]
    ) -> None:
        scheme = rng.choice((PLAIN, "topic://"))
        self.own = f"{scheme}public/default/{name}"
        super().__init__(world, name, host, rng, [self.own, self.own, topics[0]])

    async def session(self, client: SimulatedClient) -> None:
        await client.connect_coordinator()
        while not self.stopping and client.alive:
            await self.open(client)
            try:
                await self._round(client)
            except BrokerError as error:
                self.note(f"round: {error}")
            await asyncio.sleep(self.rng.expovariate(1))

    async def _round(self, client: SimulatedClient) -> None:
        """Some messages, a transaction on them, a deletion, the end of the transaction."""
        rng = self.rng
        consumers = [
            await client.attach(segment, SUBSCRIPTION, pb.CommandSubscribe.Shared, self.name, 100)
            for segment in self.layouts[self.own].all()
        ]
        for _ in range(rng.randrange(4)):
            await self._send(client, None)
        record = await client.begin_recorded(rng.choice((500, 10_000)))
        for consumer in consumers:
            await self._acknowledge(client, consumer, record.txn)
        for _ in range(rng.randrange(4)):
            await self._send(client, record.txn)
        work = [self._delete_subscription(consumers), self._delete_topic()]
        rng.shuffle(work)
        for each in work:
            if rng.random() < 0.6:
                await each
            else:
                each.close()
        await client.end_recorded(record, rng.choice((pb.COMMIT, pb.ABORT)))

    async def _send(self, client: SimulatedClient, txn: tuple[int, int] | None) -> None:
        message = self.new_message(awaited=False, txn=txn)
        producer = await self.producer_for(client, message)
        await client.wait(self.begin_send(producer, message))

    async def _acknowledge(
        self, client: SimulatedClient, consumer: RawConsumer, txn: tuple[int, int]
    ) -> None:
        await asyncio.sleep(0.2)
        while not consumer.messages.empty():
            delivery = consumer.messages.get_nowait()
            segment = client.seen(consumer, delivery)[0].segment
            await client.add_subscription(txn, segment, SUBSCRIPTION)
            await client.transactional_ack(consumer, [delivery.message_id], txn)

    async def _delete_subscription(self, consumers: list[RawConsumer]) -> None:
        for consumer in consumers:
            await consumer.unsubscribe(force=True)

    async def _delete_topic(self) -> None:
        broker, name = self.world.running, parse_topic_name(self.own)
        if not broker.alive:
            return
        if self.own.startswith(PLAIN):
            await self._on_broker(broker.host, broker.broker.topics.delete(name, force=True))
        else:
            await self._on_broker(broker.host, broker.broker.scalable.delete(name, force=True))

    async def _on_broker(self, host: Host, work: Coroutine[None, None, None]) -> None:
        """As an operator asks; the broker may die of something else meanwhile."""
        task = self.world.loop.spawn(host, work, f"{self.name} deletes")
        done, _ = await asyncio.wait({task}, timeout=ANSWER_S)
        if done and (error := task.exception()) is not None:
            self.note(f"no deletion: {error}")
