"""Clusters that are compared before one is added to the list of a namespace."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.replication.namespace_comparison import (
    TopicCreation,
    creation_in_force,
    creation_of_broker,
)
from tests.unit.broker.admin.conftest import Rest
from tests.unit.broker.replication.conftest import NAMESPACE, Cluster

Pair = tuple[Cluster, Cluster]
COMPARING = f"{NAMESPACE}/replication?compareTopicPartitions=true"
TOPICS = "/admin/v2/persistent/public/default"
BOTH = ["east", "west"]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """East, which knows west, and west; they do not replicate."""
    east, west = Cluster(tmp_path, "east"), Cluster(tmp_path, "west")
    await east.start()
    await west.start()
    await east.ask("PUT", "/admin/v2/clusters/west", west.record)
    await east.ask("POST", "/admin/v2/tenants/public", {"allowedClusters": BOTH})
    yield east, west
    await east.stop()
    await west.stop()


async def made(rest: Rest, name: str, partitions: int, domain: str = "persistent") -> None:
    """Make a topic."""
    kind = f"/admin/v2/{domain}/public/default/{name}"
    if partitions:
        await rest.done("PUT", f"{kind}/partitions", partitions)
    else:
        await rest.done("PUT", kind)


async def test_list_is_set_where_all_topics_have_the_same_partitions(pair: Pair) -> None:
    east, west = pair
    for each in pair:
        await made(each.rest, "a", 2)
        await made(each.rest, "b", 0)
        await made(each.rest, "n", 3, "non-persistent")
    await made(east.rest, "missing-there", 4)
    await made(west.rest, "missing-here", 5)
    await east.ask("POST", COMPARING, BOTH)
    assert await east.rest.get(f"{NAMESPACE}/replication") == BOTH
    # What is in the list is not compared again.
    await west.stop()
    await east.ask("POST", COMPARING, BOTH)
    await west.start()


@pytest.mark.parametrize(
    ("here", "there", "domain"),
    [(2, 3, "persistent"), (0, 2, "persistent"), (2, 0, "persistent"), (2, 3, "non-persistent")],
)
async def test_list_is_refused_where_a_topic_has_other_partitions(
    pair: Pair, here: int, there: int, domain: str
) -> None:
    east, west = pair
    await made(east.rest, "a", here, domain)
    await made(west.rest, "a", there, domain)
    reason = await east.rest.refused(409, "POST", COMPARING, BOTH)
    assert f"default/a has {here} partitions here and {there} in cluster 'west'" in reason
    assert await east.rest.get(f"{NAMESPACE}/replication") == ["east"]
    await east.ask("POST", f"{NAMESPACE}/replication", BOTH)


async def test_list_is_refused_where_topics_are_made_in_another_way(pair: Pair) -> None:
    east, west = pair
    partitioned = {
        "allowAutoTopicCreation": True,
        "topicType": "partitioned",
        "defaultNumPartitions": 4,
    }
    await west.ask("POST", f"{NAMESPACE}/autoTopicCreation", partitioned)
    reason = await east.rest.refused(409, "POST", COMPARING, BOTH)
    assert "autoTopicCreation" in reason
    await east.ask("POST", f"{NAMESPACE}/autoTopicCreation", partitioned)
    await east.ask("POST", COMPARING, BOTH)


async def test_list_is_refused_where_the_namespace_is_missing(pair: Pair) -> None:
    east, _ = pair
    await east.ask("PUT", "/admin/v2/namespaces/public/other")
    path = COMPARING.replace("default", "other")
    assert "no namespace" in await east.rest.refused(409, "POST", path, BOTH)


async def test_list_is_refused_while_the_other_cluster_is_away(pair: Pair) -> None:
    east, west = pair
    await made(east.rest, "a", 2)
    await west.stop()
    assert "west" in await east.rest.refused(503, "POST", COMPARING, BOTH)
    assert await east.rest.get(f"{NAMESPACE}/replication") == ["east"]
    await west.start()


def test_how_topics_are_made_is_read_from_the_settings_of_apache_pulsar_too() -> None:
    made = creation_of_broker(
        {"allowAutoTopicCreationType": "partitioned", "defaultNumPartitions": "7"}
    )
    assert made == TopicCreation("partitioned", 7)
    assert creation_of_broker({}) == TopicCreation("non-partitioned", 1)
    assert creation_in_force({"autoTopicCreationOverride": None}, made) == made
    override = {"autoTopicCreationOverride": {"topicType": "non-partitioned"}}
    assert creation_in_force(override, made) == TopicCreation("non-partitioned", 7)
