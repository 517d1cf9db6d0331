"""Entries that the official Java client has written, read as they are stored and taken apart."""

import magnetar
from magnetar.compression import CompressionType
from magnetar.protocol.ids import EARLIEST, LATEST
from magnetar.reads import MessageColumns, message_ids, take_apart, take_pieces
from tests.interop.conftest import MakeTopic
from tests.interop.java_client import JavaClient
from tests.interop.test_payloads import (
    EVENT_TIME_MS,
    KEYS,
    PROPERTIES,
    VALUES,
    batched_or_not,
    of_all_compressions,
)


async def columns_of(client: magnetar.Client, topic: str) -> tuple[MessageColumns, list[bytes]]:
    """What is in the only segment of a topic, and its ids."""
    (segment,) = (await client.layout(topic)).active
    columns = MessageColumns()
    async for entries in client.read_range(segment.topic, EARLIEST, LATEST):
        for entry in entries:
            take_apart(entry, columns)
    if columns.pieces:
        take_pieces(columns.pieces, columns)
    return columns, message_ids(columns, segment.segment_id)


@of_all_compressions
@batched_or_not
async def test_entries_of_java(
    client: magnetar.Client,
    java: JavaClient,
    topic: MakeTopic,
    compression: CompressionType,
    batching: bool,
) -> None:
    where = await topic()
    producer = await java.producer(
        where.name, compression=compression.name, batching=batching, producer_name="java"
    )
    ids = await producer.send(VALUES, keys=KEYS, properties=PROPERTIES, event_time_ms=EVENT_TIME_MS)
    columns, read_ids = await columns_of(client, where.name)
    assert columns.values == VALUES
    assert columns.keys == KEYS
    assert columns.event_times_ms == [EVENT_TIME_MS] * len(VALUES)
    assert columns.sequence_ids == list(range(len(VALUES)))
    assert {n: dict(each) for n, each in columns.properties.items()} == dict.fromkeys(
        range(len(VALUES)), PROPERTIES
    )
    assert {run.producer.startswith("java") for run in columns.runs} == {True}
    places = [magnetar.MessageId.from_bytes(each).entry for each in read_ids]
    told = [magnetar.MessageId.from_bytes(each).entry for each in ids]
    assert [each._replace(batch_size=0) for each in places] == told  # a receipt lacks the size
    assert any(index > 0 for index in columns.batch_indexes) is batching
    await producer.close()


async def test_pieces_of_java(client: magnetar.Client, java: JavaClient, topic: MakeTopic) -> None:
    where = await topic()
    producer = await java.producer(where.name, chunk_size=20_000, compression="ZSTD")
    value = VALUES[4] * 2
    ids = await producer.send([value], keys=["k"], properties=PROPERTIES)
    columns, read_ids = await columns_of(client, where.name)
    assert len(columns.pieces) > 1
    assert columns.values == [value]
    assert columns.keys == ["k"]
    assert dict(columns.properties[0]) == PROPERTIES
    assert magnetar.MessageId.from_bytes(read_ids[0]) == magnetar.MessageId.from_bytes(ids[0])
    await producer.close()
