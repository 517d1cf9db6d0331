"""L8: what a consumer was sent before another one was active is used by one of them alone."""

from collections.abc import Sequence

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import build_batch
from tests.support.raw_client import BrokerError, Delivery, RawClient, RawConsumer
from tests.unit.broker.topics.test_end_to_end import EARLIEST, FAILOVER, options
from tests.unit.broker.topics.test_transactional_acks import (
    TOPIC,
    Stage,
    got,
    messages_of,
    payloads,
    stage,
)

__all__ = ["stage"]


async def subscribe(client: RawClient, name: str, permits: int) -> RawConsumer:
    """`first` is the active one whenever it is there."""
    level = ("first", "second").index(name)
    wanted = options(FAILOVER, initial_position=EARLIEST, consumer_name=name, priority_level=level)
    return await client.subscribe(TOPIC, "s", wanted, permits=permits)


async def use(stage: Stage, consumer: RawConsumer, messages: Sequence[Delivery]) -> None:
    """Acknowledge these in a transaction, and commit it."""
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[-1], cumulative=True)
    await stage.commit(txn)


async def refused(stage: Stage, consumer: RawConsumer, message: Delivery) -> None:
    txn = await stage.begin()
    with pytest.raises(BrokerError, match="abort the transaction") as error:
        await stage.ack(consumer, txn, message, cumulative=True)
    assert error.value.code == pb.TransactionConflict
    await stage.abort(txn)


async def taken_over(stage: Stage, sent: int, used: int) -> tuple[RawConsumer, RawConsumer]:
    """`second` was sent so many messages; `first` came, used so many from the start, and left."""
    second = await subscribe(stage.client, "second", sent)
    await stage.client.ping()
    first = await subscribe(stage.client, "first", 5)
    if used:
        await use(stage, first, await got(first, used))
    await first.close()
    return first, second


async def test_two_transactions_cannot_use_one_message(stage: Stage) -> None:
    _, second = await taken_over(stage, sent=2, used=3)
    second.flow(10)
    messages = await got(second, 4)
    assert payloads(messages) == ["0", "1", "3", "4"]
    await refused(stage, second, messages[2])
    await use(stage, second, messages[3:])


async def test_messages_after_an_unused_one_are_refused_until_all_are_taken(stage: Stage) -> None:
    _, second = await taken_over(stage, sent=3, used=1)
    second.flow(10)
    messages = await got(second, 7)
    assert payloads(messages) == ["0", "1", "2", "1", "2", "3", "4"]
    await refused(stage, second, messages[1])
    await refused(stage, second, messages[2])
    await refused(stage, second, messages[5])
    await use(stage, second, messages[6:])


async def test_a_consumer_that_asks_for_redelivery_has_nothing_old(stage: Stage) -> None:
    _, second = await taken_over(stage, sent=2, used=3)
    second.flow(10)
    await got(second, 4)
    second.redeliver()
    messages = await got(second, 2)
    assert payloads(messages) == ["3", "4"]
    await use(stage, second, messages)


async def test_nothing_is_refused_if_the_other_one_used_nothing(stage: Stage) -> None:
    _, second = await taken_over(stage, sent=3, used=0)
    second.flow(10)
    messages = await got(second, 8)
    assert payloads(messages) == ["0", "1", "2", "0", "1", "2", "3", "4"]
    await use(stage, second, messages[:1])
    await use(stage, second, messages[1:3])
    await use(stage, second, messages[6:])


async def test_what_its_own_open_transaction_used_refuses_nothing(stage: Stage) -> None:
    second = await subscribe(stage.client, "second", 2)
    messages = await got(second, 2)
    txn = await stage.begin()
    await stage.ack(second, txn, messages[1], cumulative=True)
    first = await subscribe(stage.client, "first", 5)
    await first.close()
    await stage.commit(txn)
    second.flow(10)
    await use(stage, second, await got(second, 3))


async def test_half_a_batch_that_its_own_transaction_used_refuses_nothing(stage: Stage) -> None:
    producer = await stage.client.create_producer(TOPIC)
    body = build_batch([(pb.SingleMessageMetadata(), b"%d" % each) for each in range(4)])
    await producer.send(body, metadata=pb.MessageMetadata(num_messages_in_batch=4))
    second = await subscribe(stage.client, "second", 6)
    *_, batch = await got(second, 6)
    txn = await stage.begin()
    await stage.ack(second, txn, messages_of(batch, 0, 1), cumulative=True)
    first = await subscribe(stage.client, "first", 5)
    await first.close()
    await stage.ack(second, txn, messages_of(batch, 0, 1, 2), cumulative=True)
    await stage.commit(txn)
    await use(stage, second, [batch])


async def test_a_whole_batch_that_its_own_transaction_used_refuses_nothing(stage: Stage) -> None:
    producer = await stage.client.create_producer(TOPIC)
    body = build_batch([(pb.SingleMessageMetadata(), b"%d" % each) for each in range(4)])
    await producer.send(body, metadata=pb.MessageMetadata(num_messages_in_batch=4))
    await producer.send(b"behind")
    second = await subscribe(stage.client, "second", 10)
    *_, batch, behind = await got(second, 7)
    txn = await stage.begin()
    await stage.ack(second, txn, messages_of(batch, 0, 1, 2, 3), cumulative=True)
    first = await subscribe(stage.client, "first", 0)
    await first.close()
    await stage.commit(txn)
    await use(stage, second, [behind])


async def test_a_consumer_that_is_active_no_more_cannot_use_what_the_next_one_was_sent(
    stage: Stage,
) -> None:
    second = await subscribe(stage.client, "second", 2)
    theirs = await got(second, 2)
    first = await subscribe(stage.client, "first", 1)
    ours = await got(first, 1)
    await refused(stage, second, theirs[-1])
    first.flow(1)
    ours += await got(first, 1)
    assert payloads(ours) == ["0", "1"]
    await use(stage, first, ours)


async def test_a_consumer_that_is_active_no_more_uses_what_nobody_else_was_sent(
    stage: Stage,
) -> None:
    second = await subscribe(stage.client, "second", 2)
    messages = await got(second, 2)
    first = await subscribe(stage.client, "first", 0)
    await use(stage, second, messages)
    first.flow(1)
    assert payloads(await got(first, 1)) == ["2"]
