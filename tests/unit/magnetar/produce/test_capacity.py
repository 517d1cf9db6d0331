"""Order and limits of `Capacity`."""

import asyncio

import pytest

from magnetar.errors import AlreadyClosed
from magnetar.produce.capacity import Capacity


async def sender(capacity: Capacity, name: str, order: list[str]) -> None:
    if capacity.is_contended:
        await capacity.reserve()
        capacity.use_reserved()
    capacity.take(10)
    order.append(name)


async def started(capacity: Capacity, names: str, order: list[str]) -> list["asyncio.Task[None]"]:
    tasks = [asyncio.create_task(sender(capacity, name, order)) for name in names]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_places_go_in_the_order_of_asking() -> None:
    capacity, order = Capacity(2, 1000), list[str]()
    tasks = await started(capacity, "abcde", order)
    assert order == ["a", "b"]
    capacity.give_back(1, 10)
    assert capacity.is_full  # the place is reserved
    tasks += await started(capacity, "f", order)
    assert order == ["a", "b", "c"]
    capacity.give_back(2, 20)
    await started(capacity, "", order)
    assert order == ["a", "b", "c", "d", "e"]
    capacity.give_back(2, 20)
    await asyncio.gather(*tasks)
    assert order == list("abcdef")
    assert capacity.messages == 1


async def test_new_send_does_not_overtake_a_woken_waiter() -> None:
    capacity, order = Capacity(2, 1000), list[str]()
    capacity.take(10)
    capacity.take(10)
    tasks = await started(capacity, "a", order)
    capacity.give_back(2, 20)
    tasks.append(asyncio.create_task(sender(capacity, "b", order)))
    await asyncio.gather(*tasks)
    assert order == ["a", "b"]


async def test_bytes_are_a_limit_that_one_message_may_pass() -> None:
    capacity = Capacity(100, 25)
    for _ in range(2):
        capacity.take(20)
    assert capacity.is_full
    capacity.give_back(1, 20)
    assert not capacity.is_full


async def test_capacity_of_a_cancelled_waiter_goes_to_the_next() -> None:
    capacity, order = Capacity(1, 1000), list[str]()
    capacity.take(10)
    tasks = await started(capacity, "abc", order)
    tasks[0].cancel()
    await started(capacity, "", order)
    capacity.give_back(1, 10)
    tasks[1].cancel()  # it has its place, and was not told yet
    await asyncio.wait(tasks)
    assert order == ["c"]
    assert capacity.is_full


async def test_waiting_sends_fail_when_the_producer_ends() -> None:
    capacity = Capacity(1, 1000)
    capacity.take(10)
    tasks = await started(capacity, "ab", [])
    capacity.fail(AlreadyClosed("It is over."))
    for task in tasks:
        with pytest.raises(AlreadyClosed, match="over"):
            await task
