"""A client that consumes, produces and acknowledges in transactions, carefully or not.

It commits only what was receipted and acknowledged, as stock clients do.  It also stands still past
its timeout and goes on, asks twice, asks for both ends at once, writes after the end, and leaves
transactions to their deadline.
"""

import asyncio
import random
from typing import TYPE_CHECKING

from protocol import pulsar_pb2 as pb
from tests.simulation.actors import QUEUE, Sender
from tests.simulation.client import GONE, SimulatedClient
from tests.simulation.history import Transaction, Txn
from tests.simulation.loop import Host
from tests.support.raw_client import BrokerError, Delivery, RawConsumer

if TYPE_CHECKING:
    from tests.simulation.world import World

ACTIONS = {pb.COMMIT: "COMMITTED", pb.ABORT: "ABORTED"}
COORDINATORS = 2


class Transactor(Sender):
    """See the module's docstring."""

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topics: list[str]
    ) -> None:
        super().__init__(world, name, host, rng, topics)
        self.coordinator = rng.randrange(COORDINATORS)
        self.consumers: dict[str, RawConsumer] = {}
        self._to_end: tuple[Transaction, int] | None = None
        """What a broken connection kept from being ended."""

    async def session(self, client: SimulatedClient) -> None:
        await self.open(client)
        await client.connect_coordinator(self.coordinator)
        self.consumers = {}
        if self._to_end is not None and self.rng.random() < 0.7:
            record, action = self._to_end
            self._to_end = None
            await self._end(client, record, action)
        while not self.stopping and client.alive:
            await self._attach(client)
            await self._transaction(client)
            await asyncio.sleep(self.rng.expovariate(1 / self.world.plan.pause_s) * 3)

    async def _attach(self, client: SimulatedClient) -> None:
        for segment, consumer in list(self.consumers.items()):
            if not consumer.events.empty():
                del self.consumers[segment]
        layout = self.layouts[self.topics[0]]
        layout.refresh()
        for segment in layout.all():
            if segment in self.consumers:
                continue
            try:
                self.consumers[segment] = await client.attach(
                    segment, QUEUE, pb.CommandSubscribe.Shared, self.name, 5
                )
            except BrokerError as error:
                self.note(f"cannot attach to {segment}: {error}")

    async def _transaction(self, client: SimulatedClient) -> None:
        rng, history = self.rng, self.world.history
        timeout_ms = rng.choice((300, 3000, 20_000))
        txn = await client.begin(timeout_ms, self.coordinator)
        record = Transaction(txn, asyncio.get_running_loop().time(), timeout_ms)
        history.transactions[txn] = record
        self.note(f"begins {txn} timeout={timeout_ms}")
        self._to_end = (record, pb.ABORT)
        whole = await self._work(client, txn)
        if rng.random() < 0.1:
            await asyncio.sleep(timeout_ms / 1000 * rng.uniform(0.9, 1.5))
        luck = rng.random()
        if luck < 0.1:
            self._to_end = None
            return
        action = pb.COMMIT if whole and luck < 0.75 else pb.ABORT
        self._to_end = (record, action)
        await self._end(client, record, action)
        self._to_end = None
        if rng.random() < 0.1:
            await self._send(client, txn, {})

    async def _work(self, client: SimulatedClient, txn: Txn) -> bool:
        """Sends and acknowledgements, beside each other; whether all of them worked."""
        rng = self.rng
        partitions: dict[str, None] = {}
        subscribed: dict[str, None] = {}
        taken = self._take(rng.randrange(4))
        steps = [*(("ack", each) for each in taken), *(("send", None),) * rng.randrange(5)]
        rng.shuffle(steps)
        whole, outcomes = True, []
        for kind, what in steps:
            try:
                if kind == "send":
                    outcomes.append(await self._begin_send(client, txn, partitions))
                else:
                    await self._ack(client, txn, what, subscribed)  # type: ignore[arg-type]
            except BrokerError as error:
                self.note(f"{txn} {kind}: {error}")
                whole = False
            if rng.random() < 0.1:
                await asyncio.sleep(rng.expovariate(2))
        for outcome in outcomes:
            whole = not await client.wait(outcome) and whole
        return whole

    def _take(self, count: int) -> list[tuple[RawConsumer, Delivery]]:
        found = []
        for consumer in self.consumers.values():
            while len(found) < count and not consumer.messages.empty():
                found.append((consumer, consumer.messages.get_nowait()))
                consumer.flow(1)
        return found

    async def _begin_send(
        self, client: SimulatedClient, txn: Txn, partitions: dict[str, None]
    ) -> "asyncio.Future[str]":
        message = self.new_message(awaited=False, txn=txn)
        layout = self.layouts[message.topic]
        layout.refresh()
        segment = layout.route(message.key)
        if segment not in partitions and self.rng.random() < 0.9:
            await client.add_partition(txn, [segment])
            partitions[segment] = None
        return self.begin_send(await self.producer_on(client, segment), message)

    async def _send(self, client: SimulatedClient, txn: Txn, partitions: dict[str, None]) -> None:
        """A write after the end: refused, or it shares the fate of its transaction."""
        message = self.new_message(awaited=False, txn=txn)
        producer = await self.producer_for(client, message)
        await client.wait(self.begin_send(producer, message))

    async def _ack(
        self,
        client: SimulatedClient,
        txn: Txn,
        what: tuple[RawConsumer, Delivery],
        subscribed: dict[str, None],
    ) -> None:
        consumer, delivery = what
        place = (delivery.message_id.ledger_id, delivery.message_id.entry_id)
        seen = client.delivered[(consumer.consumer_id, *place)]
        if seen.segment not in subscribed:
            await client.add_subscription(txn, seen.segment, QUEUE)
            subscribed[seen.segment] = None
        ack = self.world.history.acking(seen, txn)
        try:
            await client.transactional_ack(consumer, [delivery.message_id], txn)
        except GONE as error:
            self.world.history.ack_answered(ack, f"{type(error).__name__} {error}")
            raise
        self.world.history.ack_answered(ack, None)

    async def _end(self, client: SimulatedClient, record: Transaction, action: int) -> None:
        luck = self.rng.random()
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

    async def _end_once(self, client: SimulatedClient, record: Transaction, action: int) -> None:
        name = ACTIONS[action]
        record.asked.append(name)
        self.note(f"ends {record.txn} {name}")
        try:
            await client.end(record.txn, action)  # type: ignore[arg-type]
        except GONE as error:
            self.note(f"end of {record.txn}: {type(error).__name__} {error}")
            record.answers.append((name, str(error) or type(error).__name__))
            raise
        record.answers.append((name, ""))
        self.note(f"end of {record.txn} answered: {name}")
