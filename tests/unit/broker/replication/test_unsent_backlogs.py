"""Replicated subscriptions where another cluster did not get all that is stored here."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.waiting import until, until_awaited
from tests.unit.broker.replication.conftest import Cluster
from tests.unit.broker.replication.test_replicated_subscription_failover import AWAY_S
from tests.unit.broker.replication.test_replicated_subscriptions import (
    PATH,
    SOON,
    attach,
    consume,
    is_past,
    is_settled,
    newest,
    options,
    published,
    receive,
    rest_of,
    subscription,
    take,
)

Pair = tuple[Cluster, Cluster]
REPLICATOR = f"{PATH}/subscription/pulsar.repl.west"


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """East and west, which take snapshots often; they do not replicate yet."""
    east, west = Cluster(tmp_path, "east", **SOON), Cluster(tmp_path, "west", **SOON)
    await east.start()
    await west.start()
    yield east, west
    await east.stop()
    await west.stop()


async def replicate(*clusters: Cluster) -> None:
    """Let clusters replicate to each other from now on."""
    for each in clusters:
        await each.set_up([other for other in clusters if other is not each])


async def leave_behind(cluster: Cluster, *payloads: bytes) -> None:
    """Store messages that the replicated subscription has not consumed."""
    client, _ = await attach(cluster)
    await client.close()
    await cluster.publish(*payloads)


async def consume_there(east: Cluster, west: Cluster, count: int) -> None:
    """Have the subscription consume in the west what it got, and the east hear of it."""
    copied = await newest(east)
    await until(lambda: east.is_done() and is_settled(east, west))
    client, consumer = await attach(west)
    await take(consumer, count)
    found = subscription(east)
    assert found is not None
    await until(lambda: found.cursor.is_acknowledged(copied), AWAY_S)
    await client.close()


async def test_messages_from_before_a_cluster_was_added_stay_where_they_are(pair: Pair) -> None:
    east, west = pair
    await leave_behind(east, b"0", b"1", b"2")
    await replicate(east, west)
    await until(lambda: "west" in east.replicators())
    await east.publish(b"3", b"4")
    await consume_there(east, west, 2)
    assert await rest_of(east) == [b"0", b"1", b"2"]


async def test_that_holds_after_a_restart_and_for_shared_consumers(pair: Pair) -> None:
    east, west = pair
    await leave_behind(east, b"0", b"1", b"2")
    await replicate(east, west)
    await until(lambda: "west" in east.replicators())
    await east.publish(b"3", b"4")
    await until(east.is_done)
    await east.stop()
    await east.start()
    client, consumer = await attach(east, options(pb.CommandSubscribe.Shared))
    assert len(await receive(consumer, 5)) == 5
    west_client, west_consumer = await attach(west, options(pb.CommandSubscribe.Shared))
    for each in await receive(west_consumer, 2):
        west_consumer.ack(each.message_id)
    copied = await newest(east)
    found = subscription(east)
    assert found is not None
    await until(lambda: found.cursor.is_acknowledged(copied), AWAY_S)
    await client.close()
    await west_client.close()
    assert await rest_of(east) == [b"0", b"1", b"2"]


async def test_subscription_moves_as_a_whole_once_those_are_consumed_here(pair: Pair) -> None:
    east, west = pair
    await leave_behind(east, b"0", b"1", b"2")
    await replicate(east, west)
    await until(lambda: "west" in east.replicators())
    await east.publish(b"3", b"4")
    await consume_there(east, west, 2)
    await consume(east, 3)
    await published(east, 2, 5)
    copied = await newest(east)
    client, consumer = await attach(west)
    await take(consumer, 2)
    await until(lambda: is_past(east, copied), AWAY_S)
    await client.close()
    assert await rest_of(east) == []


@pytest.mark.parametrize("request_", ["skip_all", "skip/10", "expireMessages/1"])
async def test_skipped_messages_of_a_replicator_stay_for_consumers_here(
    pair: Pair, request_: str
) -> None:
    east, west = pair
    await replicate(east, west)
    await east.publish()
    await until(east.is_done)
    await west.stop()
    await until(lambda: not east.replicators()["west"].connected)
    await leave_behind(east, b"0", b"1", b"2")
    cursor = east.replicators()["west"].subscription
    await until(lambda: cursor.backlog >= 3)

    async def is_skipped() -> bool:
        await east.ask("POST", f"{REPLICATOR}/{request_}")
        return cursor.backlog == 0

    await until_awaited(is_skipped)
    # The note outlasts the broker.
    await east.stop()
    await west.start()
    await east.start()
    await east.publish(b"3", b"4")
    await consume_there(east, west, 2)
    assert await rest_of(east) == [b"0", b"1", b"2"]


async def test_subscription_that_is_missing_here_begins_where_the_cluster_was_added(
    pair: Pair,
) -> None:
    east, west = pair
    await east.publish(b"0", b"1", b"2")
    await replicate(east, west)
    await until(lambda: "west" in east.replicators())
    await east.publish(b"3", b"4")
    await until(east.is_done)
    client, consumer = await attach(west)
    copied = await newest(east)
    await take(consumer, 2)
    await until(lambda: is_past(east, copied), AWAY_S)
    await client.close()
    assert await rest_of(east) == []
