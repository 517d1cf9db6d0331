"""Subscriptions of a scalable topic in two clusters: consumers go on where they stopped."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any, Literal

import pytest

import magnetar
from broker.scalable.subscription_exchange import SubscriptionExchange
from broker.topics.truncation import truncate
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.bounds import set_bound
from tests.support.waiting import until, until_awaited
from tests.unit.broker.replication.conftest import NAMESPACE, Cluster, replicating
from tests.unit.broker.replication.test_scalable_topic_backlogs import publish
from tests.unit.broker.replication.test_scalable_topics import (
    KEYS,
    PATH,
    TOPIC,
    Pair,
    Written,
    active,
    client_of,
    has,
    is_done,
    make,
    merge,
    pair,
    segments_of,
    shown_by,
    split,
    writing,
)

__all__ = ["pair"]

KINDS = ("stream", "queue")
Start = Literal["earliest", "latest"]
PERIOD_MS = 50
NEVER_MS = 10**9


@pytest.fixture
async def quick(tmp_path: Path) -> AsyncIterator[Pair]:
    """East and west, which ask each other often."""
    settings = {"replicated_subscriptions_snapshot_frequency_ms": PERIOD_MS}
    east, west = Cluster(tmp_path, "east", **settings), Cluster(tmp_path, "west", **settings)
    async with replicating(east, west):
        for each in (east, west):
            await each.keep_messages()
        yield east, west


@asynccontextmanager
async def consuming(
    cluster: Cluster, kind: str, *, replicated: bool = True, start: Start = "earliest"
) -> AsyncIterator[magnetar.StreamConsumer[bytes] | magnetar.QueueConsumer[bytes]]:
    async with client_of(cluster) as client:
        make_one = client.stream_consumer if kind == "stream" else client.queue_consumer
        async with make_one(
            TOPIC, "s", initial_position=start, replicate_subscription_state=replicated
        ) as consumer:
            yield consumer


Taken = list[tuple[str, bytes]]


async def take(cluster: Cluster, kind: str, count: int) -> Taken:
    """Consume so many messages, and acknowledge them."""
    taken: Taken = []
    async with consuming(cluster, kind) as consumer:
        while len(taken) < count:
            message = await consumer.receive()
            taken.append((message.key or "", message.data))
            await consumer.ack(message)
    return taken


def messages_of(*written: Written) -> set[tuple[str, bytes]]:
    return {(key, each) for one in written for key, found in one.items() for each in found}


async def backlog(cluster: Cluster, subscription: str = "s") -> int:
    shown: dict[str, Any] = await shown_by(cluster, f"{PATH}/stats")
    found = shown["subscriptions"].get(subscription)
    return -1 if found is None else int(found["msgBacklog"])


async def until_left(cluster: Cluster, count: int) -> None:
    """Return when so many messages are left of the subscription."""

    async def is_so() -> bool:
        return await backlog(cluster) == count

    await until_awaited(is_so)


def exchange_of(cluster: Cluster) -> SubscriptionExchange:
    return cluster.broker.scalable.subscription_exchange


async def until_asked_again(cluster: Cluster) -> None:
    """Return when the other cluster has answered questions that were asked after this call."""
    exchange = exchange_of(cluster)
    before = exchange.questions
    await until(lambda: exchange.questions > before + 1)


def is_asking(cluster: Cluster) -> bool:
    """Whether there is anything that the cluster asks about the topic's subscriptions."""
    return bool(exchange_of(cluster).status(parse_topic_name(TOPIC)))


async def set_replicated(cluster: Cluster) -> None:
    await cluster.ask("POST", f"{PATH}/subscriptions/s/replicatedSubscriptionStatus", True)


async def until_late(cluster: Cluster, names: list[str]) -> None:
    """Return when statistics show these as subscriptions that may lack messages in west."""

    async def is_so() -> bool:
        shown = (await shown_by(cluster, f"{PATH}/stats"))["replicatedSubscriptions"]
        return bool(shown.get("west", {}).get("late", []) == names)

    await until_awaited(is_so)


@pytest.mark.parametrize("kind", KINDS)
async def test_consumer_goes_on_in_the_other_cluster_where_it_stopped(
    quick: Pair, kind: str
) -> None:
    east, west = quick
    await make(east, 2)
    await make(west, 3)
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(2)
        await has(west, written)
        first = await take(east, kind, len(messages_of(written)))
        assert set(first) == messages_of(written)
        await until_left(west, 0)
        before = messages_of(written)
        await writer.write(1)
        await has(west, written)
    news = messages_of(written) - before
    assert sorted(await take(west, kind, len(news))) == sorted(news)
    # And back: what was consumed of its own messages in the other cluster is known here.
    await until_left(east, 0)


async def test_messages_that_are_not_acknowledged_come_in_the_other_cluster(quick: Pair) -> None:
    east, west = quick
    await make(east)
    await make(west)
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(1)
    await has(west, written)
    async with consuming(east, "queue") as consumer:
        received = [await consumer.receive() for _ in messages_of(written)]
        kept = received[5]
        for each in received:
            if each is not kept:
                await consumer.ack(each)
        # Those before it are acknowledged elsewhere too, and those behind it are not.
        await until_left(west, len(received) - 5)
    taken = await take(west, "queue", len(received) - 5)
    assert {(each.key or "", each.data) for each in received[5:]} == set(taken)
    await until_left(east, 0)


async def test_subscriptions_move_while_layouts_change_on_both_sides(quick: Pair) -> None:
    east, west = quick
    await make(east, 1)
    await make(west, 2)
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(1)
        await take(east, "stream", len(messages_of(written)))
        await split(east, 0)
        await merge(west, 0, 1)
        await writer.write(1)
        await has(west, written)
        await until_left(west, len(messages_of(written)) // 2)
        await split(west, (await active(west))[0])
        await writer.write(1)
        await has(west, written)
    count = 2 * len(messages_of(written)) // 3
    taken = await take(west, "stream", count)
    assert set(taken) == {(key, each) for key, found in written.items() for each in found[1:]}
    await until_left(east, 0)


async def test_both_clusters_write_and_either_consumes(quick: Pair) -> None:
    east, west = quick
    await make(east, 2)
    await make(west, 1)
    here: Written = {}
    there: Written = {}
    async with (
        writing(east, here, batching=False) as in_east,
        writing(west, there, batching=False) as in_west,
    ):
        await in_east.write(1)
        await in_west.write(1)
        await has(west, here | there)
        await has(east, here | there)
        every = messages_of(here, there)
        assert set(await take(west, "queue", len(every))) == every
        await until_left(east, 0)
        await until_left(west, 0)
        await in_east.write(1)
        await in_west.write(1)
        await has(west, here | there)
        await has(east, here | there)
        news = messages_of(here, there) - every
        assert set(await take(east, "queue", len(news))) == news
        await until_left(west, 0)


async def test_it_goes_on_after_a_restart_of_either_cluster(quick: Pair) -> None:
    east, west = quick
    await make(east, 2)
    await make(west, 1)
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(1)
    await has(west, written)
    await take(east, "stream", len(messages_of(written)))
    await until_left(west, 0)
    for each in (east, west):
        await each.stop()
        await each.start()
    async with writing(east, written, "again", batching=False) as writer:
        await writer.write(1)
    await has(west, written)
    half = len(messages_of(written)) // 2
    await take(west, "stream", half)
    await until_left(east, 0)
    await until_left(west, 0)


async def test_a_subscription_that_is_there_without_being_replicated_is_left_alone(
    quick: Pair,
) -> None:
    east, west = quick
    await make(east)
    await make(west)
    written: Written = {}
    async with consuming(west, "queue", replicated=False):
        pass
    async with writing(east, written, batching=False) as writer:
        await writer.write(1)
    await has(west, written)
    async with consuming(east, "queue") as consumer:
        count = len(messages_of(written))
        received = [await consumer.receive() for _ in range(count)]
        for each in received[1:]:
            await consumer.ack(each)

        async def is_told() -> bool:
            shown = (await shown_by(east, f"{PATH}/stats"))["replicatedSubscriptions"]
            return bool(shown.get("west", {}).get("notReplicated") == ["s"])

        await until_awaited(is_told)
    assert await backlog(west) == count


@pytest.mark.parametrize("maker", ["the other cluster", "a consumer", "a late consumer"])
async def test_what_a_cluster_has_dropped_is_not_consumed_as_its_late_subscription_tells(
    quick: Pair, maker: str
) -> None:
    east, west = quick
    await make(east)
    await make(west)
    gone: Written = {}
    kept: Written = {}
    async with consuming(east, "queue", replicated=False):
        pass
    async with writing(east, gone, batching=False) as writer:
        await writer.write(1)
    await has(west, gone)
    await truncate(segments_of(west)[0])
    if maker != "the other cluster":
        start: Start = "earliest" if maker == "a consumer" else "latest"
        async with consuming(west, "queue", start=start):
            pass
    await set_replicated(east)
    await until_late(east, ["s"])
    async with writing(east, kept, "again", batching=False) as writer:
        await writer.write(1)
    await has(west, kept)
    assert set(await take(west, "queue", len(messages_of(kept)))) == messages_of(kept)
    await until_asked_again(east)
    assert await backlog(east) == len(messages_of(gone)) + len(messages_of(kept))
    assert set(await take(east, "queue", len(messages_of(gone)))) == messages_of(gone)
    await until_left(east, 0)
    await until_late(east, [])


async def test_a_subscription_that_is_made_for_a_late_one_follows_it(quick: Pair) -> None:
    east, west = quick
    await make(east)
    await make(west)
    earlier: Written = {}
    later: Written = {}
    async with writing(east, earlier, batching=False) as writer:
        await writer.write(1)
    await has(west, earlier)
    await truncate(segments_of(west)[0])
    async with consuming(west, "queue", start="latest"):
        # In east it begins at the first message, and nobody wants any of these.
        await until_left(east, 0)
    async with writing(east, later, "again", batching=False) as writer:
        await writer.write(1)
    await has(west, later)
    await take(west, "queue", len(messages_of(later)))
    await until_left(east, 0)


async def test_a_subscription_without_gaps_stays_so_over_a_restart_and_a_split(
    quick: Pair,
) -> None:
    east, west = quick
    await make(east)
    await make(west)
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(1)
    await has(west, written)
    async with consuming(east, "queue"):
        pass

    def is_noted() -> bool:
        found = segments_of(west)[0].subscriptions.get("s")
        return found is not None and '"clusters":["east"]' in found.cursor.replication_note

    await until(is_noted)
    await split(west, 0)
    await west.stop()
    await west.start()
    # None of it was consumed in east: only what is noted in west tells that none is missing.
    await take(west, "queue", len(messages_of(written)))
    await until_left(east, 0)


@pytest.mark.parametrize(
    "bounds",
    [
        {"REPLICATED_SUBSCRIPTION_ENTRIES": 5},
        {
            "REPLICATED_SUBSCRIPTION_ENTRIES_OF_BROKER": 5,
            "REPLICATED_SUBSCRIPTION_ENTRIES_ASSURED": 2,
        },
    ],
    ids=["of a segment", "of a broker"],
)
async def test_cluster_with_more_copies_than_it_tracks_is_told_until_all_are_acknowledged(
    quick: Pair, bounds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bounds.items():
        set_bound(monkeypatch, name, value)
    east, west = quick
    await make(east, 2)
    await make(west, 3)
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(4)
        await has(west, written)
    await take(east, "queue", len(messages_of(written)))
    await until_left(west, 0)


async def test_segment_reads_on_once_others_of_its_broker_have_made_room(
    quick: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATED_SUBSCRIPTION_ENTRIES_OF_BROKER", 5)
    set_bound(monkeypatch, "REPLICATED_SUBSCRIPTION_ENTRIES_ASSURED", 3)
    set_bound(monkeypatch, "SUBSCRIPTION_IDLE_PERIODS", 2)
    east, west = quick
    await make(east)
    await make(west)
    async with consuming(east, "queue"):
        pass
    room, exchange = east.broker.replications.subscription_entries, exchange_of(east)
    room.held += 5  # by other segments
    stays = pb.MessageMetadata(replicate_to=["__local__"])
    await publish(east, [b"x"] * 3, [stays] * 3)
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(1)
    await has(west, written)
    assert set(await take(west, "queue", len(messages_of(written)))) == messages_of(written)
    await until(lambda: not exchange.status(parse_topic_name(TOPIC)))
    # What was due is done, and nothing happens any more that has the segment read on.
    await asyncio.sleep(4 * PERIOD_MS / 1000)
    assert await backlog(east) == 3 + len(messages_of(written))
    room.held -= 5
    await until_left(east, 3)


async def test_what_a_cluster_has_answered_outlives_its_crash(quick: Pair, tmp_path: Path) -> None:
    east, west = quick
    west.settings["cursor_flush_ms"] = NEVER_MS
    await west.stop()
    await west.start()
    await make(east)
    await make(west)
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        # The first answers are noted with the position, once nothing is missing in west.
        for _ in range(3):
            await writer.write(1)
            await has(west, written)
            await take(east, "queue", len(KEYS))
            await until_left(west, 0)
            # They have nothing more to tell, so that they never ask again.
            await until(lambda: not any(map(is_asking, quick)))
    copytree(tmp_path / "west", tmp_path / "crashed")
    await west.stop()
    rmtree(tmp_path / "west")
    copytree(tmp_path / "crashed", tmp_path / "west")
    await west.start()
    await until_left(west, 0)


@pytest.mark.parametrize("tracked", [5, 100])
async def test_cluster_that_was_away_learns_that_a_segment_was_consumed_and_pruned(
    quick: Pair, tracked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATED_SUBSCRIPTION_ENTRIES", tracked)
    east, west = quick
    nothing = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
    await east.ask("POST", f"{NAMESPACE}/retention", nothing)
    await make(east)
    await make(west)
    async with consuming(east, "queue"):
        pass
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(1)
    await has(west, written)
    await split(east, 0)
    # The west knows that nothing is to be told of the children.
    await until_asked_again(east)
    await until(lambda: is_done(east))
    await west.stop()
    assert len(await take(east, "queue", len(KEYS))) == len(KEYS)
    await east.broker.scalable.prune_all()
    record = await east.broker.scalable.get(parse_topic_name(TOPIC))
    assert sorted(record.layout.segments) == [1, 2]
    await west.start()
    await until_left(west, 0)
    await until(lambda: not is_asking(east))
