"""Tasks that live as long as their owner: watchers, rounds, sessions that are kept.

Rules:

- A task that fails, or ends when it should not, is told in the log and begun anew: what it keeps
  true would be stale for ever otherwise.  So its first step is to read what is true now.
- Pauses double from RESTART_PAUSE_MIN_S to RESTART_PAUSE_MAX_S; a run that lasted longer than that
  begins them anew.
- An error that is no `MagnetarError` is a defect, and is logged with its traceback.
- Only `cancel`, `stop` and an error that `EndsForGood` end a task for good.  A cancellation that is
  none of the task's own (what it waited for was cancelled) counts as a failure; one that is its own
  ends it, whatever the run makes of it.
- A stop is final: whatever is begun during it or after it is refused.
"""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import ClassVar

import structlog

from config.bounds import RESTART_PAUSE_MAX_S, RESTART_PAUSE_MIN_S
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError

log = structlog.get_logger(__name__)

Run = Callable[[], Awaitable[None]]


class EndsForGood(Exception):
    """What it says stays true as long as the process lives: nothing is begun anew after it."""


class OwnerStopped(PeerError):
    """Whoever would keep a task has been stopped."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY
    http_status: ClassVar[HTTPStatus] = HTTPStatus.SERVICE_UNAVAILABLE


class Supervised:
    """The long-living tasks of one owner; see the module's rules."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def keep(self, what: str, run: Run) -> asyncio.Task[None]:
        """Have it run until it is stopped: `run` is called again whenever it ends.

        Raises `OwnerStopped`.
        """
        return self._start(what, run, for_ever=True)

    def see_through(self, what: str, run: Run) -> asyncio.Task[None]:
        """Have it run until it has returned once.  Raises `OwnerStopped`."""
        return self._start(what, run, for_ever=False)

    @property
    def running(self) -> bool:
        """Whether there is any."""
        return bool(self._tasks)

    def cancel(self) -> None:
        """End all, without waiting for it."""
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """End all, and refuse whatever would be begun.  May be called again."""
        self._stopped = True
        self.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _start(self, what: str, run: Run, *, for_ever: bool) -> asyncio.Task[None]:
        if self._stopped:
            raise OwnerStopped(f"This broker stops, and {what} with it: ask again, or another one.")
        task = asyncio.get_running_loop().create_task(self._repeat(what, run, for_ever=for_ever))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _repeat(self, what: str, run: Run, *, for_ever: bool) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        backoff = Backoff(RESTART_PAUSE_MIN_S, RESTART_PAUSE_MAX_S)
        while True:
            began_s = loop.time()
            failure: BaseException | None = None
            try:
                await run()
            except asyncio.CancelledError as error:
                if task is None or task.cancelling():
                    raise
                failure = error
            except Exception as error:  # noqa: BLE001 - a defect must not make anything stale for ever
                failure = error
            else:
                if not for_ever:
                    return
            if _is_last(what, failure, cancelled=task is not None and task.cancelling() > 0):
                return
            if loop.time() - began_s > RESTART_PAUSE_MAX_S:
                backoff.reset()
            pause_s = backoff.pause_s()
            _tell(what, failure, pause_s)
            await asyncio.sleep(pause_s)


def _is_last(what: str, failure: BaseException | None, *, cancelled: bool) -> bool:
    """Whether nothing follows this end; what is worth telling of it is told."""
    if cancelled and failure is not None and not isinstance(failure, MagnetarError):
        log.error("task_failed_when_cancelled", task=what, exc_info=failure)
    elif not cancelled and isinstance(failure, EndsForGood):
        log.warning("task_ended_for_good", task=what, error=str(failure))
    return cancelled or isinstance(failure, EndsForGood)


def _tell(what: str, failure: BaseException | None, pause_s: float) -> None:
    if failure is None:
        log.warning("task_ended", task=what, begins_again_in_s=pause_s)
    elif isinstance(failure, MagnetarError):
        log.warning("task_failed", task=what, error=str(failure), begins_again_in_s=pause_s)
    else:
        log.error("task_failed", task=what, exc_info=failure, begins_again_in_s=pause_s)
