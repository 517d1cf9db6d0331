"""Attempts and decisions of the sink at a real broker, without Spark."""

import asyncio
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructType

import magnetar
import magnetar.spark
from magnetar.errors import InvalidTransactionStatus, TransactionKeyFenced
from magnetar.spark.admin import AdminRest
from magnetar.spark.attempt_writer import AttemptWriter, Task
from magnetar.spark.key_groups import KeyGroups
from magnetar.spark.row_hash import row_hash
from magnetar.spark.row_sender import RowSender
from magnetar.spark.sink import Sink
from magnetar.spark.sink_driver import BatchOutcome, SinkDriver
from magnetar.spark.sink_options import SinkOptions, TransactionKeyOption
from magnetar.spark.sink_rows import RowColumns, Rows
from magnetar.spark.task_report import RowCount, TaskReport
from tests.client.conftest import Topic
from tests.java.broker_under_test import BrokerUnderTest
from tests.pipeline import rows as seen_rows
from tests.pipeline.conftest import MakeTopic
from tests.pipeline.rows import Pair
from tests.support.waiting import until

LONG_S = 600.0
SHORT_S = 1.0
COLUMNS = RowColumns.of([("key", "string"), ("value", "binary")])
Writer = AttemptWriter[magnetar.Attempt]


def batch_of(pairs: list[Pair]) -> pa.RecordBatch:
    keys, values = zip(*pairs, strict=True)
    return pa.record_batch({"key": list(keys), "value": list(values)})


def in_rows(pairs: list[Pair]) -> Rows:
    return COLUMNS.rows(batch_of(pairs))


@asynccontextmanager
async def owner(client: magnetar.Client, topic: Topic) -> AsyncIterator[KeyGroups]:
    """Of the topic's key, which is opened."""
    key = await client.transaction_key(topic.local_name)
    groups = KeyGroups(client, TransactionKeyOption(topic.local_name, key.epoch))
    try:
        yield groups
    finally:
        await groups.close()
        await key.close()


def writer(
    client: magnetar.Client,
    topic: Topic,
    groups: KeyGroups,
    task: Task,
    *,
    timeout_s: float = LONG_S,
    kind: type[Writer] = AttemptWriter,
) -> Writer:
    async def opened(attempt: magnetar.Attempt | None) -> RowSender:
        producer = await client.producer(topic.name)
        return RowSender(producer, attempt, partial(client.layout, topic.name))

    return kind(task, groups, opened, timeout_s=timeout_s)


async def written(one: Writer, pairs: list[Pair]) -> TaskReport:
    try:
        await one.write(in_rows(pairs))
        return await one.finish()
    finally:
        await one.close()


def counted(found: list[seen_rows.Row]) -> Counter[int]:
    return Counter(row.segment_id for row in found)


async def test_only_winners_are_seen_and_their_counts_are_those_of_what_is_seen(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(3)
    pairs = seen_rows.pairs(3000)
    async with owner(client, made) as groups:
        task = Task("n", 0, "q", 0)
        loser = await written(writer(client, made, groups, task), pairs)
        winner = await written(writer(client, made, groups, task), pairs)
        assert (loser.group, loser.counts) == (winner.group, winner.counts)
        assert loser.attempt != winner.attempt
        driver = SinkDriver(groups, None)
        assert await driver.commit([winner], 0) is BatchOutcome.COMMITTED
        assert await driver.commit([winner], 0) is BatchOutcome.COMMITTED, "asked again"
        assert not await driver.abort(), "nothing is open"
    found = await seen_rows.committed(client, made.name)
    assert sorted((row.key, row.value) for row in found) == sorted(pairs)
    layout = await client.layout(made.name)
    hashes: Counter[int] = Counter()
    for row in found:
        hashes[row.segment_id] += row_hash(str(row.key).encode(), row.value)
    assert winner.counts == {
        layout.segments[one].topic: RowCount(count, hashes[one] % 2**64)
        for one, count in counted(found).items()
    }


async def test_rows_are_counted_in_the_segments_that_have_them_over_splits(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    pairs = seen_rows.pairs(30_000, keys=500)
    async with owner(client, made) as groups:
        one = writer(client, made, groups, Task("n", 0, "q", 0))
        try:
            writing = asyncio.ensure_future(one.write(in_rows(pairs)))
            await made.split(0)
            await made.split(1)
            await writing
            report = await one.finish()
        finally:
            await one.close()
        assert await SinkDriver(groups, None).commit([report], 0) is BatchOutcome.COMMITTED
    found = await seen_rows.committed(client, made.name)
    assert sorted((row.key, row.value) for row in found) == sorted(pairs)
    layout = await client.layout(made.name)
    expected = {layout.segments[one].topic: count for one, count in counted(found).items()}
    assert {segment: count.messages for segment, count in report.counts.items()} == expected
    # Readers may see a child before the end of its parent; children have the higher ids.
    in_order = sorted(found, key=lambda row: row.segment_id)
    of_key = seen_rows.of_key(in_order)
    assert all(values == sorted(values, key=int) for values in of_key.values())


class Watched(Writer):
    """Tells how often its group was extended."""

    extensions = 0

    async def extend(self, group: magnetar.TxnId) -> None:
        await super().extend(group)
        self.extensions += 1


class Silent(Writer):
    """Gives no sign of life."""

    async def extend(self, group: magnetar.TxnId) -> None:
        await asyncio.Event().wait()


async def test_a_task_that_takes_longer_than_the_timeout_keeps_its_group_open(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    async with owner(client, made) as groups:
        task = Task("n", 0, "q", 0)
        one = writer(client, made, groups, task, timeout_s=SHORT_S, kind=Watched)
        assert isinstance(one, Watched)
        await one.write(in_rows([("k", b"early")]))
        await until(lambda: one.extensions >= 6)  # thrice its timeout
        report = await written(one, [("k", b"late")])
        assert await SinkDriver(groups, None).commit([report], 0) is BatchOutcome.COMMITTED
    found = await seen_rows.committed(client, made.name)
    assert [row.value for row in found] == [b"early", b"late"]


async def test_a_group_whose_time_is_up_is_no_batch_that_is_done(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    async with owner(client, made) as groups:
        task = Task("n", 0, "q", 0)
        one = writer(client, made, groups, task, timeout_s=SHORT_S, kind=Silent)
        report = await written(one, [("k", b"lost")])
        # Readers wait for the group, so they see its end.
        assert await seen_rows.committed(client, made.name) == []
        driver = SinkDriver(groups, None)
        with pytest.raises(InvalidTransactionStatus):
            await driver.commit([report], 0)
        again = await written(writer(client, made, groups, Task("m", 0, "q", 0)), [("k", b"again")])
        assert await driver.commit([again], 0) is BatchOutcome.COMMITTED
    found = await seen_rows.committed(client, made.name)
    assert [row.value for row in found] == [b"again"]


async def test_fenced_attempt_can_neither_write_nor_commit_nor_abort(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    async with owner(client, made) as old:
        early = writer(client, made, old, Task("n", 0, "q", 0))
        await early.write(in_rows([("k", b"old")]))
        async with owner(client, made) as new:
            report = await written(writer(client, made, new, Task("m", 0, "q", 0)), [("k", b"new")])
            with pytest.raises(magnetar.MagnetarError):
                await written(early, [("k", b"late")])
            with pytest.raises(TransactionKeyFenced):
                await written(writer(client, made, old, Task("l", 0, "q", 0)), [("k", b"x")])
            stale = SinkDriver(old, None)
            with pytest.raises(TransactionKeyFenced):
                await stale.commit([TaskReport("k", 0, "q", 0)], 0)
            assert not await stale.abort()
            assert await SinkDriver(new, None).commit([report], 0) is BatchOutcome.COMMITTED
    found = await seen_rows.committed(client, made.name)
    assert [row.value for row in found] == [b"new"]


async def test_a_task_whose_rows_are_late_keeps_the_group_of_the_others_open(
    service: BrokerUnderTest, client: magnetar.Client, topic: MakeTopic
) -> None:
    """It has begun nothing when the others have finished, and they extend nothing any more."""
    made = await topic(1)
    key = await asyncio.to_thread(magnetar.spark.open_key, service.url, made.local_name)
    given = {"serviceUrl": service.url, "topic": made.name, "txnTimeoutMs": "1000"}
    schema = StructType().add("key", StringType()).add("value", BinaryType())
    sink = Sink(SinkOptions.of(given | dict(key.options), streaming=True), schema)
    pairs, computed = seen_rows.pairs(2), threading.Event()

    def late() -> Iterator[pa.RecordBatch]:
        assert computed.wait(LONG_S), "the test has ended"
        yield batch_of(pairs[1:])

    early = await asyncio.to_thread(sink.write, Task("n", 0, "q", 0), [batch_of(pairs[:1])])
    assert early.group is not None
    path = f"/admin/v3/transactions/transaction/{early.group.most}/{early.group.least}"

    async def header() -> tuple[str, int]:
        told = await asyncio.to_thread(AdminRest(service.admin_url).get, path)
        assert isinstance(told, dict)
        return told["status"], told["deadlineMs"]

    _, deadline_ms = await header()
    writing = asyncio.ensure_future(asyncio.to_thread(sink.write, Task("n", 1, "q", 0), late()))
    try:
        await until(lambda: time.time() * 1000 > deadline_ms)
        assert (await header())[0] == "OPEN"
    finally:
        computed.set()
    reports = [early, await writing]
    groups = KeyGroups(client, TransactionKeyOption(made.local_name, key.epoch))
    assert await SinkDriver(groups, None).commit(reports, 0) is BatchOutcome.COMMITTED
    await groups.close()
    found = await seen_rows.committed(client, made.name)
    assert sorted((row.key, row.value) for row in found) == sorted(pairs)


@pytest.mark.parametrize("partitions", [0, 2])
async def test_rows_may_go_to_a_regular_topic(
    service: BrokerUnderTest, client: magnetar.Client, partitions: int
) -> None:
    name = f"persistent://public/default/regular-sink-{uuid.uuid4().hex[:8]}"
    path = f"/admin/v2/{name.replace('://', '/')}"
    rest = AdminRest(service.admin_url)
    if partitions:
        await asyncio.to_thread(rest.call, "PUT", f"{path}/partitions", partitions)
    else:
        await asyncio.to_thread(rest.call, "PUT", path)
    key = await asyncio.to_thread(magnetar.spark.open_key, service.url, name)
    given = {"serviceUrl": service.url, "topic": name, **key.options}
    schema = StructType().add("key", StringType()).add("value", BinaryType())
    sink = Sink(SinkOptions.of(given, streaming=False), schema)
    pairs = seen_rows.pairs(20)
    report = await asyncio.to_thread(sink.write, Task("n", 0, "q", 0), [batch_of(pairs)])
    groups = KeyGroups(client, TransactionKeyOption(name, key.epoch))
    assert await SinkDriver(groups, None).commit([report], 0) is BatchOutcome.COMMITTED
    await groups.close()
    found = await seen_rows.committed(client, name)
    assert sorted((row.key, row.value) for row in found) == sorted(pairs)
