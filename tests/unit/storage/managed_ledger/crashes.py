"""Crashes of a managed ledger after each number of loop turns."""

import asyncio
from collections.abc import Callable, Coroutine

from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Limits
from tests.unit.storage.managed_ledger.fakes import SMALL, World, settle


def numbered(count: int) -> list[bytes]:
    return [f"e{number}".encode() for number in range(count)]


async def crash_at_each_step(
    prepare: Callable[[World, ManagedLedger], Coroutine[None, None, None]],
    act: Callable[[ManagedLedger], Coroutine[None, None, object]],
    check: Callable[[World, ManagedLedger, bool, int], Coroutine[None, None, None]],
    limits: Limits = SMALL,
) -> None:
    """Run `act`, let the process die after each number of loop turns, and look what is left."""
    step, finished = 0, False
    while not finished:
        world = World(limits)
        ledger = await world.open()
        await prepare(world, ledger)
        task = asyncio.ensure_future(act(ledger))
        for _ in range(step):
            await asyncio.sleep(0)
        finished = task.done()
        if finished:
            await task
            await settle()
        await check(world, await world.crash(), finished, step)
        task.cancel()  # it waits for what its process will never see
        step += 1
        assert step < 1000
    assert step > 3
