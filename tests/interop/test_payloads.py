"""What is in a message, from one client to the other."""

import random
import uuid

import pytest

import magnetar
from magnetar.compression import CompressionType
from magnetar.consume.message import Message
from magnetar.consume.settings import InitialPosition
from magnetar.errors import ProducerBusy, ProducerFenced
from magnetar.produce.producer_settings import AccessMode
from tests.client.conftest import rest
from tests.interop.conftest import MakeTopic
from tests.interop.java_client import JavaClient, JavaFailed, JavaMessage, told
from tests.interop.records import KINDS

EARLIEST = InitialPosition.EARLIEST
EVENT_TIME_MS = 1_700_000_000_123
PROPERTIES = {"a": "1", "größe": "", "": "x"}
KEYS = ["a", "", "größer", *(f"k{number}" for number in range(17))]
SIZES = [0, 1, 100, 5_000, 70_000]
"""The Java client compresses from 4 KiB on, a batch ends at 128 KiB."""
VALUES = [
    random.Random(number).randbytes(SIZES[number % 5] // 2) + bytes(SIZES[number % 5] // 2)
    for number in range(len(KEYS))
]
"""Half of each is random, so that compressors have something to do and something to fail on."""
LARGER_THAN_THE_LIMIT = random.Random(1).randbytes(6 * 1024 * 1024)

of_all_compressions = pytest.mark.parametrize("compression", list(CompressionType))
batched_or_not = pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])


def ours(message: Message[bytes]) -> tuple[object, ...]:
    return (
        told(message.value),
        message.key,
        dict(message.properties),
        message.event_time_ms,
        message.sequence_id,
        message.producer_name,
    )


def javas(message: JavaMessage) -> tuple[object, ...]:
    return (
        message.value,
        message.key,
        dict(message.properties),
        message.event_time_ms,
        message.sequence_id,
        message.producer_name,
    )


def expected(name: str) -> list[tuple[object, ...]]:
    return [
        (told(value), key, PROPERTIES, EVENT_TIME_MS, number, name)
        for number, (value, key) in enumerate(zip(VALUES, KEYS, strict=True))
    ]


@of_all_compressions
@batched_or_not
async def test_java_writes(
    client: magnetar.Client,
    java: JavaClient,
    topic: MakeTopic,
    compression: CompressionType,
    batching: bool,
) -> None:
    name = f"java-{compression.name}-{batching}"
    where = await topic()
    producer = await java.producer(
        where.name, compression=compression.name, batching=batching, producer_name=name
    )
    await producer.send(VALUES, keys=KEYS, properties=PROPERTIES, event_time_ms=EVENT_TIME_MS)
    async with client.queue_consumer(where.name, "ours", initial_position=EARLIEST) as consumer:
        received = [await consumer.receive(10) for _ in VALUES]
    sent_name = received[0].producer_name
    assert sent_name.startswith(name)
    assert [ours(message) for message in received] == expected(sent_name)
    assert any(message.id.entry.batch_index > 0 for message in received) is batching
    await producer.close()


@of_all_compressions
@batched_or_not
async def test_ours_writes(
    client: magnetar.Client,
    java: JavaClient,
    topic: MakeTopic,
    compression: CompressionType,
    batching: bool,
) -> None:
    where = await topic()
    async with client.producer(
        where.name, name="ours", compression=compression, batching=batching
    ) as producer:
        for value, key in zip(VALUES, KEYS, strict=True):
            producer.send_nowait(value, key=key, properties=PROPERTIES, event_time_ms=EVENT_TIME_MS)
        await producer.flush()
    consumer = await java.stream(where.name, "java")
    received = await consumer.receive(len(VALUES))
    sent_name = received[0].producer_name
    assert sent_name is not None
    assert sent_name.startswith("ours")
    # Keys of different entry buckets come in batches of their own.
    received.sort(key=lambda message: message.sequence_id)
    assert [javas(message) for message in received] == expected(sent_name)
    await consumer.close()


async def test_java_writes_chunks(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    where = await topic()
    producer = await java.producer(where.name, chunk_size=20_000, compression="ZSTD")
    value = VALUES[4] * 2
    ids = await producer.send([value, b"after"], keys=["k", "k"], properties=PROPERTIES)
    async with client.stream_consumer(where.name, "ours", initial_position=EARLIEST) as consumer:
        chunked, after = [await consumer.receive(10) for _ in range(2)]
    assert (chunked.value, chunked.key, dict(chunked.properties)) == (value, "k", PROPERTIES)
    assert after.value == b"after"
    assert chunked.id.entry.first_chunk is not None
    assert chunked.id == magnetar.MessageId.from_bytes(ids[0])
    await producer.close()


async def test_ours_writes_chunks(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    where = await topic()
    consumer = await java.stream(where.name, "java")
    async with client.producer(where.name, chunking=True) as producer:
        await producer.send(LARGER_THAN_THE_LIMIT, key="k", properties=PROPERTIES)
        await producer.send(b"after")
    chunked, after = await consumer.receive(2)
    assert chunked.value == told(LARGER_THAN_THE_LIMIT)
    assert (chunked.key, chunked.properties) == ("k", PROPERTIES)
    assert after.value == told(b"after")
    await consumer.close()


async def test_no_key_is_no_empty_key(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    where = await topic()
    producer = await java.producer(where.name)
    await producer.send([b"java"])
    async with client.producer(where.name) as our_producer:
        await our_producer.send(b"ours")
    consumer = await java.stream(where.name, "java")
    assert [message.key for message in await consumer.receive(2)] == [None, None]
    async with client.queue_consumer(where.name, "ours", initial_position=EARLIEST) as reader:
        messages = [await reader.receive(10) for _ in range(2)]
    assert [message.key for message in messages] == [None, None]
    assert [message.event_time_ms for message in messages] == [None, None]
    for opened in (producer, consumer):
        await opened.close()


async def test_order_of_keys_over_segments(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    """Of each producer: the Java client of 5.0.0-M1 puts a key by the low half of its hash."""
    where = await topic(4)
    keys = [f"k{number % 10}" for number in range(100)]
    values = [f"{key}|{number}".encode() for number, key in enumerate(keys)]
    producer = await java.producer(where.name, batching=True)
    await producer.send([b"java|" + value for value in values], keys=keys)
    async with client.producer(where.name) as our_producer:
        for value, key in zip(values, keys, strict=True):
            our_producer.send_nowait(b"ours|" + value, key=key)
    consumer = await java.stream(where.name, "java")
    theirs = [(message.key, message.value) for message in await consumer.receive(200)]
    async with client.stream_consumer(where.name, "ours", initial_position=EARLIEST) as reader:
        read = [await reader.receive(10) for _ in range(200)]
    found = [(message.key, told(message.value)) for message in read]
    for key in set(keys):
        for who in (b"java|", b"ours|"):
            sent = [told(who + value) for value in values if value.startswith(f"{key}|".encode())]
            for seen in (theirs, found):
                assert [value for k, value in seen if k == key and value in sent] == sent
    for opened in (producer, consumer):
        await opened.close()


async def test_no_value(client: magnetar.Client, java: JavaClient, topic: MakeTopic) -> None:
    """Which says of a key that it is gone; it is not an empty value."""
    where = await topic()
    producer = await java.producer(where.name, "json_point")
    await producer.send([None], keys=["java"])
    async with client.producer(where.name, schema=KINDS["json_point"][0]) as our_producer:
        await our_producer.send(None, key="ours")
    consumer = await java.stream(where.name, "java", "json_point")
    received = await consumer.receive(2)
    assert [(each.key, each.value) for each in received] == [("java", None), ("ours", None)]
    async with client.stream_consumer(
        where.name, "ours", schema=KINDS["json_point"][0], initial_position=EARLIEST
    ) as reader:
        messages = [await reader.receive(10) for _ in range(2)]
    assert [(each.is_null, each.value) for each in messages] == [(True, None), (True, None)]
    for opened in (producer, consumer):
        await opened.close()


async def test_an_ordinary_topic(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    """Made by the first who uses it."""
    name = f"persistent://public/default/{(await topic()).local_name}-ordinary"
    consumer = await java.queue(name, "java")
    async with client.producer(name) as our_producer:
        await our_producer.send(b"ours", key="k")
    producer = await java.producer(name)
    await producer.send([b"java"], keys=["k"])
    received = [(each.value, each.key) for each in await consumer.receive(2)]
    assert received == [(told(b"ours"), "k"), (told(b"java"), "k")]
    async with client.queue_consumer(name, "ours", initial_position=EARLIEST) as reader:
        values = [(await reader.receive(10)).value for _ in range(2)]
    assert values == [b"ours", b"java"]
    for opened in (producer, consumer):
        await opened.close()


@pytest.mark.parametrize("first", ["java", "ours"])
async def test_an_exclusive_producer(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, first: str
) -> None:
    """Neither writes where the other one does alone; each may take it over."""
    where = await topic()
    if first == "java":
        producer = await java.producer(where.name, access_mode="EXCLUSIVE")
        await producer.send([b"java"])
        with pytest.raises(ProducerBusy):
            async with client.producer(where.name) as ours:
                await ours.send(b"ours")
        async with client.producer(
            where.name, access_mode=AccessMode.EXCLUSIVE_WITH_FENCING
        ) as ours:
            await ours.send(b"ours")
            with pytest.raises(JavaFailed, match=r"[Ff]enced"):
                await producer.send([b"java"])
        return
    async with client.producer(where.name, access_mode=AccessMode.EXCLUSIVE) as ours:
        await ours.send(b"ours")
        with pytest.raises(JavaFailed, match="ProducerBusy"):
            await (await java.producer(where.name)).send([b"java"])
        fencing = await java.producer(where.name, access_mode="EXCLUSIVE_WITH_FENCING")
        await fencing.send([b"java"])
        with pytest.raises(ProducerFenced):
            await ours.send(b"ours")
        await fencing.close()


async def test_a_named_producer_is_the_same_for_brokers(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    """By the name in its messages what it sends again is recognized, whichever client sends it."""
    where = await topic(2)
    producer = await java.producer(where.name, producer_name="one name")
    await producer.send([b"java"] * 8)
    await producer.close()
    async with client.producer(where.name, name="one name") as ours:
        for _ in range(8):
            await ours.send(b"ours")
    async with client.queue_consumer(where.name, "ours", initial_position=EARLIEST) as reader:
        received = [await reader.receive(10) for _ in range(16)]
    names = {
        who: {(each.segment_id, each.producer_name) for each in received if each.value == who}
        for who in (b"java", b"ours")
    }
    assert len(names[b"java"]) == 2
    assert names[b"ours"] <= names[b"java"]


async def test_message_of_one_client_is_resent_by_the_other(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    """Is dropped where brokers deduplicate, and numbers go on where the other one was."""
    service = (await topic()).service
    namespace = f"public/interop-{uuid.uuid4().hex[:8]}"
    for method, path, body in (
        ("PUT", f"/namespaces/{namespace}", {}),
        ("POST", f"/namespaces/{namespace}/deduplication", True),
        ("PUT", f"/scalable/{namespace}/topic", {}),
    ):
        status, answer = await rest(service, method, path, body=body)
        assert status == 204, answer
    name = f"topic://{namespace}/topic"
    values = [f"v{number}".encode() for number in range(20)]
    producer = await java.producer(name, producer_name="one")
    await producer.send(values[:10], sequence_ids=range(10))
    await producer.close()
    async with client.producer(name, name="one") as ours:
        for number in range(5, 15):
            await ours.send(values[number], sequence_id=number)
        assert ours.last_sequence_id == 14
    producer = await java.producer(name, producer_name="one")
    await producer.send(values[12:], sequence_ids=range(12, 20))
    await producer.close()
    async with client.stream_consumer(name, "ours", initial_position=EARLIEST) as reader:
        received = [await reader.receive(10) for _ in values]
    assert [(each.value, each.sequence_id) for each in received] == [
        (value, number) for number, value in enumerate(values)
    ]
