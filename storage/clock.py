"""Wall-clock time as a parameter, so that a simulation can replace it.

It is only for timestamps that are stored or shown: durations and timers use the clock of the
running event loop.
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
