"""Lists of clusters of tenants, namespaces and topics over REST, and which of them are in force."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.policies.applied_policies import AppliedPolicies
from broker.policies.message_rate import MessageRate
from config.bounds import MAX_CLUSTERS
from magnetar.protocol.names import parse_topic_name, segment_name
from tests.support.embedded_broker import running
from tests.support.waiting import until
from tests.unit.broker.admin.conftest import Rest, asking_broker

CLUSTERS = "/admin/v2/clusters"
TENANTS = "/admin/v2/tenants"
NAMESPACES = "/admin/v2/namespaces"
OF_NAMESPACE = f"{NAMESPACES}/t/n/replication"
ALLOWED = f"{NAMESPACES}/t/n/allowedClusters"
TOPIC = "/admin/v2/persistent/t/n/x"
OF_TOPIC = f"{TOPIC}/replication"
BOTH = ["east", "standalone"]
ALL = ["east", "south", "standalone"]
NAME = parse_topic_name("persistent://t/n/x")
SCALABLE = "/admin/v2/scalable/t/n/s"
SEGMENT = parse_topic_name("segment://t/n/s/0000-ffff-0")
KEY_HASH = "replicationKeyHash"
RATE = {"dispatchThrottlingRateInMsg": 10, "relativeToPublishRate": False}


class Replicated:
    """A broker that knows two other clusters, and a tenant that may use them."""

    def __init__(self, broker: Broker, rest: Rest) -> None:
        self.broker = broker
        self.rest = rest

    async def applied(self) -> AppliedPolicies:
        return await self.broker.policies.require_of(NAME)

    async def clusters(self) -> set[str]:
        return set((await self.applied()).replication_clusters)


async def register(rest: Rest) -> None:
    for name in ("east", "south"):
        data = {"brokerServiceUrl": f"pulsar://{name}:6650"}
        await rest.done("PUT", f"{CLUSTERS}/{name}", data)


@pytest.fixture
async def replicated(tmp_path: Path) -> AsyncIterator[Replicated]:
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        await register(rest)
        await rest.done("PUT", f"{TENANTS}/t", {"allowedClusters": ALL})
        await rest.done("PUT", f"{NAMESPACES}/t/n")
        await rest.done("PUT", TOPIC)
        yield Replicated(broker, rest)


# Tenants


async def test_a_tenant_may_use_clusters_that_exist_and_always_this_one(
    replicated: Replicated,
) -> None:
    rest, path = replicated.rest, f"{TENANTS}/u"
    reason = await rest.refused(412, "PUT", path, {"allowedClusters": ["standalone", "north"]})
    assert "north" in reason
    assert "'standalone'" in await rest.refused(412, "PUT", path, {"allowedClusters": ["east"]})
    await rest.done("PUT", path, {"allowedClusters": ["standalone", "east", "east"]})
    assert await rest.get(path) == {"adminRoles": [], "allowedClusters": BOTH}


async def test_a_tenant_keeps_the_clusters_that_its_namespaces_and_topics_name(
    replicated: Replicated,
) -> None:
    rest, path = replicated.rest, f"{TENANTS}/t"
    alone = {"allowedClusters": ["standalone"]}
    await rest.done("POST", OF_NAMESPACE, BOTH)
    assert "t/n names" in await rest.refused(409, "POST", path, alone)
    await rest.done("POST", OF_NAMESPACE, ["standalone"])
    await rest.done("POST", OF_TOPIC, BOTH)
    assert "topic x of t/n" in await rest.refused(409, "POST", path, alone)
    await rest.done("POST", path, {"allowedClusters": BOTH})
    await rest.done("DELETE", OF_TOPIC)
    await rest.done("POST", path, alone)
    await rest.refused(404, "POST", f"{TENANTS}/none", alone)


# Namespaces


async def test_the_list_of_a_namespace_is_in_force_for_its_topics(replicated: Replicated) -> None:
    rest = replicated.rest
    assert await replicated.clusters() == set()
    await rest.done("POST", f"{OF_NAMESPACE}?compareTopicPartitions=false", BOTH[::-1])
    assert await rest.get(OF_NAMESPACE) == BOTH
    assert await rest.get(f"{OF_TOPIC}?applied=true") == BOTH
    assert await replicated.clusters() == set(BOTH)
    shown = await rest.get(f"{NAMESPACES}/t/n")
    assert isinstance(shown, dict)
    assert shown["replication_clusters"] == BOTH
    await rest.done("POST", OF_NAMESPACE, ["standalone"])
    assert await replicated.clusters() == set()


async def test_a_change_of_the_list_is_reported_to_the_broker(replicated: Replicated) -> None:
    changes: list[tuple[str, str | None]] = []
    await replicated.applied()
    replicated.broker.policies.on_change(
        lambda namespace, name: changes.append((str(namespace), name))
    )
    await replicated.rest.done("POST", OF_NAMESPACE, BOTH)
    await until(lambda: ("t/n", None) in changes)
    await replicated.rest.done("POST", OF_TOPIC, ["standalone"])
    await until(lambda: ("t/n", "x") in changes)


async def test_a_list_that_a_namespace_cannot_have_is_refused(replicated: Replicated) -> None:
    rest = replicated.rest
    assert 'is empty: send ["standalone"]' in await rest.refused(412, "POST", OF_NAMESPACE, [])
    assert "list of names" in await rest.refused(412, "POST", OF_NAMESPACE, [1])
    assert "list of names" in await rest.refused(412, "POST", OF_NAMESPACE)
    many = [f"c{number}" for number in range(MAX_CLUSTERS + 2)]
    assert f"{len(many)} names" in await rest.refused(412, "POST", OF_NAMESPACE, many)
    assert "north" in await rest.refused(403, "POST", OF_NAMESPACE, ["north", "standalone"])
    assert "lacks 'standalone'" in await rest.refused(412, "POST", OF_NAMESPACE, ["east"])
    comparing = f"{OF_NAMESPACE}?compareTopicPartitions=true"
    assert "serviceUrl" in await rest.refused(503, "POST", comparing, BOTH)
    await rest.done("PUT", f"{TENANTS}/u")
    await rest.done("PUT", f"{NAMESPACES}/u/n")
    reason = await rest.refused(403, "POST", f"{NAMESPACES}/u/n/replication", BOTH)
    assert "not allowed to the tenant u" in reason
    await rest.done("POST", f"{CLUSTERS}/east/peers", ["south"])
    assert "peers" in await rest.refused(412, "POST", OF_NAMESPACE, ALL)
    assert await rest.get(OF_NAMESPACE) == ["standalone"]
    await rest.done("POST", f"{CLUSTERS}/east/peers", ["standalone"])
    assert "peers" in await rest.refused(412, "POST", OF_NAMESPACE, BOTH)


async def test_a_namespace_limits_its_list_to_some_clusters_of_the_tenant(
    replicated: Replicated,
) -> None:
    rest = replicated.rest
    assert await rest.get(ALLOWED) == []
    await rest.done("POST", OF_NAMESPACE, BOTH)
    assert "lacks east" in await rest.refused(400, "POST", ALLOWED, ["south", "standalone"])
    await rest.done("POST", ALLOWED, BOTH)
    assert await rest.get(ALLOWED) == BOTH
    assert "names south" in await rest.refused(400, "POST", OF_NAMESPACE, ALL)
    assert "names north" in await rest.refused(403, "POST", ALLOWED, [*BOTH, "north"])
    await rest.done("PUT", f"{TENANTS}/u", {"allowedClusters": ["standalone"]})
    await rest.done("PUT", f"{NAMESPACES}/u/n")
    await rest.refused(403, "POST", f"{NAMESPACES}/u/n/allowedClusters", BOTH)
    await rest.done("POST", ALLOWED, ALL)
    await rest.done("POST", OF_NAMESPACE, ALL)


async def test_a_new_namespace_comes_with_lists(replicated: Replicated) -> None:
    rest, path = replicated.rest, f"{NAMESPACES}/t/m"
    both: dict[str, object] = {"replication_clusters": BOTH, "allowed_clusters": ALL}
    for status, wrong in (
        (412, {"replication_clusters": "east"}),
        (412, {"replication_clusters": ["east"]}),
        (403, {"replication_clusters": ["standalone", "north"]}),
        (403, {"allowed_clusters": ["standalone", "north"]}),
        (400, both | {"allowed_clusters": ["south", "standalone"]}),
        (400, {"allowed_clusters": ["east"]}),
    ):
        await rest.refused(status, "PUT", path, wrong)
    await rest.refused(404, "GET", path)
    await rest.done("PUT", path, both)
    assert await rest.get(f"{path}/replication") == BOTH
    assert await rest.get(f"{path}/allowedClusters") == ALL


# Topics


async def test_the_list_of_a_topic_comes_before_that_of_its_namespace(
    replicated: Replicated,
) -> None:
    rest = replicated.rest
    assert await rest.call("GET", OF_TOPIC) == (204, "")
    assert await rest.get(f"{OF_TOPIC}?applied=true") == ["standalone"]
    await rest.done("POST", OF_TOPIC, ["standalone", "south"])
    assert await rest.get(OF_TOPIC) == ["south", "standalone"]
    assert await replicated.clusters() == {"south", "standalone"}
    await rest.done("POST", OF_NAMESPACE, BOTH)
    assert await replicated.clusters() == {"south", "standalone"}
    await rest.done("POST", OF_TOPIC, ["standalone"])
    assert await replicated.clusters() == set()
    await rest.done("DELETE", OF_TOPIC)
    assert await rest.call("GET", OF_TOPIC) == (204, "")
    assert await replicated.clusters() == set(BOTH)


async def test_a_list_that_a_topic_cannot_have_is_refused(replicated: Replicated) -> None:
    rest = replicated.rest
    for wrong in ([], "east", [1], None):
        assert "list of names" in await rest.refused(412, "POST", OF_TOPIC, wrong)
    assert "lacks 'standalone'" in await rest.refused(412, "POST", OF_TOPIC, ["east"])
    assert "north" in await rest.refused(403, "POST", OF_TOPIC, ["north", "standalone"])
    await rest.done("POST", f"{CLUSTERS}/east/peers", ["south"])
    assert "peers" in await rest.refused(412, "POST", OF_TOPIC, ALL)
    await rest.done("PUT", f"{TENANTS}/u")
    await rest.done("PUT", f"{NAMESPACES}/u/n")
    await rest.done("PUT", "/admin/v2/persistent/u/n/x")
    await rest.refused(403, "POST", "/admin/v2/persistent/u/n/x/replication", BOTH)
    await rest.refused(404, "POST", "/admin/v2/persistent/t/n/none/replication", BOTH)
    assert await rest.call("GET", OF_TOPIC) == (204, "")


async def test_a_global_list_of_a_topic_stays_within_that_of_its_namespace(
    replicated: Replicated,
) -> None:
    rest, path = replicated.rest, f"{OF_TOPIC}?isGlobal=true"
    assert "at least two" in await rest.refused(412, "POST", path, ["standalone"])
    await rest.done("POST", OF_NAMESPACE, BOTH)
    assert "namespace's list" in await rest.refused(412, "POST", path, ALL)
    assert "lacks 'standalone'" in await rest.refused(412, "POST", path, ["east"])
    await rest.done("POST", path, ["standalone"])
    assert await rest.get(path) == ["standalone"]
    assert await rest.call("GET", OF_TOPIC) == (204, "")
    assert await replicated.clusters() == set()
    await rest.done("POST", OF_TOPIC, BOTH)
    assert await replicated.clusters() == set(BOTH)
    await rest.done("DELETE", path)
    assert await rest.call("GET", path) == (204, "")


async def test_the_rate_of_replicators_is_in_force(replicated: Replicated) -> None:
    rest, of_namespace = replicated.rest, f"{NAMESPACES}/t/n/replicatorDispatchRate"
    assert (await replicated.applied()).replicator_dispatch_rate is None
    await rest.done("POST", of_namespace, RATE)
    assert (await replicated.applied()).replicator_dispatch_rate == MessageRate(10, 0)
    own = {"dispatchThrottlingRateInByte": 7, "ratePeriodInSecond": 2}
    await rest.done("POST", f"{TOPIC}/replicatorDispatchRate", own)
    assert (await replicated.applied()).replicator_dispatch_rate == MessageRate(0, 7, 2)
    await rest.done("PUT", SCALABLE)
    await rest.done("POST", "/admin/v2/persistent/t/n/s/replicatorDispatchRate", RATE)
    of_scalable = await replicated.broker.policies.require_of(SEGMENT)
    assert of_scalable.replicator_dispatch_rate == MessageRate(10, 0)


async def test_a_scalable_topic_has_a_list_of_its_own(replicated: Replicated) -> None:
    rest, policies = replicated.rest, replicated.broker.policies
    path = "/admin/v2/persistent/t/n/s/replication"
    await rest.refused(404, "POST", path, BOTH)
    await rest.done("PUT", SCALABLE)
    await rest.done("POST", OF_NAMESPACE, BOTH)
    assert (await policies.require_of(SEGMENT)).replication_clusters == set(BOTH)
    assert await rest.call("GET", path) == (204, "")
    assert await rest.get(f"{path}?applied=true") == BOTH
    assert "lacks 'standalone'" in await rest.refused(412, "POST", path, ["east"])
    await rest.done("POST", path, ["south", "standalone"])
    assert await rest.get(path) == ["south", "standalone"]
    assert (await policies.require_of(SEGMENT)).replication_clusters == {"south", "standalone"}
    assert await replicated.clusters() == set(BOTH), "the list is of that topic alone"
    await rest.done("POST", path, ["standalone"])
    assert (await policies.require_of(SEGMENT)).replication_clusters == set()
    await rest.done("DELETE", path)
    assert (await policies.require_of(SEGMENT)).replication_clusters == set(BOTH)


async def test_the_half_of_the_hash_is_set_while_a_topic_is_not_replicated(
    replicated: Replicated,
) -> None:
    rest, policies, path = replicated.rest, replicated.broker.policies, f"{SCALABLE}/{KEY_HASH}"
    await rest.refused(404, "POST", path, "low")
    await rest.done("PUT", SCALABLE)
    assert (await policies.require_of(SEGMENT)).replication_key_hash == "high"
    assert await rest.call("GET", path) == (204, "")
    assert await rest.get(f"{path}?applied=true") == "high"
    wrong: object
    for wrong in ("middle", 1, None, ["low"], {}):
        assert "high or low" in await rest.refused(412, "POST", path, wrong)
    await rest.done("POST", path, "low")
    assert await rest.get(path) == "low"
    assert (await policies.require_of(SEGMENT)).replication_key_hash == "low"
    await rest.done("POST", OF_NAMESPACE, BOTH)
    assert "list of clusters" in await rest.refused(412, "POST", path, "high")
    assert "list of clusters" in await rest.refused(412, "DELETE", path)
    await rest.done("POST", OF_NAMESPACE, ["standalone"])
    await rest.done("DELETE", path)
    assert (await policies.require_of(SEGMENT)).replication_key_hash == "high"
    await rest.refused(404, "GET", f"/admin/v2/scalable/t/n/x/{KEY_HASH}")


async def test_a_topic_that_was_replicated_gets_another_incarnation(replicated: Replicated) -> None:
    rest, scalable = replicated.rest, replicated.broker.scalable
    path = f"{SCALABLE}/replication/incarnation"
    await rest.refused(404, "POST", path)
    await rest.done("PUT", SCALABLE)
    await rest.done("POST", path)
    topic = segment_name(SEGMENT).parent
    assert (await scalable.get(topic)).incarnation is None, "no other cluster knows it"
    first = (await scalable.replicated.read(segment_name(SEGMENT))).incarnation
    await rest.done("POST", path)
    second = (await scalable.get(topic)).incarnation
    assert second not in (None, first)
    # What other clusters have is known by hashes: by others it would be something else.
    await rest.done("POST", f"{SCALABLE}/{KEY_HASH}", "low")
    assert (await scalable.get(topic)).incarnation not in (None, first, second)


async def test_a_topic_that_is_to_be_replicated_is_not_migrated(replicated: Replicated) -> None:
    rest, migrate = replicated.rest, "/admin/v2/scalable/t/n/x/migrate"
    await rest.done("POST", OF_NAMESPACE, BOTH)
    assert "east" in await rest.refused(412, "POST", f"{migrate}?force=true")
    assert await rest.get("/admin/v2/persistent/t/n") == [str(NAME)]
    await rest.done("POST", OF_TOPIC, ["standalone"])
    await rest.done("POST", migrate)


# Deletion of clusters, and renaming


async def test_a_cluster_that_a_tenant_or_namespace_names_is_not_deleted(
    replicated: Replicated,
) -> None:
    rest = replicated.rest
    await rest.done("POST", OF_NAMESPACE, BOTH)
    assert "tenant t names" in await rest.refused(412, "DELETE", f"{CLUSTERS}/east")
    # As a broker of another version may have written it.
    await replicated.broker.metadata.put("/admin/policies/t", b'{"allowedClusters":[]}')
    assert "namespace t/n names" in await rest.refused(412, "DELETE", f"{CLUSTERS}/east")
    await rest.done("POST", OF_NAMESPACE, ["standalone"])
    await rest.done("DELETE", f"{CLUSTERS}/east")


async def test_lists_from_before_a_cluster_was_renamed_mean_the_cluster_itself(
    tmp_path: Path,
) -> None:
    default = f"{NAMESPACES}/public/default/replication"
    async with running(tmp_path, cluster_name="old"):
        pass
    async with (
        running(tmp_path, cluster_name="new") as broker,
        asking_broker(broker) as rest,
    ):
        assert await rest.get(default) == ["new"]
        await rest.done("PUT", f"{CLUSTERS}/old", {"brokerServiceUrl": "pulsar://old:6650"})
        name = parse_topic_name("persistent://public/default/x")
        assert not (await broker.policies.require_of(name)).replication_clusters
        # It is another cluster now.
        assert "names the cluster old" in await rest.refused(412, "DELETE", f"{CLUSTERS}/old")
        await rest.done("POST", default, ["new"])
        await rest.done("POST", f"{TENANTS}/public", {"allowedClusters": ["new"]})
        assert await rest.get(default) == ["new"]
