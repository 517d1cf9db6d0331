"""Readers, consumers and table views of `pulsar-client` (Python) on a compacted topic."""

import json
import time
import uuid
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pulsar
import pytest

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.fixtures import RunningPeer

PATIENCE_MS = 30_000
PATIENCE_S = 15
KEYS = 5


@pytest.fixture
def client(broker: BrokerUnderTest | RunningPeer) -> Iterator[pulsar.Client]:
    client = pulsar.Client(broker.url, operation_timeout_seconds=10)
    yield client
    client.close()


def compact(broker: BrokerUnderTest | RunningPeer, topic: str) -> None:
    """As `pulsar-admin topics compact` does, and until it is done."""
    url = f"{broker.admin_url}/admin/v2/{topic.replace('://', '/')}/compaction"
    with urlopen(Request(url, method="PUT")) as answer:
        assert answer.status == 204
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with urlopen(url) as answer:
            status = json.load(answer)["status"]
        if status != "RUNNING":
            assert status == "SUCCESS"
            return
        time.sleep(0.02)
    raise TimeoutError(url)


def is_removed(message: pulsar.Message) -> bool:
    """Whether it is the place of a message in a batch that compaction removed.

    This client delivers it, without key and payload; Java's does not.
    """
    return not message.partition_key() and not message.data()


def read(client: pulsar.Client, topic: str) -> list[tuple[str, bytes]]:
    """Everything that a reader has until nothing is available."""
    reader = client.create_reader(topic, pulsar.MessageId.earliest, is_read_compacted=True)
    found = []
    while reader.has_message_available():
        message = reader.read_next(PATIENCE_MS)
        if not is_removed(message):
            found.append((message.partition_key(), message.data()))
    reader.close()
    return found


@pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])
def test_newest_values_are_read_and_in_a_table(
    broker: BrokerUnderTest | RunningPeer, client: pulsar.Client, *, batching: bool
) -> None:
    topic = f"persistent://public/default/python-compacted-{uuid.uuid4().hex[:8]}"
    producer = client.create_producer(
        topic, batching_enabled=batching, batching_max_publish_delay_ms=20
    )

    def send(word: str) -> None:
        for number in range(2 * KEYS):
            value = f"{word}{number}".encode()
            producer.send_async(value, lambda *_: None, partition_key=f"k{number % KEYS}")
        producer.send_async(b"", lambda *_: None, partition_key="k0")
        producer.flush()

    def expected(word: str) -> dict[str, bytes]:
        return {f"k{key}": f"{word}{KEYS + key}".encode() for key in range(1, KEYS)}

    send("a")
    compact(broker, topic)
    assert dict(read(client, topic)) == expected("a")
    assert len(read(client, topic)) == KEYS - 1
    table = client.create_table_view(topic)
    assert {key: table.get(key) for key in expected("a")} == expected("a")
    assert table.get("k0") is None
    send("b")
    compact(broker, topic)
    assert sorted(read(client, topic)) == sorted(expected("b").items())
    late = client.create_table_view(topic)
    assert len(late) == KEYS - 1
    assert {key: late.get(key) for key in expected("b")} == expected("b")
    consumer = client.subscribe(
        topic,
        "compacted",
        is_read_compacted=True,
        initial_position=pulsar.InitialPosition.Earliest,
    )
    found: dict[str, bytes] = {}
    while len(found) < KEYS - 1:
        message = consumer.receive(PATIENCE_MS)
        if not is_removed(message):
            found[message.partition_key()] = message.data()
    assert found == expected("b")
    for each in (late, table):
        each.close()
