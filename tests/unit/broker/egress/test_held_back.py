"""What follows messages that a transaction of another consumer acknowledged waits for its end.

Otherwise a cumulative acknowledgement that comes just after an abort would acknowledge messages
that its consumer has never got.
"""

import pytest

from protocol import pulsar_pb2 as pb
from protocol.incarnation import INCARNATION
from tests.support.raw_client import RawConsumer
from tests.unit.broker.egress.test_end_to_end import EARLIEST, EXCLUSIVE, FAILOVER, options
from tests.unit.broker.egress.test_transactional_acks import (
    ABORTED,
    COMMITTED,
    TOPIC,
    Stage,
    got,
    nothing_comes,
    payloads,
    stage,
)
from txn.records import TxnState
from txn.txn_id import TxnId

__all__ = ["stage"]

in_order = pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER], ids=["exclusive", "failover"])
either_way = pytest.mark.parametrize("state", [COMMITTED, ABORTED], ids=["commit", "abort"])
LEFT = {COMMITTED: ["3", "4"], ABORTED: ["0", "1", "2", "3", "4"]}


async def subscribe(
    stage: Stage,
    name: str,
    kind: pb.CommandSubscribe.SubType = EXCLUSIVE,
    *,
    incarnation: str = "",
) -> RawConsumer:
    wanted = options(kind, initial_position=EARLIEST, consumer_name=name)
    if incarnation:
        wanted.metadata.add(key=INCARNATION, value=incarnation)
    return await stage.client.subscribe(TOPIC, "s", wanted, permits=100)


async def held_by(stage: Stage, consumer: RawConsumer) -> TxnId:
    """A transaction in which it acknowledged the first three; the consumer is gone."""
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[2], cumulative=True)
    await consumer.close()
    return txn


@in_order
@either_way
async def test_another_one_gets_what_is_left_when_the_transaction_has_ended(
    stage: Stage, kind: pb.CommandSubscribe.SubType, state: TxnState
) -> None:
    txn = await held_by(stage, await subscribe(stage, "one", kind))
    other = await subscribe(stage, "two", kind)
    await nothing_comes(other)
    await stage.end(txn, state)
    assert payloads(await got(other, len(LEFT[state]))) == LEFT[state]
    await nothing_comes(other)


@pytest.mark.parametrize("incarnation", ["", "first"], ids=["not-told", "told"])
async def test_who_comes_back_goes_on_in_its_transaction(stage: Stage, incarnation: str) -> None:
    txn = await held_by(stage, await subscribe(stage, "one", incarnation=incarnation))
    back = await subscribe(stage, "one", incarnation=incarnation)
    messages = await got(back, 2)
    assert payloads(messages) == ["3", "4"]
    await stage.ack(back, txn, messages[0], cumulative=True)
    await stage.commit(txn)
    back.redeliver()
    assert payloads(await got(back, 1)) == ["4"]


@either_way
async def test_another_incarnation_is_another_one(stage: Stage, state: TxnState) -> None:
    txn = await held_by(stage, await subscribe(stage, "one", incarnation="first"))
    other = await subscribe(stage, "one", incarnation="second")
    await nothing_comes(other)
    await stage.end(txn, state)
    assert payloads(await got(other, len(LEFT[state]))) == LEFT[state]


@either_way
async def test_after_a_load_nobody_is_known_to_go_on(stage: Stage, state: TxnState) -> None:
    txn = await held_by(stage, await subscribe(stage, "one"))
    await stage.reload()
    back = await subscribe(stage, "one")
    await nothing_comes(back)
    await stage.end(txn, state)
    assert payloads(await got(back, len(LEFT[state]))) == LEFT[state]


async def test_after_a_load_it_is_known_by_its_next_acknowledgement(stage: Stage) -> None:
    consumer = await subscribe(stage, "one")
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[2], cumulative=True)
    await stage.reload()
    back = await subscribe(stage, "one")
    await nothing_comes(back)
    await stage.ack(back, txn, messages[3], cumulative=True)
    assert payloads(await got(back, 1)) == ["4"]
    await stage.abort(txn)
    assert payloads(await got(back, 5)) == LEFT[ABORTED]
