"""The sink on a real broker and real Spark, in the session that tests share."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import magnetar
import magnetar.spark
from magnetar.reads.entries import Visibility
from tests.client.conftest import Topic
from tests.java.broker_under_test import BrokerUnderTest
from tests.pipeline import row_faults, rows, sinks
from tests.pipeline.conftest import MakeTopic
from tests.pipeline.rows import Pair
from tests.support.waiting import until

TIMEOUT_S: Final = 120
SMALL: Final = 5
"""Rows that the sink is given at once, so that a task can fail when it has written some."""
TOTAL: Final = 80
IN_A_BATCH: Final = 40


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(name, SMALL)
    yield
    spark.conf.unset(name)


@dataclass
class Bench:
    """A topic, a key, a checkpoint, and queries of them."""

    spark: SparkSession
    service: BrokerUnderTest
    client: magnetar.Client
    topic: Topic
    directory: Path

    async def key(self) -> magnetar.spark.OpenedKey:
        return await asyncio.to_thread(
            magnetar.spark.open_key, self.service.url, self.topic.local_name
        )

    def counted(self, rows: int = IN_A_BATCH, total: int = TOTAL) -> DataFrame:
        return sinks.counted(self.spark, rows=rows, total=total)

    def checkpoint(self, name: str = "checkpoint") -> Path:
        return self.directory / name

    def forget_commit(self, batch: int) -> None:
        """As if the driver had died before it noted that."""
        self._forget("commits", batch)

    def forget_batch(self, batch: int) -> None:
        """As if the checkpoint had been put back to before that."""
        self._forget("commits", batch)
        self._forget("offsets", batch)

    def _forget(self, directory: str, batch: int) -> None:
        for name in (f"{batch}", f".{batch}.crc"):
            (self.checkpoint() / directory / name).unlink()

    def start(
        self, frame: DataFrame, key: magnetar.spark.OpenedKey | None, **options: object
    ) -> StreamingQuery:
        given = {"serviceUrl": self.service.url, "topic": self.topic.name}
        checkpoint = self.checkpoint(str(options.pop("checkpoint", "checkpoint")))
        sink = str(options.pop("sink", "pulsar5"))
        every = given | dict(key.options if key else {}) | options
        return sinks.started(frame, every, checkpoint, sink)

    async def run(
        self, frame: DataFrame, key: magnetar.spark.OpenedKey | None, **options: object
    ) -> StreamingQuery:
        """To its end; raises why it failed.

        It is started by the thread that has made the session: Spark finds sinks by the thread.
        """
        query = self.start(frame, key, **options)
        assert await asyncio.to_thread(query.awaitTermination, TIMEOUT_S), "it runs on"
        return query

    async def aborted(self) -> int:
        """How many entries were stored for nothing."""
        found = 0
        for segment in (await self.client.layout(self.topic.name)).segments.values():
            plan = await self.client.plan_range(segment.topic)
            entries = self.client.read_range(segment.topic, plan.start, plan.raw_end, raw=True)
            async for some in entries:
                found += sum(each.visibility is Visibility.ABORTED for each in some)
        return found

    async def seen(self) -> list[Pair]:
        """What readers see; hangs while something is open."""
        found = await rows.committed(self.client, self.topic.name)
        return sorted((row.key or "", row.value) for row in found)


@pytest.fixture
def bench(
    spark: SparkSession,
    service: BrokerUnderTest,
    client: magnetar.Client,
    topic: MakeTopic,
    tmp_path: Path,
) -> Callable[..., "asyncio.Future[Bench]"]:
    """`await bench(segments=2)`."""

    async def make(segments: int = 2) -> Bench:
        return Bench(spark, service, client, await topic(segments), tmp_path)

    return make  # type: ignore[return-value]


MakeBench = Callable[..., "asyncio.Future[Bench]"]


def expected(total: int = TOTAL) -> list[Pair]:
    return sorted(sinks.expected(total))


async def test_a_query_writes_each_row_once_and_notes_its_batches(bench: MakeBench) -> None:
    made = await bench()
    key = await made.key()
    assert key.last is None
    query = await made.run(made.counted(total=100), key)
    assert await made.seen() == expected(100)
    again = await made.key()
    assert again.epoch == key.epoch + 1
    assert again.last is not None
    assert (again.last.query, again.last.batch) == (str(query.id), 2)


async def test_rows_of_tries_that_fail_are_not_seen(bench: MakeBench) -> None:
    made = await bench()
    await made.run(made.counted(), await made.key(), sink="late-failure")
    assert await made.seen() == expected()
    assert await made.aborted(), "the tries that failed have written nothing"


async def test_a_batch_that_fails_is_aborted_at_once_and_done_again(bench: MakeBench) -> None:
    made = await bench()
    with pytest.raises(StreamingQueryException, match="fails when all its rows are stored"):
        await made.run(made.counted(), await made.key(), sink="hopeless", txnTimeoutMs=600_000)
    assert await made.seen() == []
    assert await made.aborted(), "the batch that failed has written nothing"
    await made.run(made.counted(), await made.key())
    assert await made.seen() == expected()


async def test_a_batch_that_spark_does_not_know_to_be_committed_is_not_seen_twice(
    bench: MakeBench,
) -> None:
    """Its driver died after the commit: the same batch is run again, with the same id."""
    made = await bench()
    await made.run(made.counted(), await made.key())
    made.forget_commit(1)
    query = await made.run(made.counted(total=100), await made.key())
    assert [each["batchId"] for each in query.recentProgress][:2] == [1, 2]
    assert await made.seen() == expected(100)


async def test_another_checkpoint_under_the_same_key_is_another_query(bench: MakeBench) -> None:
    made = await bench()
    first = await made.run(made.counted(), await made.key())
    other = await made.run(made.counted(), await made.key(), checkpoint="other")
    assert first.id != other.id
    assert await made.seen() == sorted(2 * expected())
    # The first one comes back, with its last batch.
    made.forget_commit(1)
    await made.run(made.counted(), await made.key())
    assert await made.seen() == sorted(2 * expected())


@pytest.mark.usefixtures("small_batches")
async def test_a_query_that_was_overtaken_harms_nothing(bench: MakeBench, tmp_path: Path) -> None:
    made = await bench()
    old = await made.key()
    one_task = made.counted().coalesce(1)
    frame = one_task.mapInArrow(row_faults.waiting(tmp_path), "key string, value string")
    late = made.start(frame, old)
    await until((tmp_path / "waits-0").exists)
    await made.run(made.counted(), await made.key(), checkpoint="other")
    assert await made.seen() == expected()
    (tmp_path / "go").touch()
    with pytest.raises(StreamingQueryException):
        await asyncio.to_thread(late.awaitTermination, TIMEOUT_S)
    with pytest.raises(StreamingQueryException, match="another epoch"):
        await made.run(made.counted(), old)
    assert await made.seen() == expected()


@pytest.mark.usefixtures("small_batches")
async def test_segments_are_split_while_they_are_written(bench: MakeBench, tmp_path: Path) -> None:
    made = await bench(segments=1)
    frame = made.counted().mapInArrow(row_faults.waiting(tmp_path), "key string, value string")
    query = made.start(frame, await made.key())
    await until(lambda: (tmp_path / "waits-0").exists() and (tmp_path / "waits-1").exists())
    await made.topic.split(0)
    (tmp_path / "go").touch()
    assert await asyncio.to_thread(query.awaitTermination, TIMEOUT_S)
    assert await made.seen() == expected()


async def test_a_query_without_rows_notes_its_batches_all_the_same(bench: MakeBench) -> None:
    made = await bench()
    query = await made.run(made.counted().where("false"), await made.key())
    last = (await made.key()).last
    assert last is not None
    assert (last.query, last.batch) == (str(query.id), 1)
    assert await made.seen() == []


async def test_positions_that_nobody_has_are_refused_before_anything_is_seen(
    bench: MakeBench,
) -> None:
    made = await bench()
    with pytest.raises(StreamingQueryException, match="no source of the format pulsar5"):
        await made.run(made.counted(), await made.key(), trackPositions="true")
    assert await made.seen() == []
    assert (await made.key()).last is None


async def test_at_least_once_needs_no_key(bench: MakeBench) -> None:
    made = await bench()
    await made.run(made.counted(), None, delivery="at-least-once")
    assert await made.seen() == expected()


async def test_a_job_is_done_once_however_often_it_is_run(bench: MakeBench) -> None:
    made = await bench()
    magnetar.spark.register(made.spark)
    frame = made.spark.createDataFrame(
        [(key, value.decode()) for key, value in expected()], "key string, value string"
    ).repartition(3)
    key = await made.key()
    given = {"serviceUrl": made.service.url, "topic": made.topic.name, **key.options}

    def write(job: str, mode: str = "append") -> None:
        frame.write.format("pulsar5").options(**given).option("jobId", job).mode(mode).save()

    for job in ("one", "one", "two"):
        write(job)
    assert await made.seen() == sorted(2 * expected())
    with pytest.raises(PySparkException, match="A topic is not overwritten"):
        write("three", "overwrite")


async def test_sink_names_missing_options_and_columns_before_it_writes(bench: MakeBench) -> None:
    made = await bench()
    with pytest.raises(
        (StreamingQueryException, AnalysisException), match=r"magnetar\.spark\.open_key"
    ):
        await made.run(made.counted(), None)
    with pytest.raises((StreamingQueryException, AnalysisException), match="no column value"):
        await made.run(made.counted().drop("value"), await made.key(), checkpoint="other")


async def test_a_query_whose_checkpoint_is_lost_goes_on_where_its_key_says(
    bench: MakeBench, topic: MakeTopic
) -> None:
    """Consume, transform, produce: positions move with the rows."""
    made = await bench()
    source = await topic(2)
    magnetar.spark.register(made.spark)

    def read(start: str) -> DataFrame:
        frame = made.spark.readStream.format("pulsar5").options(
            serviceUrl=made.service.url, topic=source.name, name="in", start=start
        )
        return frame.load().selectExpr("key", "concat(value, value) AS value")

    given = rows.pairs(120)
    await rows.publish(made.client, source.name, given[:50])
    await made.run(read("earliest"), await made.key(), trackPositions="true")
    await rows.publish(made.client, source.name, given[50:90])
    await made.run(read("earliest"), await made.key(), trackPositions="true")
    last = (await made.key()).last
    assert last is not None
    assert last.positions is not None

    await rows.publish(made.client, source.name, given[90:])
    await made.run(
        read(last.positions), await made.key(), trackPositions="true", checkpoint="other"
    )
    assert await made.seen() == sorted((key, 2 * value) for key, value in given)


async def test_another_batch_under_the_number_of_one_that_is_done_is_refused(
    bench: MakeBench, topic: MakeTopic
) -> None:
    """Its tasks are told that it is done, and drop its rows."""
    made = await bench()
    source = await topic(1)
    magnetar.spark.register(made.spark)
    frame = (
        made.spark.readStream.format("pulsar5")
        .options(serviceUrl=made.service.url, topic=source.name)
        .load()
        .select("key", "value")
    )
    given = rows.pairs(60)
    await rows.publish(made.client, source.name, given[:20])
    query = await made.run(frame, await made.key(), trackPositions="true")
    last = query.recentProgress[-1]["batchId"]
    made.forget_batch(last)
    await rows.publish(made.client, source.name, given[20:])
    with pytest.raises(StreamingQueryException, match="with other positions"):
        await made.run(frame, await made.key(), trackPositions="true")
    assert await made.seen() == sorted(given[:20])
