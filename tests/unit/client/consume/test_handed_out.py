"""What keeps a consumer from leaving."""

import asyncio
import weakref

from magnetar.consume.handed_out import HandedOut
from magnetar.consume.received import Entry, Received
from magnetar.message_id import EntryId
from protocol.pulsar_pb2 import MessageMetadata


def message(entry: int, index: int = -1, size: int = 0) -> Received[object]:
    return Received(None, Entry((1, entry), -1, 0, MessageMetadata(), size), index, None, b"")


class Weak(Received[object]):
    """One of which it can be seen whether it is kept."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        super().__init__(None, Entry((1, 1), -1, 0, MessageMetadata(), 0), -1, None, b"")


async def is_over(handed_out: HandedOut) -> bool:
    waiting = asyncio.ensure_future(handed_out.all_acknowledged())
    await asyncio.sleep(0)
    over = waiting.done()
    waiting.cancel()
    return over


async def test_everything_before_an_acknowledged_message_is_done() -> None:
    out = HandedOut()
    for each in (message(1), message(2, 0, 2), message(2, 1, 2), message(3)):
        out.add(each)
    out.acknowledged_up_to(EntryId(1, 2, 0, 2))
    assert len(out) == 2
    out.acknowledged_up_to(EntryId(1, 2))
    assert len(out) == 1
    waiting = asyncio.ensure_future(out.all_acknowledged())
    await asyncio.sleep(0)
    assert not waiting.done()
    out.acknowledged_up_to(EntryId(1, 3))
    await asyncio.wait_for(waiting, 5)


async def test_one_by_one_in_any_order() -> None:
    out = HandedOut()
    for number in range(3):
        out.add(message(number))
    for number in (2, 0):
        out.acknowledged(EntryId(1, number))
        assert not await is_over(out)
    out.acknowledged(EntryId(1, 1))
    assert await is_over(out)


async def test_what_is_taken_back_or_comes_again_does_not_count() -> None:
    out = HandedOut()
    last = message(2)
    out.add(message(1))
    out.add(last)
    out.take_back(last)
    out.acknowledged_up_to(EntryId(1, 1))
    assert await is_over(out)
    out.add(last)
    out.attached()
    assert await is_over(out)


def test_messages_are_not_kept() -> None:
    out = HandedOut()
    one = Weak()
    out.add(one)
    kept = weakref.ref(one)
    del one
    assert kept() is None
    assert len(out) == 1


def test_what_is_said_in_a_transaction_is_said_once() -> None:
    out = HandedOut()
    for number in range(4):
        out.add(message(number))
    first, second, third, last = (message(number).entry_id for number in range(4))
    assert out.said_up_to(second) == [first, second]
    assert out.said_up_to(third) == [third]
    assert len(out) == 4
    out.attached()
    assert out.said_up_to(last) == [last]
    out.add(message(0))
    assert out.said_up_to(last) == [first]


def test_what_was_handed_out_before_is_still_to_be_acknowledged() -> None:
    out = HandedOut()
    for number in range(4):
        out.add(message(number))
    first, second, third, last = (message(number).entry_id for number in range(4))
    out.acknowledged(second)
    out.attached()
    assert not out
    out.add(message(0))
    assert sorted(out.acknowledged_up_to(third)) == [first, third]
    assert out.acknowledged_up_to(last) == [last]
    out.add(message(0))
    out.attached()
    out.give_up()
    assert out.acknowledged_up_to(last) == []
