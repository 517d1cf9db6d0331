"""A client that consumes, produces and acknowledges in transactions, carefully or not.

It commits only what was receipted and acknowledged, as stock clients do.  It also stands still past
its timeout and goes on, asks twice, asks for both ends at once, writes after the end, and leaves
transactions to their deadline.
"""

import asyncio
import random
from dataclasses import dataclass
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
LANES = 3
"""Transactions that one client has open beside each other."""


@dataclass
class Work:
    """What was asked for in a transaction, and how much of it was answered well."""

    record: Transaction
    wanted: int
    asked: int = 0
    done: int = 0

    @property
    def end(self) -> int:
        """Only what is whole is committed."""
        return self.wanted if self.asked == self.done else pb.ABORT

    def receipted(self, outcome: "asyncio.Future[str]") -> None:
        self.done += not outcome.cancelled() and not outcome.result()


class Transactor(Sender):
    """See the module's docstring."""

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
        await client.connect_coordinator(self.coordinator)
        self.consumers = {}
        left, self._open = self._open, {}
        for work in left.values():
            if self.rng.random() < 0.8:
                await self._end(client, work)
        lanes = [asyncio.create_task(self._lane(client)) for _ in range(LANES)]
        try:
            while not self.stopping and client.alive:
                await self._attach(client)
                await asyncio.sleep(0.3)
        finally:
            for lane in lanes:
                lane.cancel()

    async def _lane(self, client: SimulatedClient) -> None:
        """One transaction after the other."""
        while not self.stopping and client.alive:
            try:
                await self._transaction(client)
            except GONE as error:
                self.note(f"lane: {type(error).__name__} {error}")
            await asyncio.sleep(self.rng.expovariate(1 / self.world.plan.pause_s))

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
        timeout_ms = rng.choice((300, 5000, 20_000, 20_000))
        txn = await client.begin(timeout_ms, self.coordinator)
        record = Transaction(txn, asyncio.get_running_loop().time(), timeout_ms)
        history.transactions[txn] = record
        self.note(f"begins {txn} timeout={timeout_ms}")
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

    def _wanted(self) -> int:
        return pb.ABORT if self.rng.random() < self.world.plan.aborted else pb.COMMIT

    async def _work(self, client: SimulatedClient, work: Work) -> None:
        """Sends and acknowledgements, beside each other."""
        rng = self.rng
        partitions: dict[str, None] = {}
        subscribed: dict[str, None] = {}
        taken = self._take(rng.randrange(4))
        steps = [*(("ack", each) for each in taken), *(("send", None),) * rng.randrange(5)]
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
        found = []
        for consumer in self.consumers.values():
            while len(found) < count and not consumer.messages.empty():
                found.append((consumer, consumer.messages.get_nowait()))
                consumer.flow(1)
        return found

    async def _begin_send(
        self, client: SimulatedClient, work: Work, partitions: dict[str, None]
    ) -> "asyncio.Future[str]":
        txn = work.record.txn
        message = self.new_message(awaited=False, txn=txn)
        layout = self.layouts[message.topic]
        layout.refresh()
        segment = layout.route(message.key)
        if segment not in partitions and self.rng.random() < 0.9:
            await client.add_partition(txn, [segment])
            partitions[segment] = None
        outcome = self.begin_send(await self.producer_on(client, segment), message)
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
