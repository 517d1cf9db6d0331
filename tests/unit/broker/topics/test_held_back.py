"""A9: what follows messages that a transaction of another consumer acknowledged waits for its end.

Otherwise a cumulative acknowledgement that comes just after an abort would acknowledge messages
that its consumer has never got.
"""

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.incarnation import INCARNATION
from magnetar.protocol.txn_id import TxnId
from tests.support.raw_client import RawConsumer
from tests.unit.broker.topics.test_end_to_end import EARLIEST, EXCLUSIVE, FAILOVER, options
from tests.unit.broker.topics.test_transactional_acks import (
    ABORTED,
    COMMITTED,
    TOPIC,
    Stage,
    got,
    nothing_comes,
    payloads,
    singly,
    stage,
)
from txn.records import TxnState

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


async def held_by(stage: Stage, consumer: RawConsumer, *, cumulative: bool = True) -> TxnId:
    """A transaction in which it acknowledged the first three; the consumer is gone."""
    messages = await got(consumer, 5)
    txn = await stage.begin()
    if cumulative:
        await stage.ack(consumer, txn, messages[2], cumulative=True)
    else:
        await stage.ack(consumer, txn, *messages[:3])
    await consumer.close()
    return txn


@singly
@either_way
async def test_shared_consumers_get_messages_an_earlier_cumulative_ack_releases(
    stage: Stage, kind: pb.CommandSubscribe.SubType, state: TxnState
) -> None:
    """The subscription has changed its type while the transaction is open."""
    txn = await held_by(stage, await subscribe(stage, "one"))
    two = await subscribe(stage, "two", kind)
    await nothing_comes(two)
    await stage.end(txn, state)
    assert sorted(payloads(await got(two, len(LEFT[state])))) == LEFT[state]
    await nothing_comes(two)


@in_order
@either_way
@pytest.mark.parametrize("cumulative", [True, False], ids=["cumulative", "individual"])
async def test_another_one_gets_what_is_left_when_the_transaction_has_ended(
    stage: Stage, kind: pb.CommandSubscribe.SubType, state: TxnState, cumulative: bool
) -> None:
    txn = await held_by(stage, await subscribe(stage, "one", kind), cumulative=cumulative)
    other = await subscribe(stage, "two", kind)
    await nothing_comes(other)
    await stage.end(txn, state)
    assert payloads(await got(other, len(LEFT[state]))) == LEFT[state]
    await nothing_comes(other)


@pytest.mark.parametrize("reload", [False, True], ids=["attached-again", "loaded-again"])
async def test_a_consumer_with_its_incarnation_goes_on_in_its_transaction(
    stage: Stage, reload: bool
) -> None:
    """After a load too: the record of its acknowledgement says whose it is."""
    txn = await held_by(stage, await subscribe(stage, "one", incarnation="first"))
    if reload:
        await stage.reload()
    back = await subscribe(stage, "one", incarnation="first")
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


@pytest.mark.parametrize("reload", [False, True], ids=["attached-again", "loaded-again"])
@either_way
async def test_a_consumer_without_incarnation_waits_for_its_transaction(
    stage: Stage, state: TxnState, reload: bool
) -> None:
    """It may be another process that was given the name of the one before."""
    txn = await held_by(stage, await subscribe(stage, "one"))
    if reload:
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
