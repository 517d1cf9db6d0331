"""What statistics and metrics say of the replication of scalable topics."""

import pytest

from magnetar.wire.connection import Connection
from tests.support.metrics_text import metrics_text
from tests.support.waiting import until, until_awaited
from tests.unit.broker.replication.test_scalable_topics import (
    KEYS,
    PATH,
    Pair,
    Written,
    failure_of,
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


async def test_statistics_say_why_nothing_is_sent_to_a_cluster_that_is_down(pair: Pair) -> None:
    east, west = pair
    await make(east, 1)
    await make(west, 1)
    written: Written = {}
    async with writing(east, written) as writer:
        await west.stop()
        await writer.write(1)
        segment = segments_of(east)[0]
        await until(lambda: "connect" in failure_of(segment).lower())
        await west.start()
        await writer.write(1)
        await has(west, written)
        await until(lambda: not failure_of(segment))


async def test_statistics_show_each_segment_and_the_sums_of_the_topic(pair: Pair) -> None:
    east, west = pair
    await make(east, 2)
    await make(west, 3)
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(2)
        await has(west, written)
        await until(lambda: is_done(east))
    sent = await shown_by(east, f"{PATH}/stats")
    assert sent["replicationKeyHash"] == "high"
    assert sent["replication"].keys() == {"west"}
    of_west = sent["replication"]["west"]
    assert of_west["segments"].keys() == {"0", "1"}
    count = sum(map(len, written.values()))
    assert of_west["msgOutCount"] == count
    assert sum(each["msgOutCount"] for each in of_west["segments"].values()) == count
    assert (of_west["connected"], of_west["replicationBacklog"]) == (True, 0)
    assert (of_west["openedBatchCount"], "lastFailure" in of_west) == (0, False)
    one = await shown_by(east, f"{PATH}/segments/0/stats")
    assert one["replication"]["west"]["msgOutCount"] == of_west["segments"]["0"]["msgOutCount"]
    received = await shown_by(west, f"{PATH}/stats")
    assert received["producers"] == [], "senders are no producers of applications"
    of_east = received["replication"]["east"]
    assert of_east["segments"].keys() == {"0", "1", "2"}
    assert of_east["msgInCount"] == count
    assert of_east["inboundConnection"].startswith("127.0.0.1:")


async def test_metrics_count_a_segment_that_stands_and_none_that_waits_for_it(pair: Pair) -> None:
    east, west = pair
    for each in pair:
        await make(each, 1)
    name = "segment://public/default/t"
    parent, child = f"{name}/0000-ffff-0", f"{name}/0000-7fff-1"

    async def shown(metric: str, segment: str) -> str:
        labels = (
            f'cluster="east",namespace="public/default",remote_cluster="west",topic="{segment}"'
        )
        start = f"pulsar_replication_{metric}{{{labels}}} "
        text = await metrics_text(east.broker)
        return next((x.removeprefix(start) for x in text.splitlines() if x.startswith(start)), "")

    await west.stop()
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(1)
        await split(east, 0)
        await until(lambda: any(each.sealed for each in segments_of(east)))
        await writer.write(1)

        async def has_failed() -> bool:
            return await shown("disconnected_count", parent) == "1.0"

        await until_awaited(has_failed, 30)
        assert await shown("backlog", parent) == f"{len(KEYS)}.0"
        assert await shown("disconnected_count", child) == "0.0"
        assert await shown("connected_count", child) == "0.0"
        assert float(await shown("backlog", child)) > 0
        stats = await shown_by(east, f"{PATH}/stats")
        assert stats["replication"]["west"]["lastFailure"]
        assert stats["replication"]["west"]["replicationBacklog"] == 2 * len(KEYS)
        assert "lastFailure" not in stats["replication"]["west"]["segments"]["1"]
        await west.start()
        await has(west, written)
        await until(lambda: is_done(east))
    assert await shown("disconnected_count", parent) == "0.0"


async def test_a_broker_that_takes_no_segments_is_named_in_the_statistics(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "segment_replication", False)
    east, _ = pair
    await make(east, 1)
    written: Written = {}
    async with writing(east, written) as writer:
        await writer.write(1)
    await until(lambda: "update its brokers" in failure_of(segments_of(east)[0]))
