"""Transactions of one client, as the other one sees them."""

import pytest

import magnetar
from magnetar.consume.settings import InitialPosition
from magnetar.errors import OperationTimedOut
from tests.interop.conftest import MakeTopic
from tests.interop.java_client import JavaClient, told

EARLIEST = InitialPosition.EARLIEST
KEYS = [f"k{number}" for number in range(10)]
VALUES = [f"v{number}".encode() for number in range(10)]
EVERYTHING = sorted(str(told(value)) for value in VALUES)
QUIET_MS = 300
NAME = "one"
"""Of both: Apache Pulsar 5.0.0-M1 gives nobody else what a closed ordered consumer had."""

ends = pytest.mark.parametrize("end", ["commit", "abort"])


@ends
async def test_java_writes(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, end: str
) -> None:
    where = await topic(2)
    producer = await java.producer(where.name, batching=True)
    async with client.queue_consumer(where.name, "ours", initial_position=EARLIEST) as consumer:
        transaction = await java.begin()
        await producer.send(VALUES, keys=KEYS, transaction=transaction)
        with pytest.raises(OperationTimedOut):
            await consumer.receive(QUIET_MS / 1000)
        await (transaction.commit() if end == "commit" else transaction.abort())
        await producer.send([b"after"])
        count = len(VALUES) + 1 if end == "commit" else 1
        received = sorted([str(told((await consumer.receive(10)).value)) for _ in range(count)])
    assert received == sorted([str(told(b"after")), *(EVERYTHING if end == "commit" else [])])
    await producer.close()


@ends
async def test_ours_writes(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, end: str
) -> None:
    where = await topic(2)
    consumer = await java.queue(where.name, "java")
    async with client.producer(where.name) as producer:
        transaction = await client.transaction()
        for value, key in zip(VALUES, KEYS, strict=True):
            await producer.send(value, key=key, transaction=transaction)
        assert await consumer.receive(1, quiet_ms=QUIET_MS) == []
        await (transaction.commit() if end == "commit" else transaction.abort())
        await producer.send(b"after")
    count = len(VALUES) + 1 if end == "commit" else 1
    received = sorted(str(message.value) for message in await consumer.receive(count))
    assert received == sorted([str(told(b"after")), *(EVERYTHING if end == "commit" else [])])
    await consumer.close()


@ends
@pytest.mark.parametrize("ordered", [False, True], ids=["queue", "stream"])
async def test_java_acknowledges(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, end: str, ordered: bool
) -> None:
    """What a transaction of one acknowledged and aborted the other one gets."""
    where = await topic()
    async with client.producer(where.name) as producer:
        for value in VALUES:
            await producer.send(value)
    open_java = java.stream if ordered else java.queue
    consumer = await open_java(where.name, "s", consumer_name=NAME)
    messages = await consumer.receive(len(VALUES))
    transaction = await java.begin()
    ids = [messages[-1].id] if ordered else [message.id for message in messages]
    await consumer.ack(*ids, transaction=transaction)
    await (transaction.commit() if end == "commit" else transaction.abort())
    await consumer.close()
    async with client.producer(where.name) as producer:
        await producer.send(b"after")
    open_ours = client.stream_consumer if ordered else client.queue_consumer
    expected = [b"after"] if end == "commit" else [*VALUES, b"after"]
    async with open_ours(where.name, "s", initial_position=EARLIEST, consumer_name=NAME) as ours:
        received = [(await ours.receive(10)).value for _ in expected]
    assert sorted(received) == sorted(expected)


@ends
@pytest.mark.parametrize("ordered", [False, True], ids=["queue", "stream"])
async def test_ours_acknowledges(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, end: str, ordered: bool
) -> None:
    where = await topic()
    producer = await java.producer(where.name)
    await producer.send(VALUES)
    open_ours = client.stream_consumer if ordered else client.queue_consumer
    async with open_ours(where.name, "s", initial_position=EARLIEST, consumer_name=NAME) as ours:
        received = [await ours.receive(10) for _ in VALUES]
        transaction = await client.transaction()
        for message in received[-1:] if ordered else received:
            await ours.ack(message, transaction=transaction)
        await (transaction.commit() if end == "commit" else transaction.abort())
    await producer.send([b"after"])
    open_java = java.stream if ordered else java.queue
    consumer = await open_java(where.name, "s", consumer_name=NAME)
    expected = [b"after"] if end == "commit" else [*VALUES, b"after"]
    messages = await consumer.receive(len(expected))
    assert sorted(str(each.value) for each in messages) == sorted(
        str(told(value)) for value in expected
    )
    for opened in (producer, consumer):
        await opened.close()


async def test_one_consumes_what_the_other_transforms(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    """Java to ours to Java: consume, transform and produce in one transaction of ours."""
    source, sink = await topic(2), await topic(2)
    producer = await java.producer(source.name, batching=True)
    await producer.send(VALUES, keys=KEYS)
    async with (
        client.queue_consumer(source.name, "work", initial_position=EARLIEST) as worker,
        client.producer(sink.name) as output,
        client.transaction() as transaction,
    ):
        for _ in VALUES:
            message = await worker.receive(10)
            await output.send(message.value, key=message.key, transaction=transaction)
            await worker.ack(message, transaction=transaction)
    consumer = await java.queue(sink.name, "java")
    assert sorted(str(each.value) for each in await consumer.receive(10)) == EVERYTHING
    left = await java.queue(source.name, "work")
    assert await left.receive(1, quiet_ms=QUIET_MS) == []
    for opened in (producer, consumer, left):
        await opened.close()
