"""Layouts, auto-creation and entries as clients after 5.0.0-M1 ask for and send them."""

from itertools import pairwise

import pytest

from broker.app.service import Broker
from broker.scalable.layout import IllegalBucketCount
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import SegmentId
from magnetar.protocol.message import build_batch
from magnetar.protocol.names import parse_topic_name
from tests.newer_clients.conftest import Connect
from tests.support.raw_client import BrokerError, RawClient

TOPIC = "topic://public/default/orders"
REGULAR = "persistent://public/default/letters"
ONLY_SEGMENT = "segment://public/default/orders/0000-ffff-0"
NO_CREATION = pytest.mark.parametrize("settings", [{"scalable_topic_auto_create": False}])
EARLIEST = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)


@pytest.mark.parametrize("wanted", [None, True])
async def test_a_missing_topic_is_created_with_one_segment(
    connect: Connect, wanted: bool | None
) -> None:
    client = await connect()
    _, update = await client.watch_dag(TOPIC, create_if_missing=wanted)
    assert not update.HasField("error")
    assert update.resolved_topic_name == TOPIC
    (segment,) = update.dag.segments
    assert (segment.hash_start, segment.hash_end) == (0, 0xFFFF)
    assert segment.state == pb.ACTIVE
    _, again = await client.watch_dag(TOPIC, create_if_missing=False)
    assert again.dag.segments == update.dag.segments


async def test_two_that_miss_the_same_topic_get_the_same_one(connect: Connect) -> None:
    """The one that loses the race to create it does not fail."""
    clients = [await connect() for _ in range(4)]
    sessions = [client.session_of(pb.BaseCommand.SCALABLE_TOPIC_UPDATE, 1) for client in clients]
    for client in clients:
        lookup = pb.CommandScalableTopicLookup(session_id=1, topic=TOPIC)
        client.send(pb.BaseCommand.SCALABLE_TOPIC_LOOKUP, lookup)
    updates = [(await session.next()).scalable_topic_update for session in sessions]
    assert all(update.dag == updates[0].dag for update in updates)
    assert len(updates[0].dag.segments) == 1


async def test_create_if_missing_false_creates_nothing(connect: Connect) -> None:
    """What namespace consumers send, so that a deleted topic stays deleted."""
    client = await connect()
    for _ in range(2):
        _, update = await client.watch_dag(TOPIC, create_if_missing=False)
        assert update.error == pb.TopicNotFound
    await client.ping()
    _, update = await client.watch_dag(TOPIC, create_if_missing=True)
    assert update.HasField("dag")


@NO_CREATION
@pytest.mark.parametrize("wanted", [None, True, False])
async def test_where_creation_is_off_nothing_is_created(
    connect: Connect, wanted: bool | None
) -> None:
    client = await connect()
    _, update = await client.watch_dag(TOPIC, create_if_missing=wanted)
    assert update.error == pb.TopicNotFound
    assert TOPIC in update.message


@pytest.mark.parametrize("name", [" orders", "orders "])
async def test_no_topic_begins_or_ends_with_a_blank(connect: Connect, name: str) -> None:
    client = await connect()
    _, update = await client.watch_dag(f"topic://public/default/{name}")
    assert update.HasField("error")
    assert not update.HasField("dag")


@pytest.mark.parametrize("name", [ONLY_SEGMENT, "segment://public/default/none/0000-ffff-0"])
async def test_segments_are_not_created_by_using_them(connect: Connect, name: str) -> None:
    client = await connect()
    for opening in (client.create_producer(name), client.subscribe(name, "s")):
        with pytest.raises(BrokerError) as refused:
            await opening
        assert refused.value.code == pb.TopicNotFound


async def test_addresses_are_filled_for_clients_that_connect_by_them(
    broker: Broker, connect: Connect
) -> None:
    """C++ goes straight to `segment_brokers`: each ACTIVE segment is there, and no other."""
    name = parse_topic_name(TOPIC)
    await broker.scalable.create(name, segments=2, properties={})
    client = await connect()
    session, update = await client.watch_dag(TOPIC)
    url = f"pulsar://127.0.0.1:{broker.port}"
    before = update.dag
    assert before.controller_broker_url == url
    assert {each.segment_id: each.broker_url for each in before.segment_brokers} == {0: url, 1: url}
    await broker.scalable.split(name, SegmentId(0))
    after = (await session.next()).scalable_topic_update.dag
    active = {segment.segment_id for segment in after.segments if segment.state == pb.ACTIVE}
    assert active == {1, 2, 3}
    assert {each.segment_id for each in after.segment_brokers} == active
    assert all(each.broker_url == url for each in after.segment_brokers)


async def test_epochs_rise_with_every_push(broker: Broker, connect: Connect) -> None:
    """One passage of the specification lets clients drop a layout whose epoch is not newer."""
    name = parse_topic_name(TOPIC)
    await broker.scalable.create(name, segments=1, properties={})
    client = await connect()
    session, update = await client.watch_dag(TOPIC)
    epochs = [update.dag.epoch]
    await broker.scalable.split(name, SegmentId(0))
    await broker.scalable.split(name, SegmentId(1))
    await broker.scalable.merge(name, (SegmentId(3), SegmentId(4)))
    while len(epochs) < 4:
        epochs.append((await session.next()).scalable_topic_update.dag.epoch)
    assert all(one < other for one, other in pairwise(epochs))


async def test_segments_share_the_entry_buckets_of_their_topic(
    broker: Broker, connect: Connect
) -> None:
    name = parse_topic_name(TOPIC)
    await broker.scalable.create(name, segments=2, properties={})
    await broker.scalable.split(name, SegmentId(0))
    await broker.scalable.rebucket(name, [1], 3)
    await broker.scalable.merge(name, (SegmentId(2), SegmentId(3)))
    _, update = await (await connect()).watch_dag(TOPIC)
    found = {each.segment_id: tuple(each.entry_bucket_splits) for each in update.dag.segments}
    halves, thirds = (32768,), (21845, 43690)
    assert found == {0: halves, 1: halves, 2: (), 3: (), 4: thirds, 5: halves}


@pytest.mark.parametrize("settings", [{"scalable_topic_entry_bucket_budget": 1}])
async def test_a_budget_of_one_gives_no_entry_buckets(connect: Connect) -> None:
    _, update = await (await connect()).watch_dag(TOPIC)
    (segment,) = update.dag.segments
    assert not segment.entry_bucket_splits


@pytest.mark.parametrize("settings", [{"scalable_topic_entry_bucket_max_per_segment": 5}])
async def test_entry_buckets_of_a_segment_are_bounded(broker: Broker, connect: Connect) -> None:
    name = parse_topic_name(TOPIC)
    await broker.scalable.create(name, segments=2, properties={})
    with pytest.raises(IllegalBucketCount):
        await broker.scalable.rebucket(name, [0], 6)
    await broker.scalable.rebucket(name, [0], 4)
    await broker.scalable.merge(name, (SegmentId(2), SegmentId(1)))
    _, update = await (await connect()).watch_dag(TOPIC)
    assert len(update.dag.segments[-1].entry_bucket_splits) + 1 == 5


def stamped(first: int, last: int, messages: int) -> pb.MessageMetadata:
    """Metadata of a batch of one bucket: its sequence id is the highest, and it says nothing
    of `highest_sequence_id`.
    """
    return pb.MessageMetadata(
        num_messages_in_batch=messages, entry_hash_min=first, entry_hash_max=last
    )


async def test_hash_stamps_reach_the_consumer_untouched(connect: Connect) -> None:
    client = await connect()
    await client.watch_dag(TOPIC)
    consumer = await client.subscribe(ONLY_SEGMENT, "s", EARLIEST, permits=10)
    producer = await client.create_producer(ONLY_SEGMENT)
    single = pb.SingleMessageMetadata(payload_size=0, partition_key="k")
    payload = build_batch([(single, b"one"), (single, b"two")])
    send = pb.CommandSend(num_messages=2)
    await producer.send(payload, metadata=stamped(0, 0x3FFF, 2), send=send, sequence_id=7)
    delivery = await consumer.receive()
    assert (delivery.metadata.entry_hash_min, delivery.metadata.entry_hash_max) == (0, 0x3FFF)
    assert delivery.payload == payload


GAPS = (3, 4, 9, 200, 201)


async def send_gaps(client: RawClient, epoch: int) -> list[pb.CommandSendReceipt]:
    options = pb.CommandProducer(
        producer_id=1, producer_name="p", user_provided_producer_name=True, epoch=epoch
    )
    producer = await client.create_producer(REGULAR, options)
    single = pb.SingleMessageMetadata(payload_size=0)
    payload = build_batch([(single, b"m")] * 3)
    send = pb.CommandSend(num_messages=3)
    return [
        await producer.send(payload, metadata=stamped(0, 1, 3), send=send, sequence_id=number)
        for number in GAPS
    ]


@pytest.mark.parametrize("settings", [{"deduplication": False}, {"deduplication": True}])
async def test_sequence_ids_may_have_gaps(connect: Connect, settings: dict[str, object]) -> None:
    """Batches of several buckets share the ids of one producer; each names only its highest."""
    client = await connect()
    consumer = await client.subscribe(REGULAR, "s", EARLIEST, permits=100)
    receipts = await send_gaps(client, epoch=0)
    assert [receipt.sequence_id for receipt in receipts] == list(GAPS)
    assert [receipt.message_id.entry_id for receipt in receipts] == list(range(len(GAPS)))
    assert len([await consumer.receive() for _ in GAPS]) == len(GAPS)


@pytest.mark.parametrize("settings", [{"deduplication": False}, {"deduplication": True}])
async def test_resends_with_gaps_are_recognised(
    connect: Connect, settings: dict[str, object]
) -> None:
    client = await connect()
    consumer = await client.subscribe(REGULAR, "s", EARLIEST, permits=100)
    await send_gaps(client, epoch=0)
    again = await connect()
    receipts = await send_gaps(again, epoch=1)
    assert all(receipt.message_id.ledger_id == 2**64 - 1 for receipt in receipts)
    producer = again.producers[1]
    await producer.send(b"new", sequence_id=GAPS[-1] + 5)
    found = [await consumer.receive() for _ in range(len(GAPS) + 1)]
    assert [delivery.metadata.sequence_id for delivery in found] == [*GAPS, GAPS[-1] + 5]
