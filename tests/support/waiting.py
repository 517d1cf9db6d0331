"""Waiting for conditions, and ending what was started."""

import asyncio
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 30.0
POLL_S = 0.01


async def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Return when the condition holds; raises `TimeoutError` if it does not come to."""
    for _ in range(int(timeout_s / POLL_S)):
        if condition():
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"the condition did not hold within {timeout_s} s")


async def end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks that still run, and wait for them; their errors are not raised."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
