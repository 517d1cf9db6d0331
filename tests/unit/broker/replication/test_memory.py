"""A replicated topic that is closed frees its memory at once."""

import asyncio

from magnetar.protocol.names import parse_topic_name
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import TOPIC, Cluster
from tests.unit.broker.topics.test_topic_memory import unreachable_objects

Pair = tuple[Cluster, Cluster]


async def test_closed_topic_that_was_replicated_is_freed_at_once(pair: Pair) -> None:
    east, west = pair
    await west.messages(0)
    with unreachable_objects() as found:
        for _ in range(3):
            await east.publish(b"0")
            await until(east.is_done)
            await east.broker.topics.unload(parse_topic_name(TOPIC))
        await asyncio.sleep(0.1)
    assert found == []


async def test_closed_topic_whose_other_cluster_is_away_is_freed_at_once(pair: Pair) -> None:
    east, west = pair
    await west.stop()
    with unreachable_objects() as found:
        await east.publish(b"0")
        await until(lambda: bool(east.replicators()["west"].failure))
        await east.broker.topics.unload(parse_topic_name(TOPIC))
        await asyncio.sleep(0.1)
    assert found == []


async def test_closed_topic_whose_other_cluster_is_unknown_is_freed_at_once(pair: Pair) -> None:
    east, _ = pair
    await east.broker.metadata.delete("/admin/clusters/west")
    await until(lambda: east.broker.clusters.get("west") is None)
    with unreachable_objects() as found:
        await east.publish(b"0")
        assert "no cluster" in (await east.stats())["replication"]["west"]["lastFailure"]
        await east.broker.topics.unload(parse_topic_name(TOPIC))
        await asyncio.sleep(0.1)
    assert found == []
