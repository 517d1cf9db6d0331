"""The metadata operations of one segment owner, tried until they succeed."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TypeVar

import structlog

from config.bounds import TXN_CLEANING_RETRY_MAX_S
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)

T = TypeVar("T")
_FIRST_RETRY_S = 0.1


class _Abandoned(Exception):
    """The owner ended before the work was done."""


class OwnerWork:
    """The metadata operations of one segment owner.

    After `end` nothing is begun or tried again.  `of` is the segment, for the log.
    """

    def __init__(self, of: str) -> None:
        self._of = of
        self._tasks = BackgroundTasks(
            log, failure_event="segment_work_failed", expected=(_Abandoned,), segment=of
        )
        self._queued: set[asyncio.Task[object]] = set()
        """The tasks that wait for a slot."""
        self._ending = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether any operation is in progress."""
        return self._tasks.busy

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._ending.is_set()

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Start an operation, unless the owner has ended."""
        if self.ended:
            work.close()
            return
        self._tasks.start(work)

    async def until_done(
        self, work: Callable[[], Awaitable[T]], slots: asyncio.Semaphore | None = None
    ) -> T:
        """Return the result of `work`, tried until it succeeds, within an operation started here.

        Pauses double up to TXN_CLEANING_RETRY_MAX_S.  With `slots` each try holds a slot.
        """
        backoff = Backoff(_FIRST_RETRY_S, TXN_CLEANING_RETRY_MAX_S)
        while not self.ended and (slots is None or await self._slot(slots)):
            try:
                return await work()
            except MagnetarError as error:
                pause_s = backoff.pause_s()
                log.warning(
                    "transaction_not_cleaned_up",
                    segment=self._of,
                    error=str(error),
                    next_try_s=pause_s,
                )
            finally:
                if slots is not None:
                    slots.release()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause_s)
        raise _Abandoned

    async def _slot(self, slots: asyncio.Semaphore) -> bool:
        """Wait for a slot; False if the owner ended before."""
        task = asyncio.current_task()
        assert task is not None
        self._queued.add(task)
        try:
            await slots.acquire()
        except asyncio.CancelledError:
            if not self.ended:
                raise
            task.uncancel()  # `end` has cancelled it, and nothing was begun.
            return False
        finally:
            self._queued.discard(task)
        if self.ended:
            slots.release()
            return False
        return True

    def end(self) -> None:
        """Begin nothing more."""
        self._ending.set()
        # A write in progress is not cancelled, as a cancelled put may still take effect.
        for task in self._queued:
            task.cancel()

    async def wait(self) -> None:
        """Return when no operation is in progress."""
        await self._tasks.wait()
