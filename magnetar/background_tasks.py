"""The background tasks of one owner: they run once, or they are kept running.

The broker, transactions, the stores and the client all use this module.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import ClassVar, Final, Protocol, TypeVar

from magnetar.protocol.backoff import Backoff
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError

RESTART_PAUSE_MIN_S: Final = 0.05
RESTART_PAUSE_MAX_S: Final = 2.0
"""The first and the longest pause before a kept task runs again.  Until then a watcher reads
nothing new, so this is also how stale it can be."""

Run = Callable[[], Awaitable[None]]
T = TypeVar("T")


class EndsForGood(Exception):
    """An error that stays true as long as the process lives: a kept task is not run again."""


class OwnerStopped(PeerError):
    """The owner of the tasks has been stopped, and starts no more."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY
    http_status: ClassVar[HTTPStatus] = HTTPStatus.SERVICE_UNAVAILABLE


class TaskLog(Protocol):
    """The two methods of a structlog logger that report tasks."""

    def warning(self, event: str, /, **fields: object) -> object:
        """Log an event that was to be expected."""

    def error(self, event: str, /, **fields: object) -> object:
        """Log a defect; the field `exc_info` is its exception."""


class _StandardLog:
    """Reports tasks by `logging`, as `event key=value`: the client comes without structlog."""

    def warning(self, event: str, /, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        self._log(logging.ERROR, event, fields)

    def _log(self, level: int, event: str, fields: dict[str, object]) -> None:
        error = fields.pop("exc_info", None)
        line = " ".join([event, *(f"{name}={value}" for name, value in fields.items())])
        exc_info = error if isinstance(error, BaseException) else None
        logging.getLogger(__name__).log(level, "%s", line, exc_info=exc_info)


class BackgroundTasks:
    """The background tasks of one owner, which are cancelled or waited for together.

    A task does not end with its caller: a connection that closes cancels its requests, and a change
    of stored data must not stop half way.

    A failure of a task that runs once is logged as `failure_event`, with the fields `context`,
    unless it is one of `expected`.  If neither is given it is left to asyncio, which logs a failure
    that nobody has awaited.  `log` is a structlog logger; None stands for `logging`.
    """

    __slots__ = (
        "_context",
        "_expected",
        "_failure_event",
        "_log",
        "_reports",
        "_stopped",
        "_tasks",
    )

    def __init__(
        self,
        log: TaskLog | None = None,
        *,
        failure_event: str | None = None,
        expected: tuple[type[Exception], ...] = (),
        **context: object,
    ) -> None:
        self._log: TaskLog = _StandardLog() if log is None else log
        self._reports = failure_event is not None or bool(expected)
        self._failure_event = failure_event or "background_work_failed"
        self._expected = expected
        self._context = context
        self._tasks: set[asyncio.Task[object]] = set()
        self._stopped = False

    # Running once

    def start(self, work: Coroutine[object, object, T], name: str | None = None) -> asyncio.Task[T]:
        """Run it once, in a task of that name.  Await the task through `asyncio.shield`.

        Raises `OwnerStopped`.
        """
        if self._stopped:
            work.close()
            raise _stopped(name or "its work")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, work: Coroutine[object, object, T]) -> T:
        """Run it once and return its result; it goes on if the caller is cancelled.

        Raises `OwnerStopped`, and what `work` raises.
        """
        return await asyncio.shield(self.start(work))

    # Kept running

    def keep(self, name: str, run: Run) -> asyncio.Task[None]:
        """Call `run` again whenever it ends, until the task is cancelled.

        A failure must not leave stale what `run` keeps up to date, so its first step is to read the
        present state.  Only a cancellation of the task and an error that is `EndsForGood` end it.
        Pauses double from RESTART_PAUSE_MIN_S to RESTART_PAUSE_MAX_S, and begin anew after a run
        that lasted longer.  `name` is the task's, also in the log.  Raises `OwnerStopped`.
        """
        return self.start(self._repeat(name, run, for_ever=True), name)

    def keep_every(self, interval_s: float, name: str, run: Run) -> asyncio.Task[None]:
        """Call `run` each time that long after its last end, the first time in `interval_s`.

        See `keep`.
        """

        async def run_again_and_again() -> None:
            while True:
                await asyncio.sleep(interval_s)
                await run()

        return self.keep(name, run_again_and_again)

    def see_through(self, name: str, run: Run) -> asyncio.Task[None]:
        """Call `run` again whenever it fails, until it has returned once.  See `keep`."""
        return self.start(self._repeat(name, run, for_ever=False), name)

    # All of them

    @property
    def busy(self) -> bool:
        """Whether any task runs."""
        return bool(self._tasks)

    @property
    def count(self) -> int:
        """The number of tasks that run now."""
        return len(self._tasks)

    @property
    def running(self) -> frozenset[asyncio.Task[object]]:
        """The tasks that run now, for a wait with a bound or together with others."""
        return frozenset(self._tasks)

    async def wait(self) -> None:
        """Return when no task runs, also none that was started meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Cancel the tasks that run now, and do not wait for their ends."""
        for task in self._tasks:
            task.cancel()

    async def end(self) -> None:
        """Cancel the tasks that run now and return when they have ended.

        Others may be started meanwhile and afterwards.
        """
        self.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        """Refuse new tasks from now on, and end those that run.  May be called again."""
        self._stopped = True
        await self.end()

    # How it is done

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        # Reading the exception tells asyncio that somebody has seen it.
        if not self._reports or task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, self._expected):
            self._log.error(self._failure_event, **self._context, exc_info=error)

    async def _repeat(self, name: str, run: Run, *, for_ever: bool) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        backoff = Backoff(RESTART_PAUSE_MIN_S, RESTART_PAUSE_MAX_S)
        while True:
            began_s = loop.time()
            failure: BaseException | None = None
            try:
                await run()
            except asyncio.CancelledError as error:
                # Without a cancellation of this task, something that it waited for was cancelled.
                if task is None or task.cancelling():
                    raise
                failure = error
            except Exception as error:  # noqa: BLE001 - no defect may make anything stale for ever
                failure = error
            else:
                if not for_ever:
                    return
            # A run may turn the cancellation of its task into a return, or into another error.
            if self._is_last(name, failure, cancelled=task is not None and task.cancelling() > 0):
                return
            if loop.time() - began_s > RESTART_PAUSE_MAX_S:
                backoff.reset()
            pause_s = backoff.pause_s()
            self._log_end(name, failure, pause_s)
            await asyncio.sleep(pause_s)

    def _is_last(self, name: str, failure: BaseException | None, *, cancelled: bool) -> bool:
        """Whether the task is not run again; a failure that nobody will see is logged."""
        if cancelled and failure is not None and not isinstance(failure, MagnetarError):
            self._log.error("task_failed_when_cancelled", task=name, exc_info=failure)
        elif not cancelled and isinstance(failure, EndsForGood):
            self._log.warning("task_ended_for_good", task=name, error=str(failure))
        return cancelled or isinstance(failure, EndsForGood)

    def _log_end(self, name: str, failure: BaseException | None, pause_s: float) -> None:
        if failure is None:
            self._log.warning("task_ended", task=name, begins_again_in_s=pause_s)
        elif isinstance(failure, MagnetarError):
            text = str(failure)
            self._log.warning("task_failed", task=name, error=text, begins_again_in_s=pause_s)
        else:
            # It is a defect: with its traceback.
            self._log.error("task_failed", task=name, exc_info=failure, begins_again_in_s=pause_s)


def _stopped(name: str) -> OwnerStopped:
    return OwnerStopped(f"This broker stops, and {name} with it: ask again, or another one.")
