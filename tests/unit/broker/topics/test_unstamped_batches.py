"""A segment knows for ever that it got a batch without entry hashes, whatever its producers do."""

import asyncio
from pathlib import Path

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import build_batch
from magnetar.protocol.names import parse_topic_name
from tests.support.embedded_broker import running
from tests.support.raw_handles import RawProducer
from tests.unit.broker.topics.test_end_to_end import client_of

TOPIC = "topic://public/default/x"
SEGMENT = "segment://public/default/x/0000-ffff-0"


def shareable(broker: Broker) -> bool:
    return broker.topics.loaded()[SEGMENT].shareable


async def send(producer: RawProducer, messages: int, entry_hash: int | None) -> None:
    single = pb.SingleMessageMetadata(payload_size=0, partition_key="k")
    metadata = pb.MessageMetadata()
    if messages > 1:
        metadata.num_messages_in_batch = messages
    if entry_hash is not None:
        metadata.entry_hash_min = metadata.entry_hash_max = entry_hash
    payload = build_batch([(single, b"m")] * messages) if messages > 1 else b"m"
    await producer.send(payload, metadata=metadata, send=pb.CommandSend(num_messages=messages))


async def test_stamped_batches_and_single_messages_let_a_segment_be_shared(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await broker.scalable.create(parse_topic_name(TOPIC), segments=1, properties={})
        client = await client_of(broker)
        producer = await client.create_producer(SEGMENT)
        await send(producer, 1, None)
        await send(producer, 3, 0)
        await send(producer, 1, None)
        assert shareable(broker)
        await client.close()


@pytest.mark.parametrize("deduplication", [False, True])
async def test_an_unstamped_batch_is_known_after_a_restart(
    tmp_path: Path, deduplication: bool
) -> None:
    async with running(tmp_path, deduplication=deduplication) as broker:
        await broker.scalable.create(parse_topic_name(TOPIC), segments=1, properties={})
        client = await client_of(broker)
        producer = await client.create_producer(SEGMENT)
        other = await client.create_producer(SEGMENT)
        await send(other, 2, 7)
        await send(producer, 2, None)
        assert not shareable(broker)
        await client.close()
    async with running(tmp_path) as broker:
        client = await client_of(broker)
        await client.create_producer(SEGMENT)
        assert not shareable(broker)
        await client.close()


async def test_an_ordinary_topic_is_never_shared(tmp_path: Path) -> None:
    name = "persistent://public/default/y"
    async with running(tmp_path) as broker:
        client = await client_of(broker)
        producer = await client.create_producer(name)
        await asyncio.gather(*(send(producer, 2, 7) for _ in range(2)))
        assert not broker.topics.loaded()[name].shareable
        await client.close()
