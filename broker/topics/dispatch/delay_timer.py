"""The timer of a dispatcher's delayed messages, set on the earliest due time."""

import asyncio
from collections.abc import Callable

from config.bounds import DELAYED_LOOK_S
from storage.callbacks import ignore


class DelayTimer:
    """Calls `wake` when a due time has come, at most once in `tick_ms`.

    Due times are milliseconds of the wall clock `now_ms`.
    """

    __slots__ = ("_for_ms", "_loop", "_not_before_s", "_now_ms", "_tick_s", "_timer", "_wake")

    def __init__(self, now_ms: Callable[[], int], tick_ms: int, wake: Callable[[], None]) -> None:
        self._now_ms = now_ms
        self._tick_s = tick_ms / 1000
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._not_before_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._for_ms = 0

    def set_tick(self, tick_ms: int) -> None:
        """Wake at most once in so many milliseconds from now on."""
        self._tick_s = tick_ms / 1000

    def aim(self, due_ms: int | None) -> None:
        """Wake at `due_ms` instead of the time given before; None: not at all."""
        if self._timer is not None:
            if due_ms == self._for_ms:
                return
            self._timer.cancel()
            self._timer = None
        if due_ms is not None:
            self._for_ms = due_ms
            # The loop's timer does not follow changes of the wall clock, so it wakes after
            # DELAYED_LOOK_S at the latest.  Waking too early is harmless: the dispatcher checks
            # what is due.
            now_s = self._loop.time()
            in_s = min((due_ms - self._now_ms()) / 1000, DELAYED_LOOK_S)
            self._timer = self._loop.call_at(max(now_s + in_s, self._not_before_s), self._ring)

    def close(self) -> None:
        """Do not wake any more."""
        self.aim(None)
        self._wake = ignore

    def _ring(self) -> None:
        self._timer = None
        self._not_before_s = self._loop.time() + self._tick_s
        self._wake()
