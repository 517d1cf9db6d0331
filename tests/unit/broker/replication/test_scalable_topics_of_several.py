"""A scalable topic whose segments are on two brokers, sent to another cluster."""

from pathlib import Path

import magnetar
from magnetar.protocol.names import SegmentName
from tests.support.waiting import until, until_awaited
from tests.unit.broker.placement.cluster import Cluster as Brokers
from tests.unit.broker.placement.cluster import Node
from tests.unit.broker.replication.conftest import NAMESPACE, Cluster
from tests.unit.broker.replication.test_moving_subscriptions import until_left
from tests.unit.broker.replication.test_scalable_topics import TOPIC, Writer, Written, has, make
from tests.unit.broker.scalable.node import TOPIC as NAME
from tests.unit.broker.scalable.several import hold, take_lead

SEGMENTS = (SegmentName(NAME, 0, 0x7FFF, 0), SegmentName(NAME, 0x8000, 0xFFFF, 1))


async def two_brokers(brokers: Brokers, west: Cluster, **settings: object) -> tuple[Node, Node]:
    """The brokers of the east, which replicates to the west."""
    first, second = [await brokers.add(cluster_name="east", **settings) for _ in range(2)]
    await west.keep_messages()
    for method, path, body in (
        ("PUT", "/admin/v2/clusters/west", west.record),
        ("POST", "/admin/v2/tenants/public", {"allowedClusters": ["east", "west"]}),
        ("POST", f"{NAMESPACE}/replication", ["east", "west"]),
    ):
        assert await brokers.rest(first, method, path, body) is None
    await until(lambda: all(each.broker.clusters.get("west") for each in (first, second)))
    return first, second


async def replicate_back(west: Cluster, leader: Node) -> None:
    """Have the west replicate to the east, by the broker that leads the topic there."""
    east = {
        "brokerServiceUrl": f"pulsar://127.0.0.1:{leader.broker.port}",
        "serviceUrl": leader.placement.web_url,
    }
    await west.ask("PUT", "/admin/v2/clusters/east", east)
    await west.ask("POST", "/admin/v2/tenants/public", {"allowedClusters": ["east", "west"]})
    await west.replicate("east", "west")


async def test_children_on_one_broker_wait_for_their_parent_on_another_one(
    cluster: Brokers, tmp_path: Path
) -> None:
    west = Cluster(tmp_path, "west")
    await west.start()
    first, second = await two_brokers(cluster, west)
    parent = SegmentName(NAME, 0, 0xFFFF, 0)
    children = (SegmentName(NAME, 0, 0x7FFF, 1), SegmentName(NAME, 0x8000, 0xFFFF, 2))
    await make(west, 3)
    await first.broker.scalable.create(NAME, segments=1, properties={})
    await take_lead(first)
    await hold(second, str(parent))
    await west.stop()
    written: Written = {}
    async with magnetar.connect(f"pulsar://127.0.0.1:{first.broker.port}") as client:
        async with client.producer(TOPIC) as producer:
            await Writer(client, producer, "east", written).write(5)
        # Without a producer, whose lookups would say who owns the children.
        await first.broker.scalable.split(NAME, 0)
        for child, node in zip(children, (first, second), strict=True):
            await hold(node, str(child))
        async with client.producer(TOPIC) as producer:
            await Writer(client, producer, "east", written).write(5)
            await west.start()
            await has(west, written)
    assert [len(cluster.owners(str(each))) for each in (parent, *children)] == [1, 1, 1]
    assert first.owns(str(children[0]))
    assert second.owns(str(parent))
    await west.stop()


async def test_subscriptions_move_by_a_leader_that_owns_no_segment(
    cluster: Brokers, tmp_path: Path
) -> None:
    quick = {"replicated_subscriptions_snapshot_frequency_ms": 50}
    west = Cluster(tmp_path, "west", **quick)
    await west.start()
    leader, owner = await two_brokers(cluster, west, **quick)
    await replicate_back(west, leader)
    await make(west, 1)
    await leader.broker.scalable.create(NAME, segments=2, properties={})
    await take_lead(leader)
    for segment in SEGMENTS:
        await hold(owner, str(segment))
    written: Written = {}
    async with (
        magnetar.connect(f"pulsar://127.0.0.1:{leader.broker.port}") as here,
        magnetar.connect(f"pulsar://127.0.0.1:{west.broker.port}") as there,
    ):
        for client, name in ((here, "east"), (there, "west")):
            async with client.producer(TOPIC, batching=False) as producer:
                await Writer(client, producer, name, written).write(2)
        await has(west, written)
        count = sum(map(len, written.values()))
        async with here.queue_consumer(
            TOPIC, "s", initial_position="earliest", replicate_subscription_state=True
        ) as consumer:
            for _ in range(count):
                await consumer.ack(await consumer.receive())
        await until_left(west, 0)
        async with there.producer(TOPIC, batching=False) as producer:
            await Writer(there, producer, "west", written).write(1)
        async with there.queue_consumer(
            TOPIC, "s", initial_position="earliest", replicate_subscription_state=True
        ) as consumer:
            for _ in range(sum(map(len, written.values())) - count):
                await consumer.ack(await consumer.receive())

        async def is_known() -> bool:
            segments = [owner.broker.topics.loaded()[str(each)] for each in SEGMENTS]
            arrived = sum(each.ledger.entry_count for each in segments)
            left = sum(each.subscriptions["s"].backlog for each in segments)
            return (arrived, left) == (sum(map(len, written.values())), 0)

        async def arrived() -> bool:
            stored = [owner.broker.topics.loaded()[str(each)] for each in SEGMENTS]
            return sum(each.ledger.entry_count for each in stored) == sum(
                map(len, written.values())
            )

        await until_awaited(is_known)
    assert not leader.owns(str(SEGMENTS[0]))
    await west.stop()
