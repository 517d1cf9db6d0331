"""Waiting for conditions, and ending what was started."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

TIMEOUT_S = 30.0
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


async def end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks that still run, and wait for them; their errors are not raised."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
