"""Acknowledgements that a client writes just behind the CLOSE_CONSUMER of their consumer."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable
from typing import cast

import pytest

from broker.app.service import Broker
from broker.topics.client_connection import ClientConnection
from broker.topics.closed_consumers import ClosedConsumers
from broker.topics.consumer import SubscribeRequest, SubscriptionType
from config.bounds import CLOSED_CONSUMERS_KEPT, LATE_ACK_S
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.pulsar_pb2 import BaseCommand
from tests.support.raw_client import RawClient
from tests.support.raw_handles import BrokerError, Delivery, RawConsumer
from tests.unit.broker.topics.fakes import FakeConnection, FakeTopic, settle

TOPIC = "persistent://public/default/t"
EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = range(4)


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[RawClient]:
    client = await RawClient.open("127.0.0.1", broker.port)
    yield client
    await client.close()


def options(kind: int, **fields: object) -> pb.CommandSubscribe:
    given = {"sub_type": kind, "initial_position": 1} | fields
    return pb.CommandSubscribe(**given)  # type: ignore[arg-type]


def close_behind(consumer: RawConsumer) -> None:
    """Send CLOSE_CONSUMER, without waiting for its answer."""
    close = pb.CommandCloseConsumer(
        consumer_id=consumer.consumer_id, request_id=consumer.client.next_id()
    )
    consumer.client.send(BaseCommand.CLOSE_CONSUMER, close)


async def publish(client: RawClient, count: int = 5) -> None:
    producer = await client.create_producer(TOPIC)
    for index in range(count):
        await producer.send(b"%d" % index)
    await producer.close()


async def received(consumer: RawConsumer, count: int) -> list[Delivery]:
    return [await consumer.receive() for _ in range(count)]


async def begin_close(client: RawClient, kind: int = SHARED) -> tuple[RawConsumer, list[Delivery]]:
    """A consumer whose CLOSE_CONSUMER is on its way, and the five messages that it has."""
    consumer = await client.subscribe(TOPIC, "s", options(kind), permits=100)
    await publish(client)
    messages = await received(consumer, 5)
    close_behind(consumer)
    return consumer, messages


async def refused(request: Awaitable[object], code: pb.ServerError) -> None:
    with pytest.raises(BrokerError) as caught:
        await request
    assert caught.value.code == code


async def rest(client: RawClient, kind: int) -> list[bytes]:
    """The messages that the next consumer gets."""
    consumer = await client.subscribe(TOPIC, "s", options(kind), permits=100)
    await client.ping()
    await asyncio.sleep(0.05)
    await client.ping()
    found = []
    while not consumer.messages.empty():
        found.append(bytes(consumer.messages.get_nowait().payload))
    await consumer.close()
    return sorted(found)


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED])
async def test_individual_acknowledgement_behind_the_close_is_taken(
    client: RawClient, kind: int
) -> None:
    consumer, messages = await begin_close(client, kind)
    consumer.ack(messages[0].message_id, messages[2].message_id)
    assert await rest(client, kind) == [b"1", b"3", b"4"]


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER])
async def test_cumulative_acknowledgement_behind_the_close_is_taken(
    client: RawClient, kind: int
) -> None:
    consumer, messages = await begin_close(client, kind)
    consumer.ack(messages[2].message_id, cumulative=True)
    assert await rest(client, kind) == [b"3", b"4"]


async def test_answered_acknowledgement_behind_the_close_is_durable(
    client: RawClient, broker: Broker
) -> None:
    consumer, messages = await begin_close(client)
    answer = await consumer.ack_answered(*(each.message_id for each in messages))
    assert not answer.HasField("error")
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
    subscription = topic.subscriptions["s"]
    assert (subscription.backlog, subscription.cursor.dirty) == (0, False)
    assert subscription.acknowledged_total == 5


async def test_message_that_was_redelivered_is_settled_where_it_is_pending(
    client: RawClient, broker: Broker
) -> None:
    first = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    await publish(client)
    messages = await received(first, 5)
    second = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    close_behind(first)
    assert len(await received(second, 5)) == 5
    first.ack(messages[0].message_id, messages[1].message_id)
    await client.ping()
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
    subscription = topic.subscriptions["s"]
    assert (subscription.backlog, subscription.unacked) == (3, 3)
    second.redeliver()
    assert sorted(bytes(each.payload) for each in await received(second, 3)) == [b"2", b"3", b"4"]


async def test_messages_of_a_batch_are_taken_one_by_one(client: RawClient) -> None:
    consumer = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    producer = await client.create_producer(TOPIC)
    await producer.send(b"abc", metadata=pb.MessageMetadata(num_messages_in_batch=3))
    (batch,) = await received(consumer, 1)
    close_behind(consumer)
    left = pb.MessageIdData()
    left.CopyFrom(batch.message_id)
    left.ack_set.append(0b110)
    left.batch_size = 3
    consumer.ack(left)
    following = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    again = await following.receive()
    assert list(again.command.ack_set) == [0b110]


async def test_acknowledgement_before_a_seek_is_not_taken_after_it(client: RawClient) -> None:
    consumer = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    other = await client.subscribe(TOPIC, "s", options(SHARED))
    await publish(client)
    messages = await received(consumer, 5)
    close_behind(consumer)
    await other.seek(messages[0].message_id)
    consumer.ack(*(each.message_id for each in messages))
    assert await rest(client, SHARED) == [b"0", b"1", b"2", b"3", b"4"]


async def test_acknowledgement_of_an_unsubscribed_subscription_is_not_taken(
    client: RawClient,
) -> None:
    consumer = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    other = await client.subscribe(TOPIC, "s", options(SHARED))
    await publish(client)
    messages = await received(consumer, 5)
    close_behind(consumer)
    await other.unsubscribe()
    await (await client.subscribe(TOPIC, "s", options(SHARED))).close()
    consumer.ack(*(each.message_id for each in messages))
    assert len(await rest(client, SHARED)) == 5


async def test_redeliver_behind_the_close_is_ignored(client: RawClient, broker: Broker) -> None:
    first = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    await publish(client)
    await received(first, 5)
    second = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    close_behind(first)
    await received(second, 5)
    first.redeliver()
    first.flow(10)
    await client.ping()
    assert second.messages.empty()


async def test_acknowledgement_in_a_transaction_is_refused(client: RawClient) -> None:
    consumer, messages = await begin_close(client)
    ack = consumer.ack_command([messages[0].message_id], False, client.next_id())
    ack.txnid_most_bits, ack.txnid_least_bits = 0, 1
    await refused(client.request(BaseCommand.ACK, ack), pb.ServerError.ConsumerNotFound)
    assert len(await rest(client, SHARED)) == 5


async def test_cumulative_acknowledgement_is_refused_once_consumers_share_messages(
    client: RawClient,
) -> None:
    consumer, messages = await begin_close(client, EXCLUSIVE)
    following = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    await received(following, 5)
    await refused(
        consumer.ack_answered(messages[4].message_id, cumulative=True),
        pb.ServerError.NotAllowedError,
    )
    await following.close()
    assert len(await rest(client, SHARED)) == 5


async def test_other_connections_cannot_use_the_id(client: RawClient, broker: Broker) -> None:
    consumer, messages = await begin_close(client)
    await client.ping()
    stranger = await RawClient.open("127.0.0.1", broker.port)
    await refused(
        RawConsumer(stranger, consumer.consumer_id).ack_answered(messages[0].message_id),
        pb.ServerError.ConsumerNotFound,
    )
    await stranger.close()


async def test_acknowledgement_after_the_bound_is_not_taken(
    client: RawClient, broker: Broker
) -> None:
    consumer = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    await publish(client)
    messages = await received(consumer, 5)
    await consumer.close()
    (connection,) = broker.connections
    later_s = asyncio.get_running_loop().time() + LATE_ACK_S
    assert connection.closed_consumers.get(consumer.consumer_id, later_s) is None
    await refused(consumer.ack_answered(messages[0].message_id), pb.ServerError.ConsumerNotFound)


async def test_number_of_closed_consumers_of_a_connection_is_bounded(
    client: RawClient, broker: Broker
) -> None:
    await client.subscribe(TOPIC, "s", options(SHARED))
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
    subscription = topic.subscriptions["s"]
    (attached,) = subscription.consumers
    closed = ClosedConsumers()
    for consumer_id in range(CLOSED_CONSUMERS_KEPT + 1):
        attached.consumer_id = consumer_id
        closed.add(attached, 0.0)
    assert closed.get(0, 0.0) is None
    assert closed.get(1, 0.0) is not None
    assert closed.get(1, LATE_ACK_S) is None, "all are too old"
    assert len(closed) == 0


async def test_closed_consumers_keep_no_subscription_in_memory() -> None:
    topic = FakeTopic()
    closed = ClosedConsumers()
    subscription = topic.subscription()
    request = SubscribeRequest(
        connection=cast("ClientConnection", FakeConnection()),
        consumer_id=1,
        subscription="s",
        type=SubscriptionType.SHARED,
        consumer_name="c",
    )
    consumer = await subscription.add_consumer(request)
    consumer.close()
    closed.add(consumer, 0.0)
    remembered = closed.get(1, 0.0)
    assert remembered is not None
    assert remembered.subscription is subscription
    del topic, request, subscription, consumer
    await settle()
    gc.collect()
    assert remembered.subscription is None
