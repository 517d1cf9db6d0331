"""First programs of `pulsar-client` (Python over the C++ client), as its users write them.

Rules: each runs with the binary and with the HTTP service URL; nothing is set up before it but what
the program does itself, with the client or by the REST interface.
"""

import json
import re
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from urllib.request import Request, urlopen

import pulsar
import pytest
from pulsar.schema import AvroSchema, Boolean, Integer, JsonSchema, Record, String, StringSchema

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.fixtures import RunningPeer

COUNT = 10
PATIENCE_MS = 30_000
LARGE = bytes(range(256)) * (24 * 1024)
"""6 MiB: more than one message may have."""
PAYLOADS = [f"message {number}".encode() for number in range(100)]
TYPES = [
    pulsar.ConsumerType.Exclusive,
    pulsar.ConsumerType.Shared,
    pulsar.ConsumerType.Failover,
    pulsar.ConsumerType.KeyShared,
]


class Measurement(Record):  # type: ignore[misc]
    sensor = String()
    value = Integer()
    valid = Boolean()


@pytest.fixture(params=["pulsar", "http"])
def client(
    request: pytest.FixtureRequest, broker: BrokerUnderTest | RunningPeer
) -> Iterator[pulsar.Client]:
    url = broker.url if request.param == "pulsar" else broker.admin_url
    client = pulsar.Client(url, operation_timeout_seconds=10)
    yield client
    # A producer that was fenced may be closing by itself.
    with suppress(pulsar.AlreadyClosed):
        client.close()


@pytest.fixture
def topic() -> str:
    return f"persistent://public/default/python-{uuid.uuid4().hex[:8]}"


def partition(broker: BrokerUnderTest | RunningPeer, topic: str, count: int) -> None:
    """As a script does that has no admin client."""
    path = topic.replace("://", "/")
    url = f"{broker.admin_url}/admin/v2/{path}/partitions"
    body = json.dumps(count).encode()
    with urlopen(Request(url, body, {"Content-Type": "application/json"}, method="PUT")):
        pass


def set_policy(broker: BrokerUnderTest | RunningPeer, path: str, value: object) -> None:
    """Set a policy over REST; `path` begins with `namespaces/` or `persistent/`."""
    url, headers = f"{broker.admin_url}/admin/v2/{path}", {"Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(value).encode(), headers, method="POST")):
        pass


@pytest.fixture
def namespace(broker: BrokerUnderTest | RunningPeer) -> str:
    """A namespace of the test's own."""
    name = f"public/python-{uuid.uuid4().hex[:8]}"
    with urlopen(Request(f"{broker.admin_url}/admin/v2/namespaces/{name}", method="PUT")):
        return name


def send_all(client: pulsar.Client, topic: str, payloads: list[bytes]) -> list[pulsar.MessageId]:
    """One by one, each with a key; their ids."""
    producer = client.create_producer(topic)
    ids = [producer.send(payload, partition_key=payload.decode()) for payload in payloads]
    producer.close()
    return ids


def receive_all(consumer: pulsar.Consumer, count: int) -> list[bytes]:
    """So many messages, acknowledged; in the order in which they came."""
    received = []
    for _ in range(count):
        message = consumer.receive(PATIENCE_MS)
        consumer.acknowledge(message)
        received.append(message.data())
    return received


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_each_type_of_subscription_gets_what_was_sent(
    client: pulsar.Client, topic: str, kind: pulsar.ConsumerType
) -> None:
    consumer = client.subscribe(topic, "first", consumer_type=kind)
    send_all(client, topic, PAYLOADS[:COUNT])
    assert sorted(receive_all(consumer, COUNT)) == PAYLOADS[:COUNT]
    with pytest.raises(pulsar.Timeout):
        consumer.receive(100)


def test_a_partitioned_topic_is_made_filled_and_read(
    client: pulsar.Client, broker: BrokerUnderTest | RunningPeer, topic: str
) -> None:
    partition(broker, topic, 4)
    assert len(client.get_topic_partitions(topic)) == 4
    consumer = client.subscribe(topic, "first", consumer_type=pulsar.ConsumerType.Shared)
    ids = send_all(client, topic, PAYLOADS)
    assert {each.partition() for each in ids} == {0, 1, 2, 3}
    assert sorted(receive_all(consumer, len(PAYLOADS))) == sorted(PAYLOADS)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (StringSchema(), "größer"),
        (JsonSchema(Measurement), Measurement(sensor="a", value=-1, valid=True)),
        (AvroSchema(Measurement), Measurement(sensor="a", value=-1, valid=True)),
    ],
    ids=["string", "json", "avro"],
)
def test_a_schema_gives_values_back(
    client: pulsar.Client, topic: str, schema: pulsar.schema.Schema, value: object
) -> None:
    consumer = client.subscribe(topic, "first", schema=schema)
    client.create_producer(topic, schema=schema).send(value)
    message = consumer.receive(PATIENCE_MS)
    assert message.value() == value
    consumer.acknowledge(message)


def test_a_producer_with_another_schema_is_refused(client: pulsar.Client, topic: str) -> None:
    client.create_producer(topic, schema=JsonSchema(Measurement))
    with pytest.raises(pulsar.IncompatibleSchema):
        client.create_producer(topic, schema=StringSchema())


def test_a_reader_begins_at_its_message_within_compressed_batches(
    client: pulsar.Client, topic: str
) -> None:
    producer = client.create_producer(
        topic,
        batching_enabled=True,
        batching_max_publish_delay_ms=5,
        compression_type=pulsar.CompressionType.ZLib,
        block_if_queue_full=True,
    )
    ids: list[pulsar.MessageId] = []
    for payload in PAYLOADS:
        producer.send_async(payload, lambda _result, message_id: ids.append(message_id))
    producer.flush()

    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert [reader.read_next(PATIENCE_MS).data() for _ in PAYLOADS] == PAYLOADS
    assert not reader.has_message_available()
    reader.seek(pulsar.MessageId.earliest)
    assert reader.read_next(PATIENCE_MS).data() == PAYLOADS[0]

    after = client.create_reader(topic, ids[50])
    assert after.read_next(PATIENCE_MS).data() == PAYLOADS[51]
    at = client.create_reader(topic, ids[50], start_message_id_inclusive=True)
    assert at.read_next(PATIENCE_MS).data() == PAYLOADS[50]


def test_a_large_message_goes_through_in_chunks(client: pulsar.Client, topic: str) -> None:
    consumer = client.subscribe(topic, "first")
    producer = client.create_producer(topic, batching_enabled=False, chunking_enabled=True)
    producer.send(LARGE)
    assert receive_all(consumer, 1) == [LARGE]


def test_one_consumer_has_several_topics(client: pulsar.Client, topic: str) -> None:
    """By their names, and by a pattern."""
    first, second = f"{topic}-one", f"{topic}-two"
    send_all(client, first, PAYLOADS[:COUNT])
    send_all(client, second, PAYLOADS[COUNT : 2 * COUNT])
    for name, topics in (("named", [first, second]), ("pattern", re.compile(f"{topic}-.*"))):
        consumer = client.subscribe(topics, name, initial_position=pulsar.InitialPosition.Earliest)
        assert sorted(receive_all(consumer, 2 * COUNT)) == sorted(PAYLOADS[: 2 * COUNT])
        consumer.close()


def test_a_message_refused_too_often_is_a_dead_letter(client: pulsar.Client, topic: str) -> None:
    dead_letters = client.subscribe(f"{topic}-dead", "first")
    consumer = client.subscribe(
        topic,
        "first",
        pulsar.ConsumerType.Shared,
        negative_ack_redelivery_delay_ms=100,
        dead_letter_policy=pulsar.ConsumerDeadLetterPolicy(2, f"{topic}-dead", "first"),
    )
    send_all(client, topic, [b"bad"])
    for count in range(3):
        message = consumer.receive(PATIENCE_MS)
        assert message.redelivery_count() == count
        consumer.negative_acknowledge(message)
    assert receive_all(dead_letters, 1) == [b"bad"]


def test_a_delayed_message_comes_when_it_is_due(
    client: pulsar.Client, topic: str, on_peer: bool
) -> None:
    consumer = client.subscribe(topic, "first", pulsar.ConsumerType.Shared)
    producer = client.create_producer(topic)
    began_s = time.monotonic()
    producer.send(b"later", deliver_after=timedelta(seconds=2))
    assert receive_all(consumer, 1) == [b"later"]
    early_s = 1 if on_peer else 0  # docs/differences.md, delayed delivery
    assert time.monotonic() - began_s >= 1.9 - early_s


def test_a_table_view_has_the_last_value_of_each_key(client: pulsar.Client, topic: str) -> None:
    producer = client.create_producer(topic)
    for value in (b"old", b"new"):
        producer.send(value, partition_key="key")
    view = client.create_table_view(topic)
    assert view.get("key") == b"new"
    producer.send(b"newest", partition_key="key")
    deadline_s = time.monotonic() + PATIENCE_MS / 1000
    while view.get("key") != b"newest":
        assert time.monotonic() < deadline_s, view.get("key")
        time.sleep(0.01)
    view.close()


def test_a_second_exclusive_producer_is_refused(client: pulsar.Client, topic: str) -> None:
    def exclusive() -> pulsar.Producer:
        return client.create_producer(topic, access_mode=pulsar.ProducerAccessMode.Exclusive)

    first = exclusive()
    with pytest.raises(pulsar.ProducerFenced):
        exclusive()
    first.close()
    exclusive()


def test_a_consumer_goes_back_to_a_time_and_behind_a_message(
    client: pulsar.Client, topic: str
) -> None:
    ids = send_all(client, topic, PAYLOADS[:COUNT])
    consumer = client.subscribe(topic, "first")
    assert consumer.get_last_message_id() == ids[-1]
    consumer.seek(int((time.time() - 3600) * 1000))
    assert consumer.receive(PATIENCE_MS).data() == PAYLOADS[0]
    consumer.seek(ids[4])
    message = consumer.receive(PATIENCE_MS)
    # The client drops the message itself: it would begin there if asked to include it.
    assert message.data() == PAYLOADS[5]
    consumer.acknowledge_cumulative(message)
    consumer.close()
    assert receive_all(client.subscribe(topic, "first"), COUNT - 6) == PAYLOADS[6:COUNT]


def test_a_consumer_receives_by_the_batch(client: pulsar.Client, topic: str) -> None:
    consumer = client.subscribe(
        topic,
        "first",
        batch_receive_policy=pulsar.ConsumerBatchReceivePolicy(COUNT, 1024 * 1024, PATIENCE_MS),
        batch_index_ack_enabled=True,
    )
    producer = client.create_producer(topic, batching_enabled=True)
    for payload in PAYLOADS[:COUNT]:
        producer.send_async(payload, None)
    producer.flush()
    messages = consumer.batch_receive()
    assert [each.data() for each in messages] == PAYLOADS[:COUNT]
    for each in messages:
        consumer.acknowledge(each)


def test_policies_decide_which_topics_are_created_at_the_first_use(
    client: pulsar.Client, broker: BrokerUnderTest | RunningPeer, namespace: str
) -> None:
    base = f"persistent://{namespace}"
    partitioned = {
        "allowAutoTopicCreation": True,
        "topicType": "partitioned",
        "defaultNumPartitions": 3,
    }
    set_policy(broker, f"namespaces/{namespace}/autoTopicCreation", partitioned)
    consumer = client.subscribe(f"{base}/made", "first")
    send_all(client, f"{base}/made", PAYLOADS)
    assert sorted(receive_all(consumer, len(PAYLOADS))) == sorted(PAYLOADS)
    assert len(client.get_topic_partitions(f"{base}/made")) == 3
    forbidden = {"allowAutoTopicCreation": False}
    set_policy(broker, f"namespaces/{namespace}/autoTopicCreation", forbidden)
    for use in (client.create_producer, lambda name: client.subscribe(name, "first")):
        # For a 404 of the HTTP service URL this client has no error of its own.
        with pytest.raises((pulsar.TopicNotFound, pulsar.ConnectError)):
            use(f"{base}/none")


def test_a_producer_waits_until_it_is_the_only_one(client: pulsar.Client, topic: str) -> None:
    def exclusive(mode: pulsar.ProducerAccessMode) -> pulsar.Producer:
        return client.create_producer(topic, access_mode=mode, send_timeout_millis=PATIENCE_MS)

    holder = exclusive(pulsar.ProducerAccessMode.Exclusive)
    with pytest.raises(pulsar.ProducerBusy):
        client.create_producer(topic)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(exclusive, pulsar.ProducerAccessMode.WaitForExclusive)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        holder.close()
        waited = waiting.result(timeout=PATIENCE_MS / 1000)
    waited.send(b"x")
    waited.close()
    fenced = exclusive(pulsar.ProducerAccessMode.Exclusive)
    exclusive(pulsar.ProducerAccessMode.ExclusiveWithFencing).send(b"y")
    with pytest.raises(pulsar.ProducerFenced):
        fenced.send(b"z")


def test_consumer_of_a_terminated_topic_stays_connected(
    client: pulsar.Client, topic: str, broker: BrokerUnderTest | RunningPeer, on_peer: bool
) -> None:
    """This client closes its connection when it gets REACHED_END_OF_TOPIC."""
    if on_peer:
        pytest.skip("docs/differences.md, end of a terminated topic")
    producer = client.create_producer(topic)
    for payload in PAYLOADS[:COUNT]:
        producer.send(payload)
    consumer = client.subscribe(topic, "s", initial_position=pulsar.InitialPosition.Earliest)
    # What is acknowledged on a terminated topic is deleted; this subscription keeps it.
    client.subscribe(topic, "keeper", initial_position=pulsar.InitialPosition.Earliest)
    address = consumer_address(broker, topic)
    set_policy(broker, f"{topic.replace('://', '/')}/terminate", None)
    for _ in range(2):
        for payload in PAYLOADS[:COUNT]:
            message = consumer.receive(PATIENCE_MS)
            assert message.data() == payload
            consumer.acknowledge(message)
        with pytest.raises(pulsar.Timeout):
            consumer.receive(500)
        assert consumer_address(broker, topic) == address
        consumer.seek(pulsar.MessageId.earliest)


def consumer_address(broker: BrokerUnderTest | RunningPeer, topic: str) -> list[str]:
    """Where the consumers of the subscription `s` are connected from, as statistics show."""
    url = f"{broker.admin_url}/admin/v2/{topic.replace('://', '/')}/stats"
    with urlopen(url) as answer:
        return [each["address"] for each in json.load(answer)["subscriptions"]["s"]["consumers"]]
