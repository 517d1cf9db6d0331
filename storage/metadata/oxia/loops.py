"""Loops that serve as long as the store is open, whatever errors happen in them."""

import asyncio
from collections.abc import Callable, Coroutine

import structlog

from config import bounds
from magnetar.protocol.backoff import Backoff

_log = structlog.get_logger(__name__)


def log_defect(where: str, error: BaseException) -> None:
    """Log an unexpected error with its trace."""
    _log.error("oxia_defect", where=where, error=repr(error), exc_info=error)


class Loop:
    """Runs a coroutine until `stop`, and again after an unexpected error and a growing pause.

    `serve` does not return.  An error that it raises is a bug: it is logged, and `broken` is called
    before the pause, so that the owner leaves nothing half done.  Made on the running loop.
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
        """End the loop; returns when it has ended.  It ends too if this call is cancelled."""
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
                self._report(error)
            except Exception as error:  # noqa: BLE001 - whatever it was, the loop has to go on
                self._report(error)
            if loop.time() - began_s > bounds.OXIA_BACKOFF_MAX_S:
                self._backoff.reset()
            await asyncio.sleep(self._backoff.pause_s())

    def _report(self, defect: BaseException) -> None:
        log_defect(self._name, defect)
        try:
            self._broken(defect)
        except Exception as error:  # noqa: BLE001 - as above
            log_defect(self._name, error)
