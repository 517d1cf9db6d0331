"""The processing timeout of queue consumers on a real broker: too late, in time, dead letters."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Unpack

import pytest

import magnetar
from magnetar import DeadLetterPolicy, InitialPosition, Message, NackDelay, QueueConsumer
from magnetar.consume.settings import QueueOptions
from magnetar.errors import ConnectionLost, InvalidArgument
from tests.client.conftest import NAMESPACE, MakeTopic
from tests.support.waiting import until

WAIT_S = 30
TIMEOUT_S = 0.3
LONG_S = 60.0
"""A timeout that no test waits for."""


@asynccontextmanager
async def queue(
    client: magnetar.Client,
    topic: str,
    timeout_s: float = TIMEOUT_S,
    **options: Unpack[QueueOptions],
) -> AsyncIterator[QueueConsumer[str]]:
    options.setdefault("initial_position", InitialPosition.EARLIEST)
    options["processing_timeout_s"] = timeout_s
    async with client.queue_consumer(topic, "s", schema=str, **options) as consumer:
        yield consumer


async def send(client: magnetar.Client, topic: str, *values: str) -> None:
    """In one batch, if there are several."""
    async with client.producer(topic, schema=str) as producer:
        await asyncio.gather(*(producer.send(each) for each in values))


async def take(consumer: QueueConsumer[str], count: int) -> list[Message[str]]:
    return [await consumer.receive(WAIT_S) for _ in range(count)]


async def until_there(consumer: QueueConsumer[str], count: int) -> None:
    """Until so many messages wait to be handed out."""
    await until(lambda: len(consumer._inbox) >= count, WAIT_S)


async def comes_again_first(
    client: magnetar.Client, topic: str, consumer: QueueConsumer[str]
) -> Message[str]:
    """Another message, left alone, comes again: what was late before it would have come first."""
    await send(client, topic, "last")
    assert (await consumer.receive(WAIT_S)).value == "last"
    return await consumer.receive(WAIT_S)


async def test_a_message_comes_again_after_the_time_and_not_before(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made, loop = await topic(), asyncio.get_running_loop()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, "m")
        handed_out_after = -TIMEOUT_S
        for count in range(4):
            await until_there(consumer, 1)
            assert loop.time() - handed_out_after >= TIMEOUT_S
            handed_out_after = loop.time()
            message = await consumer.receive(WAIT_S)
            assert (message.value, message.redelivery_count) == ("m", count)
        await consumer.ack(message, wait=True)
        assert (await comes_again_first(client, made.name, consumer)).value == "last"


async def test_a_message_that_waits_to_be_handed_out_has_its_whole_time(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, "a")
        await send(client, made.name, "b")
        first = await consumer.receive(WAIT_S)
        await until_there(consumer, 2)
        # "b" has waited as long as "a" was too late.
        second, again = await take(consumer, 2)
        assert (second.value, second.redelivery_count) == ("b", 0)
        assert (again.id, again.redelivery_count) == (first.id, 1)


async def test_timed_out_message_goes_to_another_consumer(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name, receiver_queue_size=1) as stuck:
        await send(client, made.name, "m")
        message = await stuck.receive(WAIT_S)
        await send(client, made.name, "fills its queue")
        await until_there(stuck, 1)
        async with queue(client, made.name, LONG_S) as other:
            again = await other.receive(WAIT_S)
            assert (again.id, again.redelivery_count) == (message.id, 1)
            await other.ack(again, wait=True)


async def test_a_late_acknowledgement_counts(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, "m")
        message = await consumer.receive(WAIT_S)
        await consumer.receive(WAIT_S)
        await consumer.ack(message, wait=True)
        again = await comes_again_first(client, made.name, consumer)
        assert again.value == "last"


async def test_a_late_nack_is_not_counted_twice(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic()
    delay = NackDelay(min_ms=0, max_ms=0)
    async with queue(client, made.name, nack_delay=delay) as consumer:
        await send(client, made.name, "late")
        await send(client, made.name, "other")
        await until_there(consumer, 2)
        late, other = await take(consumer, 2)
        await until_there(consumer, 2)
        consumer.nack(late)
        # Without delay it would be asked for before this is answered.
        await consumer.ack(other, wait=True)
        counts = {each.value: each.redelivery_count for each in await take(consumer, 2)}
        assert counts == {"late": 1, "other": 1}


async def test_message_that_times_out_too_often_is_a_dead_letter(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    await topic(name=f"{made.local_name}-DLQ")
    policy = DeadLetterPolicy(max_redelivery_count=2)
    async with (
        queue(client, f"{made.name}-DLQ", LONG_S) as dead,
        queue(client, made.name, dead_letters=policy) as consumer,
    ):
        await send(client, made.name, "slow")
        came = await take(consumer, 3)
        assert [each.redelivery_count for each in came] == [0, 1, 2]
        letter = await dead.receive(WAIT_S)
        assert letter.value == "slow"
        assert letter.properties["ORIGIN_MESSAGE_ID"] == str(came[0].id.entry)
        again = await comes_again_first(client, made.name, consumer)
        assert again.value == "last"


async def test_of_a_batch_only_what_is_not_acknowledged_comes_again(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, *"abcdef")
        messages = await take(consumer, 6)
        assert messages[0].id.entry.batch_size == 6
        await consumer.ack(messages[1:4])
        again = await take(consumer, 3)
        assert [each.value for each in again] == ["a", "e", "f"]
        assert {each.redelivery_count for each in again} == {1}
        await consumer.ack(again, wait=True)
        assert (await comes_again_first(client, made.name, consumer)).value == "last"


async def test_message_acknowledged_in_a_transaction_does_not_time_out(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, "held")
        message = await consumer.receive(WAIT_S)
        transaction = await client.transaction()
        await consumer.ack(message, transaction=transaction)
        assert (await comes_again_first(client, made.name, consumer)).value == "last"
        await transaction.commit()
        again = await consumer.receive(WAIT_S)
        assert again.value == "last"


async def test_message_of_an_aborted_transaction_gets_a_new_timeout(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, "undone")
        message = await consumer.receive(WAIT_S)
        transaction = await client.transaction()
        await consumer.ack(message, transaction=transaction)
        await transaction.abort()
        again, third = await take(consumer, 2)
        assert {again.id, third.id} == {message.id}
        assert third.redelivery_count == again.redelivery_count + 1


async def test_a_message_in_pieces_comes_again_whole(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    data = "0123456789abcdef" * 400 * 1024
    async with queue(client, made.name, expire_chunked_after_ms=0) as consumer:
        async with client.producer(made.name, schema=str, chunking=True) as producer:
            where = await producer.send(data)
        message, again = await take(consumer, 2)
        assert message.id == again.id == where
        assert message.id.entry.first_chunk is not None
        assert (again.value == data, again.redelivery_count) == (True, 1)
        await consumer.ack(again, wait=True)
        assert (await comes_again_first(client, made.name, consumer)).value == "last"


@pytest.mark.parametrize("wait", [True, False])
async def test_timely_ack_holds_over_a_lost_connection(
    client: magnetar.Client, topic: MakeTopic, wait: bool
) -> None:
    made = await topic()
    async with queue(client, made.name, ack_grouping_ms=0 if wait else 60_000) as consumer:
        await send(client, made.name, "done")
        await send(client, made.name, "open")
        await until_there(consumer, 2)
        done, left = await take(consumer, 2)
        # What waits for others is sent on the next connection.
        acknowledged = consumer.ack(done, wait=wait)
        if wait:
            await acknowledged
        connection = consumer._segments[0].connection
        assert connection is not None
        connection.abort(ConnectionLost("The test broke it."))
        for _ in range(3):
            again = await consumer.receive(WAIT_S)
            assert again.id == left.id


async def test_of_a_namespace_the_time_begins_when_the_application_has_a_message(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    mark = {"test": uuid.uuid4().hex}
    made = await topic(properties=mark)
    async with client.queue_consumer(
        namespace=NAMESPACE,
        properties=mark,
        subscription="s",
        schema=str,
        initial_position=InitialPosition.EARLIEST,
        processing_timeout_s=TIMEOUT_S,
    ) as consumer:
        await send(client, made.name, "a")
        await send(client, made.name, "b")
        first = await consumer.receive(WAIT_S)
        await until(lambda: len(consumer._ready._messages) == 2, WAIT_S)
        second = await consumer.receive(WAIT_S)
        assert (second.value, second.redelivery_count) == ("b", 0)
        await consumer.ack(second)
        for count in (1, 2):
            again = await consumer.receive(WAIT_S)
            assert (again.id, again.redelivery_count) == (first.id, count)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf")])
async def test_a_timeout_that_is_none_is_refused(client: magnetar.Client, timeout_s: float) -> None:
    with pytest.raises(InvalidArgument, match="processing_timeout_s"):
        client.queue_consumer("topic://public/default/t", "s", processing_timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", [None, 0])
async def test_without_a_timeout_nothing_is_watched(
    client: magnetar.Client, topic: MakeTopic, timeout_s: float | None
) -> None:
    made = await topic()
    async with client.queue_consumer(made.name, "s", processing_timeout_s=timeout_s) as consumer:
        assert consumer._segments[0]._timeouts is None
