"""Who gets room, and in which order."""

import asyncio

import pytest

from magnetar.errors import AlreadyClosed
from magnetar.produce.room import Room


async def sender(room: Room, name: str, order: list[str]) -> None:
    if room.is_contended:
        await room.reserve()
        room.use_reserved()
    room.take(10)
    order.append(name)


async def started(room: Room, names: str, order: list[str]) -> list["asyncio.Task[None]"]:
    tasks = [asyncio.create_task(sender(room, name, order)) for name in names]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_places_go_in_the_order_of_asking() -> None:
    room, order = Room(2, 1000), list[str]()
    tasks = await started(room, "abcde", order)
    assert order == ["a", "b"]
    room.give_back(1, 10)
    assert room.is_full  # the place is reserved
    tasks += await started(room, "f", order)
    assert order == ["a", "b", "c"]
    room.give_back(2, 20)
    await started(room, "", order)
    assert order == ["a", "b", "c", "d", "e"]
    room.give_back(2, 20)
    await asyncio.gather(*tasks)
    assert order == list("abcdef")
    assert room.messages == 1


async def test_new_send_does_not_overtake_a_woken_waiter() -> None:
    room, order = Room(2, 1000), list[str]()
    room.take(10)
    room.take(10)
    tasks = await started(room, "a", order)
    room.give_back(2, 20)
    tasks.append(asyncio.create_task(sender(room, "b", order)))
    await asyncio.gather(*tasks)
    assert order == ["a", "b"]


async def test_bytes_are_a_limit_that_one_message_may_pass() -> None:
    room = Room(100, 25)
    for _ in range(2):
        room.take(20)
    assert room.is_full
    room.give_back(1, 20)
    assert not room.is_full


async def test_a_place_of_who_gave_up_goes_to_the_next() -> None:
    room, order = Room(1, 1000), list[str]()
    room.take(10)
    tasks = await started(room, "abc", order)
    tasks[0].cancel()
    await started(room, "", order)
    room.give_back(1, 10)
    tasks[1].cancel()  # it has its place, and was not told yet
    await asyncio.wait(tasks)
    assert order == ["c"]
    assert room.is_full


async def test_waiting_sends_fail_when_the_producer_ends() -> None:
    room = Room(1, 1000)
    room.take(10)
    tasks = await started(room, "ab", [])
    room.fail(AlreadyClosed("It is over."))
    for task in tasks:
        with pytest.raises(AlreadyClosed, match="over"):
            await task
