"""Ordered consumers as clients after 5.0.0-M1 register, hand over and leave."""

import asyncio
from collections.abc import Callable

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from magnetar.protocol.message import build_batch
from magnetar.protocol.names import parse_topic_name
from tests.newer_clients.conftest import Connect, cpp_client
from tests.newer_clients.ordered_consumer import OrderedConsumer, ids
from tests.support.raw_client import BrokerError, RawClient, Session, basecommand

Kind = pb.BaseCommand
TOPIC = "topic://public/default/orders"
EARLIEST = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)


@pytest.fixture
async def client(broker: Broker, connect: Connect) -> RawClient:
    """A client, when the topic with two segments is there."""
    await broker.scalable.create(parse_topic_name(TOPIC), segments=2, properties={})
    return await connect()


async def test_leaving_by_command_gives_the_segments_away_at_once(
    client: RawClient, connect: Connect
) -> None:
    staying = await OrderedConsumer.open(client, TOPIC, "a")
    await staying.until({0, 1})
    leaving_client = await connect()
    leaving = await OrderedConsumer.open(leaving_client, TOPIC, "b")
    await staying.until({0})
    await leaving.until({1})
    await leaving.leave()
    await staying.until({0, 1})
    await leaving_client.ping()


async def test_leaving_what_is_not_there_is_a_success(client: RawClient, connect: Connect) -> None:
    """Twice, unknown, and another connection's: the scope of the id is the connection."""
    consumer = await OrderedConsumer.open(client, TOPIC, "a", consumer_id=5)
    await consumer.until({0, 1})
    other = await connect()
    await other.unsubscribe_scalable(Session(other, 5))
    await other.unsubscribe_scalable(Session(other, 99))
    second = await OrderedConsumer.open(other, TOPIC, "b", consumer_id=5)
    await consumer.until({0})
    await second.until({1})
    await second.leave()
    await other.unsubscribe_scalable(Session(other, 5))
    await consumer.until({0, 1})


async def test_leaving_takes_back_a_registration_in_flight(
    client: RawClient, connect: Connect
) -> None:
    """Written in one go: whatever the registration is answered, it is not there afterwards."""
    hasty = await connect()
    subscribe = pb.CommandScalableTopicSubscribe(
        request_id=1001,
        topic=TOPIC,
        subscription="s",
        consumer_name="hasty",
        consumer_id=7,
        consumer_type=pb.STREAM,
    )
    leave = pb.CommandScalableTopicUnsubscribe(request_id=1002, consumer_id=7)
    hasty.write(
        encode_command(basecommand(Kind.SCALABLE_TOPIC_SUBSCRIBE, subscribe))
        + encode_command(basecommand(Kind.SCALABLE_TOPIC_UNSUBSCRIBE, leave))
    )
    answered: set[int] = set()
    while not {1001, 1002} <= answered:
        event = await hasty.wait(hasty.events.get())
        if event.type == Kind.SUCCESS:
            answered.add(event.success.request_id)
        if event.type == Kind.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE:
            answered.add(event.scalable_topic_subscribe_response.request_id)
    _, assignment = await client.subscribe_scalable(TOPIC, "s", "patient")
    assert ids(assignment) == {0, 1}


def m1_client() -> pb.CommandConnect:
    """CONNECT of the Java client 5.0.0-M1, which would take a shared segment for its own."""
    return pb.CommandConnect(client_version="Pulsar-Java-v5.0.0-M1", protocol_version=21)


@pytest.mark.parametrize("version", [m1_client, cpp_client])
async def test_buckets_are_not_assigned_beside_clients_that_know_none(
    client: RawClient, connect: Connect, version: Callable[[], pb.CommandConnect]
) -> None:
    """More consumers than segments: the surplus gets nothing, and nobody a part of a segment."""
    consumers = [
        await OrderedConsumer.open(await connect(), TOPIC, name) for name in ("a", "b", "c")
    ]
    consumers.append(await OrderedConsumer.open(await connect(version()), TOPIC, "d"))
    for consumer, segments in zip(consumers, ({0}, {1}, set(), set()), strict=True):
        await consumer.until_shared()
        await consumer.until(segments)


async def test_surplus_consumers_share_segments(client: RawClient, connect: Connect) -> None:
    consumers = [
        await OrderedConsumer.open(await connect(), TOPIC, name) for name in ("a", "b", "c", "d")
    ]
    halves = [(0, 32767), (32768, 65535)]
    await asyncio.gather(*(each.until_shared(0) for each in (consumers[0], consumers[2])))
    await asyncio.gather(*(each.until_shared(1) for each in (consumers[1], consumers[3])))
    assert [list(each.buckets.values()) for each in consumers] == [[halves]] * 4
    await consumers[2].leave()
    await consumers[0].until_shared()
    await consumers[0].until({0})
    assert set(consumers[0].consumers) == {0}


async def test_a_segment_with_an_unstamped_batch_is_shared_no_longer(
    client: RawClient, connect: Connect
) -> None:
    consumers = [
        await OrderedConsumer.open(await connect(), TOPIC, name) for name in ("a", "b", "c")
    ]
    await asyncio.gather(consumers[0].until_shared(0), consumers[2].until_shared(0))
    producer = await client.create_producer("segment://public/default/orders/0000-7fff-0")
    payload = build_batch([(pb.SingleMessageMetadata(payload_size=0), b"m")] * 2)
    metadata = pb.MessageMetadata(num_messages_in_batch=2)
    await producer.send(payload, metadata=metadata, send=pb.CommandSend(num_messages=2))
    await consumers[2].until(set())
    await consumers[0].until_shared()
    await consumers[0].until({0})
    assert (await consumers[0].consumers[0].receive()).payload == payload


async def test_a_hand_over_never_answers_consumer_busy(client: RawClient, connect: Connect) -> None:
    """The newcomer subscribes before the old owner has closed: it waits, and gets everything."""
    topic = "segment://public/default/orders/8000-ffff-1"
    producer = await client.create_producer(topic)
    old = await OrderedConsumer.open(client, TOPIC, "a")
    await old.until({0, 1})
    await producer.send(b"first")
    first = await old.consumers[1].receive()
    newcomer = await connect(cpp_client())
    await newcomer.subscribe_scalable(TOPIC, "s", "b")
    options = pb.CommandSubscribe(consumer_name="b-seg-1")
    options.MergeFrom(EARLIEST)
    taking = asyncio.create_task(newcomer.subscribe(topic, "s", options, permits=100))
    await old.told({0})
    await newcomer.ping()
    assert not taking.done()
    await old.consumers[1].close()
    again = await (await taking).receive()
    assert (again.payload, again.message_id.entry_id) == (b"first", first.message_id.entry_id)


async def test_an_exclusive_consumer_beside_the_controller_is_busy(connect: Connect) -> None:
    """Where no hand-over is under way, later clients retry what they are told at once."""
    client = await connect()
    topic = "persistent://public/default/letters"
    await client.subscribe(topic, "s")
    with pytest.raises(BrokerError) as refused:
        await client.subscribe(topic, "s")
    assert refused.value.code == pb.ConsumerBusy


async def test_a_client_that_does_not_drain_leaves_its_messages_to_the_next(
    client: RawClient,
) -> None:
    """C++ closes at once when a segment is taken away, with messages not acknowledged."""
    topic = "segment://public/default/orders/0000-7fff-0"
    producer = await client.create_producer(topic)
    for number in range(4):
        await producer.send(b"%d" % number)
    hasty = await client.subscribe(topic, "s", EARLIEST, permits=100)
    got = [await hasty.receive() for _ in range(4)]
    await hasty.ack_answered(got[0].message_id)
    await hasty.close()
    owner = await client.subscribe(topic, "s", EARLIEST, permits=100)
    assert [(await owner.receive()).payload for _ in range(3)] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("settings", [{"scalable_consumer_grace_period_s": 0}])
async def test_the_end_of_an_old_connection_does_not_evict_who_came_again(
    client: RawClient, connect: Connect, settings: dict[str, object]
) -> None:
    """Same name over a new connection, then the old one ends: no timer starts for it.

    A third consumer whose only connection ends at the same time shows when it would have run out.
    """
    old, passing = await connect(), await connect()
    await old.subscribe_scalable(TOPIC, "s", "a")
    consumer = await OrderedConsumer.open(client, TOPIC, "a")
    gone = await OrderedConsumer.open(passing, TOPIC, "b")
    await consumer.until({0})
    await gone.until({1})
    await old.close()
    await passing.close()
    await consumer.until({0, 1})
    newcomer = await OrderedConsumer.open(await connect(), TOPIC, "c")
    await consumer.until({0})
    await newcomer.until({1})
