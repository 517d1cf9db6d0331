"""`pulsar-client` (Python over the C++ client) on non-persistent topics."""

import json
import time
import uuid
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pulsar
import pytest

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.fixtures import RunningPeer

Broker = BrokerUnderTest | RunningPeer
PATIENCE_MS = 30_000
PAYLOADS = [f"message {number}".encode() for number in range(20)]
TYPES = [
    pulsar.ConsumerType.Exclusive,
    pulsar.ConsumerType.Shared,
    pulsar.ConsumerType.Failover,
    pulsar.ConsumerType.KeyShared,
]


@pytest.fixture
def client(broker: Broker) -> Iterator[pulsar.Client]:
    client = pulsar.Client(broker.url, operation_timeout_seconds=10)
    yield client
    client.close()


@pytest.fixture
def topic() -> str:
    return f"non-persistent://public/default/python-{uuid.uuid4().hex[:8]}"


def received(consumer: pulsar.Consumer, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        message = consumer.receive(PATIENCE_MS)
        consumer.acknowledge(message)
        found.append(message.data())
    return found


@pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_connected_consumer_gets_what_is_sent_and_no_later_one_does(
    client: pulsar.Client, topic: str, kind: pulsar.ConsumerType, *, batching: bool
) -> None:
    consumer = client.subscribe(topic, "first", consumer_type=kind)
    producer = client.create_producer(topic, batching_enabled=batching)
    for payload in PAYLOADS:
        producer.send_async(payload, lambda *_: None, partition_key=payload.decode())
    producer.flush()
    assert sorted(received(consumer, len(PAYLOADS))) == sorted(PAYLOADS)
    consumer.close()
    producer.send(b"lost")
    later = client.subscribe(
        topic, "first", consumer_type=kind, initial_position=pulsar.InitialPosition.Earliest
    )
    producer.send(b"got")
    assert received(later, 1) == [b"got"]


def test_partitioned_topic_is_filled_and_read(
    client: pulsar.Client, broker: Broker, topic: str
) -> None:
    url = f"{broker.admin_url}/admin/v2/{topic.replace('://', '/')}/partitions"
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(3).encode(), headers, method="PUT")):
        pass
    assert len(client.get_topic_partitions(topic)) == 3
    consumer = client.subscribe(topic, "s", consumer_type=pulsar.ConsumerType.Shared)
    producer = client.create_producer(topic)
    for payload in PAYLOADS:
        producer.send(payload, partition_key=payload.decode())
    assert sorted(received(consumer, len(PAYLOADS))) == sorted(PAYLOADS)


def test_reader_gets_messages_from_now_on(client: pulsar.Client, topic: str) -> None:
    producer = client.create_producer(topic)
    producer.send(b"before")
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    producer.send(b"after")
    assert reader.read_next(PATIENCE_MS).data() == b"after"


def test_messages_beyond_the_queue_of_a_consumer_are_dropped_and_counted(
    client: pulsar.Client, broker: Broker, topic: str
) -> None:
    consumer = client.subscribe(topic, "s", receiver_queue_size=5)
    producer = client.create_producer(topic, batching_enabled=False)
    for payload in PAYLOADS:
        producer.send(payload)
    assert received(consumer, 5) == PAYLOADS[:5]
    with pytest.raises(pulsar.Timeout):
        consumer.receive(500)
    url = f"{broker.admin_url}/admin/v2/{topic.replace('://', '/')}/stats"
    # The peer works out rates once a minute.
    deadline_s = time.monotonic() + 70
    while True:
        with urlopen(url) as answer:
            stats = json.load(answer)
        if stats["subscriptions"]["s"]["msgDropRate"] > 0 or time.monotonic() > deadline_s:
            break
        time.sleep(1)
    assert stats["subscriptions"]["s"]["msgDropRate"] > 0
