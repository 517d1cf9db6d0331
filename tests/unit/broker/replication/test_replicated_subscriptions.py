"""Subscriptions that move in several clusters together."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from broker.replication.remote_producer import RemoteProducer
from broker.replication.topic_replication import ReplicatedTopic
from broker.topics.subscription import Subscription
from broker.topics.subscription_markers import SubscriptionUpdate, marker_entry
from broker.topics.topic import Topic
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from magnetar.protocol.message import parse_metadata
from magnetar.wire.connection import Connection
from storage.managed_ledger.types import Entry
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.child_process import free_port
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import RawClient
from tests.support.raw_handles import Delivery, RawConsumer
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import NAMESPACE, TOPIC, Cluster, replicating

Pair = tuple[Cluster, Cluster]
PATH = "/admin/v2/persistent/public/default/t"
STATUS = f"{PATH}/subscription/s/replicatedSubscriptionStatus"
SOON: dict[str, object] = {"replicated_subscriptions_snapshot_frequency_ms": 20}


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """East and west, which take snapshots often."""
    east, west = Cluster(tmp_path, "east", **SOON), Cluster(tmp_path, "west", **SOON)
    async with replicating(east, west):
        yield east, west


def options(
    kind: pb.CommandSubscribe.SubType = pb.CommandSubscribe.Exclusive, *, replicated: bool = True
) -> pb.CommandSubscribe:
    """Of a consumer from the first message on."""
    return pb.CommandSubscribe(
        sub_type=kind,
        initial_position=pb.CommandSubscribe.Earliest,
        replicate_subscription_state=replicated,
    )


async def attach(
    cluster: Cluster, settings: pb.CommandSubscribe | None = None
) -> tuple[RawClient, RawConsumer]:
    """A consumer of the subscription `s`."""
    client = await cluster.client()
    return client, await client.subscribe(TOPIC, "s", settings or options(), permits=1000)


async def receive(consumer: RawConsumer, count: int) -> list[Delivery]:
    """The next messages."""
    return [await consumer.receive() for _ in range(count)]


async def take(consumer: RawConsumer, count: int) -> None:
    """Have a consumer acknowledge its next messages, cumulatively."""
    received = await receive(consumer, count)
    consumer.ack(received[-1].message_id, cumulative=True)


def subscription(cluster: Cluster, name: str = "s") -> Subscription | None:
    """That of the loaded topic."""
    topic = cluster.broker.topics.loaded().get(TOPIC)
    return None if topic is None else topic.subscriptions.get(name)


def is_past(cluster: Cluster, position: Position, name: str = "s") -> bool:
    """Whether the subscription has consumed everything up to this position of its cluster."""
    found = subscription(cluster, name)
    return found is not None and found.cursor.mark_delete >= position


async def newest(cluster: Cluster) -> Position:
    """The position of the newest message, behind which only markers are."""
    entry = await cluster.broker.topics.loaded()[TOPIC].last_message.entry()
    assert entry is not None
    return entry.position


def end(cluster: Cluster) -> Position:
    """The last position of the topic, be it of a marker."""
    return cluster.broker.topics.loaded()[TOPIC].ledger.last_confirmed


def is_settled(*clusters: Cluster) -> bool:
    """Whether the newest snapshots include all messages, and subscriptions are moved."""
    topics = [each.broker.topics.loaded()[TOPIC] for each in clusters]
    return all(
        isinstance(each.replication, ReplicatedTopic) and each.replication.subscriptions.quiet
        for each in topics
    )


def is_told(here: Cluster, there: Cluster) -> bool:
    """Whether the other cluster has, and has obeyed, the markers of what was consumed here."""
    found = subscription(here)
    consumed = found is not None and found.cursor.mark_delete == end(here)
    return consumed and is_settled(here, there) and here.is_done() and there.is_done()


async def rest_of(cluster: Cluster) -> list[bytes]:
    """What a consumer gets that goes on in this cluster, up to the newest message."""
    client, consumer = await attach(cluster)
    await cluster.publish(b"end")
    found: list[bytes] = []
    while not found or found[-1] != b"end":
        found.append((await consumer.receive()).payload)
    await client.close()
    return found[:-1]


async def consume(cluster: Cluster, count: int) -> None:
    """Have the subscription consume its next messages in a cluster, and close the consumer."""
    client, consumer = await attach(cluster)
    received = await receive(consumer, count)
    await consumer.ack_answered(received[-1].message_id, cumulative=True)
    await client.close()


async def test_consumer_goes_on_in_the_other_cluster_where_it_stopped(pair: Pair) -> None:
    east, west = pair
    client, consumer = await attach(east)
    await east.publish(*(b"%d" % number for number in range(10)))
    await until(east.is_done)
    copied = await newest(west)
    await take(consumer, 10)
    await until(lambda: is_past(west, copied))
    await client.close()
    assert await rest_of(west) == []
    for cluster in pair:
        shown = (await cluster.stats())["subscriptions"]["s"]
        assert shown["isReplicated"] is True


async def published(cluster: Cluster, count: int, first: int = 0) -> list[bytes]:
    """Store messages, wait until the other clusters have them, and return their payloads."""
    payloads = [b"%d" % number for number in range(first, first + count)]
    await cluster.publish(*payloads)
    await until(cluster.is_done)
    return payloads


async def test_other_cluster_is_behind_by_a_snapshot_at_most_and_never_ahead(pair: Pair) -> None:
    east, west = pair
    client, consumer = await attach(east)
    payloads: list[bytes] = []
    copied: list[Position] = []
    for number in range(5):
        payloads += await published(east, 4, 4 * number)
        copied.append(await newest(west))
        await until(lambda: is_settled(east, west))
    received = await receive(consumer, 20)
    # In the middle of what came between two snapshots.
    consumer.ack(received[9].message_id, cumulative=True)
    await until(lambda: is_past(west, copied[1]))
    await client.close()
    left = await rest_of(west)
    assert left == payloads[-len(left) :]
    assert 10 <= len(left) <= 12


async def test_message_that_is_not_acknowledged_comes_again_with_all_behind_it(pair: Pair) -> None:
    east, west = pair
    shared = options(pb.CommandSubscribe.Shared)
    client, consumer = await attach(east, shared)
    await published(east, 5)
    first = await newest(west)
    received = await receive(consumer, 5)
    consumer.ack(*(each.message_id for each in received))
    await until(lambda: is_past(west, first))
    behind = await published(east, 5, 5)
    received = await receive(consumer, 5)
    consumer.ack(*(each.message_id for each in received[1:]))
    found = subscription(east)
    assert found is not None
    await until(lambda: found.unacked == 1 and is_settled(east, west))
    await client.close()
    client, consumer = await attach(west, shared)
    assert [each.payload for each in await receive(consumer, 5)] == behind
    await client.close()


async def test_subscription_goes_there_and_back(pair: Pair) -> None:
    east, west = pair
    client, _ = await attach(east)
    await client.close()
    await published(east, 3)
    copied = await newest(west)
    await consume(east, 3)
    client, consumer = await attach(east)
    await until(lambda: is_past(west, copied))
    await client.close()
    await published(west, 3, 3)
    there = await newest(east)
    client, consumer = await attach(west)
    received = await receive(consumer, 3)
    assert [each.payload for each in received] == [b"3", b"4", b"5"]
    consumer.ack(received[-1].message_id, cumulative=True)
    await until(lambda: is_past(east, there))
    await client.close()
    assert await rest_of(east) == []


async def test_subscription_with_consumers_there_is_moved_too(pair: Pair) -> None:
    east, west = pair
    shared = options(pb.CommandSubscribe.Shared)
    client, consumer = await attach(east, shared)
    other, waiting = await attach(west, shared)
    await published(east, 5)
    copied = await newest(west)
    await receive(waiting, 5)
    found = subscription(west)
    assert found is not None
    assert found.unacked == 5
    received = await receive(consumer, 5)
    consumer.ack(*(each.message_id for each in received))
    await until(lambda: is_past(west, copied))
    assert found.unacked == 0
    await client.close()
    await other.close()


async def test_nothing_is_written_while_no_message_comes(pair: Pair) -> None:
    east, west = pair
    client, consumer = await attach(east)
    await published(east, 1)
    copied = await newest(west)
    (received,) = await receive(consumer, 1)
    consumer.ack(received.message_id)
    await until(lambda: is_past(west, copied))
    await until(lambda: is_settled(east, west))
    ledgers = [cluster.broker.topics.loaded()[TOPIC].ledger for cluster in pair]
    # A snapshot of each cluster: requests, answers and the snapshot itself; and an update.
    assert all(each.entry_count <= 15 for each in ledgers)
    await client.close()


async def test_no_timer_runs_while_a_cluster_is_away_and_a_snapshot_is_taken_once_it_is_back(
    pair: Pair,
) -> None:
    east, west = pair
    client, consumer = await attach(east)
    await east.publish(b"0")
    await until(east.is_done)
    await west.stop()
    await until(lambda: not east.replicators()["west"].connected)
    await east.publish(b"1")
    await until(lambda: is_settled(east))
    await west.start()
    await until(east.is_done)
    copied = await newest(west)
    await take(consumer, 2)
    await until(lambda: is_past(west, copied))
    await client.close()


async def test_snapshot_that_waited_for_a_cluster_is_taken_without_it_once_the_list_is(
    pair: Pair,
) -> None:
    east, west = pair
    away = {"brokerServiceUrl": f"pulsar://127.0.0.1:{free_port()}"}
    await east.ask("PUT", "/admin/v2/clusters/away", away)
    names = ["away", "east", "west"]
    await east.ask("POST", "/admin/v2/tenants/public", {"allowedClusters": names})
    await east.replicate(*names)
    client, consumer = await attach(east)
    await east.publish(b"0")
    await until(lambda: "away" in east.replicators())
    await until(lambda: not east.replicators()["west"].subscription.backlog)
    copied = await newest(west)
    await take(consumer, 1)
    await until(lambda: is_settled(east))
    assert not is_past(west, copied)
    await east.replicate("east", "west")
    await until(lambda: is_past(west, copied))
    await client.close()


async def test_snapshot_that_was_due_while_a_replicator_left_is_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving, may_leave, leaves = list[str](), asyncio.Event(), RemoteProducer.leave

    async def leave(producer: RemoteProducer, connection: Connection) -> None:
        leaving.append(producer.cluster)
        if producer.cluster == "west":
            await may_leave.wait()
        await leaves(producer, connection)

    monkeypatch.setattr(RemoteProducer, "leave", leave)
    set_bound(monkeypatch, "REPLICATOR_IDLE_S", 0.2)
    east, west = pair
    client, consumer = await attach(east)
    await until(lambda: "west" in leaving and is_settled(east))
    # The replicator has nothing to send, as it is from there.
    before = end(east)
    await west.publish(b"0")
    await until(lambda: end(east) > before and east.is_done())
    await until(lambda: is_settled(east))
    may_leave.set()
    copied = await newest(west)
    await take(consumer, 1)
    await until(lambda: is_past(west, copied))
    await client.close()


async def test_subscription_of_a_name_that_is_not_replicated_there_is_left_alone(
    pair: Pair,
) -> None:
    east, west = pair
    other, _ = await attach(west, options(replicated=False))
    await other.close()
    client, consumer = await attach(east)
    payloads = await published(east, 5)
    await take(consumer, 5)
    second = await client.subscribe(TOPIC, "s2", options(), permits=1000)
    copied = await newest(west)
    await take(second, 5)
    await until(lambda: is_past(west, copied, "s2"))
    assert not is_past(west, copied)
    other, consumer = await attach(west, options(replicated=False))
    assert [each.payload for each in await receive(consumer, 5)] == payloads
    await client.close()
    await other.close()


async def test_subscription_that_is_replicated_no_longer_stays_where_it_is(pair: Pair) -> None:
    east, west = pair
    client, consumer = await attach(east)
    await published(east, 5)
    first = await newest(west)
    await take(consumer, 5)
    await until(lambda: is_past(west, first))
    await east.ask("POST", STATUS, False)
    second = await client.subscribe(TOPIC, "s2", options(), permits=1000)
    behind = await published(east, 5, 5)
    copied = await newest(west)
    for each, count in ((consumer, 5), (second, 10)):
        await take(each, count)
    await until(lambda: is_past(west, copied, "s2"))
    await client.close()
    assert await rest_of(west) == behind


async def test_subscription_is_replicated_from_a_request_on(pair: Pair) -> None:
    east, west = pair
    client, consumer = await attach(east, options(replicated=False))
    await published(east, 5)
    copied = await newest(west)
    await take(consumer, 5)
    await east.ask("POST", STATUS, True)
    await until(lambda: is_past(west, copied))
    shown = await east.rest.get(STATUS)
    assert shown == {TOPIC: True}
    await client.close()


async def test_metrics_show_snapshots(pair: Pair) -> None:
    east, west = pair
    client, _ = await attach(east)
    await published(east, 1)
    await until(lambda: east.broker.replications.snapshots.completed)
    await until(lambda: is_settled(east, west))
    text = await metrics_text(east.broker)
    name, labels = "pulsar_replicated_subscriptions", '{cluster="east"}'
    assert f"{name}_pending_snapshots{labels} 0.0\n" in text
    assert f"{name}_timedout_snapshots_total{labels} 0.0\n" in text
    completed = east.broker.replications.snapshots.completed
    assert f"{name}_snapshot_ms_count{labels} {completed:.1f}\n" in text
    assert f"{name}_snapshot_ms_sum{labels} " in text
    await client.close()


async def test_subscription_that_may_not_be_made_there_is_made_once_it_may(pair: Pair) -> None:
    east, west = pair
    path = f"{NAMESPACE}/maxSubscriptionsPerTopic"
    await west.ask("POST", path, 1)
    other = await west.client()
    await other.subscribe(TOPIC, "own", options(replicated=False))
    client, consumer = await attach(east)
    await published(east, 3)
    await take(consumer, 3)
    await until(lambda: is_told(east, west))
    assert subscription(west) is None
    await west.ask("DELETE", path)
    await published(east, 1, 3)
    copied = await newest(west)
    (last,) = await receive(consumer, 1)
    consumer.ack(last.message_id)
    await until(lambda: is_past(west, copied))
    await client.close()
    await other.close()


async def test_subscription_is_made_there_once_the_store_works_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    failures: list[str] = []

    async def fail(_: Topic, name: str, *__: object, **___: object) -> Subscription:
        failures.append(name)
        raise MetadataError("The store does not answer.")

    client, consumer = await attach(east)
    await published(east, 3)
    copied = await newest(west)
    with monkeypatch.context() as broken:
        broken.setattr(Topic, "create_subscription", fail)
        await take(consumer, 3)
        await until(lambda: failures)
        await until(east.is_done)
    # Nothing is published any more, and so no other snapshot is taken.
    await until(lambda: is_past(west, copied))
    await client.close()


async def test_more_subscriptions_than_may_wait_to_be_moved_are_all_moved(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "SUBSCRIPTION_UPDATES_WAITING", 1)
    east, west = pair
    moving, moves, consumed = list[str](), asyncio.Event(), Subscription.consumed_elsewhere

    async def wait(subscription: Subscription, position: Position, began: Position) -> None:
        moving.append(subscription.name)
        await moves.wait()
        await consumed(subscription, position, began)

    monkeypatch.setattr(Subscription, "consumed_elsewhere", wait)
    client, names = await east.client(), [f"s{number}" for number in range(4)]
    consumers = [await client.subscribe(TOPIC, each, options(), permits=1000) for each in names]
    await published(east, 3)
    copied = await newest(west)
    for consumer in consumers:
        await take(consumer, 3)
    await until(lambda: moving and east.is_done())
    moves.set()
    # Nothing is published any more, and so no other snapshot is taken.
    await until(lambda: all(is_past(west, copied, each) for each in names))
    await client.close()


async def test_updates_of_one_subscription_that_wait_have_a_bound(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "SUBSCRIPTION_UPDATES_WAITING", 2)
    east, _ = pair
    client, _ = await attach(east)
    moves, done = asyncio.Event(), list[int]()

    async def wait(subscription: Subscription, position: Position, began: Position) -> None:
        await moves.wait()

    monkeypatch.setattr(Subscription, "consumed_elsewhere", wait)
    replication = east.broker.topics.loaded()[TOPIC].replication
    assert isinstance(replication, ReplicatedTopic)
    update = SubscriptionUpdate("s", {"east": Position(0, 0)})
    data = marker_entry(update, 1)
    for number in range(5):
        entry = Entry(Position(0, number), data)
        replication.subscriptions.received(
            "west", entry, parse_metadata(data), partial(done.append, number)
        )
        await asyncio.sleep(0)
    assert done == [3, 4]
    moves.set()
    await until(lambda: sorted(done) == [0, 1, 2, 3, 4])
    await client.close()
