"""Apache Pulsar replicates to Magnetar: what arrives is what was sent, each message once.

The source is Apache Pulsar itself, so this runs with the peer (`make stock-peer`).
"""

import threading
import urllib.error
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pulsar
import pytest
from pulsar.schema import AvroSchema

from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.two_clusters import POSITION, beside_peer, register, rest, until

SOURCE: Final = "standalone"
HERE: Final = "other"
NAMESPACE: Final = "geo/replicated"
PATIENCE_MS: Final = 30_000
COUNT: Final = 200
KILLS: Final = 3
SENSOR: Final = {
    "type": "record",
    "name": "Sensor",
    "fields": [{"name": "name", "type": "string"}],
}
LATER_SENSOR: Final = {
    **SENSOR,
    "fields": [
        {"name": "name", "type": "string"},
        {"name": "value", "type": "int", "default": 7},
    ],
}
Writer = Callable[[pulsar.Client, str], None]


class Facts(NamedTuple):
    """What a consumer sees of a message, in whatever cluster."""

    data: bytes
    key: str
    properties: dict[str, str]
    event_ms: int
    publish_ms: int
    producer: str


class Replication(NamedTuple):
    """The peer as source, and a Magnetar to which it replicates a namespace."""

    peer: BrokerUnderTest
    magnetar: MagnetarProcess


@pytest.fixture(scope="module")
def magnetar_here(
    on_peer: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerUnderTest]:
    yield from beside_peer(on_peer, tmp_path_factory, HERE)


@pytest.fixture(scope="module")
def replication(broker: BrokerUnderTest, magnetar_here: MagnetarProcess) -> Replication:
    register(broker, HERE, magnetar_here)
    rest(magnetar_here, "PUT", "tenants/geo", {"allowedClusters": [HERE]})
    rest(magnetar_here, "PUT", f"namespaces/{NAMESPACE}", {"deduplicationEnabled": True})
    rest(broker, "PUT", "tenants/geo", {"allowedClusters": [SOURCE, HERE]})
    rest(broker, "PUT", f"namespaces/{NAMESPACE}", {"replication_clusters": [SOURCE, HERE]})
    return Replication(broker, magnetar_here)


def read(broker: BrokerUnderTest, topic: str, count: int) -> list[Facts]:
    """The first messages of a topic, and no more than there are."""
    client = pulsar.Client(broker.url)
    try:
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        return [facts(reader.read_next(PATIENCE_MS)) for _ in range(count)]
    finally:
        client.close()


def facts(message: pulsar.Message) -> Facts:
    properties = dict(message.properties())
    properties.pop(POSITION, None)
    return Facts(
        message.data(),
        message.partition_key(),
        properties,
        message.event_timestamp(),
        message.publish_timestamp(),
        message.producer_name(),
    )


def write_one_by_one(client: pulsar.Client, topic: str) -> None:
    producer = client.create_producer(topic, compression_type=pulsar.CompressionType.LZ4)
    for number in range(COUNT):
        producer.send(
            b"%d" % number * 50,
            properties={"number": str(number)},
            partition_key=f"k{number % 7}",
            event_timestamp=1000 + number,
        )


def write_batches(client: pulsar.Client, topic: str) -> None:
    producer = client.create_producer(topic, batching_enabled=True, batching_max_messages=17)
    for number in range(COUNT):
        producer.send_async(
            b"%d" % number,
            lambda result, message_id: None,
            properties={"number": str(number)},
            partition_key=f"k{number % 7}",
        )
    producer.flush()


@pytest.mark.parametrize("write", [write_one_by_one, write_batches])
def test_messages_arrive_as_they_were_sent(replication: Replication, write: Writer) -> None:
    topic = f"persistent://{NAMESPACE}/{write.__name__}"
    client = pulsar.Client(replication.peer.url)
    write(client, topic)
    client.close()
    sent = read(replication.peer, topic, COUNT)
    assert read(replication.magnetar, topic, COUNT) == sent
    stats = rest(replication.magnetar, "GET", f"persistent/{NAMESPACE}/{write.__name__}/stats")
    assert isinstance(stats, dict)
    assert stats["publishers"] == []
    assert stats["replication"][SOURCE]["inboundConnection"]
    assert stats["replication"][SOURCE]["msgInCount"] == COUNT


def test_versions_of_an_avro_schema_arrive(replication: Replication) -> None:
    topic = f"persistent://{NAMESPACE}/sensors"
    client = pulsar.Client(replication.peer.url)
    for definition, value in (
        (SENSOR, {"name": "a"}),
        (LATER_SENSOR, {"name": "b", "value": 3}),
        (SENSOR, {"name": "c"}),
    ):
        schema = AvroSchema(None, schema_definition=definition)
        client.create_producer(topic, schema=schema).send(value)
    client.close()
    assert [each.data for each in read(replication.magnetar, topic, 3)] == [
        each.data for each in read(replication.peer, topic, 3)
    ]
    client = pulsar.Client(replication.magnetar.url)
    schema = AvroSchema(None, schema_definition=LATER_SENSOR)
    reader = client.create_reader(topic, pulsar.MessageId.earliest, schema=schema)
    found = [reader.read_next(PATIENCE_MS).value() for _ in range(3)]
    client.close()
    assert found == [
        {"name": name, "value": value} for name, value in zip("abc", (7, 3, 7), strict=True)
    ]
    versions = rest(replication.magnetar, "GET", f"schemas/{NAMESPACE}/sensors/schemas")
    assert isinstance(versions, dict)
    assert len(versions["getSchemaResponses"]) == 2


def stored_entries(replication: Replication, local_name: str) -> int:
    try:
        path = f"persistent/{NAMESPACE}/{local_name}/internalStats"
        stats = rest(replication.magnetar, "GET", path)
    except urllib.error.HTTPError:
        return 0  # The topic is not there yet.
    assert isinstance(stats, dict)
    return sum(each["entries"] for each in stats["ledgers"])


def backlog(replication: Replication, local_name: str) -> object:
    """The number of entries that the peer has still to replicate."""
    stats = rest(replication.peer, "GET", f"persistent/{NAMESPACE}/{local_name}/stats")
    assert isinstance(stats, dict)
    return stats["replication"][HERE]["replicationBacklog"]


def test_messages_arrive_around_the_marker_of_a_replicated_subscription(
    replication: Replication,
) -> None:
    topic = f"persistent://{NAMESPACE}/marked"
    client = pulsar.Client(replication.peer.url)
    client.subscribe(topic, "s", replicate_subscription_state_enabled=True)
    producer = client.create_producer(topic)
    producer.send(b"0")
    until(lambda: stored_entries(replication, "marked") == 2)
    producer.send(b"1")
    client.close()
    assert [each.data for each in read(replication.magnetar, topic, 2)] == [b"0", b"1"]
    # The replicator has taken the receipt of the marker.
    until(lambda: backlog(replication, "marked") == 0)


def test_each_message_arrives_once_over_kills(replication: Replication) -> None:
    topic = f"persistent://{NAMESPACE}/killed"
    sent, stopping = 0, threading.Event()

    def publish() -> None:
        nonlocal sent
        client = pulsar.Client(replication.peer.url)
        producer = client.create_producer(topic, batching_enabled=True)
        while not stopping.is_set():
            producer.send(b"%d" % sent)
            sent += 1
        client.close()

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        for _ in range(KILLS):
            before = sent
            # Some arrive, so that a replicator is connected when Magnetar dies.
            read(replication.magnetar, topic, before + 100)
            replication.magnetar.kill()
            replication.magnetar.start()
    finally:
        stopping.set()
        publishing.join()
    found = read(replication.magnetar, topic, sent)
    assert [int(each.data) for each in found] == list(range(sent))
    stored = rest(replication.peer, "GET", f"persistent/{NAMESPACE}/killed/internalStats")
    assert isinstance(stored, dict)
    assert stored_entries(replication, "killed") == stored["numberOfEntries"]
