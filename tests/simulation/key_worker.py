"""Clients that share a transaction key: each opens it when it can, and fences the others.

Whoever is fenced learns it by its next request, or because its connection ends, and after a while
opens the key again.  One that stands still in mid-transaction and goes on is a zombie.
"""

import asyncio
import random
from typing import TYPE_CHECKING, ClassVar

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import coordinator_of_key
from tests.simulation.actors import Sender
from tests.simulation.client import GONE, SimulatedClient
from tests.simulation.history import KeyOpened, Transaction
from tests.simulation.loop import Host
from tests.simulation.transactor import COORDINATORS
from tests.support.raw_client import BrokerError

if TYPE_CHECKING:
    from tests.simulation.world import World

KEY = "task"
COORDINATOR = coordinator_of_key(KEY, COORDINATORS)


class KeyWorker(Sender):
    """See the module's docstring."""

    key: ClassVar[str] = KEY
    coordinator: ClassVar[int] = COORDINATOR

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topics: list[str]
    ) -> None:
        super().__init__(world, name, host, rng, topics)
        self.epoch = -1
        self.told: tuple[str, int] | None = None
        """The last batch that was committed, as OPEN told it."""
        self._presented = -1
        self._requests = 0
        self._unanswered = False

    async def session(self, client: SimulatedClient) -> None:
        await self.open(client)
        await self._open_key(client)
        while not self.stopping and client.alive:
            await self._transaction(client)
            await asyncio.sleep(self.rng.expovariate(1 / self.world.plan.pause_s))

    def _name(self) -> str:
        """Of a request that may be sent again."""
        self._requests += 1
        return f"{self.name}-{self._requests}"

    async def _open_key(self, client: SimulatedClient) -> None:
        """Take it over, or only if nobody else has; an OPEN without answer is sent again."""
        if not self._unanswered:
            self._presented = self.rng.choice((-1, self.epoch))
            self._opener = self._name()
        self._unanswered = True
        try:
            answer = await client.open_key(
                self.coordinator, self.key, self._presented, self._opener
            )
        except BrokerError as error:
            self._unanswered = error.code != pb.NotAllowedError
            if not self._unanswered:
                self.epoch = -1
            raise
        self._unanswered = False
        self.epoch = answer.epoch
        last = answer.last_txnid_most_bits, answer.last_txnid_least_bits
        told = answer.last_group if answer.HasField("last_group") else None
        self.told = None if told is None else (told.query, told.batch)
        self.world.history.key_opened(
            KeyOpened(
                self.key,
                answer.epoch,
                self.name,
                asyncio.get_running_loop().time(),
                last if answer.HasField("last_txnid_least_bits") else None,
                answer.last_committed if answer.HasField("last_committed") else None,
                self.told,
            )
        )

    async def _transaction(self, client: SimulatedClient) -> None:
        rng, timeout_ms = self.rng, self.rng.choice((2000, 20_000))
        txn = await client.begin(timeout_ms, COORDINATOR, (KEY, self.epoch), self._name())
        record = Transaction(txn, asyncio.get_running_loop().time(), timeout_ms, (KEY, self.epoch))
        self.world.history.transactions[txn] = record
        self.note(f"begins {txn} under epoch {self.epoch}")
        outcomes = []
        for _ in range(rng.randrange(1, 4)):
            message = self.new_message(awaited=False, txn=txn)
            layout = self.layouts[message.topic]
            layout.refresh()
            segment = layout.route(message.key)
            await client.add_partition(txn, [segment])
            outcomes.append(self.begin_send(await self.producer_on(client, segment), message))
        for outcome in outcomes:
            if refusal := await client.wait(outcome):
                raise ConnectionError(refusal)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, 3))
        try:
            await client.end_recorded(record, pb.COMMIT)
        except GONE:
            if rng.random() < 0.5:
                await self._late(client, record)
            raise

    async def _late(self, client: SimulatedClient, record: Transaction) -> None:
        """It does not believe it, and asks on another connection."""
        other = await SimulatedClient.of(self.world.history, self.name, self.world.port)
        other.keys = client.keys
        try:
            await other.end_recorded(record, pb.COMMIT)
        finally:
            other.drop()
