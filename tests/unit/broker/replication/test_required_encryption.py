"""Clusters whose namespaces take encrypted messages only."""

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import NAMESPACE, TOPIC, Cluster
from tests.unit.broker.replication.test_replicated_subscriptions import (
    Pair,
    attach,
    is_past,
    newest,
    pair,
    receive,
)

__all__ = ["pair"]


async def publish(cluster: Cluster, *payloads: bytes) -> None:
    """Store messages that count as encrypted."""
    client = await cluster.client()
    producer = await client.create_producer(TOPIC, pb.CommandProducer(encrypted=True))
    for payload in payloads:
        keys = [pb.EncryptionKeys(key="k", value=b"v")]
        await producer.send(payload, metadata=pb.MessageMetadata(encryption_keys=keys))
    await client.close()


async def test_encrypted_messages_and_markers_are_replicated(pair: Pair) -> None:
    east, west = pair
    for each in pair:
        await each.ask("POST", f"{NAMESPACE}/encryptionRequired", True)
    client, consumer = await attach(east)
    await publish(east, b"0", b"1")
    await until(east.is_done)
    copied = await newest(west)
    received = await receive(consumer, 2)
    consumer.ack(received[-1].message_id, cumulative=True)
    await until(lambda: is_past(west, copied))
    await client.close()


async def test_other_messages_wait_until_the_other_cluster_takes_them(pair: Pair) -> None:
    east, west = pair
    await west.messages(0)
    await west.ask("POST", f"{NAMESPACE}/encryptionRequired", True)
    await publish(east, b"0")
    await east.publish(b"1")
    await until(lambda: "not encrypted" in (east.replicators()["west"].failure or ""))
    assert west.broker.topics.loaded()[TOPIC].ledger.entry_count == 1
    await west.ask("POST", f"{NAMESPACE}/encryptionRequired", False)
    await until(east.is_done)
    assert await west.payloads(2) == [b"0", b"1"]
