"""A subscription that both clients use, at once or one after the other."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import magnetar
from magnetar.consume.settings import InitialPosition, NackDelay
from magnetar.errors import OperationTimedOut
from magnetar.message_id import MessageId
from tests.client.conftest import Topic
from tests.interop.conftest import MakeTopic
from tests.interop.java_client import JavaClient, JavaConsumer, told

EARLIEST = InitialPosition.EARLIEST
COUNT = 200
KEYS = [f"k{number % 20}" for number in range(COUNT)]
VALUES = [f"v{number}".encode() for number in range(COUNT)]
EVERYTHING = {str(told(value)) for value in VALUES}
AT_ONCE = NackDelay(min_ms=10, max_ms=10)
QUIET_S = 0.5

batched_or_not = pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])


async def fill(client: magnetar.Client, topic: Topic, *, batching: bool = True) -> None:
    async with client.producer(topic.name, batching=batching) as producer:
        for value, key in zip(VALUES, KEYS, strict=True):
            producer.send_nowait(value, key=key)


async def until_quiet(
    consumer: magnetar.QueueConsumer[bytes] | magnetar.StreamConsumer[bytes],
) -> AsyncIterator[magnetar.Message[bytes]]:
    """Whatever comes until nothing does for a while."""
    while True:
        try:
            yield await consumer.receive(QUIET_S)
        except OperationTimedOut:
            return


async def test_two_consumers_of_a_queue(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    """Each gets some, together they get everything once, and nobody gets it again."""
    where = await topic(2)
    theirs = await java.queue(where.name, "shared", receiver_queue_size=10)
    async with client.queue_consumer(
        where.name, "shared", initial_position=EARLIEST, receiver_queue_size=10
    ) as ours:
        await fill(client, where, batching=False)
        mine: set[str] = set()
        yours: set[str] = set()
        while len(mine) + len(yours) < COUNT:
            async for message in until_quiet(ours):
                mine.add(str(told(message.value)))
                await ours.ack(message)
            messages = await theirs.receive_rest()
            yours |= {str(message.value) for message in messages}
            await theirs.ack(*(message.id for message in messages))
    assert mine
    assert yours
    assert mine | yours == EVERYTHING
    assert not mine & yours
    assert await theirs.receive_rest() == []
    await theirs.close()


@batched_or_not
@pytest.mark.parametrize("first", ["java", "ours"])
async def test_a_queue_is_handed_over(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, first: str, batching: bool
) -> None:
    """What one acknowledged, singly and in part of a batch, the other does not get."""
    where = await topic()
    await fill(client, where, batching=batching)
    done = {str(told(value)) for value in VALUES[: COUNT // 2 : 2]}
    if first == "java":
        theirs = await java.queue(where.name, "q")
        messages = await theirs.receive(COUNT)
        await theirs.ack(*(each.id for each in messages if each.value in done))
        await theirs.close()
        async with client.queue_consumer(where.name, "q", initial_position=EARLIEST) as ours:
            rest = {str(told(message.value)) async for message in until_quiet(ours)}
    else:
        async with client.queue_consumer(where.name, "q", initial_position=EARLIEST) as ours:
            for _ in range(COUNT):
                message = await ours.receive(10)
                if told(message.value) in done:
                    await ours.ack(message)
        theirs = await java.queue(where.name, "q")
        rest = {str(message.value) for message in await theirs.receive_rest()}
        await theirs.close()
    assert EVERYTHING - done <= rest
    if first == "ours" or not batching:
        # The Java client acknowledges a batch when it has all of it.
        assert rest == EVERYTHING - done


@batched_or_not
@pytest.mark.parametrize("first", ["java", "ours"])
async def test_a_stream_is_handed_over(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, first: str, batching: bool
) -> None:
    """Acknowledged up to a message, over segments, by the position vector of one or the other.

    They have one name: Apache Pulsar 5.0.0-M1 gives nobody else what a closed consumer had.
    """
    where = await topic(2)
    await fill(client, where, batching=batching)
    half = COUNT // 2 + 3
    if first == "java":
        theirs = await java.stream(where.name, "s", consumer_name="one")
        messages = await theirs.receive(half)
        await theirs.ack(messages[-1].id)
        await theirs.close()
        before = [str(message.value) for message in messages]
        async with client.stream_consumer(
            where.name, "s", initial_position=EARLIEST, consumer_name="one"
        ) as ours:
            after = [str(told(message.value)) async for message in until_quiet(ours)]
    else:
        async with client.stream_consumer(
            where.name, "s", initial_position=EARLIEST, consumer_name="one"
        ) as ours:
            received = [await ours.receive(10) for _ in range(half)]
            await ours.ack(received[-1])
            before = [str(told(message.value)) for message in received]
        theirs = await java.stream(where.name, "s", consumer_name="one")
        after = [str(message.value) for message in await theirs.receive_rest()]
        await theirs.close()
    assert set(before) | set(after) == EVERYTHING
    if first == "ours" or not batching:
        assert not set(before) & set(after)
    order = {str(told(value)): number for number, value in enumerate(VALUES)}
    key_of = dict(zip(order, KEYS, strict=True))
    for part in (before, after):
        for key in set(KEYS):
            of_key = [order[value] for value in part if key_of[value] == key]
            assert of_key == sorted(of_key)


async def test_two_consumers_of_a_stream(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    """They share the segments, and each key stays with one of them, in order.

    Keys are judged in a second round: in the first one the older consumer may read a segment that
    is being handed over, and what it has not acknowledged comes again.
    """
    where = await topic(2)
    theirs = await java.stream(where.name, "together")
    async with client.stream_consumer(
        where.name, "together", initial_position=EARLIEST, consumer_name="ours"
    ) as ours:
        for _ in range(2):
            mine, yours = await read_a_round(client, where, ours, theirs)
    assert mine
    assert yours
    assert not set(mine) & set(yours)
    for numbers in (*mine.values(), *yours.values()):
        assert numbers == sorted(numbers)
    await theirs.close()


async def read_a_round(
    client: magnetar.Client,
    where: Topic,
    ours: magnetar.StreamConsumer[bytes],
    theirs: JavaConsumer,
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Send every message once and read until both are quiet: numbers by key, ours and theirs."""
    mine: dict[str, list[int]] = {}
    yours: dict[str, list[int]] = {}
    await fill(client, where)
    async with asyncio.timeout(30):
        while len({each for of in (*mine.values(), *yours.values()) for each in of}) < COUNT:
            async for message in until_quiet(ours):
                mine.setdefault(str(message.key), []).append(int(message.value[1:]))
                await ours.ack(message)
            messages = await theirs.receive_rest()
            for each in messages:
                yours.setdefault(str(each.key), []).append(VALUES.index(_bytes(each.value)))
            if messages:
                await theirs.ack(messages[-1].id)
    return mine, yours


@pytest.mark.parametrize("who", ["java", "ours"])
async def test_message_refused_by_one_consumer_goes_to_the_other(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, who: str
) -> None:
    where = await topic()
    async with client.producer(where.name) as producer:
        await producer.send(b"one")
    if who == "java":
        theirs = await java.queue(where.name, "q")
        (refused,) = await theirs.receive(1)
        async with client.queue_consumer(where.name, "q") as ours:
            await theirs.close()
            message = await ours.receive(10)
            assert (message.value, message.id) == (b"one", MessageId.from_bytes(refused.id))
        return
    async with client.queue_consumer(
        where.name, "q", initial_position=EARLIEST, nack_delay=AT_ONCE
    ) as ours:
        ours.nack(await ours.receive(10))
        again = await ours.receive(10)
        assert again.redelivery_count == 1
    theirs = await java.queue(where.name, "q")
    (message_of_java,) = await theirs.receive(1)
    assert message_of_java.value == told(b"one")
    assert MessageId.from_bytes(message_of_java.id) == again.id
    await theirs.close()


FIRST_DEATH = {"REAL_TOPIC": "first", "REAL_SUBSCRIPTION": "first", "ORIGIN_MESSAGE_ID": "1:2:3"}


@pytest.mark.parametrize("key", ["k", b"\x00\xff"])
@pytest.mark.parametrize("properties", [{"a": "1"}, FIRST_DEATH], ids=["first", "second"])
async def test_dead_letters(
    client: magnetar.Client,
    java: JavaClient,
    topic: MakeTopic,
    key: str | bytes,
    properties: dict[str, str],
) -> None:
    """Both send what nobody could process to the same place, and say the same of it."""
    where = await topic()
    letters = await topic(name=f"{where.local_name}-DLQ")
    async with client.producer(where.name) as producer:
        await producer.send(
            b"poison", key=key, ordering_key=b"o", properties=properties, event_time_ms=7
        )
    theirs = await java.queue(where.name, "java", max_redelivery_count=1)
    async with client.queue_consumer(
        where.name,
        "ours",
        initial_position=EARLIEST,
        nack_delay=AT_ONCE,
        dead_letters=magnetar.DeadLetterPolicy(max_redelivery_count=1),
    ) as ours:
        for _ in range(2):
            (message,) = await theirs.receive(1)
            await theirs.nack(message.id)
            ours.nack(await ours.receive(10))
        assert await theirs.receive_rest() == []
        async with client.queue_consumer(letters.name, "read", initial_position=EARLIEST) as reader:
            found = [await reader.receive(10) for _ in range(2)]
    by_subscription = {each.properties["REAL_SUBSCRIPTION"]: each for each in found}
    said = [
        (
            each.value,
            each.key,
            each.event_time_ms,
            {name: text for name, text in each.properties.items() if name != "REAL_SUBSCRIPTION"},
        )
        for each in (by_subscription["ours"], by_subscription["java"])
    ]
    assert said[0] == said[1]
    # The Java client (v5) sends its dead letters without these.
    letter = by_subscription["ours"]
    assert letter.key_bytes == (key if isinstance(key, bytes) else key.encode())
    assert (letter.has_bytes_key, letter.ordering_key) == (isinstance(key, bytes), b"o")
    assert letter.event_time_ms == 7
    await theirs.close()


@pytest.mark.parametrize("writer", ["java", "ours"])
async def test_a_split_in_the_middle(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, writer: str
) -> None:
    """One writes while the topic is cut in two, the other reads: nothing is lost.

    What ours writes is in order; the stock producer breaks the order when a segment is sealed.
    """
    where = await topic()
    seen: list[tuple[str | None, object]] = []
    if writer == "ours":
        theirs = await java.stream(where.name, "s")
        await fill(client, where)
        await where.split(0)
        await fill(client, where)
        while len(seen) < 2 * COUNT:
            received = await theirs.receive(COUNT)
            seen += [(each.key, each.value) for each in received]
            await theirs.ack(received[-1].id)  # what the children have comes after that
        await theirs.close()
        order = {str(told(value)): number for number, value in enumerate(VALUES)}
        for key in set(KEYS):
            numbers = [order[str(value)] for each, value in seen if each == key]
            assert numbers == 2 * sorted(set(numbers))
    else:
        producer = await java.producer(where.name, batching=True)
        async with client.stream_consumer(where.name, "s", initial_position=EARLIEST) as ours:
            await producer.send(VALUES, keys=KEYS)
            await where.split(0)
            await producer.send(VALUES, keys=KEYS)
            for _ in range(2 * COUNT):
                message = await ours.receive(10)
                seen.append((message.key, told(message.value)))
                await ours.ack(message)
        await producer.close()
    pairs = [(key, told(value)) for key, value in zip(KEYS, VALUES, strict=True)]
    assert sorted(map(str, seen)) == sorted(map(str, 2 * pairs))


def _bytes(value: object) -> bytes:
    return next(each for each in VALUES if told(each) == value)
