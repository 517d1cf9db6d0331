"""The source on a broker: batches and streams of topics that split and merge, every row once."""

import asyncio
import datetime
import json
import os
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.functions import col, lit
from pyspark.sql.streaming.query import StreamingQuery

import magnetar
import magnetar.spark
from magnetar.message_id import MessageId
from magnetar.schema.avro import avro_of
from magnetar.schema.json import json_of
from magnetar.spark.columns import BASE_SCHEMA
from magnetar.spark.worker_python import pythons_of
from tests.client.conftest import Topic
from tests.java.broker_under_test import BrokerUnderTest
from tests.pipeline.conftest import MakeTopic
from tests.pipeline.rows import Pair, pairs, publish
from tests.support.waiting import until

PATIENCE_S = 90


@pytest.fixture(autouse=True)
def _registered(spark: SparkSession) -> None:
    magnetar.spark.register(spark)


@dataclass
class Source:
    """Of one topic; what a stream has read is in `batches`."""

    spark: SparkSession
    url: str
    topic: str
    checkpoint: Path

    def options(self, given: Mapping[str, object]) -> dict[str, str]:
        every: dict[str, object] = {"serviceUrl": self.url, "topic": self.topic, **given}
        return {name: str(value) for name, value in every.items()}

    def table(self, **given: object) -> DataFrame:
        return self.spark.read.format("pulsar5").options(**self.options(given)).load()

    async def rows(self, frame: DataFrame | None = None, **given: object) -> list[Row]:
        frame = self.table(**given) if frame is None else frame
        return await asyncio.to_thread(frame.orderBy("order_key").collect)

    def start(self, batches: list[list[Row]], *, now: bool, **given: object) -> StreamingQuery:
        """A query that adds the rows of each batch, in the order of `order_key` in each task."""

        def add(frame: DataFrame, number: int) -> None:
            found = frame.collect()
            if number < len(batches):
                raise AssertionError(f"batch {number} came again")
            batches.append(found)

        frame = self.spark.readStream.format("pulsar5").options(**self.options(given)).load()
        writer = frame.writeStream.foreachBatch(add)
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(availableNow=True) if now else writer).start()

    async def run(self, batches: list[list[Row]], **given: object) -> None:
        """Everything that is there now."""
        query = self.start(batches, now=True, **given)
        assert await asyncio.to_thread(query.awaitTermination, PATIENCE_S)


MakeSource = Callable[..., Awaitable[tuple[Source, Topic]]]


@pytest.fixture
def source(
    spark: SparkSession, service: BrokerUnderTest, topic: MakeTopic, tmp_path: Path
) -> MakeSource:
    """Of a new topic: `await source(segments=2)`."""

    async def make(segments: int = 1) -> tuple[Source, Topic]:
        made = await topic(segments)
        return Source(spark, service.url, made.name, tmp_path / "checkpoint"), made

    return make


def pairs_of(rows: Iterable[Row]) -> list[Pair]:
    return [(row.key, bytes(row.value)) for row in rows]


def check_each_once_and_in_order(rows: list[Row], sent: list[Pair]) -> None:
    found = pairs_of(rows)
    assert sorted(found) == sorted(sent)
    for key in {key for key, _ in sent}:
        expected = [value for each, value in sent if each == key]
        assert [value for each, value in found if each == key] == expected


async def generations(
    client: magnetar.Client, topic: Topic, per_step: int = 40, *, batching: bool = True
) -> list[Pair]:
    """Rows before and after a split, a merge, and a split of what came of that."""
    sent: list[Pair] = []

    async def more() -> None:
        new = pairs(per_step, first=len(sent))
        async with client.producer(topic.name, batching=batching) as producer:
            for key, value in new:
                producer.send_nowait(value, key=key)
        sent.extend(new)

    await more()
    await topic.split((await topic.active())[0])
    await more()
    await topic.merge(*(await topic.active_by_range())[:2])
    await more()
    await topic.split((await topic.active())[0])
    await more()
    return sent


async def test_a_batch_has_all_columns(source: MakeSource, client: magnetar.Client) -> None:
    reading, made = await source()
    async with client.producer(made.name, name="writer", batching=False) as producer:
        where = await producer.send(
            b"one", key="a", properties={"x": "1", "y": "2"}, event_time_ms=5
        )
        await producer.send(b"two", key=b"\xff\x00")
        await producer.send(b"three")
    first, second, third = await reading.rows()
    assert list(first.asDict()) == BASE_SCHEMA.names
    assert (first.key, bytes(first.value), first.properties) == ("a", b"one", {"x": "1", "y": "2"})
    assert first.event_time == datetime.datetime(1970, 1, 1, 0, 0, 0, 5000)
    assert (second.key, second.event_time, second.properties) == ("/wA=", None, {})
    assert third.key is None
    assert first.producer.startswith("writer")
    assert first.sequence_id < second.sequence_id < third.sequence_id
    assert first.segment_id == 0
    assert first.txn_id is None
    assert MessageId.from_bytes(bytes(first.message_id)) == where
    chosen = reading.spark.read.format("pulsar5").schema("value binary, segment_id bigint not null")
    rows = await reading.rows(
        chosen.options(**reading.options({})).load().withColumn("order_key", lit(1))
    )
    assert sorted(bytes(row.value) for row in rows) == [b"one", b"three", b"two"]


async def test_a_batch_crosses_the_dag_and_order_key_has_the_order(
    source: MakeSource, client: magnetar.Client
) -> None:
    reading, made = await source()
    sent = await generations(client, made)
    rows = await reading.rows()
    check_each_once_and_in_order(rows, sent)
    assert len({row.segment_id for row in rows}) == 6


async def test_times_and_filters_choose_rows(source: MakeSource, client: magnetar.Client) -> None:
    reading, made = await source()
    first, later = pairs(50), pairs(50, first=50)
    await publish(client, made.name, first)
    await made.split(0)
    published_ms = time.time_ns() // 1_000_000
    await until(lambda: time.time_ns() // 1_000_000 > published_ms)
    await publish(client, made.name, later)
    every = await reading.rows()
    moment = min(row.publish_time for row in every if row.segment_id > 0)
    since = moment.replace(tzinfo=datetime.UTC).isoformat()
    check_each_once_and_in_order(await reading.rows(start=since), later)
    check_each_once_and_in_order(await reading.rows(end=since), first)
    table = reading.table(pushFilters=True, clockSkewMs=1000)
    check_each_once_and_in_order(
        await reading.rows(table.where(col("publish_time") >= lit(moment))), later
    )
    check_each_once_and_in_order(
        await reading.rows(table.where(col("publish_time") < lit(moment))), first
    )
    of_key = await reading.rows(table.where(col("key") == "k7"))
    assert pairs_of(of_key) == [pair for pair in first + later if pair[0] == "k7"]
    of_segment = await reading.rows(table.where("segment_id = 0 and key = 'k7'"))
    assert pairs_of(of_segment) == [pair for pair in first if pair[0] == "k7"]
    assert await reading.rows(table.where("segment_id in (17, 18)")) == []


async def test_a_stream_reads_on_while_the_topic_splits_and_merges(
    source: MakeSource, client: magnetar.Client
) -> None:
    reading, made = await source(2)
    batches: list[list[Row]] = []
    query = reading.start(batches, now=False)
    sent = await generations(client, made)
    try:
        await until(lambda: sum(map(len, batches)) >= len(sent), PATIENCE_S)
    finally:
        await asyncio.to_thread(query.stop)
    check_each_once_and_in_order([row for batch in batches for row in batch], sent)


async def test_available_now_with_limits_over_restarts(
    source: MakeSource, client: magnetar.Client
) -> None:
    reading, made = await source()
    batches: list[list[Row]] = []
    sent = await generations(client, made, per_step=20, batching=False)
    await reading.run(batches, maxRowsPerTrigger=15)
    check_each_once_and_in_order([row for batch in batches for row in batch], sent)
    assert len(batches) == 8
    assert max(map(len, batches)) <= 15
    more = pairs(30, first=len(sent))
    await publish(client, made.name, more)
    await made.split((await made.active())[0])
    last = pairs(30, first=len(sent) + len(more))
    await publish(client, made.name, last)
    known = len(batches)
    await reading.run(batches, chain=True)
    check_each_once_and_in_order([row for batch in batches for row in batch], sent + more + last)
    assert len(batches) == known + 1
    await reading.run(batches)
    assert len(batches) == known + 1, "a run without anything new read something"


async def test_a_batch_that_is_run_again_has_the_same_rows(
    source: MakeSource, client: magnetar.Client
) -> None:
    reading, made = await source()
    sent = await generations(client, made, per_step=20)
    batches: list[list[Row]] = []
    await reading.run(batches, ordering="none")
    [first] = batches
    (reading.checkpoint / "commits" / "0").unlink()
    for crc in (reading.checkpoint / "commits").glob(".*.crc"):
        crc.unlink()
    await publish(client, made.name, pairs(10, first=500))
    await made.split((await made.active())[0])
    again: list[list[Row]] = []
    await reading.run(again, ordering="none")
    assert sorted(pairs_of(again[0])) == sorted(pairs_of(first)) == sorted(sent)
    assert sorted(pairs_of(again[1])) == sorted(pairs(10, first=500))


async def test_the_first_batch_begins_where_it_began_before(
    source: MakeSource, client: magnetar.Client
) -> None:
    """Spark has not written that down, and asks anew where a query begins: `latest` has moved."""
    reading, made = await source()
    sent = await generations(client, made, per_step=20)
    first: list[list[Row]] = []
    await reading.run(first, ordering="none")
    for log in (reading.checkpoint / "commits").glob("*0*"):
        log.unlink()
    again: list[list[Row]] = []
    await reading.run(again, ordering="none", start="latest")
    assert sorted(pairs_of(again[0])) == sorted(pairs_of(first[0])) == sorted(sent)


async def test_transactions_are_read_when_they_are_committed(
    source: MakeSource, client: magnetar.Client
) -> None:
    reading, made = await source()
    async with client.producer(made.name) as producer:
        await producer.send(b"before")
        async with client.transaction() as given_up:
            await producer.send(b"never", transaction=given_up)
            await given_up.abort()
        async with client.transaction() as open_:
            await producer.send(b"within", transaction=open_)
            await producer.send(b"behind")
            batches: list[list[Row]] = []
            query = reading.start(batches, now=True)
            assert await asyncio.to_thread(query.awaitTermination, PATIENCE_S)
            last = query.lastProgress
            assert last is not None
            [held] = last["sources"]
            end, stored = json.loads(held["endOffset"]), json.loads(held["latestOffset"])
            assert stored["pos"]["0"] > end["pos"]["0"]
    await reading.run(batches)
    assert [bytes(row.value) for batch in batches for row in batch] == [
        b"before",
        b"within",
        b"behind",
    ]
    assert batches[-1][0].txn_id == str(open_.id)


async def test_a_chunked_message_is_read_by_the_task_with_its_last_chunk(
    source: MakeSource, client: magnetar.Client
) -> None:
    reading, made = await source()
    large = bytes(range(256)) * 50_000  # 12.8 MB: three pieces
    async with client.producer(made.name, chunking=True, batching=False) as producer:
        await producer.send(b"small")
        await producer.send(large)
        await producer.send(b"end")
    batches: list[list[Row]] = []
    await reading.run(batches, maxRowsPerTrigger=1)
    assert [bytes(row.value) for batch in batches for row in batch] == [b"small", large, b"end"]
    assert len(batches) == 5


@dataclass
class Order:
    customer: str
    amount: int
    at: datetime.datetime
    tags: list[str]
    note: str | None = None


ORDERS = [
    Order("a", 5, datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC), ["x"], "n"),
    Order("b", 2**40, datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), []),
]


@pytest.mark.parametrize(("decode", "schema"), [("avro", avro_of(Order)), ("json", json_of(Order))])
async def test_values_are_decoded_by_the_schema_of_the_topic(
    source: MakeSource, client: magnetar.Client, decode: str, schema: magnetar.Schema[Order]
) -> None:
    reading, made = await source()
    async with client.producer(made.name, schema=schema) as producer:
        for order in ORDERS:
            await producer.send(order)
    frame = reading.table(decode=decode, onCorrupt="column")
    rows = await reading.rows(frame)
    assert [row.data.amount for row in rows] == [5, 2**40]
    assert [row.data.customer for row in rows] == ["a", "b"]
    assert [row.data.tags for row in rows] == [["x"], []]
    assert [row.data.note for row in rows] == ["n", None]
    assert [row.data.at for row in rows] == [order.at.replace(tzinfo=None) for order in ORDERS]
    assert [row._corrupt for row in rows] == [None, None]


def test_spark_tells_by_which_pythons_it_will_run_the_format(spark: SparkSession) -> None:
    assert list(pythons_of(spark)) == [os.environ["PYSPARK_PYTHON"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        magnetar.spark.register(spark)


async def test_errors_say_what_to_do(source: MakeSource) -> None:
    reading, _ = await source()
    for given, sentence in (
        ({"start": "yesterday"}, "earliest, latest, a time"),
        ({"maxRowPerTrigger": 5}, "do you mean maxRowsPerTrigger"),
        ({"decode": "avro"}, "decodeSchema"),
        ({"ordering": "key"}, "order_key"),
    ):
        with pytest.raises(Exception, match=sentence):
            await reading.rows(**given)
