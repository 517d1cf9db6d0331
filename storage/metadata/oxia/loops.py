"""Loops that serve as long as the store is open, whatever happens in them.

Rules:
- An error that a loop does not expect is a defect of ours.  It is logged with its trace, its owner
  is told, so that nothing stays half done, and the loop begins again after a pause that doubles.
- Only `stop` ends a loop.  Whoever stops it and is cancelled meanwhile is cancelled: the loop ends
  all the same.
"""

import asyncio
from collections.abc import Callable, Coroutine

import structlog

from config import bounds
from magnetar.protocol.backoff import Backoff

_log = structlog.get_logger(__name__)


def log_defect(where: str, error: BaseException) -> None:
    """An error that nobody expected: the one place that logs it."""
    _log.error("oxia_defect", where=where, error=repr(error), exc_info=error)


class Loop:
    """Runs a coroutine again and again until the store is closed, with pauses after failures.

    Made on the running loop.

    `serve` does not return; `broken` is called after a defect, before the pause.
    """

    __slots__ = ("_backoff", "_broken", "_name", "_serve", "_task")

    def __init__(
        self,
        name: str,
        serve: Callable[[], Coroutine[object, object, None]],
        backoff: Backoff,
        broken: Callable[[BaseException], None],
    ) -> None:
        self._name = name
        self._serve = serve
        self._backoff = backoff
        self._broken = broken
        self._task = asyncio.create_task(self._run(), name=name)

    async def stop(self) -> None:
        """End it; returns when it has ended."""
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                await self._serve()
            except asyncio.CancelledError as error:
                if task is None or task.cancelling():
                    raise
                self._tell(error)
            except Exception as error:  # noqa: BLE001 - whatever it was, the loop has to go on
                self._tell(error)
            if loop.time() - began_s > bounds.OXIA_BACKOFF_MAX_S:
                self._backoff.reset()
            await asyncio.sleep(self._backoff.pause_s())

    def _tell(self, defect: BaseException) -> None:
        log_defect(self._name, defect)
        try:
            self._broken(defect)
        except Exception as error:  # noqa: BLE001 - as above
            log_defect(self._name, error)
