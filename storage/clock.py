"""Wall-clock time, handed in so that a simulation can own it.

Durations and timers use the running event loop's own clock; this one is only for timestamps that
are stored or shown.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of wall-clock time."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch, from the operating system."""
        return time.time_ns() // 1_000_000
