"""Waiting for conditions, counting turns of the event loop, and ending what was started."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.child_process import BESIDE_VARIABLE

TIMEOUT_S = 300.0 if BESIDE_VARIABLE in os.environ else 30.0
"""Longer for tests on the processor time that others leave."""
POLL_S = 0.005


async def until(
    condition: Callable[[], object], timeout_s: float = TIMEOUT_S, *, poll_s: float = POLL_S
) -> None:
    """Return when the condition is true; `TimeoutError` if it is not within the timeout.

    `poll_s=0` checks it at every turn of the event loop, for conditions that hold only briefly.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        if loop.time() > deadline:
            raise TimeoutError(f"the condition did not hold within {timeout_s} s")
        await asyncio.sleep(poll_s)


async def until_awaited(
    condition: Callable[[], Awaitable[object]], timeout_s: float = TIMEOUT_S
) -> None:
    """As `until`, for a condition that must be awaited."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(POLL_S)


def count_turns() -> Callable[[], int]:
    """A function that returns the number of turns that the event loop has made from now on."""
    loop, turns = asyncio.get_running_loop(), 0

    def count() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(count)

    loop.call_soon(count)
    return lambda: turns


async def end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks that still run, and wait for them; their errors are not raised."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
