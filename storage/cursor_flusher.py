"""When a cursor's position is written: in batches, by a timer that runs only while it is dirty.

Rules:

- A change makes the cursor dirty and starts the timer; all changes until it fires are one write.
- One write at a time.  `persist` waits for a write that began after the call's changes.
- A failed write is tried again with growing pauses, until it works or the stream stops.
"""

import asyncio
from collections.abc import Callable, Coroutine

import structlog

from config import bounds
from protocol.server_error import InternalError, MagnetarError

log = structlog.get_logger(__name__)


class CursorFlusher:
    """See the module's rules.  `write` makes the state of its moment (or a later one) durable."""

    __slots__ = ("_delay_s", "_durable", "_flush_s", "_generation", "_loop", "_name",
                 "_stopped", "_task", "_timer", "_write")  # fmt: skip

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        flush_ms: int,
        write: Callable[[], Coroutine[object, object, None]],
    ) -> None:
        self._name = name
        self._loop = loop
        self._flush_s = self._delay_s = flush_ms / 1000
        self._write = write
        self._generation = 0
        self._durable = 0
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def dirty(self) -> bool:
        """True while there are changes not known to be durable."""
        return self._durable != self._generation

    def touch(self) -> None:
        """The state changed."""
        self._generation += 1
        if self._timer is None and self._task is None:
            self._arm()

    def _arm(self) -> None:
        if not self._stopped:
            self._timer = self._loop.call_later(self._delay_s, self._due)

    async def persist(self) -> None:
        """Return when everything up to now is durable; raises what the write raises."""
        wanted = self._generation
        while self._durable < wanted:
            task = self._task or self._start()
            await asyncio.shield(task)

    async def stop(self) -> None:
        """No more timed writes; waits for the one that runs."""
        self._stopped = True
        self._stop_timer()
        if self._task is not None:
            await asyncio.wait({self._task})

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> asyncio.Task[None]:
        self._stop_timer()
        self._task = self._loop.create_task(self._flush())
        self._task.add_done_callback(self._ended)
        return self._task

    def _due(self) -> None:
        self._timer = None
        if self._task is None:
            self._start()

    async def _flush(self) -> None:
        generation = self._generation
        try:
            await self._write()
            self._durable = generation
            self._delay_s = self._flush_s
        except InternalError:
            raise
        except MagnetarError:
            self._delay_s = min(2 * self._delay_s, bounds.CURSOR_RETRY_MAX_S)
            self._arm()
            raise
        finally:
            self._task = None
        if self.dirty and self._timer is None:
            self._arm()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, MagnetarError):
            log.warning("cursor_not_persisted", cursor=self._name, error=str(error))
        elif error is not None:
            raise error
