"""Work that ends even if the one who asked for it goes away.

Rules: a connection that closes cancels its requests; what changes stored things must not stop half
way, so it runs as a task of whoever owns those things.  A failure nobody waits for is logged.
"""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

import structlog

from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)
T = TypeVar("T")


class Background:
    """The tasks of one owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Begin; whoever awaits the task does so through `asyncio.shield`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, work: Coroutine[object, object, T]) -> T:
        """Its result; if the caller is cancelled, the work goes on."""
        return await asyncio.shield(self.start(work))

    @property
    def busy(self) -> bool:
        """Whether anything is running."""
        return bool(self._tasks)

    async def wait(self) -> None:
        """Return when nothing is running."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, MagnetarError):
            log.error("background_work_failed", exc_info=error)
