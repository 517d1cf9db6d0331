"""Source and sink on brokers that have no groups, no keys and no reads of segments.

`pytest tests/pipeline/test_stock.py --peer` runs them on Apache Pulsar itself.  Without `--peer`
the same is done on a Magnetar broker, whose keys are kept in a state topic then, too.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import magnetar
import magnetar.spark
from magnetar import GroupRecord
from magnetar.errors import InvalidTransactionStatus, NotAllowed, TransactionKeyFenced
from magnetar.spark.commit import Decision, WinningAttempt
from magnetar.spark.errors import StateUnreadable
from magnetar.spark.key_log import Entry, EntryKind
from magnetar.spark.plain_groups import PlainGroups
from magnetar.spark.sink_options import TransactionKeyOption
from magnetar.spark.state_topic import KeyLog, ReadSoFar
from tests.client.conftest import Service, Topic
from tests.pipeline import rows, sinks
from tests.pipeline.conftest import MakeDriver, create_topic
from tests.pipeline.hooks import Action, Point
from tests.pipeline.rows import Pair
from tests.support.child_process import once_it_is

PATIENCE_S: Final = 150
"""Apache Pulsar looks for transactions whose time is up once in 60 s."""
TIMEOUT_MS: Final = 20_000
TOTAL: Final = 80


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest, on_peer: bool) -> Service:
    """The broker."""
    found: Service = request.getfixturevalue("broker" if on_peer else "service")
    return found


@dataclass
class Bench:
    """A target topic, a state topic, and what is done with them."""

    service: Service
    client: magnetar.Client
    target: Topic
    state: Topic
    directory: Path

    async def key(self) -> magnetar.spark.OpenedKey:
        return await asyncio.to_thread(
            magnetar.spark.open_key,
            self.service.url,
            self.target.local_name,
            state_topic=self.state.name,
        )

    def groups(self, key: magnetar.spark.OpenedKey) -> PlainGroups:
        assert key.state is not None
        return PlainGroups(
            self.client,
            TransactionKeyOption(key.name, key.epoch),
            key.state,
            ReadSoFar(key.state.start),
        )

    async def written(self, value: bytes) -> magnetar.TxnId:
        """A transaction that has one message for the target."""
        txn = await self.client.begin_transaction(timeout_s=TIMEOUT_MS / 1000)
        async with (
            self.client.producer(self.target.name) as producer,
            self.client.attach_transaction(txn) as attached,
        ):
            await producer.send(value, key="k", transaction=attached)
            await attached.settled()
        return txn

    async def commit(self, key: magnetar.spark.OpenedKey, txn: magnetar.TxnId, batch: int) -> bool:
        decision = Decision("n", txn, (WinningAttempt(txn, {}),), "q", batch)
        return await self.groups(key).commit(decision, f"up to {batch}")

    async def run(
        self, frame: DataFrame, key: magnetar.spark.OpenedKey | None, **options: object
    ) -> None:
        given = {"serviceUrl": self.service.url, "topic": self.target.name}
        checkpoint = self.directory / str(options.pop("checkpoint", "checkpoint"))
        every = given | dict(key.options if key else {}) | options
        query = sinks.started(frame, every, checkpoint)
        assert await asyncio.to_thread(query.awaitTermination, PATIENCE_S), "it runs on"

    async def seen(self) -> list[Pair]:
        """What readers see, when nothing is open any more."""

        async def at_rest() -> bool:
            for segment in (await self.client.layout(self.target.name)).segments.values():
                plan = await self.client.plan_range(segment.topic)
                if plan.horizon < plan.raw_end:
                    return False
            return True

        await once_it_is(at_rest, "the end of every transaction", PATIENCE_S)
        found = await rows.committed(self.client, self.target.name)
        return sorted((row.key or "", row.value) for row in found)


@pytest.fixture
async def bench(stock: Service, tmp_path: Path) -> AsyncIterator[Bench]:
    async with magnetar.connect(stock.url) as client:
        target = await create_topic(stock, "target", 2)
        yield Bench(stock, client, target, await create_topic(stock, "state"), tmp_path)


def expected(total: int = TOTAL) -> list[Pair]:
    return sorted(sinks.expected(total))


def counted(spark: SparkSession, total: int = TOTAL) -> DataFrame:
    """In two tasks."""
    return sinks.counted(spark, rows=40, total=total)


# Without Spark


async def test_a_key_is_opened_and_remembers_its_last_batch(bench: Bench) -> None:
    first = await bench.key()
    assert (first.epoch, first.last) == (0, None)
    txn = await bench.written(b"one")
    assert not await bench.commit(first, txn, 0)
    assert await bench.commit(first, await bench.written(b"again"), 0), "it is not done"
    second = await bench.key()
    assert (second.epoch, second.last) == (1, GroupRecord("q", 0, "up to 0", txn))
    with pytest.raises(TransactionKeyFenced, match="another epoch than 0"):
        await bench.commit(first, await bench.written(b"of a zombie"), 1)
    await bench.commit(second, await bench.written(b"two"), 1)
    assert await bench.seen() == [("k", b"one"), ("k", b"two")]


async def test_a_batch_without_rows_is_noted(bench: Bench) -> None:
    key = await bench.key()
    assert not await bench.groups(key).commit(Decision("n", None, (), "q", 4), None)
    last = (await bench.key()).last
    assert last is not None
    assert (last.query, last.batch, last.positions) == ("q", 4, None)


async def test_who_opens_ends_a_commit_that_was_left_half_way(bench: Bench) -> None:
    """A driver dies between the record and the commit: nobody waits for its deadline."""
    key = await bench.key()
    txn = await bench.written(b"half way")
    async with KeyLog.opened(
        bench.client,
        bench.state.name,
        key.name,
        "dead",
        entitled=lambda state: True,
        known=ReadSoFar(),
    ) as log:
        await log.append(Entry(EntryKind.INTENT, "dead", key.epoch, txn))
        async with bench.client.attach_transaction(txn) as attached:
            record = GroupRecord("q", 0, None, txn)
            await log.record(Entry(EntryKind.RECORD, "dead", key.epoch, txn, record), attached)
            await attached.settled()
    begin = time.monotonic()
    assert (await bench.key()).last is None
    assert time.monotonic() - begin < TIMEOUT_MS / 1000 / 2
    with pytest.raises(InvalidTransactionStatus):
        await bench.client.end_transaction(txn, commit=True)
    assert await bench.seen() == []


async def test_a_transaction_whose_time_is_up_is_not_done(bench: Bench) -> None:
    key = await bench.key()
    txn = await bench.written(b"late")
    await bench.client.end_transaction(txn, commit=False)
    with pytest.raises((InvalidTransactionStatus, NotAllowed)):
        await bench.commit(key, txn, 0)
    assert (await bench.key()).last is None
    assert await bench.seen() == []


async def test_recreated_state_topic_is_refused(bench: Bench) -> None:
    """Both keys have epoch 0; of one driver of the old one some process has read on."""
    old = await bench.key()
    going = bench.groups(old)
    txn = await bench.written(b"one")
    assert not await going.commit(Decision("n", txn, (WinningAttempt(txn, {}),), "q", 0), None)
    await bench.state.delete()
    bench.state = await create_topic(bench.service, "state", name=bench.state.local_name)
    new = await bench.key()
    assert (new.epoch, new.last) == (old.epoch, None)
    for groups in (going, bench.groups(old)):
        txn = await bench.written(b"of a zombie")
        with pytest.raises(StateUnreadable, match="made anew"):
            await groups.commit(Decision("n", txn, (WinningAttempt(txn, {}),), "q", 1), None)
    assert not await bench.commit(new, await bench.written(b"two"), 1)
    assert await bench.seen() == [("k", b"one"), ("k", b"two")]


async def test_a_state_topic_has_one_segment(bench: Bench) -> None:
    bench.state = bench.target
    with pytest.raises(StateUnreadable, match="one segment"):
        await bench.key()


# With Spark


async def test_a_source_reads_over_a_split(
    bench: Bench, spark: SparkSession, tmp_path: Path
) -> None:
    magnetar.spark.register(spark)
    sent = rows.pairs(120)
    batches: list[list[Pair]] = []

    def add(frame: DataFrame, number: int) -> None:
        batches.append([(row.key, bytes(row.value)) for row in frame.collect()])

    async def stream() -> None:
        frame = spark.readStream.format("pulsar5").options(
            serviceUrl=bench.service.url, topic=bench.target.name
        )
        writer = frame.load().writeStream.foreachBatch(add).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "read")).start()
        assert await asyncio.to_thread(query.awaitTermination, PATIENCE_S)

    await rows.publish(bench.client, bench.target.name, sent[:40])
    await stream()
    assert sorted(pair for batch in batches for pair in batch) == sorted(sent[:40])
    async with bench.client.producer(bench.target.name) as producer:
        for commit in (True, False):
            async with bench.client.transaction() as transaction:
                for key, value in sent[40:80] if commit else rows.pairs(10, first=900):
                    producer.send_nowait(value, key=key, transaction=transaction)
                await (transaction.commit() if commit else transaction.abort())
    await bench.target.split(0)
    await rows.publish(bench.client, bench.target.name, sent[80:])
    await stream()
    found = [pair for batch in batches for pair in batch]
    assert sorted(found) == sorted(sent)
    for key in {key for key, _ in sent}:
        assert [v for k, v in found if k == key] == [v for k, v in sent if k == key]
    table = (
        spark.read.format("pulsar5")
        .options(serviceUrl=bench.service.url, topic=bench.target.name)
        .load()
    )
    every = await asyncio.to_thread(table.orderBy("order_key").collect)
    assert sorted((row.key, bytes(row.value)) for row in every) == sorted(sent)


async def test_two_tasks_write_at_least_once(bench: Bench, spark: SparkSession) -> None:
    await bench.run(counted(spark), None, delivery="at-least-once")
    assert await bench.seen() == expected()


async def test_two_tasks_do_not_write_exactly_once(bench: Bench, spark: SparkSession) -> None:
    with pytest.raises(StreamingQueryException, match=r"frame\.coalesce\(1\).*at-least-once"):
        await bench.run(counted(spark), await bench.key())
    assert await bench.seen() == []


async def test_one_task_writes_exactly_once(bench: Bench, spark: SparkSession) -> None:
    old = await bench.key()
    await bench.run(counted(spark).coalesce(1), old)
    assert await bench.seen() == expected()
    for name in ("1", ".1.crc"):
        (bench.directory / "checkpoint" / "commits" / name).unlink()
    await bench.run(counted(spark, 120).coalesce(1), await bench.key())
    assert await bench.seen() == expected(120)
    with pytest.raises(StreamingQueryException, match="another epoch"):
        await bench.run(counted(spark).coalesce(1), old, checkpoint="other")
    assert await bench.seen() == expected(120)


async def test_killed_drivers_leave_each_row_once(bench: Bench, driver: MakeDriver) -> None:
    """In a write, and between the commit and Spark's own note of it."""
    source = await create_topic(bench.service, "source", 2)
    sent = rows.pairs(100)
    await rows.publish(bench.client, source.name, sent)
    given = {
        "url": bench.service.url,
        "key": bench.target.local_name,
        "state": bench.state.name,
        "source": source.name,
        "sink": bench.target.name,
        "timeout_ms": TIMEOUT_MS,
    }
    module = "tests.pipeline.stock_copy_driver"
    for name, point in (("first", Point.WRITE_UNDER_WAY), ("second", Point.COMMIT_RETURNED)):
        dying = driver(name, module, **given)
        held = dying.hooks.at(point, Action.WAIT)
        dying.spawn()
        await dying.until(held)
        dying.kill()
    third = driver("third", module, **given)
    third.spawn()
    assert await third.finished() == 0
    assert await bench.seen() == sorted(sent)
