"""What the Java client has written, as the source of Spark reads it, without Spark itself."""

import asyncio
import dataclasses
import datetime

import pyarrow as pa
import pytest

import magnetar
from magnetar.compression import CompressionType
from magnetar.message_id import MessageId
from magnetar.spark.batch_reader import BatchReader
from magnetar.spark.data_source import Pulsar5
from tests.interop.conftest import MakeTopic
from tests.interop.java_client import JavaClient
from tests.interop.records import READINGS, Reading, as_told
from tests.interop.test_payloads import EVENT_TIME_MS, KEYS, PROPERTIES, VALUES
from tests.java.broker_under_test import BrokerUnderTest

EVENT_TIME = datetime.datetime.fromtimestamp(EVENT_TIME_MS // 1000, datetime.UTC).replace(
    microsecond=EVENT_TIME_MS % 1000 * 1000
)


async def rows_of(url: str, topic: str, **options: str) -> list[dict[str, object]]:
    """The rows of a batch, in order; made as Spark makes them."""

    def read() -> list[dict[str, object]]:
        source = Pulsar5({"serviceUrl": url, "topic": topic} | options)
        reader = source.reader(source.schema())
        assert isinstance(reader, BatchReader)
        batches = [batch for task in reader.partitions() for batch in reader.read(task)]
        found: list[dict[str, object]] = (
            pa.Table.from_batches(batches).sort_by("order_key").to_pylist()
        )
        return found

    return await asyncio.to_thread(read)


@pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])
async def test_messages_of_java_are_rows(
    broker: BrokerUnderTest, java: JavaClient, topic: MakeTopic, batching: bool
) -> None:
    where = await topic()
    for compression in CompressionType:
        producer = await java.producer(where.name, compression=compression.name, batching=batching)
        await producer.send(VALUES, keys=KEYS, properties=PROPERTIES, event_time_ms=EVENT_TIME_MS)
        await producer.close()
    rows = await rows_of(broker.url, where.name)
    assert [row["value"] for row in rows] == VALUES * len(CompressionType)
    assert [row["key"] for row in rows] == KEYS * len(CompressionType)
    assert [row["sequence_id"] for row in rows] == [*range(len(VALUES))] * len(CompressionType)
    for row in rows:
        properties = row["properties"]
        assert isinstance(properties, list)
        assert (dict(properties), row["event_time"]) == (PROPERTIES, EVENT_TIME)


async def test_java_reads_the_ids_of_the_column(
    broker: BrokerUnderTest, client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    where = await topic()
    async with client.producer(where.name) as producer:
        for number in range(200):
            producer.send_nowait(b"%d" % number)
    for row in (await rows_of(broker.url, where.name))[::40]:
        identity = row["message_id"]
        assert isinstance(identity, bytes)
        ours = MessageId.from_bytes(identity)
        meaning = (await java.explain_id(identity))["meaning"]
        assert meaning["segment_id"] == row["segment_id"] == ours.segment_id
        assert meaning["position"]["entry_id"] == ours.entry.entry_id
        assert meaning["position"]["batch_index"] == ours.entry.batch_index


def fields_of(reading: Reading) -> dict[str, object]:
    """As Arrow tells a struct."""
    told = dataclasses.asdict(reading)
    if reading.counts is not None:
        told["counts"] = list(reading.counts.items())
    return told | {"state": as_told(reading.state) if reading.state is not None else None}


@pytest.mark.parametrize(("kind", "decode"), [("avro_reading", "avro"), ("json_reading", "json")])
async def test_records_of_java_are_structs(
    broker: BrokerUnderTest, java: JavaClient, topic: MakeTopic, kind: str, decode: str
) -> None:
    where = await topic()
    producer = await java.producer(where.name, kind)
    await producer.send([as_told(reading) for reading in READINGS])
    await producer.close()
    rows = await rows_of(broker.url, where.name, decode=decode)
    assert [row["data"] for row in rows] == [fields_of(reading) for reading in READINGS]
