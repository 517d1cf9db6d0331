"""What a client with an http:// service URL asks before it sends or reads anything."""

import re

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.raw_client import RawClient
from tests.support.raw_handles import BrokerError
from tests.unit.broker.admin.conftest import Rest

PERSISTENT = "/admin/v2/persistent/public/default"
NAMESPACE = "/admin/v2/namespaces/public/default"
LOOKUP = "/lookup/v2/topic"
CHECK = "partitions?checkAllowAutoCreation=true"


async def test_a_new_topic_may_be_used(creating: Rest) -> None:
    assert await creating.get(f"{PERSISTENT}/x/{CHECK}") == {"partitions": 0, "deleted": False}
    found = await creating.get(f"{LOOKUP}/persistent/public/default/x")
    assert isinstance(found, dict)
    assert found["brokerUrl"] == f"pulsar://127.0.0.1:{creating.binary_port}"
    assert await creating.get(PERSISTENT) == [], "whoever opens it makes it"
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    await client.create_producer("persistent://public/default/x")
    assert await creating.get(PERSISTENT) == ["persistent://public/default/x"]
    assert await creating.get(f"{PERSISTENT}/x/{CHECK}") == {"partitions": 0, "deleted": False}
    await client.close()


async def test_a_new_topic_gets_the_partitions_of_its_namespace(creating: Rest) -> None:
    policy = {
        "allowAutoTopicCreation": True,
        "topicType": "partitioned",
        "defaultNumPartitions": 3,
    }
    await creating.done("POST", f"{NAMESPACE}/autoTopicCreation", policy)
    await creating.refused(404, "GET", f"{PERSISTENT}/x/partitions")
    assert await creating.get(f"{PERSISTENT}/x/{CHECK}") == {"partitions": 3, "deleted": False}
    assert await creating.get(f"{PERSISTENT}/partitioned") == ["persistent://public/default/x"]


async def test_lookup_of_a_topic_that_may_not_be_created_answers_404(creating: Rest) -> None:
    await creating.refused(404, "GET", f"{PERSISTENT}/x/partitions")
    await creating.refused(404, "GET", f"/admin/v2/persistent/public/none/x/{CHECK}")
    await creating.done("PUT", "/admin/v2/scalable/public/default/s")
    await creating.refused(404, "GET", f"{PERSISTENT}/s/{CHECK}")
    await creating.done("PUT", f"{PERSISTENT}/p/partitions", 2)
    await creating.refused(404, "GET", f"{PERSISTENT}/p-partition-2/{CHECK}")
    policy = {"allowAutoTopicCreation": False}
    await creating.done("POST", f"{NAMESPACE}/autoTopicCreation", policy)
    await creating.refused(404, "GET", f"{PERSISTENT}/x/{CHECK}")


async def test_names_are_listed_by_their_domain(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/x")
    names = ["persistent://public/default/x"]
    for mode, wanted in (("PERSISTENT", names), ("ALL", names), ("NON_PERSISTENT", [])):
        assert await rest.get(f"{NAMESPACE}/topics?mode={mode}") == wanted
    assert "NON_PERSISTENT" in await rest.refused(412, "GET", f"{NAMESPACE}/topics?mode=some")


async def test_a_lookup_refuses_what_the_wire_refuses(rest: Rest) -> None:
    reserved = "pulsar/system/__transaction_log_0"
    reason = await rest.refused(405, "GET", f"{LOOKUP}/persistent/{reserved}")
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    command = pb.CommandLookupTopic(topic=f"persistent://{reserved}")
    with pytest.raises(BrokerError, match=re.escape(reason)):
        await client.request(pb.BaseCommand.LOOKUP, command)
    await client.close()


async def test_a_v4_client_finds_its_transaction_coordinators(creating: Rest) -> None:
    system = "pulsar/system/transaction_coordinator_assign"
    path = f"/admin/v2/persistent/{system}"
    for query in ("partitions", CHECK):
        assert await creating.get(f"{path}/{query}") == {"partitions": 16, "deleted": False}
    found = await creating.get(f"{LOOKUP}/persistent/{system}-partition-15")
    assert isinstance(found, dict)
    assert found["brokerUrl"] == f"pulsar://127.0.0.1:{creating.binary_port}"
    await creating.refused(404, "GET", f"{LOOKUP}/persistent/{system}-partition-16")
    for method, place in (("PUT", path), ("PUT", f"{path}/partitions")):
        status, reason = await creating.call(method, place, 4 if "partitions" in place else None)
        assert status >= 400, reason
        assert "reserved for transaction coordinators" in str(reason)
    await creating.refused(404, "GET", f"{path}/stats")


async def test_lookup_in_a_missing_namespace_answers_404(creating: Rest) -> None:
    for domain in ("persistent", "non-persistent", "topic"):
        await creating.refused(404, "GET", f"{LOOKUP}/{domain}/public/none/x")
    await creating.refused(404, "GET", f"{LOOKUP}/persistent/nobody/none/x")
