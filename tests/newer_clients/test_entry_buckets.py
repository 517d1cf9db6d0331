"""Segments that consumers share by entry buckets, as clients after 5.0.0-M1 subscribe to them."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import build_batch
from magnetar.protocol.names import parse_topic_name
from tests.newer_clients.conftest import Connect
from tests.support.raw_client import BrokerError, RawClient
from tests.support.raw_handles import Delivery, RawConsumer

TOPIC = "topic://public/default/orders"
SEGMENT = "segment://public/default/orders/0000-ffff-0"
LOW, HIGH = 5, 60000


@pytest.fixture
async def client(broker: Broker, connect: Connect) -> RawClient:
    """A client, when the topic with one segment of four entry buckets is there."""
    await broker.scalable.create(parse_topic_name(TOPIC), segments=1, properties={})
    return await connect()


async def table_of(client: RawClient) -> list[tuple[int, int]]:
    """The entry buckets of the segment, as the layout says them."""
    _, update = await client.watch_dag(TOPIC)
    (segment,) = update.dag.segments
    starts = [0, *segment.entry_bucket_splits, 0x10000]
    return [(start, end - 1) for start, end in pairwise(starts)]


async def share(
    client: RawClient, name: str, table: Sequence[tuple[int, int]], *, permits: int = 100
) -> RawConsumer:
    options = pb.CommandSubscribe(
        sub_type=pb.CommandSubscribe.Key_Shared,
        consumer_name=name,
        initial_position=pb.CommandSubscribe.Earliest,
    )
    options.key_shared_meta.key_shared_mode = pb.STICKY
    options.key_shared_meta.entryBucketDispatch = True
    for start, end in table:
        options.key_shared_meta.hash_ranges.add(start=start, end=end)
    return await client.subscribe(SEGMENT, "s", options, permits=permits)


async def send(client: RawClient, *messages: tuple[bytes, int | None]) -> None:
    """Send a batch of two for each text, with its hash or without one."""
    producer = await client.create_producer(SEGMENT)
    single = pb.SingleMessageMetadata(payload_size=0, partition_key="k")
    for text, entry_hash in messages:
        metadata = pb.MessageMetadata(num_messages_in_batch=2)
        if entry_hash is not None:
            metadata.entry_hash_min = metadata.entry_hash_max = entry_hash
        payload = build_batch([(single, text)] * 2)
        await producer.send(payload, metadata=metadata, send=pb.CommandSend(num_messages=2))
    await producer.close()


def texts(found: Sequence[Delivery]) -> list[bytes]:
    return [each.payload[-1:] for each in found]


async def come(consumer: RawConsumer, count: int) -> list[Delivery]:
    """The next so many, and no more."""
    found = [await consumer.receive() for _ in range(count)]
    for _ in range(3):
        await consumer.client.ping()
    assert consumer.messages.empty()
    return found


async def test_sharers_get_whole_buckets_and_hand_them_over(
    client: RawClient, connect: Connect
) -> None:
    table = await table_of(client)
    assert len(table) == 4
    one = await share(client, "a", table)
    await send(client, (b"0", HIGH), (b"1", LOW))
    first = await come(one, 2)
    two = await share(await connect(), "b", table)
    await send(client, (b"2", HIGH), (b"3", LOW))
    assert texts(await come(one, 1)) == [b"3"]
    await come(two, 0)
    await one.ack_answered(first[0].message_id)
    assert texts(await come(two, 1)) == [b"2"]
    await two.close()
    assert texts(await come(one, 1)) == [b"2"]


async def test_a_sharer_with_another_table_is_refused(client: RawClient) -> None:
    table = await table_of(client)
    await share(client, "a", table)
    for other in ([(0, 0xFFFF)], table[:3], table[:1]):
        with pytest.raises(BrokerError) as refused:
            await share(client, "b", other)
        assert refused.value.code == pb.ConsumerAssignError
    await share(client, "b", table)


async def test_use_changes_when_the_last_one_has_left(client: RawClient, connect: Connect) -> None:
    table = await table_of(client)
    options = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    alone = await client.subscribe(SEGMENT, "s", options, permits=100)
    await send(client, (b"0", LOW), (b"1", HIGH))
    await come(alone, 2)
    others = [await connect() for _ in range(2)]
    sharing = [
        asyncio.create_task(share(each, n, table)) for each, n in zip(others, "ab", strict=True)
    ]
    await client.ping()
    assert not any(each.done() for each in sharing)
    await alone.close()
    low, high = await asyncio.gather(*sharing)
    assert (texts(await come(low, 1)), texts(await come(high, 1))) == ([b"0"], [b"1"])
    back = asyncio.create_task(client.subscribe(SEGMENT, "s", options, permits=100))
    await low.close()
    await client.ping()
    assert not back.done()
    await high.close()
    assert texts(await come(await back, 2)) == [b"0", b"1"]


async def test_unstamped_batches_come_alone(client: RawClient, connect: Connect) -> None:
    """What M1 and C++ clients send: the key of the first message says nothing of the others."""
    table = await table_of(client)
    one = await share(client, "a", table)
    two = await share(await connect(), "b", table)
    await send(client, (b"0", LOW), (b"1", HIGH), (b"2", None), (b"3", LOW), (b"4", HIGH))
    (before,) = await come(one, 1)
    (beside,) = await come(two, 1)
    await one.ack_answered(before.message_id)
    await come(one, 0)
    await two.ack_answered(beside.message_id)
    for _ in range(3):
        await client.ping()
    owner = two if one.messages.empty() else one
    (alone,) = await come(owner, 1)
    assert texts([alone]) == [b"2"]
    await owner.ack_answered(alone.message_id)
    assert (texts(await come(one, 1)), texts(await come(two, 1))) == ([b"3"], [b"4"])


async def test_acknowledgements_are_individual(client: RawClient) -> None:
    one = await share(client, "a", await table_of(client))
    await send(client, (b"0", LOW))
    (message,) = await come(one, 1)
    with pytest.raises(BrokerError) as refused:
        await one.ack_answered(message.message_id, cumulative=True)
    assert refused.value.code == pb.NotAllowedError
