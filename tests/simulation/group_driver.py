"""Drivers of a job that commits batches: attempts of a group, one decision, each batch once.

Every driver opens the key of the job and goes on where OPEN says, or does the last batch again, as
one does that was killed before it wrote down that it is committed.  Losers are late, commits are
sent again when their answer is lost, abort hooks come after them; and a driver that stands still
and goes on is a zombie.
"""

import asyncio
from collections.abc import Awaitable
from typing import ClassVar

from magnetar.protocol.key_hash import coordinator_of_key
from magnetar.protocol.txn_id import NUMBER_BITS
from tests.simulation.checker import JOB
from tests.simulation.client import GONE, SimulatedClient
from tests.simulation.history import GroupAsked, Transaction, Txn
from tests.simulation.key_worker import KeyWorker
from tests.simulation.transactor import COORDINATORS
from tests.support.raw_client import BrokerError

QUERY = "query"


def index_of(attempt: Txn) -> int:
    """Which attempt of its group it is."""
    return attempt[1] >> NUMBER_BITS


class GroupDriver(KeyWorker):
    """See the module's docstring."""

    key: ClassVar[str] = JOB
    coordinator: ClassVar[int] = coordinator_of_key(JOB, COORDINATORS)

    def _next(self) -> int:
        """The batch to be done: the one after the last, or that again."""
        last = -1 if self.told is None else self.told[1]
        return last if last >= 0 and self.rng.random() < 0.25 else last + 1

    async def _transaction(self, client: SimulatedClient) -> None:
        rng, nonce, batch = self.rng, self._name(), (QUERY, self._next())
        asked: GroupAsked | None = None
        wrote: list[Txn] = []
        left: list[Awaitable[str]] = []
        for _ in range(rng.choice((1, 2, 2, 3))):
            attempt = await self._begin(client, nonce, batch, asked)
            if attempt is None:
                self._done(batch)
                return
            asked = self.world.history.groups[-1]
            outcomes = await self._write(client, attempt)
            if rng.random() < 0.25:
                left += outcomes  # it is late
            elif not [refusal for each in outcomes if (refusal := await client.wait(each))]:
                wrote.append(attempt)
        if asked is None or not wrote:
            await client.abort_group(self.coordinator, (self.key, self.epoch))
            return
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0, 3))
        winners = wrote if rng.random() < 0.3 else [rng.choice(wrote)]
        await self._commit(client, asked, batch, winners)
        losers = [each for each in asked.attempts if each not in winners]
        if losers and rng.random() < 0.5:
            await self._write(client, rng.choice(losers))
        if rng.random() < 0.2:
            await self._begin(client, nonce, None, asked)
        if rng.random() < 0.2:
            await client.abort_group(self.coordinator, (self.key, self.epoch))

    async def _begin(
        self,
        client: SimulatedClient,
        nonce: str,
        batch: tuple[str, int] | None,
        asked: GroupAsked | None,
    ) -> Txn | None:
        """An attempt, which may be too late; None: the batch is done."""
        hint = batch if self.rng.random() < 0.3 else None
        key, timeout_ms = (self.key, self.epoch), self.rng.choice((2000, 20_000))
        history = self.world.history
        try:
            begun = await client.begin_attempt(self.coordinator, key, nonce, timeout_ms, hint)
        except BrokerError:
            if batch is None:
                return None  # refused, as it should be
            raise
        if begun is None:
            return None
        attempt, group = begun
        if asked is None or asked.group != group:
            now_s = asyncio.get_running_loop().time()
            history.groups.append(GroupAsked(nonce, group))
            history.transactions.setdefault(group, Transaction(group, now_s, timeout_ms, key))
        history.groups[-1].attempts.append(attempt)
        self.note(f"begins attempt {index_of(attempt)} of {group} for {nonce}")
        return attempt

    async def _write(self, client: SimulatedClient, attempt: Txn) -> list[Awaitable[str]]:
        """Rows of an attempt; what the owner refuses is a loser's."""
        outcomes: list[Awaitable[str]] = []
        for _ in range(self.rng.randrange(1, 3)):
            message = self.new_message(awaited=False, txn=attempt)
            layout = self.layouts[message.topic]
            layout.refresh()
            segment = layout.route(message.key)
            if self.rng.random() < 0.7:
                try:
                    await client.add_partition(attempt, [segment])
                except BrokerError as error:
                    self.note(f"attempt {attempt} is refused: {error}")
            outcomes.append(self.begin_send(await self.producer_on(client, segment), message))
        return outcomes

    async def _commit(
        self,
        client: SimulatedClient,
        asked: GroupAsked,
        batch: tuple[str, int],
        winners: list[Txn],
    ) -> None:
        key = (self.key, self.epoch)
        asked.winners = frozenset(index_of(each) for each in winners)
        self.note(f"commits {asked.group} for {batch} with {sorted(asked.winners)}")
        try:
            await client.commit_group(key, asked.nonce, asked.group, batch, winners)
        except BrokerError:
            raise
        except GONE:
            other = await SimulatedClient.of(self.world.history, self.name, self.world.port)
            try:
                await other.commit_group(key, asked.nonce, asked.group, batch, winners)
            finally:
                other.drop()
        self._done(batch)

    def _done(self, batch: tuple[str, int]) -> None:
        self.world.history.batch_done(self.name, batch)
        self.told = batch if self.told is None else max(self.told, batch)
