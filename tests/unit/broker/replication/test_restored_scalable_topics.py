"""Scalable topics that are made anew, here or there, or restored from a backup."""

import shutil
from pathlib import Path

import pytest

from magnetar.protocol.names import parse_topic_name
from tests.support.waiting import until
from tests.unit.broker.replication.test_scalable_topics import (
    PATH,
    TOPIC,
    Pair,
    Written,
    active,
    client_of,
    has,
    is_done,
    make,
    pair,
    segments_of,
    shown_by,
    split,
    writing,
)

__all__ = ["pair"]


async def test_a_topic_that_is_made_anew_is_another_one_to_the_other_cluster(pair: Pair) -> None:
    east, west = pair
    written, drawn = Written(), list[int | None]()
    for _ in range(2):
        await make(east)
        async with writing(east, written) as writer:
            await writer.write(2)
        await has(west, written)
        record = await east.broker.scalable.get(parse_topic_name(TOPIC))
        drawn.append(record.incarnation)
        await east.ask("DELETE", f"{PATH}?force=true")
    assert None not in drawn
    assert drawn[0] != drawn[1]


async def test_a_sealed_segment_that_counts_as_sent_is_not_taken_for_a_restored_one(
    pair: Pair,
) -> None:
    east, west = pair
    written = Written()
    await make(east)
    async with writing(east, written) as writer:
        await writer.write(1)
    await split(east, 0)
    async with writing(east, written) as writer:
        await writer.write(1)
    await has(west, written)
    await until(lambda: is_done(east))
    former = await east.broker.scalable.get(parse_topic_name(TOPIC))
    # Cursors begin anew, as if the broker had died before it wrote how far they were.
    east.settings["replication_start_at"] = "earliest"
    await east.replicate("east")
    await until(lambda: not any(each.replicator_cursors for each in segments_of(east)))
    await east.stop()
    await east.start()
    await east.replicate("east", "west")
    async with writing(east, written) as writer:
        await writer.write(1)
    await has(west, written)
    record = await east.broker.scalable.get(parse_topic_name(TOPIC))
    assert record.incarnation == former.incarnation


@pytest.mark.parametrize("what", ["messages", "messages in one batch", "a split"])
async def test_what_a_restored_cluster_writes_is_not_taken_for_what_it_sent_before(
    pair: Pair, tmp_path: Path, what: str
) -> None:
    east, west = pair
    written = Written()
    await make(east)
    async with writing(east, written) as writer:
        await writer.write(1)
    await has(west, written)
    await until(lambda: is_done(east))
    await east.stop()
    shutil.copytree(tmp_path / "east", tmp_path / "backup")
    await east.start()
    if what == "a split":
        await split(east, 0)
    async with writing(east, written, batching=what == "messages in one batch") as writer:
        await writer.write(10)
    await has(west, written)
    former = await east.broker.scalable.get(parse_topic_name(TOPIC))
    await east.stop()
    shutil.rmtree(tmp_path / "east")
    shutil.copytree(tmp_path / "backup", tmp_path / "east")
    await east.start()
    later = Written()
    async with writing(east, later, "later") as writer:
        await writer.write(1)
    await has(west, written | later)
    record = await east.broker.scalable.get(parse_topic_name(TOPIC))
    assert record.incarnation != former.incarnation


async def test_sessions_begin_anew_when_a_topic_gets_another_incarnation(pair: Pair) -> None:
    east, west = pair
    await make(east, 2)
    await make(west, 2)
    written: Written = {}
    async with writing(east, written) as writer:
        await writer.write(1)
        await has(west, written)
        await until(lambda: is_done(east))
        first = (await east.broker.scalable.get(parse_topic_name(TOPIC))).incarnation
        await east.ask("POST", f"{PATH}/replication/incarnation")
        second = (await east.broker.scalable.get(parse_topic_name(TOPIC))).incarnation
        assert second not in (None, first)
        await writer.write(1)
        await has(west, written)
    kept = [each.sequence_store.sources for each in segments_of(west)]
    assert {found.incarnation for each in kept if each for found in each.durable()} == {
        first,
        second,
    }


async def test_a_topic_that_is_deleted_and_created_there_gets_what_is_sent_from_then_on(
    pair: Pair,
) -> None:
    east, west = pair
    await make(east, 1)
    await make(west, 2)
    before: Written = {}
    after: Written = {}
    async with writing(east, before, "before") as first, writing(east, after, "after") as second:
        await first.write(2)
        await has(west, before)
        await until(lambda: is_done(east))
        await west.ask("DELETE", f"{PATH}?force=true")
        await make(west, 3)
        await second.write(2)
        await has(west, after)
        assert len(await active(west)) == 3


async def test_a_restored_cluster_gets_the_schemas_of_what_is_sent_to_it(
    pair: Pair, tmp_path: Path
) -> None:
    east, west = pair
    await make(east)
    await make(west)
    await west.stop()
    shutil.copytree(tmp_path / "west", tmp_path / "backup")
    await west.start()
    async with client_of(east) as client, client.producer(TOPIC, schema=str) as producer:
        await producer.send("before", key="k")
        await until(lambda: is_done(east))
        await west.stop()
        shutil.rmtree(tmp_path / "west")
        shutil.copytree(tmp_path / "backup", tmp_path / "west")
        await west.start()
        await producer.send("later", key="k")
        await until(lambda: is_done(east))
    found = await shown_by(west, "/admin/v2/schemas/public/default/t/schema")
    assert found["type"] == "STRING"
