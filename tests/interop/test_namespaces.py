"""Consumers of all topics of a namespace, of both clients on one subscription."""

import uuid

import pytest

import magnetar
from magnetar.consume.settings import InitialPosition
from magnetar.errors import OperationTimedOut
from magnetar.message_id import MessageId
from tests.client.conftest import NAMESPACE, Topic
from tests.interop.conftest import MakeTopic
from tests.interop.java_client import JavaClient, told

EARLIEST = InitialPosition.EARLIEST
NAME = "one"
"""Of both: Apache Pulsar 5.0.0-M1 gives nobody else what a closed ordered consumer had."""
COUNT = 10
VALUES = [f"v{number}".encode() for number in range(COUNT)]
QUIET_S = 0.5


async def two_topics(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str]
) -> tuple[Topic, Topic]:
    made = await topic(properties=mark), await topic(properties=mark)
    for each in made:
        async with client.producer(each.name) as producer:
            for value in VALUES:
                await producer.send(value)
    return made


@pytest.mark.parametrize(
    ("kind", "first"), [("queue", "java"), ("queue", "ours"), ("stream", "ours")]
)
async def test_a_namespace_is_handed_over(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, kind: str, first: str
) -> None:
    """What one acknowledged, singly or up to a message of all topics, the other does not get.

    The Java client's ordered consumer of a namespace leaves nothing to others: when it is closed it
    acknowledges all that it had fetched.
    """
    mark = {"test": uuid.uuid4().hex}
    made = await two_topics(client, topic, mark)
    open_ours = client.queue_consumer if kind == "queue" else client.stream_consumer
    before: list[tuple[str, object]] = []
    after: list[tuple[str, object]] = []
    half = COUNT + 3

    async def java_reads(seen: list[tuple[str, object]], count: int) -> None:
        consumer = await java.of_namespace(
            kind, NAMESPACE, "s", properties=mark, consumer_name=NAME
        )
        messages = await consumer.receive(count)
        ids = [message.id for message in messages]
        await consumer.ack(*(ids if kind == "queue" else ids[-1:]))
        seen += [(message.topic, message.value) for message in messages]
        if count > half:
            assert await consumer.receive_rest() == []
        await consumer.close()

    async def ours_reads(seen: list[tuple[str, object]], count: int) -> None:
        async with open_ours(
            namespace=NAMESPACE,
            subscription="s",
            properties=mark,
            initial_position=EARLIEST,
            consumer_name=NAME,
        ) as consumer:
            for _ in range(count):
                message = await consumer.receive(10)
                seen.append((message.topic, told(message.value)))
                if kind == "queue":
                    await consumer.ack(message)
            await consumer.ack(message)
            explained = await java.explain_id(message.id.to_bytes())
            if count < half:
                with pytest.raises(OperationTimedOut):
                    await consumer.receive(QUIET_S)
        assert MessageId.from_bytes(message.id.to_bytes()) == message.id
        assert explained["meaning"]["parent_topic"] == message.topic
        if kind == "stream":
            assert set(explained["meaning"]["topic_vectors"]) == {topic for topic, _ in seen}

    rest = 2 * COUNT - half
    if first == "java":
        await java_reads(before, half)
        await ours_reads(after, rest)
    else:
        await ours_reads(before, half)
        await java_reads(after, rest)
    assert sorted(map(str, before + after)) == sorted(
        str((each.name, told(value))) for each in made for value in VALUES
    )
