"""An ordinary topic whose partitions are at several brokers becomes scalable."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from broker.scalable.migration import UnmanagedClientsAttached
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.raw_client import BrokerError
from tests.support.waiting import until, until_awaited
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.scalable.several import TOPIC, OrderedReader, Writer, hold, take_lead
from tests.unit.broker.scalable.stored import noted_steps, nothing_is_noted, stored_segments

ORDINARY = parse_topic_name("persistent://public/default/t")
PARTITIONS = [str(ORDINARY.partition(index)) for index in range(3)]
MIGRATE = "/admin/v2/scalable/public/default/t/migrate"


@pytest.fixture
async def users() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def three_apart(cluster: Cluster) -> tuple[Node, Node, Node]:
    """Each broker has one partition, with the subscription `s`; the second leads the topic."""
    nodes = [await cluster.add(scalable_consumer_grace_period_s=30) for _ in range(3)]
    await nodes[0].broker.topics.partitioned.create(ORDINARY, len(PARTITIONS))
    for node, partition in zip(nodes, PARTITIONS, strict=True):
        await hold(node, partition)
        client = await node.client()
        await (await client.subscribe(partition, "s")).close()
    await take_lead(nodes[1])
    return nodes[0], nodes[1], nodes[2]


def writer(cluster: Cluster, users: AsyncExitStack) -> Writer:
    made = Writer(cluster, 8, str(ORDINARY))
    users.push_async_callback(made.close)
    return made


async def test_writers_go_on_and_readers_get_each_key_in_order(
    cluster: Cluster, users: AsyncExitStack
) -> None:
    _, b, _ = await three_apart(cluster)
    wrote = writer(cluster, users)
    await until(lambda: sum(wrote.sent.values()) > 50)
    await b.broker.scalable.migrate(TOPIC, force=False)
    await until(lambda: wrote.dag.epoch == 1)
    before = sum(wrote.sent.values())
    await until(lambda: sum(wrote.sent.values()) > before + 50)
    read = OrderedReader(cluster, "r")
    users.push_async_callback(read.close)
    await until(lambda: read.assigned == [3, 4, 5])
    await wrote.stop()
    await until(lambda: read.got.keys() == wrote.sent.keys())
    await until(lambda: all(len(read.got[key]) >= n for key, n in wrote.sent.items()))
    for key, count in wrote.sent.items():
        assert read.got[key] == list(range(count)), key
    assert await noted_steps(cluster.metadata) == []


async def test_a_session_at_any_broker_is_sent_the_layout(cluster: Cluster) -> None:
    a, b, c = await three_apart(cluster)
    sessions = [await (await node.client()).watch_dag(str(ORDINARY)) for node in (a, b, c)]
    assert all(first.dag.epoch == 0 for _, first in sessions)
    await b.broker.scalable.migrate(TOPIC, force=False)
    for session, _ in sessions:
        update = await asyncio.wait_for(session.updates.get(), 5)
        assert update.scalable_topic_update.dag.epoch == 1
        assert update.scalable_topic_update.resolved_topic_name == str(TOPIC)


async def test_a_session_is_sent_the_layout_that_another_request_reads_before_the_watch(
    cluster: Cluster,
) -> None:
    """Such as that of the leader to the owner of a partition, to seal it."""
    _, b, c = await three_apart(cluster)
    session, _ = await (await c.client()).watch_dag(str(ORDINARY))
    c.view.watching.clear()
    await b.broker.scalable.migrate(TOPIC, force=False)
    assert await c.broker.scalable.exists(TOPIC)
    assert (await session.next()).scalable_topic_update.dag.epoch == 1
    c.view.watching.set()


async def test_name_is_not_watched_when_the_last_session_of_an_ordinary_topic_ends(
    cluster: Cluster,
) -> None:
    """Also where idle topics are never unloaded."""
    node = await cluster.add(idle_topic_unload_s=0)
    topics = node.broker.scalable._topics
    client = await node.client()
    first, _ = await client.watch_dag("persistent://public/default/plain")
    await client.watch_dag("persistent://public/default/plain")
    plain = parse_topic_name("topic://public/default/plain")
    assert plain in topics.watched
    client.close_dag(first)
    await client.ping()
    assert plain in topics.watched
    await client.close()
    await until(lambda: plain not in topics.watched)


async def test_a_v4_client_at_any_broker_prevents_it_unless_forced(cluster: Cluster) -> None:
    a, b, c = await three_apart(cluster)
    client = await c.client()
    producer = await client.create_producer(PARTITIONS[2])
    with pytest.raises(UnmanagedClientsAttached, match="producer"):
        await b.broker.scalable.migrate(TOPIC, force=False)
    assert await cluster.rest(a, "POST", MIGRATE) == 409
    assert await cluster.rest(a, "POST", f"{MIGRATE}?force=true") is None
    closed = await client.wait(producer.events.get(), 10)
    assert closed.type == pb.BaseCommand.CLOSE_PRODUCER
    with pytest.raises(BrokerError) as refused:
        await client.create_producer(PARTITIONS[2])
    assert refused.value.code == pb.TopicTerminatedError
    assert await cluster.rest(a, "POST", MIGRATE) == 409, "it is scalable already"


async def test_what_a_killed_leader_had_prepared_is_undone(cluster: Cluster) -> None:
    a, b, c = await three_apart(cluster)
    prepare, killed = b.broker.scalable._segments.prepare, asyncio.Event()

    async def killing(*arguments: object) -> None:
        await prepare(*arguments)  # type: ignore[arg-type]
        await b.kill()
        killed.set()
        await asyncio.Event().wait()

    b.broker.scalable._segments.prepare = killing  # type: ignore[assignment,method-assign]
    work = asyncio.create_task(b.broker.scalable.migrate(TOPIC, force=False))
    await killed.wait()
    await until_awaited(lambda: is_cleared(cluster))
    assert not await a.broker.scalable.exists(TOPIC)
    await (await (await c.client()).create_producer(PARTITIONS[2])).close()
    assert await cluster.rest(a, "POST", MIGRATE) is None
    await until_awaited(lambda: is_finished(cluster))
    work.cancel()


async def is_cleared(cluster: Cluster) -> bool:
    made = await stored_segments(cluster.metadata, TOPIC)
    return await nothing_is_noted(cluster.metadata) and not made


async def is_finished(cluster: Cluster) -> bool:
    made = await stored_segments(cluster.metadata, TOPIC)
    return await nothing_is_noted(cluster.metadata) and len(made) == len(PARTITIONS)


async def test_what_a_killed_leader_had_published_is_finished(cluster: Cluster) -> None:
    a, b, c = await three_apart(cluster)
    b.broker.scalable._reshaper.finish_in_background = (  # type: ignore[method-assign]
        lambda live, step: None
    )
    producer = await (await c.client()).create_producer(PARTITIONS[2])
    await producer.send(b"read by nobody yet")
    await producer.close()
    await b.broker.scalable.migrate(TOPIC, force=False)
    assert await noted_steps(cluster.metadata)
    await b.kill()
    await until_awaited(lambda: is_finished(cluster))
    client = await c.client()
    with pytest.raises(BrokerError) as refused:
        await client.create_producer(PARTITIONS[2])
    assert refused.value.code == pb.TopicTerminatedError
    assert await a.broker.scalable.has_legacy_segments(TOPIC)
