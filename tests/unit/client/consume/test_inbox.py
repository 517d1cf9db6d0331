"""The inbox: order, takers that are cancelled, room."""

import asyncio

import pytest

from magnetar.consume.inbox import Inbox
from magnetar.consume.received import RECEIVED_OVERHEAD, Entry, Received
from magnetar.errors import AlreadyClosed, OperationTimedOut
from protocol.pulsar_pb2 import MessageMetadata


class Segment:
    def __init__(self) -> None:
        self.taken_of: list[bytes] = []
        self.rooms = 0

    def taken(self, received: Received[object]) -> None:
        self.taken_of.append(received.payload)

    def taken_back(self, received: Received[object]) -> None:
        self.taken_of.remove(received.payload)

    def room(self) -> None:
        self.rooms += 1


def messages(segment: Segment, *payloads: bytes, key: int = 0) -> list[Received[Segment]]:
    entry = Entry((1, key), -1, 0, MessageMetadata(), 0)
    return [Received(segment, entry, -1, None, payload) for payload in payloads]


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
    assert (await asyncio.wait_for(second, 1)).payload == b"a"


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


async def test_what_waits_is_handed_out_before_a_failure() -> None:
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


@pytest.mark.parametrize(("limit", "size"), [(2, 10_000), (10, 2 * (RECEIVED_OVERHEAD + 1))])
async def test_it_is_full_by_messages_or_bytes_and_tells_once_of_room(
    limit: int, size: int
) -> None:
    inbox: Inbox[Segment] = Inbox(limit, size)
    segment = Segment()
    inbox.put(segment, messages(segment, b"a"))
    assert not inbox.is_full
    inbox.put(segment, messages(segment, b"b", b"c"))
    assert inbox.is_full
    inbox.when_room(segment)
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
    inbox.when_room(two)
    assert inbox.drop(one, {(1, 1)}) == 1
    assert two.rooms == 0
    assert inbox.drop(one) == 1
    assert two.rooms == 1
    assert [each.payload for each in await inbox.take_many(5)] == [b"c"]
    assert one.taken_of == []


async def test_what_is_put_back_is_next() -> None:
    inbox: Inbox[Segment] = Inbox(2, 10_000)
    segment = Segment()
    inbox.put(segment, messages(segment, b"a", b"b"))
    inbox.put_back(await inbox.take())
    assert segment.taken_of == []
    assert [each.payload for each in await inbox.take_many(5)] == [b"a", b"b"]
