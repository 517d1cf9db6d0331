"""Turns are shared by addresses, and those that leave take none."""

import asyncio
from collections import Counter

import pytest

from security.turns import TooManyWait, Turns


async def take(turns: Turns, address: str, order: list[str]) -> None:
    await turns.take(address)
    order.append(address)


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_addresses_take_turns() -> None:
    turns, order = Turns(1, 10, lambda _: 0), list[str]()
    await take(turns, "a", order)
    tasks = [asyncio.create_task(take(turns, each, order)) for each in "aaabbc"]
    await settled()
    for _ in tasks:
        turns.give_back()
        await settled()
    assert "".join(order) == "aabcaba"


async def test_addresses_with_few_failures_are_first() -> None:
    failures = Counter({"a": 3, "b": 1})
    turns, order = Turns(1, 10, lambda address: failures[address]), list[str]()
    await turns.take("a")
    tasks = [asyncio.create_task(take(turns, each, order)) for each in "aabbc"]
    await settled()
    for _ in tasks:
        turns.give_back()
        await settled()
    assert "".join(order) == "cbbaa"


async def test_one_that_leaves_gives_its_turn_to_the_next() -> None:
    turns, order = Turns(1, 10, lambda _: 0), list[str]()
    await turns.take("a")
    waiting, granted, last = (asyncio.create_task(take(turns, each, order)) for each in "bcd")
    await settled()
    waiting.cancel()
    await settled()
    turns.give_back()
    granted.cancel()  # It has its turn, and does not know yet.
    await settled()
    assert order == ["d"]
    assert last.done()
    turns.give_back()
    await turns.take("e")


async def test_a_newcomer_replaces_one_of_the_busiest_address() -> None:
    turns, order = Turns(1, 3, lambda _: 0), list[str]()
    await turns.take("a")
    tasks = [asyncio.create_task(take(turns, "a", order)) for _ in range(3)]
    await settled()
    with pytest.raises(TooManyWait):
        await turns.take("a")
    newcomer = asyncio.create_task(take(turns, "b", order))
    await settled()
    with pytest.raises(TooManyWait):
        await tasks[2]
    for _ in range(3):
        turns.give_back()
        await settled()
    assert order == ["a", "b", "a"]
    assert newcomer.done()
