"""Producers and consumers of non-persistent topics, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient, RawConsumer, RawProducer

TOPIC = "non-persistent://public/default/t"
EXCLUSIVE, SHARED = pb.CommandSubscribe.Exclusive, pb.CommandSubscribe.Shared
FAILOVER, KEY_SHARED = pb.CommandSubscribe.Failover, pb.CommandSubscribe.Key_Shared
DROPPED = 2**64 - 1


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running(
        tmp_path, max_concurrent_non_persistent_messages_per_connection=10
    ) as broker:
        yield broker


def of_type(kind: pb.CommandSubscribe.SubType, name: str = "") -> pb.CommandSubscribe:
    made = pb.CommandSubscribe()
    made.sub_type = kind
    made.consumer_name = name
    return made


async def received(consumer: RawConsumer) -> list[bytes]:
    """What has arrived by now: a PING overtakes nothing."""
    await consumer.client.ping()
    return [consumer.messages.get_nowait().payload for _ in range(consumer.messages.qsize())]


def dropped(broker: Broker, subscription: str = "s", topic: str = TOPIC) -> int:
    return broker.topics.non_persistent.loaded()[topic].subscriptions[subscription].dropped_total


async def send_keys(producer: RawProducer, keys: list[str]) -> None:
    for key in keys:
        await producer.send(key.encode(), metadata=pb.MessageMetadata(partition_key=key))


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED])
async def test_connected_consumer_gets_messages_in_order_and_nothing_is_stored(
    broker: Broker, client: RawClient, kind: pb.CommandSubscribe.SubType
) -> None:
    consumer = await client.subscribe(TOPIC, "s", of_type(kind), permits=100)
    producer = await client.create_producer(TOPIC)
    for index in range(5):
        receipt = await producer.send(str(index).encode())
        assert (receipt.message_id.ledger_id, receipt.message_id.entry_id) == (0, 0)
    messages = [await consumer.receive() for _ in range(5)]
    assert [each.payload for each in messages] == [b"0", b"1", b"2", b"3", b"4"]
    assert {(each.message_id.ledger_id, each.message_id.entry_id) for each in messages} == {(0, 0)}
    assert dropped(broker) == 0
    assert TOPIC not in broker.topics.loaded()


async def test_message_without_a_permit_is_dropped_and_counted_at_that_subscription_alone(
    broker: Broker, client: RawClient
) -> None:
    hungry = await client.subscribe(TOPIC, "hungry", permits=100)
    full = await client.subscribe(TOPIC, "full", permits=2)
    producer = await client.create_producer(TOPIC)
    for index in range(5):
        await producer.send(str(index).encode())
    assert len(await received(hungry)) == 5
    assert await received(full) == [b"0", b"1"]
    assert (dropped(broker, "hungry"), dropped(broker, "full")) == (0, 3)
    full.flow(10)
    await producer.send(b"later")
    assert await received(full) == [b"later"]


async def test_batch_takes_as_many_permits_and_counts_as_many_drops_as_it_has_messages(
    broker: Broker, client: RawClient
) -> None:
    consumer = await client.subscribe(TOPIC, "s", permits=3)
    producer = await client.create_producer(TOPIC)
    batch = pb.MessageMetadata(num_messages_in_batch=3)
    for _ in range(2):
        await producer.send(b"batch", metadata=batch, send=pb.CommandSend(num_messages=3))
    assert len(await received(consumer)) == 1
    assert dropped(broker) == 3


async def test_subscription_without_consumers_drops_and_takes_any_type_later(
    broker: Broker, client: RawClient
) -> None:
    consumer = await client.subscribe(TOPIC, "s", permits=10)
    producer = await client.create_producer(TOPIC)
    await consumer.close()
    await producer.send(b"lost")
    assert dropped(broker) == 1
    shared = await client.subscribe(TOPIC, "s", of_type(SHARED), permits=10)
    await producer.send(b"got")
    assert await received(shared) == [b"got"]


async def test_shared_consumers_take_turns_and_pass_over_one_without_permits(
    broker: Broker, client: RawClient
) -> None:
    first = await client.subscribe(TOPIC, "s", of_type(SHARED), permits=2)
    second = await client.subscribe(TOPIC, "s", of_type(SHARED), permits=100)
    producer = await client.create_producer(TOPIC)
    for index in range(10):
        await producer.send(str(index).encode())
    assert len(await received(first)) == 2
    assert len(await received(second)) == 8
    assert dropped(broker) == 0


async def test_key_shared_messages_of_a_key_go_to_one_consumer_and_are_dropped_if_it_is_full(
    broker: Broker, client: RawClient
) -> None:
    keys = [f"k{index % 8}" for index in range(40)]
    first = await client.subscribe(TOPIC, "s", of_type(KEY_SHARED, "a"), permits=100)
    second = await client.subscribe(TOPIC, "s", of_type(KEY_SHARED, "b"), permits=100)
    producer = await client.create_producer(TOPIC)
    await send_keys(producer, keys)
    of_first, of_second = await received(first), await received(second)
    assert len(of_first) + len(of_second) == 40
    assert of_first
    assert of_second
    assert not set(of_first) & set(of_second)
    full = await client.subscribe(TOPIC, "s", of_type(KEY_SHARED, "c"), permits=0)
    await send_keys(producer, keys)
    got = len(await received(first)) + len(await received(second))
    assert got + dropped(broker) == 40
    assert await received(full) == []


async def test_failover_consumer_that_leaves_hands_over_to_the_next(
    broker: Broker, client: RawClient
) -> None:
    first = await client.subscribe(TOPIC, "s", of_type(FAILOVER, "b"), permits=10)
    second = await client.subscribe(TOPIC, "s", of_type(FAILOVER, "a"), permits=10)
    producer = await client.create_producer(TOPIC)
    await producer.send(b"1")
    assert (await received(first), await received(second)) == ([b"1"], [])
    await first.close()
    await producer.send(b"2")
    assert await received(second) == [b"2"]
    changes = [second.events.get_nowait() for _ in range(second.events.qsize())]
    assert [each.active_consumer_change.is_active for each in changes] == [False, True]


async def test_second_exclusive_consumer_and_another_type_are_refused(
    broker: Broker, client: RawClient
) -> None:
    await client.subscribe(TOPIC, "s")
    for options in (of_type(EXCLUSIVE), of_type(SHARED)):
        with pytest.raises(BrokerError) as refused:
            await client.subscribe(TOPIC, "s", options)
        assert refused.value.code == pb.ConsumerBusy


async def test_messages_beyond_the_bound_of_a_connection_are_dropped_with_receipt_of_minus_one(
    broker: Broker, client: RawClient
) -> None:
    consumer = await client.subscribe(TOPIC, "s", permits=100)
    producer = await client.create_producer(TOPIC)
    ids: list[int] = []
    # One write: they are decoded in one turn of the broker's loop.
    await producer.send_many(
        [b"x"] * 25, on_receipt=lambda receipt: ids.append(_ledger_id(receipt))
    )
    assert ids.count(0) + ids.count(DROPPED) == 25
    assert ids.count(DROPPED) >= 1
    assert len(await received(consumer)) == ids.count(0)
    topic = broker.topics.non_persistent.loaded()[TOPIC]
    (attached,) = topic.producers.values()
    assert attached.messages_dropped == ids.count(DROPPED)
    assert attached.messages_in == ids.count(0)
    # The bound is for messages in flight, so the next one is taken again.
    receipt = await producer.send(b"again")
    assert receipt.message_id.ledger_id == 0


def _ledger_id(receipt: pb.CommandSendReceipt | BrokerError) -> int:
    assert isinstance(receipt, pb.CommandSendReceipt)
    return receipt.message_id.ledger_id


async def test_acknowledgement_redelivery_and_seek_succeed_without_effect(
    broker: Broker, client: RawClient
) -> None:
    consumer = await client.subscribe(TOPIC, "s", permits=10)
    producer = await client.create_producer(TOPIC)
    await producer.send(b"once")
    message = await consumer.receive()
    assert not (await consumer.ack_answered(message.message_id)).HasField("error")
    assert not (await consumer.ack_answered(message.message_id, cumulative=True)).HasField("error")
    consumer.redeliver()
    await consumer.seek(pb.MessageIdData(ledger_id=0, entry_id=0))
    await consumer.seek(1)
    assert await received(consumer) == []
    await producer.send(b"next")
    assert await received(consumer) == [b"next"]


async def test_transactions_compacted_reads_and_last_message_id_are_refused_in_a_sentence(
    broker: Broker, client: RawClient
) -> None:
    consumer = await client.subscribe(TOPIC, "s", permits=10)
    producer = await client.create_producer(TOPIC)
    with pytest.raises(BrokerError, match="no transaction") as refused:
        await producer.send(b"x", send=pb.CommandSend(txnid_least_bits=1, txnid_most_bits=0))
    assert refused.value.code == pb.NotAllowedError
    ack = consumer.ack_command([pb.MessageIdData(ledger_id=0, entry_id=0)], False, None)
    ack.txnid_least_bits, ack.txnid_most_bits = 1, 0
    with pytest.raises(BrokerError, match="keeps no acknowledgements") as refused:
        await client.request(pb.BaseCommand.ACK, ack)
    assert refused.value.code == pb.TransactionConflict
    with pytest.raises(BrokerError, match="no last message id") as refused:
        await consumer.last_message_id()
    assert refused.value.code == pb.NotAllowedError
    with pytest.raises(BrokerError, match="readCompacted") as refused:
        await client.subscribe(TOPIC, "c", pb.CommandSubscribe(read_compacted=True))
    assert refused.value.code == pb.NotAllowedError
    # The producer goes on after the refusal.
    await producer.send(b"taken")
    assert await received(consumer) == [b"taken"]


async def test_delayed_message_is_delivered_at_once(broker: Broker, client: RawClient) -> None:
    consumer = await client.subscribe(TOPIC, "s", of_type(SHARED), permits=10)
    producer = await client.create_producer(TOPIC)
    await producer.send(b"x", metadata=pb.MessageMetadata(deliver_at_time=2**60))
    assert await received(consumer) == [b"x"]


async def test_reader_begins_with_the_next_message_and_its_subscription_ends_with_it(
    broker: Broker, client: RawClient
) -> None:
    producer = await client.create_producer(TOPIC)
    await producer.send(b"before")
    options = pb.CommandSubscribe(durable=False)
    options.start_message_id.CopyFrom(pb.MessageIdData(ledger_id=0, entry_id=0))
    reader = await client.subscribe(TOPIC, "reader", options, permits=10)
    await producer.send(b"after")
    assert await received(reader) == [b"after"]
    topic = broker.topics.non_persistent.loaded()[TOPIC]
    assert list(topic.subscriptions) == ["reader"]
    await reader.close()
    assert not topic.subscriptions


async def test_exclusive_producer_fences_and_initial_subscription_is_not_made(
    broker: Broker, client: RawClient
) -> None:
    exclusive = pb.CommandProducer(
        producer_access_mode=pb.Exclusive, initial_subscription_name="first"
    )
    holder = await client.create_producer(TOPIC, exclusive)
    assert holder.success.topic_epoch == 0
    assert not broker.topics.non_persistent.loaded()[TOPIC].subscriptions
    for options, code in (
        (exclusive, pb.ProducerFenced),
        (pb.CommandProducer(), pb.ProducerBusy),
    ):
        with pytest.raises(BrokerError) as refused:
            await client.create_producer(TOPIC, options)
        assert refused.value.code == code
    waiting = await client.create_producer(
        TOPIC, pb.CommandProducer(producer_access_mode=pb.WaitForExclusive)
    )
    assert not waiting.success.producer_ready
    await holder.close()
    ready = await client.wait(client.events.get())
    assert ready.producer_success.producer_ready
    assert ready.producer_success.topic_epoch == 1


async def test_unsubscribed_subscription_is_gone(broker: Broker, client: RawClient) -> None:
    consumer = await client.subscribe(TOPIC, "s")
    await consumer.unsubscribe()
    assert not broker.topics.non_persistent.loaded()[TOPIC].subscriptions


async def test_clients_of_an_unloaded_topic_are_disconnected_and_make_it_anew(
    broker: Broker, client: RawClient
) -> None:
    consumer = await client.subscribe(TOPIC, "s")
    producer = await client.create_producer(TOPIC)
    topics = broker.topics.non_persistent
    topic = topics.loaded()[TOPIC]
    await topics.unload(topic.name)
    assert (await client.wait(consumer.events.get())).type == pb.BaseCommand.CLOSE_CONSUMER
    assert (await client.wait(producer.events.get())).type == pb.BaseCommand.CLOSE_PRODUCER
    assert TOPIC not in topics.loaded()
    await client.create_producer(TOPIC)
    assert topics.loaded()[TOPIC] is not topic


async def test_damaged_message_is_refused_and_those_behind_it_wait_for_it_again(
    broker: Broker, client: RawClient
) -> None:
    consumer = await client.subscribe(TOPIC, "s", permits=10)
    producer = await client.create_producer(TOPIC)
    number, frame = producer.frame(b"damaged")
    broken = frame[:-1] + bytes([frame[-1] ^ 1])
    answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    producer.send_frame(number, broken, answered.set_result)
    error = await client.wait(answered)
    assert isinstance(error, BrokerError)
    assert error.code == pb.ChecksumError
    _, behind = producer.frame(b"behind")
    client.write(behind)
    await producer.send(b"again", sequence_id=number)
    await producer.send(b"behind")
    assert await received(consumer) == [b"again", b"behind"]


async def test_messages_of_a_slow_consumer_are_dropped_and_its_broker_keeps_none(
    broker: Broker, client: RawClient
) -> None:
    slow = await RawClient.open("127.0.0.1", broker.port)
    await slow.subscribe(TOPIC, "s", permits=100_000)
    producer = await client.create_producer(TOPIC)
    assert slow.transport is not None
    slow.transport.pause_reading()
    payload = b"x" * 200_000
    while not dropped(broker):
        await producer.send(payload)
    await slow.close()
