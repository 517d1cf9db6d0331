"""What tools send when they make, change and delete tenants and namespaces."""

import pytest

from broker.policies.policy_kinds import OF_NAMESPACES, OF_TOPICS
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import TOPIC_PATH, Rest

NAMESPACES = "/admin/v2/namespaces"
WHOLE_OF_NAMESPACES = [path for path, kind in OF_NAMESPACES.items() if kind.valid(1)]
WHOLE_OF_TOPICS = [path for path, kind in OF_TOPICS.items() if kind.valid(1)]
TENANTS = "/admin/v2/tenants"
BUNDLES = {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1}
EMPTY = {"replication_clusters": ["standalone"], "bundles": BUNDLES}
ROLES: dict[str, object] = {
    "namespace_auth": {},
    "destination_auth": {},
    "subscription_auth_roles": {},
}
OF_JAVA: dict[str, object] = {
    "auth_policies": ROLES,
    "replication_clusters": [],
    "allowed_clusters": [],
    "bundles": {"numBundles": 4},
    "backlog_quota_map": {},
    "clusterDispatchRate": {},
    "topicDispatchRate": {},
    "subscriptionDispatchRate": {},
    "replicatorDispatchRate": {},
    "clusterSubscribeRate": {},
    "publishMaxMessageRate": {},
    "latency_stats_sample_rate": {},
    "deleted": False,
    "encryption_required": False,
    "subscription_auth_mode": "None",
    "offload_threshold": -1,
    "offload_threshold_in_seconds": -1,
    "schema_compatibility_strategy": "UNDEFINED",
    "is_allow_auto_update_schema": True,
    "is_allow_auto_update_schema_with_replicator": True,
    "schema_validation_enforced": False,
    "subscription_types_enabled": [],
    "properties": {},
    "migrated": False,
}
"""As pulsar-admin and the Java admin of 5.0.0-M1 send it, with what the broker shows added."""
OF_GO: dict[str, object] = {
    "bundles": {"boundaries": None, "numBundles": 4},
    "persistence": None,
    "message_ttl_in_seconds": None,
    "offload_threshold": -1,
    "antiAffinityGroup": "",
    "replication_clusters": None,
    "backlog_quota_map": {},
    "schema_auto_update_compatibility_strategy": "",
    "schema_compatibility_strategy": "",
    "auth_policies": {"namespace_auth": None, "destination_auth": {}},
    "subscription_auth_mode": "",
    "is_allow_auto_update_schema": None,
}


@pytest.mark.parametrize("policies", [OF_JAVA, OF_GO], ids=["java", "go"])
async def test_defaults_of_a_tool_ask_for_nothing_and_are_not_stored(
    rest: Rest, policies: dict[str, object]
) -> None:
    await rest.done("PUT", f"{NAMESPACES}/public/n", policies)
    assert await rest.get(f"{NAMESPACES}/public/n") == EMPTY
    assert await rest.get(f"{NAMESPACES}/public/n/bundles") == BUNDLES


async def test_policies_that_are_served_are_given_at_creation(rest: Rest) -> None:
    served: dict[str, object] = {
        "retention_policies": {"retentionTimeInMinutes": 3, "retentionSizeInMB": 4},
        "deduplicationEnabled": True,
        "autoTopicCreationOverride": {"allowAutoTopicCreation": False},
        "offload_deletion_lag_ms": 5,
        "offload_threshold": 0,
        "schema_compatibility_strategy": "BACKWARD",
        "is_allow_auto_update_schema": False,
        "schema_validation_enforced": True,
        "encryption_required": True,
        "max_topics_per_namespace": 7,
    }
    await rest.done("PUT", f"{NAMESPACES}/public/n", OF_JAVA | served)
    assert await rest.get(f"{NAMESPACES}/public/n") == EMPTY | served


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("message_ttl_in_seconds", -2),
        ("message_ttl_in_seconds", 10.0),
        ("max_producers_per_topic", "1"),
        ("max_producers_per_topic", -1.0),
        ("offload_threshold", -1.0),
        ("schema_validation_enforced", 0),
        ("encryption_required", 0.0),
        ("is_allow_auto_update_schema", 1),
        ("replication_clusters", 0),
        ("subscription_types_enabled", ["Any"]),
        ("backlog_quota_map", {"destination_storage": {"limit": -1, "policy": "x"}}),
        ("delayed_delivery_policies", {"active": False}),
        ("is_allow_auto_update_schema", "no"),
        ("schema_auto_update_compatibility_strategy", "FULL"),
        ("encryption_required", "yes"),
        ("deleted", True),
        ("no_such_policy", "x"),
        ("retention_policies", {"retentionTimeInMinutes": -2, "retentionSizeInMB": 0}),
        ("retention_policies", {"retentionTimeInMinutes": 1, "retentionSizeInMB": 1, "more": 1}),
        ("retention_policies", {"retentionTimeInMinutes": 10, "retentionSizeInMB": 0}),
        ("retention_policies", {"retentionTimeInMinutes": 0, "retentionSizeInMB": -1}),
        ("autoTopicCreationOverride", {"allowAutoTopicCreation": True, "topicType": "some"}),
        ("autoTopicCreationOverride", {"allowAutoTopicCreation": True, "topicType": "partitioned"}),
    ],
)
async def test_a_policy_that_is_not_served_makes_no_namespace(
    rest: Rest, member: str, value: object
) -> None:
    reason = await rest.refused(412, "PUT", f"{NAMESPACES}/public/n", {member: value})
    assert member in reason
    await rest.refused(404, "GET", f"{NAMESPACES}/public/n")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((f"{NAMESPACES}/public/default/{path}", 10.0) for path in WHOLE_OF_NAMESPACES),
        *((f"{TOPIC_PATH}/{path}", 10.0) for path in WHOLE_OF_TOPICS),
        *((f"{TOPIC_PATH}/{path}", True) for path in WHOLE_OF_TOPICS),
    ],
)
async def test_policies_that_are_whole_numbers_refuse_others(
    rest: Rest, path: str, value: object
) -> None:
    await rest.done("PUT", TOPIC_PATH)
    await rest.refused(412, "POST", path, value)
    await rest.refused(412, "POST", path, {"any": value})


@pytest.mark.parametrize("member", ["replication_clusters", "allowed_clusters"])
async def test_a_namespace_is_in_this_cluster_alone(rest: Rest, member: str) -> None:
    own, other = {member: ["standalone"]}, {member: ["standalone", "other"]}
    assert "other" in await rest.refused(403, "PUT", f"{NAMESPACES}/public/n", other)
    await rest.done("PUT", f"{NAMESPACES}/public/n", own)


@pytest.mark.parametrize("resource", ["replication", "allowedClusters"])
async def test_the_clusters_of_a_namespace_are_this_one(rest: Rest, resource: str) -> None:
    path = f"{NAMESPACES}/public/default/{resource}"
    assert await rest.get(path) == (["standalone"] if resource == "replication" else [])
    await rest.done("POST", path, ["standalone"])
    assert await rest.get(path) == ["standalone"]
    for wrong in (["standalone", "other"], ["other"]):
        assert "names other" in await rest.refused(403, "POST", path, wrong)
    empty = 412 if resource == "replication" else 400
    assert "standalone" in await rest.refused(empty, "POST", path, [])
    assert "list of names" in await rest.refused(412, "POST", path, "standalone")
    await rest.refused(404, "GET", f"{NAMESPACES}/public/none/{resource}")
    await rest.refused(404, "POST", f"{NAMESPACES}/public/none/{resource}", ["standalone"])


async def test_tenant_is_stored_as_requested(rest: Rest) -> None:
    own = {"adminRoles": [], "allowedClusters": ["standalone"]}
    for name, info in (("a", None), ("b", {}), ("c", {"allowedClusters": [], "adminRoles": None})):
        await rest.done("PUT", f"{TENANTS}/{name}", info)
        assert await rest.get(f"{TENANTS}/{name}") == own
    await rest.done("POST", f"{TENANTS}/a", {**own, "adminRoles": ["me"]})
    assert await rest.get(f"{TENANTS}/a") == {**own, "adminRoles": ["me"]}


@pytest.mark.parametrize("method", ["PUT", "POST"])
async def test_invalid_tenant_is_refused(rest: Rest, method: str) -> None:
    path = f"{TENANTS}/{'t' if method == 'PUT' else 'public'}"
    assert "other" in await rest.refused(412, method, path, {"allowedClusters": ["other"]})
    assert "quota" in await rest.refused(400, method, path, {"quota": 5})
    for wrong in ({"adminRoles": "me"}, {"adminRoles": [1]}, {"allowedClusters": "standalone"}):
        assert "list of names" in await rest.refused(400, method, path, wrong)


async def test_forced_deletion_of_a_namespace_deletes_its_topics(creating: Rest) -> None:
    path, topics = f"{NAMESPACES}/public/n", "/admin/v2/persistent/public/n"
    await creating.done("PUT", path)
    await creating.done("PUT", f"{topics}/x")
    await creating.done("PUT", f"{topics}/p/partitions", 3)
    await creating.done("PUT", "/admin/v2/scalable/public/n/s?numInitialSegments=2")
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    producer = await client.create_producer("persistent://public/n/x")
    assert "force" in await creating.refused(409, "DELETE", f"{path}?force=false")
    await creating.done("DELETE", f"{path}?force=true")
    await client.wait(producer.events.get())
    await creating.refused(404, "GET", path)
    await creating.refused(404, "DELETE", f"{path}?force=true")
    await creating.done("PUT", path)
    for left in (topics, f"{topics}/partitioned", "/admin/v2/scalable/public/n"):
        assert await creating.get(left) == []
    await client.close()


async def test_forced_deletion_of_a_tenant_deletes_its_namespaces(rest: Rest) -> None:
    await rest.done("PUT", f"{TENANTS}/t")
    for name in ("a", "b"):
        await rest.done("PUT", f"{NAMESPACES}/t/{name}")
        await rest.done("PUT", f"/admin/v2/persistent/t/{name}/x")
    await rest.refused(409, "DELETE", f"{TENANTS}/t")
    await rest.done("DELETE", f"{TENANTS}/t?force=true")
    await rest.refused(404, "GET", f"{TENANTS}/t")
    await rest.done("PUT", f"{TENANTS}/t")
    assert await rest.get(f"{NAMESPACES}/t") == []


async def test_a_namespace_has_a_policy_of_automatic_splits(rest: Rest) -> None:
    path = f"{NAMESPACES}/public/default/scalableTopicAutoScalePolicy"
    assert await rest.call("GET", path) == (204, "")
    await rest.done("POST", path, {"enabled": False, "splitCooldownSeconds": 5})
    assert await rest.get(path) == {"enabled": False, "splitCooldownSeconds": 5}
    shown = await rest.get(f"{NAMESPACES}/public/default")
    assert isinstance(shown, dict)
    assert shown["scalableTopicAutoScalePolicy"] == {"enabled": False, "splitCooldownSeconds": 5}
    wrong = {"splitMsgRateInThreshold": 500}
    assert "mergeMsgRateInThreshold" in await rest.refused(412, "POST", path, wrong)
    await rest.done("DELETE", path)
    assert await rest.call("GET", path) == (204, "")
    new = f"{NAMESPACES}/public/with-policy"
    await rest.done("PUT", new, {"scalableTopicAutoScalePolicy": {"maxSegments": 2}})
    assert await rest.get(f"{new}/scalableTopicAutoScalePolicy") == {"maxSegments": 2}
    unfit = {"scalableTopicAutoScalePolicy": {"minSegments": 9, "maxSegments": 2}}
    await rest.refused(412, "PUT", f"{NAMESPACES}/public/unfit", unfit)
    unknown = {"scalableTopicAutoScalePolicy": {"most": 2}}
    await rest.refused(412, "PUT", f"{NAMESPACES}/public/wrong", unknown)
    none = f"{NAMESPACES}/public/none/scalableTopicAutoScalePolicy"
    for method, body in (("GET", None), ("POST", {"enabled": False}), ("DELETE", None)):
        await rest.refused(404, method, none, body)


async def test_an_undefined_strategy_is_that_of_the_broker(rest: Rest) -> None:
    path = f"{NAMESPACES}/public/default/schemaCompatibilityStrategy"
    await rest.done("PUT", path, "BACKWARD")
    assert await rest.get(path) == "BACKWARD"
    await rest.done("PUT", path, "UNDEFINED")
    assert (await rest.call("GET", path))[0] == 204


async def test_there_is_one_listener(rest: Rest) -> None:
    lookup = "/lookup/v2/topic/persistent/public/default/x"
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    for name in ("", "internal"):
        assert isinstance(await rest.get(f"{lookup}?listenerName={name}"), dict)
        command = pb.CommandLookupTopic(
            topic="persistent://public/default/x", advertised_listener_name=name
        )
        await client.request(pb.BaseCommand.LOOKUP, command)
    assert "'outside'" in await rest.refused(405, "GET", f"{lookup}?listenerName=outside")
    await client.close()


async def test_a_threshold_of_offloading_that_is_not_set_is_shown_as_a_number(rest: Rest) -> None:
    """Pulsar's admin library fails on an answer without one."""
    path = "/admin/v2/namespaces/public/default/offloadThreshold"
    assert await rest.get(path) == -1
    await rest.done("PUT", path, 1000)
    assert await rest.get(path) == 1000
    await rest.done("DELETE", path)
    assert await rest.get(path) == -1
