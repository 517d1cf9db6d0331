"""A namespace that requires encryption takes no producer and no message without it."""

import asyncio
from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient, RawProducer
from tests.unit.broker.admin.conftest import Rest, asking_broker

POLICY = "/admin/v2/namespaces/public/default/encryptionRequired"
TOPICS = [
    "persistent://public/default/t",
    "non-persistent://public/default/t",
    "segment://public/default/s/0000-ffff-0",
]
ENCRYPTED = pb.CommandProducer(encrypted=True)
METADATA = pb.MessageMetadata(
    producer_name="p",
    sequence_id=0,
    publish_time=1,
    encryption_keys=[pb.EncryptionKeys(key="k", value=b"v")],
)


@pytest.fixture
async def rest(rest: Rest) -> Rest:
    await rest.done("PUT", "/admin/v2/scalable/public/default/s")
    return rest


async def refused_producer(client: RawClient, topic: str) -> None:
    with pytest.raises(BrokerError, match="takes encrypted messages only") as caught:
        await client.create_producer(topic)
    assert caught.value.code == pb.MetadataError


async def refused_message(producer: RawProducer) -> None:
    with pytest.raises(BrokerError, match="The message is not encrypted") as caught:
        await producer.send(b"plain")
    assert caught.value.code == pb.MetadataError


@pytest.mark.parametrize("topic", TOPICS)
async def test_producers_and_messages_without_encryption_are_refused(
    rest: Rest, client: RawClient, topic: str
) -> None:
    await rest.done("POST", POLICY, True)
    await refused_producer(client, topic)
    producer = await client.create_producer(topic, ENCRYPTED)
    await producer.send(b"secret", metadata=METADATA)
    await refused_message(producer)
    await rest.done("POST", POLICY, False)
    await (await client.create_producer(topic)).send(b"plain")


@pytest.mark.parametrize("topic", TOPICS)
async def test_producers_that_do_not_encrypt_are_closed_when_the_policy_is_set(
    rest: Rest, client: RawClient, topic: str
) -> None:
    plain = await client.create_producer(topic)
    encrypting = await client.create_producer(topic, ENCRYPTED)
    await rest.done("POST", POLICY, True)
    closed = await asyncio.wait_for(plain.events.get(), 10)
    assert closed.type == pb.BaseCommand.CLOSE_PRODUCER
    await encrypting.send(b"secret", metadata=METADATA)
    await refused_producer(client, topic)


async def test_the_encryption_policy_is_shown_and_removed(rest: Rest) -> None:
    assert await rest.get(POLICY) is False
    await rest.done("POST", POLICY, True)
    assert await rest.get(POLICY) is True
    await rest.done("DELETE", POLICY)
    assert await rest.get(POLICY) is False
    assert "true or false" in await rest.refused(412, "POST", POLICY, "yes")


async def test_a_namespace_cannot_switch_off_what_its_broker_requires(tmp_path: Path) -> None:
    async with (
        running(tmp_path, encryption_required=True) as broker,
        asking_broker(broker) as rest,
    ):
        client = await RawClient.open("127.0.0.1", broker.port)
        await rest.done("POST", POLICY, False)
        await refused_producer(client, TOPICS[0])
        producer = await client.create_producer(TOPICS[0], ENCRYPTED)
        await refused_message(producer)
        await client.close()


async def test_a_namespace_is_created_with_the_policy(rest: Rest, client: RawClient) -> None:
    body = {"encryption_required": True}
    await rest.done("PUT", "/admin/v2/namespaces/public/sealed", body)
    await refused_producer(client, "persistent://public/sealed/t")
