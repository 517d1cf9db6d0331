"""Policies of schemas: which ones clients may add, and who must have one."""

from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.unit.broker.admin.conftest import Rest, asking_broker

NAMESPACE = "/admin/v2/namespaces/public/default"
TOPIC = "persistent://public/default/t"
PATH = "/admin/v2/persistent/public/default/t"
SCHEMAS = "/admin/v2/schemas/public/default/t/schema"
INT32 = pb.Schema(name="s", schema_data=b"", type=pb.Schema.Int32)
STRING = pb.Schema(name="s", schema_data=b"", type=pb.Schema.String)
PUBLISHING = pb.CommandProducer(schema=STRING)
SUBSCRIBING = pb.CommandSubscribe(schema=STRING)
Kind = pb.BaseCommand


async def refused(
    client: RawClient, reason: str, schema: pb.Schema | None = None, topic: str = TOPIC
) -> None:
    with pytest.raises(BrokerError, match=reason) as caught:
        await client.create_producer(topic, pb.CommandProducer(schema=schema) if schema else None)
    assert caught.value.code == pb.IncompatibleSchema


async def test_clients_add_no_schema_where_only_rest_may(rest: Rest, client: RawClient) -> None:
    path = f"{NAMESPACE}/isAllowAutoUpdateSchema"
    assert await rest.get(path) is True
    await rest.done("POST", path, False)
    assert await rest.get(path) is False
    await refused(client, "isAllowAutoUpdateSchema", STRING)
    with pytest.raises(BrokerError, match="isAllowAutoUpdateSchema") as caught:
        await client.subscribe(TOPIC, "s", SUBSCRIBING)
    assert caught.value.code == pb.IncompatibleSchema
    request = pb.CommandGetOrCreateSchema(topic=TOPIC, schema=STRING)
    with pytest.raises(BrokerError, match="isAllowAutoUpdateSchema") as caught:
        await client.request(Kind.GET_OR_CREATE_SCHEMA, request)
    assert caught.value.code == pb.IncompatibleSchema
    # Without a schema, and with one that REST has added, clients work.
    await client.create_producer(TOPIC)
    assert await rest.call("POST", SCHEMAS, {"type": "STRING", "schema": ""}) == (
        200,
        {"version": {"version": 0}},
    )
    await client.create_producer(TOPIC, PUBLISHING)
    await client.subscribe(TOPIC, "s", SUBSCRIBING)
    await rest.done("DELETE", path)
    await client.create_producer("persistent://public/default/other", PUBLISHING)
    # There are no replicators: what is said for them is shown, and that is all.
    await rest.done("POST", f"{path}?allowAutoUpdateSchemaWithReplicator=false", True)
    policies = await rest.get(NAMESPACE)
    assert isinstance(policies, dict)
    assert policies["is_allow_auto_update_schema"] is True
    assert policies["is_allow_auto_update_schema_with_replicator"] is False


@pytest.mark.parametrize("level", [NAMESPACE, PATH])
async def test_producers_without_schema_are_refused_where_it_is_enforced(
    rest: Rest, client: RawClient, level: str
) -> None:
    await rest.done("PUT", PATH)
    path = f"{level}/schemaValidationEnforced"
    assert await rest.get(path) is False
    await rest.done("POST", path, True)
    assert await rest.get(path) is True
    # The topic has no schema yet.
    await client.create_producer(TOPIC)
    await client.create_producer(TOPIC, PUBLISHING)
    await refused(client, "schemaValidationEnforced")
    await client.create_producer(TOPIC, PUBLISHING)
    await rest.done("POST", path, False)
    await client.create_producer(TOPIC)


async def test_segments_have_the_schemas_and_policies_of_their_topic(
    rest: Rest, client: RawClient
) -> None:
    segment = "segment://public/default/s/0000-ffff-0"
    await rest.done("PUT", "/admin/v2/scalable/public/default/s")
    await client.create_producer(segment, PUBLISHING)
    await rest.done("POST", "/admin/v2/persistent/public/default/s/schemaValidationEnforced", True)
    await refused(client, "schemaValidationEnforced", topic=segment)
    await rest.done("POST", f"{NAMESPACE}/isAllowAutoUpdateSchema", False)
    await refused(client, "isAllowAutoUpdateSchema", INT32, segment)


async def test_the_strategy_of_a_topic_comes_before_that_of_its_namespace(
    rest: Rest, client: RawClient
) -> None:
    await client.create_producer(TOPIC, PUBLISHING)
    await refused(client, "INT32", INT32)
    path = f"{PATH}/schemaCompatibilityStrategy"
    await rest.done("PUT", f"{NAMESPACE}/schemaCompatibilityStrategy", "BACKWARD")
    assert await rest.get(f"{path}?applied=true") == "BACKWARD"
    await rest.done("PUT", path, "ALWAYS_COMPATIBLE")
    await client.create_producer(TOPIC, pb.CommandProducer(schema=INT32))
    await rest.done("PUT", path, "UNDEFINED")
    assert await rest.call("GET", path) == (204, "")
    assert await rest.get(f"{path}?applied=true") == "BACKWARD"


async def test_the_older_name_of_the_strategy_holds_where_there_is_no_newer_one(
    rest: Rest,
) -> None:
    await rest.done("PUT", PATH)
    applied = f"{PATH}/schemaCompatibilityStrategy?applied=true"
    older = f"{NAMESPACE}/schemaAutoUpdateCompatibilityStrategy"
    assert await rest.get(applied) == "FULL"
    await rest.done("PUT", older, "AutoUpdateDisabled")
    assert await rest.get(older) == "AutoUpdateDisabled"
    assert await rest.get(applied) == "ALWAYS_INCOMPATIBLE"
    await rest.done("PUT", f"{NAMESPACE}/schemaCompatibilityStrategy", "FORWARD")
    assert await rest.get(applied) == "FORWARD"
    assert "BackwardTransitive" in await rest.refused(412, "PUT", older, "BACKWARD")


async def test_settings_hold_where_no_policy_is_set(tmp_path: Path) -> None:
    settings: dict[str, object] = {
        "schema_auto_update": False,
        "schema_validation_enforced": True,
        "schema_compatibility_strategy": "ALWAYS_INCOMPATIBLE",
    }
    async with running(tmp_path, **settings) as broker, asking_broker(broker) as rest:
        client = await RawClient.open("127.0.0.1", broker.port)
        assert await rest.get(f"{NAMESPACE}/isAllowAutoUpdateSchema") is False
        await rest.call("POST", SCHEMAS, {"type": "STRING", "schema": ""})
        await refused(client, "isAllowAutoUpdateSchema", INT32)
        # A namespace cannot switch the enforcement off.
        await rest.done("POST", f"{NAMESPACE}/schemaValidationEnforced", False)
        await refused(client, "schemaValidationEnforced")
        await rest.refused(409, "POST", SCHEMAS, {"type": "INT32", "schema": ""})
        await client.close()
