"""Seeking on subscriptions that have acknowledgements in transactions."""

import asyncio

import pytest

from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from tests.support.raw_client import BrokerError
from tests.support.waiting import until
from tests.unit.broker.topics.test_end_to_end import SHARED
from tests.unit.broker.topics.test_transactional_acks import Stage, got, payloads, stage

__all__ = ["stage"]


def deletes_late(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """No record is deleted before the event that is returned."""
    store, may_delete = stage.broker.transactions.store, asyncio.Event()
    delete = store.delete_operation

    async def delete_late(of: TxnId, key: str) -> None:
        await may_delete.wait()
        await delete(of, key)

    monkeypatch.setattr(store, "delete_operation", delete_late)
    return may_delete


async def test_a7_a_seek_waits_for_what_ended_transactions_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash would apply the commit again, over the new place."""
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[0])
    may_delete = deletes_late(stage, monkeypatch)
    await stage.commit(txn)
    subscription = await stage.subscription()
    await until(lambda: subscription.backlog == 4)
    first = messages[0].message_id
    seek = asyncio.create_task(subscription.seek(Position(first.ledger_id, first.entry_id)))
    await stage.client.ping()
    assert (subscription.backlog, await stage.records(), seek.done()) == (4, 1, False)
    may_delete.set()
    await seek
    assert (subscription.backlog, await stage.records()) == (5, 0)


async def test_consumers_go_before_a_seek_waits_for_transactions(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what they acknowledge and commit meanwhile keeps it waiting, for ever if it goes on."""
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    ended, later = await stage.begin(), await stage.begin()
    await stage.ack(consumer, ended, messages[0])
    may_delete = deletes_late(stage, monkeypatch)
    await stage.commit(ended)
    subscription = await stage.subscription()
    await until(lambda: subscription.backlog == 4)
    first = messages[0].message_id
    seek = asyncio.create_task(subscription.seek(Position(first.ledger_id, first.entry_id)))
    await stage.client.wait(consumer.events.get())
    with pytest.raises(BrokerError):
        await stage.ack(consumer, later, messages[1])
    assert not seek.done()
    may_delete.set()
    await seek


async def test_a_seek_leaves_what_open_transactions_hold(stage: Stage) -> None:
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    ended, open_ = await stage.begin(), await stage.begin()
    await stage.ack(consumer, ended, messages[0])
    await stage.ack(consumer, open_, messages[1])
    await stage.commit(ended)
    subscription = await stage.subscription()
    await until(lambda: subscription.backlog == 4)
    await consumer.seek(messages[0].message_id)
    assert await stage.records() == 1, "what ended is finished first (A7)"
    await consumer.events.get()
    again = await stage.subscribe(SHARED)
    assert payloads(await got(again, 4)) == ["0", "2", "3", "4"]
    await stage.abort(open_)
    assert payloads(await got(again, 1)) == ["1"]
