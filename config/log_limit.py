"""Bounds of log lines: those that peers can cause must not fill the disk."""

import threading
from collections.abc import Callable

from config.bounds import LOG_EVENTS_COUNTED, LOG_LINES_PER_S


class LogLimit:
    """Decides for each line whether it may be written: `per_second` in a window of one second.

    Suppressed lines are counted, for the next line that is written.  `now` is any monotonic clock
    in seconds.
    """

    __slots__ = ("_allowed", "_held_back", "_now", "_per_second", "_window_start")

    def __init__(self, per_second: int, now: Callable[[], float]) -> None:
        self._per_second = per_second
        self._now = now
        self._window_start = now()
        self._allowed = 0
        self._held_back = 0

    def take(self) -> int | None:
        """None if the line is to be suppressed, else the number of suppressed lines before it."""
        now = self._now()
        if now - self._window_start >= 1.0:
            self._window_start = now
            self._allowed = 0
        if self._allowed >= self._per_second:
            self._held_back += 1
            return None
        self._allowed += 1
        held_back, self._held_back = self._held_back, 0
        return held_back


class LogLimits:
    """One `LogLimit` for each key: an event, or the name of a library's logger.

    Used by all threads.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._limits: dict[str, LogLimit] = {}
        self._lock = threading.Lock()

    def take(self, key: str) -> int | None:
        """Decide as `LogLimit.take` does, for the line's key."""
        with self._lock:
            limit = self._limits.get(key)
            if limit is None:
                # Keys are constants of the program; if one is not, memory stays bounded all the
                # same.
                if len(self._limits) >= LOG_EVENTS_COUNTED:
                    key = ""
                limit = self._limits.setdefault(key, LogLimit(LOG_LINES_PER_S, self._now))
            return limit.take()
