"""Consumers of all topics of a namespace on a real broker: topics come and go, transactions."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import magnetar
from magnetar.consume.namespace_consumer import NamespaceQueueConsumer, NamespaceStreamConsumer
from magnetar.consume.settings import InitialPosition, QueueSettings, StreamSettings
from magnetar.errors import (
    AlreadyClosed,
    InvalidArgument,
    OperationTimedOut,
    ServiceNotReady,
    TransactionConflict,
    TransactionFailed,
)
from magnetar.message_id import MessageId
from magnetar.opening import Opening
from magnetar.schema.plain import STRING
from tests.client.conftest import NAMESPACE, MakeTopic, Topic
from tests.support.waiting import until

WAIT_S = 30
SILENCE_S = 0.2


@pytest.fixture
def mark() -> dict[str, str]:
    """A property that only the topics of this test have."""
    return {"test": uuid.uuid4().hex}


@asynccontextmanager
async def stream(
    client: magnetar.Client, mark: dict[str, str]
) -> AsyncIterator[NamespaceStreamConsumer[str]]:
    settings = StreamSettings(initial_position=InitialPosition.EARLIEST, consumer_name="all")
    async with Opening(
        lambda: NamespaceStreamConsumer(client.context, NAMESPACE, "s", STRING, settings, mark)
    ) as consumer:
        yield consumer


@asynccontextmanager
async def queue(
    client: magnetar.Client, mark: dict[str, str]
) -> AsyncIterator[NamespaceQueueConsumer[str]]:
    settings = QueueSettings(initial_position=InitialPosition.EARLIEST)
    async with Opening(
        lambda: NamespaceQueueConsumer(client.context, NAMESPACE, "s", STRING, settings, mark)
    ) as consumer:
        yield consumer


AnyConsumer = NamespaceStreamConsumer[str] | NamespaceQueueConsumer[str]


async def send(client: magnetar.Client, topic: Topic, *values: str) -> None:
    async with client.producer(topic.name, schema=STRING) as producer:
        await asyncio.gather(*(producer.send(value, key=value) for value in values))


async def read(consumer: AnyConsumer, count: int) -> set[str]:
    return {(await consumer.receive(WAIT_S)).value for _ in range(count)}


async def nothing_more(consumer: AnyConsumer) -> None:
    with pytest.raises(OperationTimedOut):
        await consumer.receive(SILENCE_S)


async def until_topics(consumer: AnyConsumer, *topics: Topic) -> None:
    await until(lambda: consumer.topics == {topic.name for topic in topics}, WAIT_S)


async def test_a_message_that_came_by_itself_is_not_acknowledged_in_order(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str]
) -> None:
    one = await topic(1, properties=mark)
    await send(client, one, "a")
    async with (
        stream(client, mark) as everything,
        client.stream_consumer(
            one.name, "other", schema=STRING, initial_position=InitialPosition.EARLIEST
        ) as alone,
    ):
        with pytest.raises(InvalidArgument, match="pass it to the consumer that received it"):
            await everything.ack(await alone.receive(WAIT_S))
        await everything.ack(await everything.receive(WAIT_S))


async def test_namespace_queue_refuses_to_ack_a_foreign_message(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str]
) -> None:
    elsewhere = await topic(1)
    await send(client, elsewhere, "a")
    async with (
        queue(client, mark) as everything,
        client.queue_consumer(
            elsewhere.name, "s", schema=STRING, initial_position=InitialPosition.EARLIEST
        ) as alone,
    ):
        message = await alone.receive(WAIT_S)
        for act in (everything.ack, everything.nack):
            with pytest.raises(InvalidArgument, match="consumer that received it"):
                act(message)
            wrong: Any
            for wrong in (None, "a", [message]):
                with pytest.raises(InvalidArgument, match="that receive returned"):
                    act(wrong)


@pytest.mark.parametrize("opened", [stream, queue])
async def test_topics_that_are_there_and_that_come_later_are_read(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str], opened: type
) -> None:
    one = await topic(2, properties=mark)
    await topic(1)
    await send(client, one, "a", "b")
    async with opened(client, mark) as consumer:
        assert await read(consumer, 2) == {"a", "b"}
        two = await topic(1, properties=mark)
        await send(client, two, "c")
        assert await read(consumer, 1) == {"c"}
        assert consumer.topics == {one.name, two.name}
        await nothing_more(consumer)


@pytest.mark.parametrize("opened", [stream, queue])
async def test_a_topic_that_is_deleted_is_left_and_does_not_come_back(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str], opened: type
) -> None:
    one, two = await topic(1, properties=mark), await topic(1, properties=mark)
    async with opened(client, mark) as consumer:
        assert consumer.topics == {one.name, two.name}
        await one.delete()
        await until_topics(consumer, two)
        await send(client, two, "a")
        assert await read(consumer, 1) == {"a"}
    async with opened(client, mark) as consumer:
        assert consumer.topics == {two.name}


async def test_acknowledging_in_order_is_over_all_topics(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str]
) -> None:
    one, two = await topic(2, properties=mark), await topic(1, properties=mark)
    await send(client, one, *(f"a{number}" for number in range(6)))
    await send(client, two, *(f"b{number}" for number in range(6)))
    async with stream(client, mark) as consumer:
        messages = [await consumer.receive(WAIT_S) for _ in range(12)]
        message_id = messages[7].id
        assert MessageId.from_bytes(message_id.to_bytes()).positions_of_topics == dict(
            message_id.positions_of_topics
        )
        await consumer.ack(messages[7], wait=True)
    rest = {message.value for message in messages[8:]}
    async with stream(client, mark) as consumer:
        assert await read(consumer, len(rest)) == rest
        await nothing_more(consumer)


@pytest.mark.parametrize("commits", [True, False])
async def test_an_acknowledgement_in_a_transaction_is_part_of_it(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str], commits: bool
) -> None:
    one, two = await topic(1, properties=mark), await topic(1, properties=mark)
    await send(client, one, "a")
    await send(client, two, "b")
    async with stream(client, mark) as consumer:
        messages = [await consumer.receive(WAIT_S) for _ in range(2)]
        transaction = await client.transaction()
        await consumer.ack(messages[-1], transaction=transaction)
        await (transaction.commit() if commits else transaction.abort())
    async with stream(client, mark) as consumer:
        if commits:
            await nothing_more(consumer)
        else:
            assert await read(consumer, 2) == {"a", "b"}


async def test_messages_of_an_aborted_transaction_are_handed_out_again(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str]
) -> None:
    one, two = await topic(1, properties=mark), await topic(1, properties=mark)
    await send(client, one, "a", "c", "e")
    await send(client, two, "b", "d", "f")
    async with stream(client, mark) as consumer:
        before = [await consumer.receive(WAIT_S) for _ in range(3)]
        transaction = await client.transaction()
        await consumer.ack(before[1], transaction=transaction)
        await transaction.abort()
        with pytest.raises(TransactionConflict):
            await consumer.ack(before[2])
        again = [await consumer.receive(WAIT_S) for _ in range(6)]
        assert {message.value for message in again} == set("abcdef")
        async with client.transaction() as transaction:
            await consumer.ack(again[-1], transaction=transaction)
        await nothing_more(consumer)


async def test_what_is_given_up_before_it_is_acknowledged_is_asked_for_again(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str]
) -> None:
    one, two = await topic(1, properties=mark), await topic(1, properties=mark)
    await send(client, one, "a", "c")
    await send(client, two, "b", "d")
    async with stream(client, mark) as consumer:
        first = await consumer.receive(WAIT_S)
        await consumer.ack(first, wait=True)
        given_up = await consumer.receive(WAIT_S)
        consumer.redeliver_unacknowledged()
        with pytest.raises(TransactionConflict):
            await consumer.ack(given_up)
        again = [await consumer.receive(WAIT_S) for _ in range(3)]
        assert {message.value for message in (first, *again)} == set("abcd")
        async with client.transaction() as transaction:
            await consumer.ack(again[-1], transaction=transaction)
        await nothing_more(consumer)


@pytest.mark.parametrize("in_transaction", [True, False])
async def test_a_message_from_before_an_abort_does_not_acknowledge_what_comes_again(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str], in_transaction: bool
) -> None:
    one = await topic(1, properties=mark)
    async with client.producer(one.name, schema=STRING) as producer:
        for value in "abc":
            producer.send_nowait(value)
    async with stream(client, mark) as consumer:
        before = [await consumer.receive(WAIT_S) for _ in range(3)]
        transaction = await client.transaction()
        await consumer.ack(before[0], transaction=transaction)
        await transaction.abort()
        assert (await consumer.receive(WAIT_S)).value == "a"
        later = await client.transaction() if in_transaction else None
        with pytest.raises(TransactionConflict):
            await consumer.ack(before[2], transaction=later)
        if later is not None:
            with pytest.raises(TransactionConflict):
                await later.commit()
            assert (await consumer.receive(WAIT_S)).value == "a"
        again = [await consumer.receive(WAIT_S) for _ in range(2)]
        assert [message.value for message in again] == ["b", "c"]
        await consumer.ack(again[-1], wait=True)
        await consumer.ack(before[0], wait=True)
        await nothing_more(consumer)


@pytest.mark.parametrize("read_on", [True, False])
async def test_messages_of_a_lost_topic_consumer_are_not_committed(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str], read_on: bool
) -> None:
    one, two = await topic(1, properties=mark), await topic(1, properties=mark)
    await send(client, one, "a", "c")
    await send(client, two, "b")
    async with stream(client, mark) as consumer:
        messages = [await consumer.receive(WAIT_S) for _ in range(3)]
        transaction = await client.transaction()
        before = consumer._consumers[one.name]
        before.failed(ServiceNotReady("A test."))
        await until(lambda: consumer._consumers.get(one.name) not in (before, None), WAIT_S)
        if read_on:
            messages.append(await consumer.receive(WAIT_S))
        with pytest.raises(AlreadyClosed):
            await consumer.ack(messages[-1], transaction=transaction)
        with pytest.raises(TransactionFailed):
            await transaction.commit()
        again = [await consumer.receive(WAIT_S) for _ in range(3)]
        assert sorted(message.value for message in again) == ["a", "b", "c"]
        async with client.transaction() as transaction:
            await consumer.ack(again[-1], transaction=transaction)
        await nothing_more(consumer)


async def test_ack_before_a_lost_topic_consumer_blocks_no_commit(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str]
) -> None:
    one = await topic(1, properties=mark)
    await send(client, one, "a")
    async with stream(client, mark) as consumer:
        await consumer.ack(await consumer.receive(WAIT_S), wait=True)
        before = consumer._consumers[one.name]
        before.failed(ServiceNotReady("A test."))
        await until(lambda: consumer._consumers.get(one.name) not in (before, None), WAIT_S)
        await send(client, one, "b")
        async with client.transaction() as transaction:
            await consumer.ack(await consumer.receive(WAIT_S), transaction=transaction)


async def test_a_queue_acknowledges_and_refuses_one_by_one(
    client: magnetar.Client, topic: MakeTopic, mark: dict[str, str]
) -> None:
    one, two = await topic(1, properties=mark), await topic(1, properties=mark)
    await send(client, one, "a", "b")
    await send(client, two, "c")
    async with queue(client, mark) as consumer:
        for _ in range(3):
            message = await consumer.receive(WAIT_S)
            if message.value != "b":
                await consumer.ack(message, wait=True)
    async with queue(client, mark) as consumer:
        message = await consumer.receive(WAIT_S)
        assert message.value == "b"
        consumer.nack(message)
        again = await consumer.receive(WAIT_S)
        assert again.value == "b"
    with pytest.raises(AlreadyClosed):
        await consumer.receive(WAIT_S)
