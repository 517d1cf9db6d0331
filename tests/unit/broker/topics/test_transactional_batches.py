"""What an abort, or a request, gives back of a batch: those messages, and no others."""

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import build_batch
from tests.support.raw_client import Delivery, RawConsumer
from tests.support.waiting import until
from tests.unit.broker.topics.test_end_to_end import SHARED
from tests.unit.broker.topics.test_transactional_acks import (
    TOPIC,
    Stage,
    also_from_disk,
    got,
    messages_of,
    nothing_comes,
    singly,
    stage,
)

__all__ = ["stage"]


async def batched(stage: Stage, kind: pb.CommandSubscribe.SubType) -> tuple[RawConsumer, Delivery]:
    """A consumer that has a batch of 4 and nothing else."""
    producer = await stage.client.create_producer(TOPIC)
    body = build_batch([(pb.SingleMessageMetadata(), str(each).encode()) for each in range(4)])
    await producer.send(body, metadata=pb.MessageMetadata(num_messages_in_batch=4))
    consumer = await stage.subscribe(kind)
    *plain, batch = await got(consumer, 6)
    await consumer.ack_answered(*(each.message_id for each in plain))
    return consumer, batch


@also_from_disk
@singly
async def test_an_abort_sends_of_a_batch_only_what_it_gave_back(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    consumer, batch = await batched(stage, kind)
    first, second, third = [await stage.begin() for _ in range(3)]
    await stage.ack(consumer, first, messages_of(batch, 0))
    await stage.ack(consumer, second, messages_of(batch, 1))
    await stage.abort(first)
    (again,) = await got(consumer, 1)
    assert list(again.command.ack_set) == [0b0001]
    subscription = await stage.subscription()
    assert subscription.unacked == 3
    await stage.ack(consumer, third, messages_of(batch, 2))
    await stage.abort(second)
    (again,) = await got(consumer, 1)
    assert list(again.command.ack_set) == [0b0010]
    await stage.commit(third)
    await nothing_comes(consumer)
    last = await stage.begin()
    await stage.ack(consumer, last, messages_of(batch, 0), messages_of(batch, 1, 3))
    await stage.commit(last)
    await until(lambda: subscription.backlog == 0)
    assert subscription.unacked == 0
    await stage.nothing_left()


async def test_aborted_acks_of_a_batch_are_redelivered_to_any_consumer_with_permits(
    stage: Stage,
) -> None:
    """Each message is with one of them; who leaves gives back what he has, and no more."""
    consumer, batch = await batched(stage, SHARED)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages_of(batch, 0, 1))
    another = await stage.subscribe(SHARED)
    await stage.abort(txn)
    subscription = await stage.subscription()
    await until(lambda: not (consumer.messages.empty() and another.messages.empty()))
    assert subscription.unacked == 4
    took = consumer if not consumer.messages.empty() else another
    (again,) = await got(took, 1)
    assert list(again.command.ack_set) == [0b0011]
    await consumer.ack_answered(messages_of(batch, 2))
    await consumer.close()
    (rest,) = await got(another, 1)
    assert list(rest.command.ack_set) == ([0b1000] if took is another else [0b1011])
    assert subscription.unacked == 3
    await another.ack_answered(messages_of(batch, 0, 1, 3))
    assert (subscription.backlog, subscription.unacked) == (0, 0)


@singly
async def test_messages_of_a_batch_are_asked_for_again_by_a_set(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    consumer, batch = await batched(stage, kind)
    wanted = pb.MessageIdData(ack_set=[0b0110])
    wanted.ledger_id, wanted.entry_id = batch.message_id.ledger_id, batch.message_id.entry_id
    consumer.redeliver(wanted)
    (again,) = await got(consumer, 1)
    assert (list(again.command.ack_set), again.command.redelivery_count) == ([0b0110], 1)
    subscription = await stage.subscription()
    assert subscription.unacked == 4
    await consumer.ack_answered(messages_of(batch, 0, 1, 2, 3))
    assert (subscription.backlog, subscription.unacked) == (0, 0)


@singly
async def test_an_abort_counts_once_for_a_batch_that_was_acknowledged_one_by_one(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    consumer, batch = await batched(stage, kind)
    txn = await stage.begin()
    for index in range(3):
        await stage.ack(consumer, txn, messages_of(batch, index))
    await stage.abort(txn)
    (again,) = await got(consumer, 1)
    assert list(again.command.ack_set) == [0b0111]
    assert again.command.redelivery_count == 1
    await nothing_comes(consumer)
