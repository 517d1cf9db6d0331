"""Consumers over a whole broker, while the end of a transaction is carried out in slices."""

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.bounds import set_bound
from tests.support.raw_handles import RawConsumer
from tests.unit.broker.topics.test_end_to_end import EXCLUSIVE, FAILOVER
from tests.unit.broker.topics.test_transactional_acks import (
    TOPIC,
    Stage,
    every_kind,
    got,
    messages_of,
    nothing_comes,
    payloads,
    singly,
    stage,
)
from tests.unit.broker.topics.test_transactional_batches import batched
from txn.pending_acks import PendingAcks

__all__ = ["stage"]

in_order = pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER], ids=["exclusive", "failover"])


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are single records, and carried out when the test says so, or somebody has to know."""
    set_bound(monkeypatch, "TXN_SLICE_POSITIONS", 1, in_module="txn.pending_acks_core")
    monkeypatch.setattr(PendingAcks, "_end_some", lambda self: None)


async def carry_out(stage: Stage, slices: int) -> None:
    transactional = (await stage.subscription()).transactional
    assert transactional is not None
    for _ in range(slices):
        assert transactional.pending.core.ending
        transactional.pending._carry_out(transactional.pending.core.end_some())


@singly
async def test_a_nack_between_the_slices_of_an_abort_brings_nothing_twice(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    consumer, batch = await batched(stage, kind)
    producer = await stage.client.create_producer(TOPIC)
    await producer.send(b"behind")
    (behind,) = await got(consumer, 1)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages_of(batch, 0))
    await stage.ack(consumer, txn, behind)
    await stage.abort(txn)
    await carry_out(stage, 1)
    wanted = pb.MessageIdData(ack_set=[0b0010])
    wanted.ledger_id, wanted.entry_id = batch.message_id.ledger_id, batch.message_id.entry_id
    consumer.redeliver(wanted)
    (again,) = await got(consumer, 1)
    assert list(again.command.ack_set) == [0b0011]
    await carry_out(stage, 1)
    assert payloads(await got(consumer, 1)) == ["behind"]
    await nothing_comes(consumer)
    subscription = await stage.subscription()
    assert subscription.unacked == 5
    await consumer.ack_answered(messages_of(batch, 0, 1, 2, 3), behind.message_id)
    assert (subscription.backlog, subscription.unacked) == (0, 0)


async def amid_an_abort(stage: Stage, kind: pb.CommandSubscribe.SubType) -> RawConsumer:
    """A consumer of five messages; an abort has released the first of three acknowledged."""
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    for each in messages[:3]:
        await stage.ack(consumer, txn, each)
    await stage.abort(txn)
    await carry_out(stage, 1)
    return consumer


@in_order
async def test_redeliver_all_between_abort_slices_delivers_each_message_once(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    """As a client does that hears of the abort before it is carried out."""
    consumer = await amid_an_abort(stage, kind)
    consumer.redeliver(epoch=1)
    assert payloads(await got(consumer, 5)) == ["0", "1", "2", "3", "4"]
    await nothing_comes(consumer)


@every_kind
async def test_consumer_attached_between_abort_slices_gets_each_message_once(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    first = await amid_an_abort(stage, kind)
    await first.close()
    second = await stage.subscribe(kind)
    await stage.client.ping()
    await carry_out(stage, 2)
    assert sorted(payloads(await got(second, 5))) == ["0", "1", "2", "3", "4"]
    await nothing_comes(second)
