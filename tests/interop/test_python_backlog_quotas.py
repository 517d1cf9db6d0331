"""Producers of `pulsar-client` (Python) on a topic whose backlog is over its quota."""

import json
import uuid
from collections.abc import Iterator
from queue import Empty, Queue
from urllib.request import Request, urlopen

import pulsar
import pytest

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.fixtures import RunningPeer

PATIENCE_S = 20
PATIENCE_MS = 1000 * PATIENCE_S
TEXT = b"x" * 1000
COUNT = 10
Broker = BrokerUnderTest | RunningPeer


@pytest.fixture
def client(broker: Broker) -> Iterator[pulsar.Client]:
    client = pulsar.Client(broker.url, operation_timeout_seconds=3)
    yield client
    client.close()


def ask(broker: Broker, method: str, path: str, body: object = None) -> None:
    headers = {"Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    url = f"{broker.admin_url}/admin/v2/{path}"
    with urlopen(Request(url, method=method, data=data, headers=headers)) as answer:
        assert answer.status == 204


def over_quota(broker: Broker, client: pulsar.Client, policy: str) -> tuple[str, pulsar.Producer]:
    """A topic over its quota, and a producer that the broker has closed."""
    name = f"python-{uuid.uuid4().hex[:8]}"
    topic = f"persistent://public/default/{name}"
    ask(broker, "PUT", f"persistent/public/default/{name}")
    ask(broker, "PUT", f"persistent/public/default/{name}/subscription/s", "earliest")
    quota = {"limitSize": 5000, "limitTime": -1, "policy": policy}
    ask(broker, "POST", f"persistent/public/default/{name}/backlogQuota", quota)
    producer = client.create_producer(topic, send_timeout_millis=0)
    for _ in range(COUNT):
        producer.send(TEXT)
    ask(broker, "GET", "brokers/backlog-quota-check")
    return topic, producer


def receive(client: pulsar.Client, topic: str, count: int) -> None:
    consumer = client.subscribe(topic, "s")
    for _ in range(count):
        consumer.acknowledge(consumer.receive(PATIENCE_MS))
    consumer.close()


def test_a_held_producer_keeps_its_messages_and_comes_back_by_itself(
    broker: Broker, client: pulsar.Client
) -> None:
    topic, producer = over_quota(broker, client, "producer_request_hold")
    results: Queue[pulsar.Result] = Queue()
    producer.send_async(TEXT, lambda result, _: results.put(result))
    with pytest.raises(Empty):
        results.get(timeout=1)
    receive(client, topic, COUNT)
    assert results.get(timeout=PATIENCE_S) == pulsar.Result.Ok
    receive(client, topic, 1)


def test_a_refused_producer_fails_until_the_backlog_is_gone(
    broker: Broker, client: pulsar.Client
) -> None:
    topic, producer = over_quota(broker, client, "producer_exception")
    results: Queue[pulsar.Result] = Queue()
    producer.send_async(TEXT, lambda result, _: results.put(result))
    blocked = pulsar.Result.ProducerBlockedQuotaExceededException
    assert results.get(timeout=PATIENCE_S) == blocked
    with pytest.raises(pulsar.PulsarException) as refused:
        client.create_producer(topic)
    assert "ProducerBlockedQuotaExceededException" in str(refused.value)
    receive(client, topic, COUNT)
    client.create_producer(topic).send(TEXT)
    receive(client, topic, 1)
