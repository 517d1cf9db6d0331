"""The jobs that write topics, on real Spark: a replay of a range, and a compaction."""

import asyncio
import io
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from aiohttp import ClientSession
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadMaxRows
from rich.console import Console

import magnetar
from magnetar.protocol.key_hash import key_hash
from magnetar.reads import MessageColumns, take_apart
from magnetar.spark.compact.job import Generation, compact
from magnetar.spark.compact.request import Compaction, key_name, milliseconds
from magnetar.spark.cut import Cut, Place
from magnetar.spark.cut_json import cut_of_text, text_of
from magnetar.spark.data_source import Pulsar5
from magnetar.spark.errors import InvalidOption
from magnetar.spark.options import Connection
from magnetar.spark.progress import Progress
from magnetar.spark.replay.job import Outcome, Speed, replay
from magnetar.spark.replay.request import Replay
from magnetar.spark.stream_reader import StreamReader
from tests.client.conftest import Topic
from tests.conftest import Report
from tests.java.broker_under_test import BrokerUnderTest
from tests.pipeline import rows
from tests.pipeline.conftest import MakeTopic
from tests.support.effort import by_effort

AT_ONCE = 50
COMPACTED_KEYS = by_effort(quick=20_000, whole=100_000, nightly=1_000_000)


async def generations(client: magnetar.Client, topic: Topic, count: int) -> list[rows.Pair]:
    """So many rows before a split, after it, and after the merge of its halves."""
    sent = rows.pairs(3 * count)
    await rows.publish(client, topic.name, sent[:count], at_once=AT_ONCE)
    await topic.split((await topic.active())[0])
    await rows.publish(client, topic.name, sent[count : 2 * count], at_once=AT_ONCE)
    first, second = (await topic.active_by_range())[:2]
    await topic.merge(first, second)
    await rows.publish(client, topic.name, sent[2 * count :], at_once=AT_ONCE)
    return sent


def in_order(found: Sequence[rows.Row], expected: Sequence[rows.Pair]) -> None:
    """Each row once, and those of a key in their order."""
    by_key: dict[str, list[bytes]] = {}
    for key, value in expected:
        by_key.setdefault(key, []).append(value)
    assert rows.of_key(found) == by_key


async def test_a_replay_filters_projects_and_goes_on_to_its_end(
    spark: SparkSession,
    service: BrokerUnderTest,
    client: magnetar.Client,
    topic: MakeTopic,
    tmp_path: Path,
) -> None:
    source, target = await topic(), await topic(2)
    sent = await generations(client, source, 200)
    asked = Replay(
        source.name,
        target.name,
        where="cast(decode(value, 'utf-8') AS int) % 3 > 0",
        select=("concat('again-', decode(value, 'utf-8')) AS value",),
    )
    out = io.StringIO()
    commits = tmp_path / "checkpoint" / "commits"

    def run(what: Replay = asked) -> Outcome:
        with Progress("Replay", Console(file=out)) as progress:
            given = (Connection(service.url), what, str(tmp_path / "checkpoint"))
            speed = Speed(rows_per_batch=100)
            return replay(spark, *given, speed, progress)

    with pytest.raises(InvalidOption, match="nothing_such"):
        run(replace(asked, where="nothing_such > 1"))
    with pytest.raises(InvalidOption, match="topics create"):
        run(replace(asked, target=f"{target.name}-misspelt"))
    outcome = run()
    assert outcome.finished
    assert outcome.rows == len(sent)
    assert "400 of them for the target" in outcome.sentence()
    assert outcome.batches >= 4
    assert f"600 of {len(sent)} rows read" in out.getvalue()
    await rows.publish(client, source.name, [("k1", b"1")])  # Behind the end of the replay.
    assert run() == Outcome(finished=True, rows=0, written=0, batches=0)
    with pytest.raises(InvalidOption, match="another replay"):
        run(Replay(source.name, target.name))
    expected = [(key, b"again-" + value) for key, value in sent if int(value) % 3]
    in_order(await rows.committed(client, target.name), expected)

    last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    (commits / f".{last}.crc").unlink()
    (commits / str(last)).unlink()  # As if the driver had died behind its decision.
    repeated = run()
    assert (repeated.finished, repeated.batches) == (True, 1)
    in_order(await rows.committed(client, target.name), expected)


async def test_replay_includes_an_open_transaction_once_it_has_ended(
    spark: SparkSession,
    service: BrokerUnderTest,
    client: magnetar.Client,
    topic: MakeTopic,
    tmp_path: Path,
) -> None:
    source, target = await topic(), await topic()
    sent = rows.pairs(30)
    await rows.publish(client, source.name, sent[:10])

    def run(end: str) -> Outcome:
        asked = Replay(source.name, target.name, end=end)
        with Progress("Replay", Console(file=io.StringIO())) as progress:
            given = (Connection(service.url), asked, str(tmp_path / "checkpoint"))
            return replay(spark, *given, Speed(), progress)

    async with client.transaction() as transaction:
        async with client.producer(source.name) as producer:
            for key, value in sent[10:20]:
                producer.send_nowait(value, key=key, transaction=transaction)
            await producer.flush()
        await rows.publish(client, source.name, sent[20:])
        (segment,) = (await client.layout(source.name)).segments.values()
        raw_end = (await client.plan_range(segment.topic)).raw_end
        end = text_of(Cut(source.name, "", {segment.segment_id: Place.at(raw_end)}))
        first = run(end)
        assert (first.finished, first.rows) == (False, 10)
        assert "Run the same command again" in first.sentence()
        await transaction.commit()
    await rows.publish(client, source.name, sent)  # Behind the end.
    second = run(end)
    assert (second.finished, second.rows) == (True, 20)
    in_order(await rows.committed(client, target.name), sent)


async def test_a_stream_ends_at_its_cut_and_reads_no_faster_than_told(
    service: BrokerUnderTest, client: magnetar.Client, topic: MakeTopic
) -> None:
    """Without Spark: its calls."""
    source = await topic()
    await rows.publish(client, source.name, rows.pairs(100), at_once=10)
    (segment,) = (await client.layout(source.name)).segments.values()
    there = (await client.plan_range(segment.topic)).raw_end
    end = text_of(Cut(source.name, "", {segment.segment_id: Place.at(there)}))
    await rows.publish(client, source.name, rows.pairs(100), at_once=10)
    format_ = Pulsar5(
        {"serviceUrl": service.url, "topic": source.name, "end": end, "maxRowsPerSecond": "50"}
    )

    def steps() -> list[float]:
        """When each batch was planned."""
        reader = format_.streamReader(format_.schema())
        assert isinstance(reader, StreamReader)
        assert reader.getDefaultReadLimit() == ReadMaxRows(50 * 5)
        at, times = reader.initialOffset(), []
        while (found := reader.latestOffset(at, ReadMaxRows(60))) != at:
            times.append(time.monotonic())
            at = found
        assert at == json.loads(end)
        return times

    first, second = await asyncio.to_thread(steps)
    assert second - first >= 60 / 50


Kept = dict[str, bytes | None]


async def stored(client: magnetar.Client, topic: str) -> list[tuple[str | None, bytes | None]]:
    """Key and value of all rows that readers see."""
    columns = MessageColumns()
    for segment in (await client.layout(topic)).segments.values():
        plan = await client.plan_range(segment.topic)
        async for entries in client.read_range(segment.topic, plan.earliest, plan.raw_end):
            for entry in entries:
                take_apart(entry, columns)
    return list(zip(columns.keys, columns.values, strict=True))


async def put(client: magnetar.Client, topic: str, rows_of: Sequence[tuple[int, int]]) -> Kept:
    """A row for each key and number; every seventh number is a tombstone.  What they leave."""
    left: Kept = {}
    async with client.producer(topic) as producer:
        for key, number in rows_of:
            value = b"%d" % number if number % 7 else None
            await producer.room()
            # None is sent as no value, whatever the producer's type of values is.
            producer.send_nowait(cast("bytes", value), key=f"key-{key}")
            left[f"key-{key}"] = value
        await producer.flush()
    return left


async def test_a_compaction_keeps_what_a_dict_keeps(
    spark: SparkSession,
    service: BrokerUnderTest,
    client: magnetar.Client,
    topic: MakeTopic,
    report: Report,
) -> None:
    """Many keys in three generations of segments; run again, nothing is written again."""
    source, target = await topic(), await topic(2)
    keys = COMPACTED_KEYS
    expected = await put(client, source.name, [(key, key + 1) for key in range(keys)])
    await source.split((await source.active())[0])
    expected |= await put(client, source.name, [(key, key + 2) for key in range(0, keys, 3)])
    first, second = (await source.active_by_range())[:2]
    await source.merge(first, second)
    expected |= await put(client, source.name, [(key, key + 3) for key in range(0, keys, 5)])
    async with client.producer(source.name) as producer:
        for number in range(5):
            await producer.send(b"no key %d" % number)
    connection = Connection(service.url)

    def run(asked: Compaction) -> Generation:
        with Progress("Compaction", Console(file=io.StringIO())) as progress:
            return compact(spark, connection, asked, progress)

    began_s = time.monotonic()
    made = run(Compaction(source.name, target.name))
    report(f"a compaction of {made.read:,} rows: {time.monotonic() - began_s:.1f} s")
    found = await stored(client, target.name)
    assert len(found) == len(expected) + 5
    assert {key: value for key, value in found if key is not None} == expected
    assert sorted(value for key, value in found if key is None and value) == [
        b"no key %d" % number for number in range(5)
    ]
    assert not made.made_before
    assert made.read == keys + len(range(0, keys, 3)) + len(range(0, keys, 5)) + 5
    assert made.combined <= made.read

    await put(client, source.name, [(0, 1)])
    again = run(Compaction(source.name, target.name))
    assert (again.made_before, again.cut) == (True, made.cut)
    last = max(await source.segments())
    other = made.cut.replace(f'"{last}":[', f'"{last}":[9')
    with pytest.raises(InvalidOption, match="another cut"):
        run(Compaction(source.name, target.name, end=other))
    assert len(await stored(client, target.name)) == len(found)
    await check_cut(client, source, made, target)


async def test_of_a_key_in_two_partitions_the_row_counts_that_was_published_last(
    spark: SparkSession, service: BrokerUnderTest, client: magnetar.Client, topic: MakeTopic
) -> None:
    target = await topic()
    name = f"grown-{uuid.uuid4().hex[:8]}"
    source, rest = f"persistent://public/default/{name}", f"persistent/public/default/{name}"
    async with ClientSession(service.admin_url) as admin:
        (await admin.put(f"/admin/v2/{rest}/partitions", json=2)).raise_for_status()
        keys = range(60)
        expected = await put(client, source, [(key, key + 1) for key in keys])
        (await admin.post(f"/admin/v2/{rest}/partitions", json=3)).raise_for_status()
    expected |= await put(client, source, [(key, key + 100) for key in keys if key % 3])
    with Progress("Compaction", Console(file=io.StringIO())) as progress:
        asked = Compaction(source, target.name)
        made = compact(spark, Connection(service.url), asked, progress)
    assert dict(await stored(client, target.name)) == expected
    moved = [
        key
        for key in keys
        if key % 3 and partition_of(f"key-{key}", 2) != partition_of(f"key-{key}", 3)
    ]
    assert made.torn == len(moved) > 0
    assert any(partition_of(f"key-{key}", 3) < partition_of(f"key-{key}", 2) for key in moved)
    assert f"{len(moved)} keys have rows in several partitions" in made.sentence()


def partition_of(key: str, partitions: int) -> int:
    return (key_hash(key.encode()) & 0x7FFFFFFF) % partitions


async def check_cut(
    client: magnetar.Client, source: Topic, made: Generation, target: Topic
) -> None:
    """The key keeps up to where the generation goes."""
    async with client.transaction_key(key_name(target.name)) as key:
        assert key.last_group is not None
        kept = cut_of_text(key.last_group.positions or "", source.name, "")
    assert kept == cut_of_text(made.cut, source.name, "")


async def test_old_tombstones_and_keyless_rows_are_left_out_if_wanted(
    spark: SparkSession, service: BrokerUnderTest, client: magnetar.Client, topic: MakeTopic
) -> None:
    source, young, old = await topic(), await topic(), await topic()
    expected = await put(client, source.name, [(key, key) for key in range(30)])
    async with client.producer(source.name) as producer:
        await producer.send(b"no key")
    connection = Connection(service.url)

    def run(asked: Compaction) -> Generation:
        with Progress("Compaction", Console(file=io.StringIO())) as progress:
            return compact(spark, connection, asked, progress)

    run(Compaction(source.name, young.name, tombstones_ms=milliseconds("1h"), keyless=False))
    assert dict(await stored(client, young.name)) == expected
    run(Compaction(source.name, old.name, tombstones_ms=0, keyless=False))
    live = {key: value for key, value in expected.items() if value is not None}
    assert dict(await stored(client, old.name)) == live
    with pytest.raises(InvalidOption, match="rows already"):
        run(Compaction(young.name, source.name))
