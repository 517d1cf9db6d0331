"""Batches decided in plain transactions: what is said when the answer does not tell the end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest

import magnetar
from magnetar.errors import InvalidTransactionStatus, OperationTimedOut, TransactionKeyFenced
from magnetar.protocol.txn_id import TxnId
from magnetar.spark.commit import Decision, WinningAttempt
from magnetar.spark.errors import StateUnreadable
from magnetar.spark.plain_groups import PlainGroups, open_state
from magnetar.spark.sink_options import TransactionKeyOption
from magnetar.spark.state_topic import ReadSoFar
from tests.unit.magnetar.spark.state_world import KEY, QUERY, TOPIC, Calm, ReadingLife

T = TypeVar("T")


@dataclass
class Driver:
    """Of a query that has opened the key."""

    client: magnetar.Client
    groups: PlainGroups
    world: Calm
    known: ReadSoFar

    @classmethod
    async def opened(cls, world: Calm, nonce: str) -> "Driver":
        client = world.client()
        state, where = await open_state(client, TOPIC, KEY, -1, nonce)
        known = ReadSoFar(where.start)
        groups = PlainGroups(client, TransactionKeyOption(KEY, state.epoch), where, known)
        return cls(client, groups, world, known)

    async def commit(self, batch: int) -> bool:
        txn = await self.client.begin_transaction()
        self.world.rows[txn] = batch
        decision = Decision("n", txn, (WinningAttempt(txn, {}),), QUERY, batch)
        return await self.groups.commit(decision, f"up to {batch}")


# The topic is another one


@pytest.mark.parametrize("batches", [0, 1])
async def test_recreated_state_topic_is_refused(batches: int) -> None:
    """Both keys have epoch 0, and messages in the same places."""
    world = Calm()
    old = await Driver.opened(world, "a")
    for batch in range(batches):
        await old.commit(batch)
    world.log.clear()
    new = await Driver.opened(world, "b")
    for _ in range(2):
        with pytest.raises(StateUnreadable, match="made anew"):
            await old.commit(batches)
    await new.commit(batches)
    assert sorted(world.visible()) == list(range(batches + 1))


async def test_recreated_empty_state_topic_is_refused() -> None:
    world = Calm()
    old = await Driver.opened(world, "a")
    await old.commit(0)
    world.log.clear()
    with pytest.raises(StateUnreadable, match="made anew"):
        await old.commit(1)
    assert world.visible() == [0]


# The end of a transaction


class Interrupted(Calm):
    """Where the answer to a commit is lost; another driver may come before it is asked again."""

    def __init__(self, *, arrives: bool) -> None:
        super().__init__()
        self.arrives = arrives
        self.opened_by_others = 0
        self.batches_of_others = 0

    async def before_it_is_read(self) -> None:
        """What others do, once."""
        others, self.opened_by_others = self.opened_by_others, 0
        for number in range(others):
            other = await Driver.opened(self, f"other {number}")
            for batch in range(1, 1 + self.batches_of_others):
                await other.commit(batch)

    async def ask(
        self, life: ReadingLife, what: str, work: Callable[[], T], *, writes: bool = False
    ) -> T:
        if what == "end" and self.opened_by_others:
            if self.arrives:
                await super().ask(life, what, work)
            await self.before_it_is_read()
            raise OperationTimedOut("nobody has answered")
        return await super().ask(life, what, work)


@pytest.mark.parametrize("batches", [0, 1, 2])
async def test_batch_with_its_record_is_committed_whatever_followed(
    batches: int,
) -> None:
    world = Interrupted(arrives=True)
    driver = await Driver.opened(world, "a")
    world.opened_by_others, world.batches_of_others = 1, batches
    assert not await driver.commit(0)
    assert sorted(world.visible()) == list(range(batches + 1))


async def test_batch_aborted_by_an_opener_is_fenced() -> None:
    world = Interrupted(arrives=False)
    driver = await Driver.opened(world, "a")
    world.opened_by_others = 1
    with pytest.raises(TransactionKeyFenced, match="another epoch than 0: 1"):
        await driver.commit(0)
    assert world.visible() == []


async def test_driver_reads_the_outcome_of_a_transaction_that_has_ended() -> None:
    """A commit that is asked again by the client, and arrives twice."""

    class Late(Calm):
        def end(self, txn: TxnId, commit: bool) -> None:
            super().end(txn, commit)
            if commit:
                raise InvalidTransactionStatus("it is over already")

    world = Late()
    driver = await Driver.opened(world, "a")
    assert not await driver.commit(0)
    assert world.visible() == [0]


async def test_timed_out_batch_is_not_done() -> None:
    class Late(Calm):
        def end(self, txn: TxnId, commit: bool) -> None:
            self.txns[txn] = "ABORTED"
            super().end(txn, commit)

    world = Late()
    driver = await Driver.opened(world, "a")
    with pytest.raises(InvalidTransactionStatus, match="Its time was up"):
        await driver.commit(0)
    assert world.visible() == []


# What was settled


async def test_driver_repeats_no_abort_of_a_settled_transaction() -> None:
    class Failing(Calm):
        failed = False

        def append(self, key: str, value: bytes, txn: TxnId | None) -> int:
            if b'"record"' in value and not self.failed:
                self.failed = True
                raise OperationTimedOut("nobody has answered")
            return super().append(key, value, txn)

    world = Failing()
    driver = await Driver.opened(world, "a")
    with pytest.raises(OperationTimedOut):
        await driver.commit(0)
    failed = TxnId(0, 0)
    assert world.ended == [(failed, False)]
    for batch in range(3):
        await driver.commit(batch)
    assert world.ended.count((failed, False)) == 2, "once by itself, once by the next batch"
    assert driver.known.settled == {failed}
    await Driver.opened(world, "b")
    with pytest.raises(TransactionKeyFenced):
        await driver.commit(3)
    await Driver.opened(world, "c")
    assert sorted(world.visible()) == [0, 1, 2]
