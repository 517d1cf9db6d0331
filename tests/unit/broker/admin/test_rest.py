"""The REST interface on a whole broker: what tools rely on, and errors that name the fix."""

import json
from importlib.metadata import version
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from broker.admin.app import AdminServer
from broker.admin.rest import errors_as_json, status_of
from broker.placement.owner_requests import OwnerFailed
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.server_error import ServerError
from storage.damage import DamageKind
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import Rest

SCALABLE = "/admin/v2/scalable/public/default"
PERSISTENT = "/admin/v2/persistent/public/default"
NAMESPACES = "/admin/v2/namespaces"


async def test_a_scalable_topic_from_creation_to_deletion(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/x?numInitialSegments=4", {"team": "a"})
    assert "exists" in await rest.refused(409, "PUT", f"{SCALABLE}/x")
    layout = await rest.get(f"{SCALABLE}/x")
    assert isinstance(layout, dict)
    assert (layout["epoch"], layout["nextSegmentId"]) == (0, 4)
    assert layout["segments"]["1"]["hashRange"] == {"start": 0x4000, "end": 0x7FFF}
    await rest.done("POST", f"{SCALABLE}/x/split/1")
    await rest.done("POST", f"{SCALABLE}/x/merge/4/5")
    layout = await rest.get(f"{SCALABLE}/x")
    assert isinstance(layout, dict)
    assert layout["segments"]["1"]["state"] == "SEALED"
    assert layout["segments"]["6"]["parentIds"] == [4, 5]
    history = await rest.get(f"{SCALABLE}/x/history")
    assert isinstance(history, list)
    assert [entry["kind"] for entry in history] == ["create", "split", "merge"]
    assert await rest.get(SCALABLE) == ["topic://public/default/x"]
    assert await rest.get(f"{SCALABLE}?property=team=a") == ["topic://public/default/x"]
    assert await rest.get(f"{SCALABLE}?property=team=b") == []
    await rest.done("DELETE", f"{SCALABLE}/x")
    assert await rest.get(SCALABLE) == []


async def test_several_segments_are_merged_at_once(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/x?numInitialSegments=4")
    await rest.done("POST", f"{SCALABLE}/x/merge/1/3/2")
    layout = await rest.get(f"{SCALABLE}/x")
    assert isinstance(layout, dict)
    assert layout["segments"]["4"]["hashRange"] == {"start": 0x4000, "end": 0xFFFF}
    assert layout["segments"]["4"]["parentIds"] == [1, 2, 3]
    for path in ("merge/0", "merge/0/x", "merge/0/4/4"):
        await rest.refused(412, "POST", f"{SCALABLE}/x/{path}")


async def test_each_segment_has_statistics_of_its_own(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/x?numInitialSegments=2")
    await rest.done("PUT", f"{SCALABLE}/x/subscriptions/s")
    stats = await rest.get(f"{SCALABLE}/x/segments/1/stats")
    assert isinstance(stats, dict)
    assert stats["subscriptions"]["s"]["msgBacklog"] == stats["msgRateIn"] == 0
    assert ":" in stats["ownerBroker"]
    await rest.refused(404, "GET", f"{SCALABLE}/x/segments/2/stats")
    await rest.refused(412, "GET", f"{SCALABLE}/x/segments/a/stats")
    await rest.refused(404, "GET", f"{SCALABLE}/none/segments/0/stats")


async def test_a_segment_gets_another_number_of_entry_buckets(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/x?numInitialSegments=2")
    await rest.done("POST", f"{SCALABLE}/x/rebucket/1?bucketCount=4")
    layout = await rest.get(f"{SCALABLE}/x")
    assert isinstance(layout, dict)
    assert layout["segments"]["2"]["entryBucketSplits"] == [16384, 32768, 49152]
    assert layout["segments"]["2"]["hashRange"] == layout["segments"]["1"]["hashRange"]
    history = await rest.get(f"{SCALABLE}/x/history")
    assert isinstance(history, list)
    assert history[-1]["kind"] == "rebucket"
    for query in ("", "?bucketCount=0", "?bucketCount=1025", "?bucketCount=4", "?bucketCount=x"):
        await rest.refused(412, "POST", f"{SCALABLE}/x/rebucket/2{query}")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ServerError.TOPIC_TERMINATED_ERROR, 405),
        (ServerError.TOO_MANY_REQUESTS, 429),
        (ServerError.METADATA_ERROR, 500),
        (None, 500),
    ],
)
def test_failure_of_another_broker_has_the_status_that_it_would_answer(
    code: ServerError | None, status: int
) -> None:
    assert status_of(OwnerFailed("The test fails.", code)) == status


async def test_refused_request_names_its_reason(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/x?numInitialSegments=4")
    assert "no segment 9" in await rest.refused(404, "POST", f"{SCALABLE}/x/split/9")
    assert "not neighbours" in await rest.refused(412, "POST", f"{SCALABLE}/x/merge/0/2")
    await rest.refused(412, "POST", f"{SCALABLE}/x/split/one")
    await rest.refused(412, "PUT", f"{SCALABLE}/y?numInitialSegments=0")
    await rest.refused(412, "GET", f"{SCALABLE}?property=team")
    for path in ("", "/stats", "/history", "/autoScalePolicy", "/scaling"):
        await rest.refused(404, "GET", f"{SCALABLE}/none{path}")
    await rest.refused(404, "DELETE", f"{SCALABLE}/none")
    await rest.refused(404, "PUT", "/admin/v2/scalable/public/none/x")
    assert "/admin/v2" in await rest.refused(404, "GET", "/admin/v2/nothing")
    index = await rest.get("/admin/v2")
    assert isinstance(index, dict)
    assert index["/admin/v2/scalable/{tenant}/{namespace}/{topic}/split/{segment}"] == ["POST"]
    await rest.refused(400, "PUT", f"{SCALABLE}/z", ["not", "properties"])


async def test_the_policy_of_automatic_splits_has_three_levels(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/x")
    policy = f"{SCALABLE}/x/autoScalePolicy"
    of_namespace = f"{NAMESPACES}/public/default/scalableTopicAutoScalePolicy"
    assert await rest.call("GET", policy) == (204, "")
    await rest.done("POST", policy, {"maxSegments": 8, "minSegments": None})
    assert await rest.get(policy) == {"maxSegments": 8}
    assert "minSegments = 99" in await rest.refused(412, "POST", policy, {"minSegments": 99})
    assert "maxSegmnets" in await rest.refused(412, "POST", policy, {"maxSegmnets": 9})
    above = {"minSegments": 2, "maxSegments": 3, "enabled": True}
    await rest.done("POST", of_namespace, above)
    scaling = await rest.get(f"{SCALABLE}/x/scaling")
    assert isinstance(scaling, dict)
    assert (scaling["policy"]["minSegments"], scaling["policy"]["maxSegments"]) == (2, 8)
    assert scaling["topicPolicy"] == {"maxSegments": 8}
    assert scaling["namespacePolicy"] == above
    assert {each["rule"] for each in scaling["refusals"]} >= {"rate", "merge"}
    record = await rest.get(f"{SCALABLE}/x")
    assert isinstance(record, dict)
    assert record["autoScalePolicy"] == {"maxSegments": 8}
    await rest.done("DELETE", policy)
    assert await rest.call("GET", policy) == (204, "")


async def test_subscriptions_of_a_scalable_topic(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/x?numInitialSegments=2")
    for _ in range(2):
        await rest.done("PUT", f"{SCALABLE}/x/subscriptions/s?type=QUEUE")
    assert await rest.get(f"{SCALABLE}/x/subscriptions") == ["s"]
    await rest.done("POST", f"{SCALABLE}/x/subscriptions/s/skip-all")
    await rest.done("POST", f"{SCALABLE}/x/subscriptions/s/seek?timestamp=0")
    await rest.refused(412, "PUT", f"{SCALABLE}/x/subscriptions/s?type=OTHER")
    await _show_and_set_replicated(rest)
    await rest.done("DELETE", f"{SCALABLE}/x/subscriptions/s")
    assert await rest.get(f"{SCALABLE}/x/subscriptions") == []


async def _show_and_set_replicated(rest: Rest) -> None:
    """On each segment; what is asked of a subscription that is not there is refused."""
    status = f"{SCALABLE}/x/subscriptions/s/replicatedSubscriptionStatus"
    segments = [f"segment://public/default/x/{each}" for each in ("0000-7fff-0", "8000-ffff-1")]
    assert await rest.get(status) == dict.fromkeys(segments, False)
    await rest.done("POST", status, True)
    assert await rest.get(status) == dict.fromkeys(segments, True)
    stats = await rest.get(f"{SCALABLE}/x/stats")
    assert isinstance(stats, dict)
    assert stats["subscriptions"]["s"]["isReplicated"] is True
    await rest.refused(412, "POST", status, "yes")
    await rest.done("POST", status, False)
    assert await rest.get(status) == dict.fromkeys(segments, False)
    unknown = status.replace("/s/", "/none/")
    for method in ("GET", "POST"):
        refusal = await rest.refused(404, method, unknown, True)
        assert "create it with PUT .../subscriptions/NAME" in refusal
    await rest.done("PUT", f"{SCALABLE}/x/subscriptions/t?replicated=true")
    found = await rest.get(status.replace("/s/", "/t/"))
    assert found == dict.fromkeys(segments, True)
    await rest.done("DELETE", f"{SCALABLE}/x/subscriptions/t")


async def test_persistent_topics(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/x")
    await rest.refused(409, "PUT", f"{PERSISTENT}/x")
    assert await rest.get(PERSISTENT) == ["persistent://public/default/x"]
    await rest.done("PUT", f"{PERSISTENT}/x/subscription/s", {"ledgerId": -1, "entryId": -1})
    assert await rest.get(f"{PERSISTENT}/x/subscriptions") == ["s"]
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    producer = await client.create_producer("persistent://public/default/x")
    for _ in range(3):
        await producer.send(b"x")
    stats = await rest.get(f"{PERSISTENT}/x/stats")
    assert isinstance(stats, dict)
    assert stats["msgInCounter"] == 3
    assert stats["subscriptions"]["s"]["msgBacklog"] == 3
    later = pb.MessageMetadata(deliver_at_time=2**62)
    await producer.send(b"later", metadata=later)
    options = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    consumer = await client.subscribe("persistent://public/default/x", "s", options, permits=10)
    for _ in range(3):
        await consumer.receive()
    stats = await rest.get(f"{PERSISTENT}/x/stats")
    assert isinstance(stats, dict)
    counts = stats["subscriptions"]["s"]
    assert (counts["msgBacklog"], counts["msgBacklogNoDelayed"], counts["msgDelayed"]) == (4, 3, 1)
    await consumer.close()
    assert stats["publishers"][0]["accessMode"] == "Shared"
    await rest.refused(412, "DELETE", f"{PERSISTENT}/x")
    await rest.done("POST", f"{PERSISTENT}/x/subscription/s/skip_all")
    internal = await rest.get(f"{PERSISTENT}/x/internalStats")
    assert isinstance(internal, dict)
    assert internal["numberOfEntries"] == 4
    assert [ledger["entries"] for ledger in internal["ledgers"]] == [4]
    assert internal["ledgers"][0]["size"] == internal["totalSize"]
    last = await rest.get(f"{PERSISTENT}/x/lastMessageId")
    assert isinstance(last, dict)
    assert last["entryId"] == 3
    await client.close()
    await rest.done("DELETE", f"{PERSISTENT}/x?force=true")
    assert await rest.get(PERSISTENT) == []
    await rest.refused(404, "GET", f"{PERSISTENT}/x/stats")


async def test_partitioned_topics(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/p/partitions", 2)
    await rest.refused(409, "PUT", f"{PERSISTENT}/p/partitions", 2)
    await rest.refused(409, "PUT", f"{PERSISTENT}/p")
    assert await rest.get(f"{PERSISTENT}/partitioned") == ["persistent://public/default/p"]
    await rest.done("POST", f"{PERSISTENT}/p/partitions", 3)
    partitions = await rest.get(f"{PERSISTENT}/p/partitions")
    assert isinstance(partitions, dict)
    assert partitions["partitions"] == 3
    each = await rest.get(f"{PERSISTENT}/p/partitioned-stats")
    assert isinstance(each, dict)
    assert len(each["partitions"]) == 3
    assert "partitioned" in await rest.refused(404, "GET", f"{PERSISTENT}/p/stats")
    await rest.refused(406, "PUT", f"{PERSISTENT}/q/partitions", "two")
    await rest.refused(406, "PUT", f"{PERSISTENT}/q/partitions", 0)
    await rest.refused(406, "POST", f"{PERSISTENT}/p/partitions", 2)
    await rest.done("DELETE", f"{PERSISTENT}/p/partitions")
    assert await rest.get(PERSISTENT) == []


async def test_tenants_namespaces_and_policies(rest: Rest) -> None:
    await rest.done("PUT", "/admin/v2/tenants/acme", {"adminRoles": [], "allowedClusters": []})
    await rest.refused(409, "PUT", "/admin/v2/tenants/acme")
    await rest.done("PUT", f"{NAMESPACES}/acme/orders")
    await rest.refused(409, "PUT", f"{NAMESPACES}/acme/orders")
    await rest.refused(404, "PUT", f"{NAMESPACES}/nobody/orders")
    assert await rest.get(f"{NAMESPACES}/acme") == ["acme/orders"]
    retention = f"{NAMESPACES}/acme/orders/retention"
    assert (await rest.call("GET", retention))[0] == 204
    value = {"retentionTimeInMinutes": 5, "retentionSizeInMB": -1}
    await rest.done("POST", retention, value)
    assert await rest.get(retention) == value
    await rest.refused(412, "POST", retention, {"retentionTimeInMinutes": -2})
    await rest.done("DELETE", retention)
    assert (await rest.call("GET", retention))[0] == 204
    await rest.done("PUT", "/admin/v2/scalable/acme/orders/x")
    await rest.refused(409, "DELETE", f"{NAMESPACES}/acme/orders")
    await rest.done("DELETE", "/admin/v2/scalable/acme/orders/x")
    await rest.done("DELETE", f"{NAMESPACES}/acme/orders")
    await rest.done("DELETE", "/admin/v2/tenants/acme")


async def test_schemas(rest: Rest) -> None:
    path = "/admin/v2/schemas/public/default/x"
    await rest.refused(404, "GET", f"{path}/schema")
    string = {"type": "STRING", "schema": "", "properties": {}}
    assert await rest.call("POST", f"{path}/schema", string) == (200, {"version": {"version": 0}})
    newest = await rest.get(f"{path}/schema")
    assert isinstance(newest, dict)
    assert (newest["version"], newest["type"]) == (0, "STRING")
    await rest.refused(409, "POST", f"{path}/schema", {"type": "INT32", "schema": ""})
    await rest.refused(422, "POST", f"{path}/schema", {"type": "NO_SUCH"})
    compatible = await rest.call("POST", f"{path}/compatibility", {"type": "INT32", "schema": ""})
    assert compatible[1] == {
        "compatibility": False,
        "schemaCompatibilityStrategy": "FULL",
    }
    assert await rest.call("DELETE", f"{path}/schema?force=false") == (200, {"version": 1})
    assert await rest.call("POST", f"{path}/schema", string) == (200, {"version": {"version": 2}})
    assert await rest.call("DELETE", f"{path}/schema?force=true") == (200, {"version": -1})
    assert await rest.call("POST", f"{path}/schema", string) == (200, {"version": {"version": 0}})


async def test_schema_of_pairs_is_sent_and_shown_as_text(rest: Rest) -> None:
    """Pulsar's admin library sends and reads KEY_VALUE schemas so, not as clients store them."""
    path = "/admin/v2/schemas/public/default/x"
    value = {"type": "record", "name": "V", "fields": [{"name": "a", "type": "int"}]}
    text = json.dumps({"key": "", "value": value}, separators=(",", ":"))
    properties = {"key.schema.type": "STRING", "value.schema.type": "AVRO"}
    schema = {"type": "KEY_VALUE", "schema": text, "properties": properties}
    assert await rest.call("POST", f"{path}/schema", schema) == (200, {"version": {"version": 0}})
    newest = await rest.get(f"{path}/schema")
    assert isinstance(newest, dict)
    assert newest["data"] == text
    assert await rest.call("POST", f"{path}/version", schema) == (200, {"version": 0})
    await rest.refused(409, "POST", f"{path}/schema", {**schema, "schema": "no pair"})


@pytest.mark.parametrize("domain", ["persistent", "non-persistent"])
async def test_topics_of_a_bundle_are_those_of_the_namespace(rest: Rest, domain: str) -> None:
    path = f"/admin/v2/{domain}/public/default"
    await rest.done("PUT", f"{path}/x")
    assert await rest.get(f"{path}?bundle=0x00000000_0xffffffff") == [
        f"{domain}://public/default/x"
    ]
    reason = await rest.refused(412, "GET", f"{path}?bundle=0x00000000_0x40000000")
    assert "each namespace has one" in reason


async def test_unknown_members_of_bodies_are_refused_by_their_names(rest: Rest) -> None:
    schema = "/admin/v2/schemas/public/default/x/schema"
    string = {"type": "STRING", "schema": ""}
    for unknown in ("propertes", "data"):
        assert unknown in await rest.refused(400, "POST", schema, {**string, unknown: "x"})
    grants = "/admin/v2/namespaces/grantPermissionsOnTopics"
    one = {"topic": "persistent://public/default/x", "role": "r", "actions": ["produce"]}
    assert "no action:" in await rest.refused(400, "POST", grants, [{**one, "action": "consume"}])
    revokes = "/admin/v2/namespaces/revokePermissionsOnTopics"
    assert "no actions:" in await rest.refused(400, "POST", revokes, [one])
    await rest.done("PUT", "/admin/v2/persistent/public/default/x")
    offload = "/admin/v2/persistent/public/default/x/offload"
    place = {"ledgerId": 1, "entryId": 0, "excluded": True}
    assert "no excluded:" in await rest.refused(400, "PUT", offload, place)


async def test_health_names_damage_and_readiness_does_not(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        admin = AdminServer(broker)
        await admin.start()
        async with aiohttp.ClientSession() as session:
            rest = Rest(session, admin.port, broker.port)
            broker.damage.note(DamageKind.LOG, "Log file 0000000001.log is missing.")
            for number in range(30):
                broker.damage.note_ledger(number, "public/default/persistent/t", [(0, 9)])
            lines = str(await rest.get("/admin/v2/brokers/health")).splitlines()
            assert lines[:2] == ["ok", "Log file 0000000001.log is missing."]
            assert lines[-1] == "11 more are damaged."
            assert await rest.get("/admin/v2/brokers/ready") == "ok"
        await admin.stop()


async def test_brokers_clusters_lookup_and_metrics(rest: Rest) -> None:
    assert await rest.get("/admin/v2/brokers/health") == "ok"
    assert await rest.get("/status.html") == "OK"
    live = await rest.get("/admin/v2/brokers")
    assert await rest.get("/admin/v2/brokers/standalone") == live
    assert "'standalone'" in await rest.refused(404, "GET", "/admin/v2/brokers/any-word")
    internal = await rest.get("/admin/v2/brokers/internal-configuration")
    assert isinstance(internal, dict)
    assert internal["bookkeeperMetadataServiceUri"] == "", "all is in the data directory"
    assert await rest.get("/admin/v2/clusters") == ["standalone"]
    await rest.refused(404, "GET", "/admin/v2/clusters/other")
    found = await rest.get("/lookup/v2/topic/topic/public/default/x")
    assert isinstance(found, dict)
    assert found["brokerUrl"] == f"pulsar://127.0.0.1:{rest.binary_port}"
    await rest.done("PUT", f"{SCALABLE}/m?numInitialSegments=1")
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    segment = "segment://public/default/m/0000-ffff-0"
    producer = await client.create_producer(segment)
    await producer.send(b"x" * 100)
    text = str(await rest.get("/metrics"))
    labels = f'cluster="standalone",namespace="public/default",topic="{segment}"'
    assert f"pulsar_in_messages_total{{{labels}}} 1.0" in text
    assert f"pulsar_producers_count{{{labels}}} 1.0" in text
    assert 'pulsar_active_connections{cluster="standalone"} 1.0' in text
    await client.close()


async def test_broker_tells_the_installed_version_everywhere(rest: Rest) -> None:
    installed = version("magnetar")
    assert await rest.get("/admin/v2/brokers/version") == installed
    assert f'pulsar_version_info{{version="{installed}"}} 1.0' in str(await rest.get("/metrics"))
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    assert client.connected.server_version == f"Magnetar {installed}"
    await client.close()


async def test_statistics_show_what_clients_tell_of_themselves(rest: Rest) -> None:
    name = "persistent://public/default/x"
    await rest.done("PUT", f"{PERSISTENT}/x")
    flags = pb.FeatureFlags(supports_partial_producer=True)
    connect = pb.CommandConnect(feature_flags=flags)
    client = await RawClient.open("127.0.0.1", rest.binary_port, connect)
    told = [pb.KeyValue(key="app", value="billing")]
    producer = await client.create_producer(name, pb.CommandProducer(metadata=told))
    await producer.send(b"x")
    await client.subscribe(name, "s", pb.CommandSubscribe(metadata=told))
    stats = await rest.get(f"{PERSISTENT}/x/stats")
    assert isinstance(stats, dict)
    assert stats["publishers"][0]["metadata"] == {"app": "billing"}
    assert stats["publishers"][0]["supportsPartialProducer"] is True
    assert stats["subscriptions"]["s"]["consumers"][0]["metadata"] == {"app": "billing"}
    internal = await rest.get(f"{PERSISTENT}/x/internalStats")
    assert isinstance(internal, dict)
    assert internal["entriesAddedCounter"] == 1
    await client.close()


@pytest.mark.parametrize("path", ["x/stats", "p/partitioned-stats"])
async def test_statistics_leave_out_publishers_and_consumers_on_request(
    rest: Rest, path: str
) -> None:
    await rest.done("PUT", f"{PERSISTENT}/x")
    await rest.done("PUT", f"{PERSISTENT}/p/partitions", 1)
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    for topic in ("x", "p-partition-0"):
        await client.create_producer(f"persistent://public/default/{topic}")
        await client.subscribe(f"persistent://public/default/{topic}", "s")
    for without in ([], ["excludePublishers"], ["excludeConsumers"]):
        stats = await rest.get(f"{PERSISTENT}/{path}?{'&'.join(f'{one}=true' for one in without)}")
        assert isinstance(stats, dict)
        for each in (stats, *stats.get("partitions", {}).values()):
            assert bool(each["publishers"]) is ("excludePublishers" not in without)
            assert bool(each["subscriptions"]["s"]["consumers"]) is (
                "excludeConsumers" not in without
            )
    await client.close()


async def test_a_missing_topic_has_no_auto_scale_policy(rest: Rest) -> None:
    path = f"{SCALABLE}/missing/autoScalePolicy"
    for method, body in (("GET", None), ("POST", {"enabled": False}), ("DELETE", None)):
        assert "topic://public/default/missing" in await rest.refused(404, method, path, body)


async def test_grace_period_of_a_topic_and_of_its_namespace(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/x")
    of_topic = f"{SCALABLE}/x/consumerSessionGracePeriod"
    of_namespace = "/admin/v2/namespaces/public/default/scalableTopicConsumerSessionGracePeriod"
    for path in (of_topic, of_namespace):
        assert (await rest.call("GET", path))[0] == 204
        await rest.done("POST", path, 5)
        assert await rest.call("GET", path) == (200, 5)
        for wrong in (-1, 2**31, True, "5", 1.5, None):
            await rest.refused(412, "POST", path, wrong)
        assert await rest.call("GET", path) == (200, 5)
    layout = (await rest.call("GET", f"{SCALABLE}/x"))[1]
    assert isinstance(layout, dict)
    assert layout["consumerSessionGracePeriodSeconds"] == 5
    await rest.done("POST", f"{SCALABLE}/x/split/0")
    assert await rest.call("GET", of_topic) == (200, 5), "a split keeps it"
    for path in (of_topic, of_namespace):
        await rest.done("DELETE", path)
        assert (await rest.call("GET", path))[0] == 204
    missing = f"{SCALABLE}/missing/consumerSessionGracePeriod"
    for method, body in (("GET", None), ("POST", 5), ("DELETE", None)):
        assert "topic://public/default/missing" in await rest.refused(404, method, missing, body)


async def test_record_too_large_to_store_answers_413(rest: Rest) -> None:
    many = {str(number): "x" for number in range(1001)}
    assert "1001 properties" in await rest.refused(413, "PUT", f"{SCALABLE}/x", many)
    await rest.done("PUT", f"{SCALABLE}/x", {"long": "v" * 5000, "": "", "a\0/b": "\x01"})
    path = f"{SCALABLE}/x/subscriptions/{'s' * 4090}"
    assert "shorter" in await rest.refused(413, "PUT", path)
    for query in (f"long={'v' * 5000}", "a%00/b=%01"):
        assert await rest.get(f"{SCALABLE}?property={query}") == ["topic://public/default/x"]


async def test_there_is_one_bundle_and_nothing_to_do_with_it(rest: Rest) -> None:
    whole = {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1}
    assert await rest.get(f"{NAMESPACES}/public/default/bundles") == whole
    bundle = f"{NAMESPACES}/public/default/0x00000000_0xffffffff"
    for method, path in (
        ("PUT", f"{bundle}/split"),
        ("PUT", f"{bundle}/unload"),
        ("DELETE", bundle),
        ("GET", "/lookup/v2/topic/persistent/public/default/x/bundle"),
    ):
        assert "bundles" in await rest.refused(501, method, path)
    await rest.done("PUT", f"{NAMESPACES}/public/default/unload")


async def test_a_client_that_goes_away_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """Neither of the broker nor of the server: nothing is logged as an error."""

    async def gone(_request: web.Request) -> web.Response:
        raise ConnectionResetError("Cannot write to closing transport")

    app = web.Application(middlewares=[errors_as_json])
    app.router.add_get("/", gone)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        with capture_logs() as logged:
            async with session.get(server.make_url("/")) as answer:
                assert answer.status == 503
    assert [each["log_level"] for each in logged] == ["debug"]
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_subscription_creates_the_missing_topic_where_clients_would(creating: Rest) -> None:
    start = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
    await creating.done("PUT", f"{PERSISTENT}/x/subscription/s", start)
    assert await creating.get(f"{PERSISTENT}/x/subscriptions") == ["s"]
    namespace = "/admin/v2/namespaces/public/default/autoTopicCreation"
    policy = {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 2}
    await creating.done("POST", namespace, policy)
    await creating.done("PUT", f"{PERSISTENT}/y/subscription/s", start)
    for index in range(2):
        assert await creating.get(f"{PERSISTENT}/y-partition-{index}/subscriptions") == ["s"]
    await creating.done("POST", namespace, {"allowAutoTopicCreation": False})
    await creating.refused(412, "PUT", f"{PERSISTENT}/z/subscription/s")
    await creating.refused(404, "PUT", "/admin/v2/persistent/public/none/z/subscription/s")
    await creating.refused(404, "GET", f"{PERSISTENT}/z/subscriptions")


async def test_no_subscription_of_a_segment_gets_the_name_of_a_replicators_position(
    rest: Rest,
) -> None:
    await rest.done("PUT", f"{SCALABLE}/x?numInitialSegments=1")
    segment = "/admin/v2/segments/public/default/x/0000-ffff-0"
    name = "pulsar.repl.west"
    for path, body in (
        (f"{segment}/subscription/{name}", None),
        (segment, [name]),
        (f"{SCALABLE}/x/subscriptions/{name}", None),
    ):
        status, answer = await rest.call("PUT", path, body)
        assert status == 405, (path, answer)
        assert "a replicator's cursor" in str(answer)


async def test_no_subscription_of_a_single_segment_is_to_be_replicated(rest: Rest) -> None:
    await rest.done("PUT", f"{SCALABLE}/x?numInitialSegments=1")
    segment = "/admin/v2/segments/public/default/x/0000-ffff-0/subscription/s"
    reason = await rest.refused(412, "PUT", f"{segment}?replicated=true", {})
    assert f"PUT {SCALABLE}/x/subscriptions/s?replicated=true" in reason
    await rest.done("PUT", f"{segment}?replicated=false", {})
