"""How messages are handed out: turns, cancellation, schemas that must be learnt first."""

import asyncio

import pytest

from magnetar.consume.inbox import Inbox
from magnetar.consume.received import Entry, Received
from magnetar.consume.receiving import Receiving
from magnetar.errors import AlreadyClosed, InvalidArgument, InvalidMessage, OperationTimedOut
from magnetar.message import Message
from magnetar.schema.schema import Schema
from protocol import pulsar_pb2 as pb


class Source:
    def __init__(self) -> None:
        self.out = 0

    def taken(self, received: object) -> None:
        self.out += 1

    def taken_back(self, received: object) -> None:
        self.out -= 1

    def room(self) -> None:
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


class Consumer(Receiving[str, Source]):
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
            received = Received(self.source, entry, -1, None, value.encode())
            self.inbox.put(self.source, [received])

    async def open(self) -> None:
        pass

    async def _close(self) -> None:
        self.inbox.clear()
        self.inbox.fail(AlreadyClosed("It is closed; open another one."))

    def _schema_of(self, received: Received[Source]) -> Schema[str]:
        return self.schema

    def _hand_out(self, received: Received[Source]) -> Message[str]:
        message = Message(received, self.schema, "topic://t/n/x", 0)
        self.handed_out.append(message.value)
        return message


async def test_messages_come_in_order_to_one_call_each() -> None:
    consumer = Consumer()
    waiting = [asyncio.create_task(consumer.receive()) for _ in range(3)]
    await asyncio.sleep(0)
    consumer.arrive("a", "b", "c")
    assert [message.value for message in await asyncio.gather(*waiting)] == ["a", "b", "c"]


async def test_a_batch_is_what_is_there() -> None:
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
