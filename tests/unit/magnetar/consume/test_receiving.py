"""The inbox, and how consumers hand out what is in it."""

import asyncio

import pytest

from magnetar.consume.message import MESSAGE_OVERHEAD_BYTES, Entry, Message, RawMessage
from magnetar.consume.receiving import Inbox, InboxConsumer
from magnetar.errors import AlreadyClosed, InvalidArgument, InvalidMessage, OperationTimedOut
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.schema.schema import Schema
from tests.support.waiting import TIMEOUT_S


class Segment:
    def __init__(self) -> None:
        self.taken_of: list[bytes] = []
        self.rooms = 0

    def taken(self, received: RawMessage[object]) -> None:
        self.taken_of.append(received.payload)

    def taken_back(self, received: RawMessage[object]) -> None:
        self.taken_of.remove(received.payload)

    def inbox_has_capacity(self) -> None:
        self.rooms += 1


def messages(segment: Segment, *payloads: bytes, key: int = 0) -> list[RawMessage[Segment]]:
    entry = Entry((1, key), -1, 0, MessageMetadata(), 0)
    return [RawMessage(segment, entry, -1, None, payload) for payload in payloads]


async def test_messages_come_in_order_and_their_segment_is_told() -> None:
    inbox: Inbox[Segment] = Inbox(10, 10_000)
    one, two = Segment(), Segment()
    inbox.put(one, messages(one, b"a"))
    inbox.put(two, messages(two, b"b", b"c"))
    assert [each.payload for each in await inbox.take_many(10, 0)] == [b"a", b"b", b"c"]
    assert (one.taken_of, two.taken_of) == ([b"a"], [b"b", b"c"])
    assert inbox.bytes_held == 0


async def test_takers_wait_in_turn_and_get_one_message_each() -> None:
    inbox: Inbox[Segment] = Inbox(10, 10_000)
    segment = Segment()
    takers = [asyncio.ensure_future(inbox.take()) for _ in range(3)]
    await asyncio.sleep(0)
    inbox.put(segment, messages(segment, b"a", b"b"))
    inbox.put(segment, messages(segment, b"c"))
    assert [(await each).payload for each in takers] == [b"a", b"b", b"c"]


async def test_a_taker_that_is_cancelled_when_its_message_is_there_leaves_it_to_the_next() -> None:
    inbox: Inbox[Segment] = Inbox(10, 10_000)
    segment = Segment()
    first, second = (asyncio.ensure_future(inbox.take()) for _ in range(2))
    await asyncio.sleep(0)
    inbox.put(segment, messages(segment, b"a"))
    first.cancel()
    assert (await second).payload == b"a"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert segment.taken_of == [b"a"]


async def test_a_taker_that_is_cancelled_just_before_its_message_comes_is_passed_over() -> None:
    inbox: Inbox[Segment] = Inbox(10, 10_000)
    segment = Segment()
    first, second = (asyncio.ensure_future(inbox.take()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    inbox.put(segment, messages(segment, b"a"))
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await asyncio.wait_for(second, TIMEOUT_S)).payload == b"a"


async def test_a_taker_that_is_cancelled_just_before_the_inbox_fails_is_cancelled() -> None:
    inbox: Inbox[Segment] = Inbox(10, 10_000)
    taker = asyncio.ensure_future(inbox.take())
    await asyncio.sleep(0)
    taker.cancel()
    inbox.fail(AlreadyClosed("It is over; open another one."))
    with pytest.raises(asyncio.CancelledError):
        await taker


async def test_cancelled_and_late_takers_have_taken_nothing() -> None:
    inbox: Inbox[Segment] = Inbox(10, 10_000)
    segment = Segment()
    with pytest.raises(OperationTimedOut, match="wait longer"):
        await inbox.take(0.001)
    assert await inbox.take_many(3, 0.001) == []
    cancelled = asyncio.ensure_future(inbox.take())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait((cancelled,))
    inbox.put(segment, messages(segment, b"a"))
    assert (await inbox.take(0)).payload == b"a"


async def test_buffered_messages_are_handed_out_before_a_failure() -> None:
    inbox: Inbox[Segment] = Inbox(10, 10_000)
    segment = Segment()
    inbox.put(segment, messages(segment, b"a"))
    inbox.fail(AlreadyClosed("It is over; open another one."))
    assert (await inbox.take()).payload == b"a"
    with pytest.raises(AlreadyClosed):
        await inbox.take()


async def test_a_failure_ends_all_that_wait() -> None:
    inbox: Inbox[Segment] = Inbox(10, 10_000)
    takers = [asyncio.ensure_future(inbox.take()) for _ in range(2)]
    await asyncio.sleep(0)
    inbox.fail(AlreadyClosed("It is over; open another one."))
    for each in takers:
        with pytest.raises(AlreadyClosed):
            await each


@pytest.mark.parametrize(("limit", "size"), [(2, 10_000), (10, 2 * (MESSAGE_OVERHEAD_BYTES + 1))])
async def test_queue_is_full_by_messages_or_bytes_and_reports_space_once(
    limit: int, size: int
) -> None:
    inbox: Inbox[Segment] = Inbox(limit, size)
    segment = Segment()
    inbox.put(segment, messages(segment, b"a"))
    assert not inbox.is_full
    inbox.put(segment, messages(segment, b"b", b"c"))
    assert inbox.is_full
    inbox.call_when_not_full(segment)
    inbox.take_nowait()
    assert segment.rooms == 0
    inbox.take_nowait()
    inbox.take_nowait()
    assert segment.rooms == 1


async def test_what_is_dropped_is_of_one_segment_or_of_some_entries() -> None:
    inbox: Inbox[Segment] = Inbox(2, 10_000)
    one, two = Segment(), Segment()
    inbox.put(one, messages(one, b"a", key=1) + messages(one, b"b", key=2))
    inbox.put(two, messages(two, b"c", key=1))
    inbox.call_when_not_full(two)
    assert len(inbox.drop(one, {(1, 1): -1})) == 1
    assert two.rooms == 0
    assert len(inbox.drop(one)) == 1
    assert two.rooms == 1
    assert [each.payload for each in await inbox.take_many(5)] == [b"c"]
    assert one.taken_of == []


async def test_message_put_back_is_received_next() -> None:
    inbox: Inbox[Segment] = Inbox(2, 10_000)
    segment = Segment()
    inbox.put(segment, messages(segment, b"a", b"b"))
    inbox.put_back(await inbox.take())
    assert segment.taken_of == []
    assert [each.payload for each in await inbox.take_many(5)] == [b"a", b"b"]


class Source:
    def __init__(self) -> None:
        self.out = 0

    def taken(self, received: object) -> None:
        self.out += 1

    def taken_back(self, received: object) -> None:
        self.out -= 1

    def inbox_has_capacity(self) -> None:
        pass


class Versioned(Schema[str]):
    """Knows a version once it was learnt, which takes until `answer` is set."""

    info = None

    def __init__(self) -> None:
        self.known: set[bytes | None] = {None}
        self.answer = asyncio.Event()
        self.refusal: Exception | None = None

    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, data: bytes, version: bytes | None = None) -> str:
        return data.decode()

    def knows(self, version: bytes | None) -> bool:
        return version in self.known

    async def learn(self, version: bytes) -> None:
        await self.answer.wait()
        if self.refusal is not None:
            raise self.refusal
        self.known.add(version)


class Consumer(InboxConsumer[str, Source]):
    def __init__(self) -> None:
        self.inbox: Inbox[Source] = Inbox(100, 10_000)
        super().__init__(self.inbox)
        self.source = Source()
        self.schema = Versioned()
        self.handed_out: list[str] = []

    def arrive(self, *values: str, version: bytes | None = None) -> None:
        for number, value in enumerate(values):
            metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0)
            if version is not None:
                metadata.schema_version = version
            entry = Entry((1, number), -1, 0, metadata, 0)
            received = RawMessage(self.source, entry, -1, None, value.encode())
            self.inbox.put(self.source, [received])

    async def open(self) -> None:
        pass

    async def _close(self) -> None:
        self.inbox.clear()
        self.inbox.fail(AlreadyClosed("It is closed; open another one."))

    def _schema_of(self, received: RawMessage[Source]) -> Schema[str]:
        return self.schema

    def _hand_out(self, received: RawMessage[Source]) -> Message[str]:
        message = Message(received, self.schema, "topic://t/n/x", 0)
        self.handed_out.append(message.value)
        return message


async def test_messages_come_in_order_to_one_call_each() -> None:
    consumer = Consumer()
    waiting = [asyncio.create_task(consumer.receive()) for _ in range(3)]
    await asyncio.sleep(0)
    consumer.arrive("a", "b", "c")
    assert [message.value for message in await asyncio.gather(*waiting)] == ["a", "b", "c"]


async def test_receive_batch_returns_the_messages_at_hand() -> None:
    consumer = Consumer()
    consumer.arrive("a", "b", "c")
    assert [each.value for each in await consumer.receive_batch(2)] == ["a", "b"]
    assert [each.value for each in await consumer.receive_batch(2)] == ["c"]
    assert await consumer.receive_batch(2, timeout_s=0) == []
    with pytest.raises(InvalidArgument):
        await consumer.receive_batch(0)


async def test_time_that_is_up_has_taken_nothing() -> None:
    consumer = Consumer()
    with pytest.raises(OperationTimedOut):
        await consumer.receive(0.001)
    consumer.arrive("a")
    assert (await consumer.receive(0)).value == "a"


async def test_a_message_waits_for_its_schema_and_nothing_overtakes_it() -> None:
    consumer = Consumer()
    consumer.arrive("a", version=b"2")
    consumer.arrive("b")
    first = asyncio.create_task(consumer.receive())
    second = asyncio.create_task(consumer.receive_batch(5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert consumer.handed_out == []
    consumer.schema.answer.set()
    assert (await first).value == "a"
    assert [each.value for each in await second] == ["b"]


async def test_who_stops_waiting_for_a_schema_has_taken_nothing() -> None:
    consumer = Consumer()
    consumer.arrive("a", version=b"2")
    waiting = asyncio.create_task(consumer.receive())
    while not consumer.source.out:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert consumer.source.out == 0
    with pytest.raises(OperationTimedOut):
        await consumer.receive(0.001)
    consumer.schema.answer.set()
    assert (await consumer.receive()).value == "a"


async def test_a_message_whose_schema_is_nowhere_does_not_stop_the_others() -> None:
    consumer = Consumer()
    consumer.schema.refusal = InvalidMessage("There is no such version; nothing to do.")
    consumer.schema.answer.set()
    consumer.arrive("a", version=b"2")
    consumer.arrive("b")
    assert [(await consumer.receive()).data for _ in range(2)] == [b"a", b"b"]


async def test_iterating_ends_with_the_close() -> None:
    consumer = Consumer()
    consumer.arrive("a")
    got: list[str] = []

    async def read() -> None:
        async for message in consumer:
            got.append(message.value)  # noqa: PERF401 - looked at while it grows

    reading = asyncio.create_task(read())
    while not got:
        await asyncio.sleep(0)
    await consumer.close()
    await reading
    with pytest.raises(AlreadyClosed):
        await consumer.receive()
