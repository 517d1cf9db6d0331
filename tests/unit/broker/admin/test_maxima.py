"""Settings that limit tenants, namespaces, partitions, and the clients of one address."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from config.settings import ConfigurationError, load_settings
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.unit.broker.admin.conftest import Rest, asking_broker

TOPICS = "/admin/v2/persistent/public/default"
TENANT = {"adminRoles": [], "allowedClusters": ["standalone"]}
SETTINGS: dict[str, object] = {
    "max_tenants": 3,
    "max_namespaces_per_tenant": 2,
    "max_num_partitions_per_partitioned_topic": 4,
    "max_same_address_producers_per_topic": 1,
    "max_same_address_consumers_per_topic": 2,
}
SHARED = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)


@pytest.fixture
async def rest(tmp_path: Path) -> AsyncIterator[Rest]:
    async with running(tmp_path, **SETTINGS) as broker, asking_broker(broker) as rest:
        yield rest


async def test_tenants_above_the_maximum_are_refused(rest: Rest) -> None:
    # public and pulsar are there from the start, and count.
    await rest.done("PUT", "/admin/v2/tenants/a", TENANT)
    assert "max_tenants" in await rest.refused(412, "PUT", "/admin/v2/tenants/b", TENANT)
    await rest.refused(409, "PUT", "/admin/v2/tenants/a", TENANT)
    await rest.done("DELETE", "/admin/v2/tenants/a")
    await rest.done("PUT", "/admin/v2/tenants/b", TENANT)


async def test_namespaces_above_the_maximum_of_a_tenant_are_refused(rest: Rest) -> None:
    await rest.done("PUT", "/admin/v2/namespaces/public/a")
    reason = await rest.refused(412, "PUT", "/admin/v2/namespaces/public/b")
    assert "max_namespaces_per_tenant" in reason
    await rest.refused(409, "PUT", "/admin/v2/namespaces/public/a")
    await rest.done("PUT", "/admin/v2/namespaces/pulsar/a")


@pytest.mark.parametrize(
    ("path", "body", "left"),
    [("/admin/v2/tenants/n", TENANT, 1), ("/admin/v2/namespaces/pulsar/n", None, 1)],
    ids=["tenants", "namespaces"],
)
async def test_creations_at_once_do_not_exceed_a_maximum(
    rest: Rest, path: str, body: object, left: int
) -> None:
    answers = await asyncio.gather(
        *(rest.call("PUT", f"{path}{number}", body) for number in range(8))
    )
    assert sorted(status for status, _ in answers) == [204] * left + [412] * (8 - left)


async def test_a_topic_gets_no_more_partitions_than_the_maximum(rest: Rest) -> None:
    reason = await rest.refused(406, "PUT", f"{TOPICS}/p/partitions", 5)
    assert "1 to 4" in reason
    await rest.done("PUT", f"{TOPICS}/p/partitions", 3)
    await rest.refused(406, "POST", f"{TOPICS}/p/partitions", 5)
    await rest.done("POST", f"{TOPICS}/p/partitions", 4)


@pytest.mark.parametrize("domain", ["persistent", "non-persistent"])
async def test_clients_of_one_address_above_the_maximum_are_refused(
    client: RawClient, domain: str
) -> None:
    topic = f"{domain}://public/default/t"
    first = await client.create_producer(topic)
    with pytest.raises(BrokerError, match=r"1 producers from 127\.0\.0\.1") as caught:
        await client.create_producer(topic)
    assert caught.value.code == pb.ProducerBusy
    await client.create_producer(f"{topic}2")
    await first.close()
    await client.create_producer(topic)
    for subscription in "ab":
        await client.subscribe(topic, subscription, SHARED)
    with pytest.raises(BrokerError, match=r"2 consumers from 127\.0\.0\.1") as caught:
        await client.subscribe(topic, "c", SHARED)
    assert caught.value.code == pb.ConsumerBusy


def test_more_partitions_by_default_than_a_topic_may_have_are_refused() -> None:
    wrong = {"default_num_partitions": 9, "max_num_partitions_per_partitioned_topic": 8}
    with pytest.raises(ConfigurationError, match="correct one of them"):
        load_settings(None, wrong)
