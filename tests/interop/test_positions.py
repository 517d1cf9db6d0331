"""Message ids and checkpoints: bytes that both clients read alike."""

from collections.abc import Iterable

import pytest

import magnetar
from magnetar.checkpoint import Checkpoint
from magnetar.consume.message import Message
from magnetar.consume.settings import InitialPosition
from magnetar.message_id import MessageId
from tests.client.conftest import Topic
from tests.interop.conftest import MakeTopic
from tests.interop.java_client import JavaClient, JavaConsumer, told

EARLIEST = InitialPosition.EARLIEST
COUNT = 40
KEYS = [f"k{number}" for number in range(COUNT)]
VALUES = [f"v{number}".encode() for number in range(COUNT)]

batched_or_not = pytest.mark.parametrize("batching", [False, True], ids=["single", "batched"])
segments = pytest.mark.parametrize("count", [1, 4], ids=["one_segment", "four_segments"])


async def java_fills(java: JavaClient, topic: Topic, batching: bool) -> list[bytes]:
    producer = await java.producer(topic.name, batching=batching)
    ids = await producer.send(VALUES, keys=KEYS)
    await producer.close()
    return ids


async def ours_fills(client: magnetar.Client, topic: Topic, batching: bool) -> list[MessageId]:
    async with client.producer(topic.name, batching=batching) as producer:
        sent = [
            producer.send_nowait(value, key=key) for value, key in zip(VALUES, KEYS, strict=True)
        ]
        return [await each for each in sent]


def values_of(messages: Iterable[Message[bytes]]) -> list[object]:
    return [told(message.value) for message in messages]


EVERYTHING = sorted(str(told(value)) for value in VALUES)


@batched_or_not
async def test_ids_of_what_was_sent(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, batching: bool
) -> None:
    """Entry, segment and place in the batch are those that any consumer sees."""
    where = await topic(2)
    theirs = [MessageId.from_bytes(each) for each in await java_fills(java, where, batching)]
    ours = await ours_fills(client, where, batching)
    async with client.queue_consumer(where.name, "ours", initial_position=EARLIEST) as consumer:
        received = [await consumer.receive(10) for _ in range(2 * COUNT)]
    places = {(each.id.segment_id, each.id.entry[:3]) for each in received}
    assert places == {(each.segment_id, each.entry[:3]) for each in theirs + ours}
    for message_id in ours:
        explained = await java.explain_id(message_id.to_bytes())
        meaning = explained["meaning"]
        assert meaning["segment_id"] == message_id.segment_id
        assert meaning["position"]["entry_id"] == message_id.entry.entry_id
        assert meaning["position"]["batch_index"] == message_id.entry.batch_index


@batched_or_not
async def test_ids_of_what_was_received(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, batching: bool
) -> None:
    """Byte for byte the same, position vectors included."""
    where = await topic()
    await ours_fills(client, where, batching)
    queue, stream = await java.queue(where.name, "queue"), await java.stream(where.name, "stream")
    of_queue = [message.id for message in await queue.receive(COUNT)]
    of_stream = [message.id for message in await stream.receive(COUNT)]
    async with client.queue_consumer(where.name, "q", initial_position=EARLIEST) as ours:
        assert [(await ours.receive(10)).id.to_bytes() for _ in range(COUNT)] == of_queue
    async with client.stream_consumer(where.name, "s", initial_position=EARLIEST) as reader:
        assert [(await reader.receive(10)).id.to_bytes() for _ in range(COUNT)] == of_stream
    for opened in (queue, stream):
        await opened.close()


@segments
@batched_or_not
async def test_ours_goes_on_where_java_was(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, batching: bool, count: int
) -> None:
    where = await topic(count)
    await java_fills(java, where, batching)
    consumer = await java.checkpoint_consumer(where.name)
    before = [message.value for message in await consumer.receive(COUNT // 2 + 1)]
    start = Checkpoint.from_bytes(await consumer.checkpoint())
    await consumer.close()
    async with client.checkpoint_consumer(where.name, start=start) as ours:
        after = values_of([await ours.receive(10) for _ in range(COUNT - len(before))])
        assert sorted(map(str, before + after)) == EVERYTHING
        last = ours.checkpoint().to_bytes()
    await nothing_is_left(java, where, last)


@segments
@batched_or_not
async def test_java_goes_on_where_ours_was(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic, batching: bool, count: int
) -> None:
    where = await topic(count)
    await ours_fills(client, where, batching)
    async with client.checkpoint_consumer(where.name, start=Checkpoint.EARLIEST) as ours:
        before = values_of([await ours.receive(10) for _ in range(COUNT // 2 + 1)])
        start = ours.checkpoint().to_bytes()
    consumer = await java.checkpoint_consumer(where.name, start=start)
    after = [message.value for message in await consumer.receive(COUNT - len(before))]
    assert sorted(map(str, before + after)) == EVERYTHING
    await java_has_read_everything(client, where, start, consumer)


async def test_a_checkpoint_survives_a_split(
    client: magnetar.Client, java: JavaClient, topic: MakeTopic
) -> None:
    where = await topic(2)
    await java_fills(java, where, True)
    consumer = await java.checkpoint_consumer(where.name)
    before = [message.value for message in await consumer.receive(COUNT // 2)]
    start = Checkpoint.from_bytes(await consumer.checkpoint())
    await consumer.close()
    await where.split(0)
    await ours_fills(client, where, True)
    async with client.checkpoint_consumer(where.name, start=start) as ours:
        after = values_of([await ours.receive(10) for _ in range(2 * COUNT - len(before))])
        last = ours.checkpoint().to_bytes()
    assert sorted(map(str, before + after)) == sorted(2 * EVERYTHING)
    await nothing_is_left(java, where, last)


@pytest.mark.parametrize("word", ["earliest", "latest"])
async def test_both_ends(java: JavaClient, word: str) -> None:
    explained = await java.explain_checkpoint(word)
    ours = Checkpoint.EARLIEST if word == "earliest" else Checkpoint.LATEST
    assert told(ours.to_bytes()) == explained["bytes"]


async def nothing_is_left(java: JavaClient, topic: Topic, checkpoint: bytes) -> None:
    """The Java client reads nothing after that checkpoint, but what comes next."""
    consumer = await java.checkpoint_consumer(topic.name, start=checkpoint)
    producer = await java.producer(topic.name)
    await producer.send([b"next"])
    assert [message.value for message in await consumer.receive(1)] == [told(b"next")]
    for opened in (producer, consumer):
        await opened.close()


async def java_has_read_everything(
    client: magnetar.Client, topic: Topic, restored: bytes, consumer: JavaConsumer
) -> None:
    """Ours reads nothing after the consumer's checkpoint, but what comes next.

    The Java client's checkpoint forgets segments of which nothing has come since it was restored.
    """
    before = Checkpoint.from_bytes(restored).positions
    last = Checkpoint.from_bytes(await consumer.checkpoint()).positions
    start = Checkpoint.of({**before, **last})
    await consumer.close()
    async with (
        client.checkpoint_consumer(topic.name, start=start) as ours,
        client.producer(topic.name) as producer,
    ):
        await producer.send(b"next")
        assert (await ours.receive(10)).value == b"next"
