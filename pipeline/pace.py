"""When the next rows may be read, so that there are no more than so many in a second.

Pure.  Rules: rows that were taken have their time, one batch after the other; time in which none
were taken is not made up for, so that no rush follows a pause.
"""

from typing import Final

__all__ = ["Pace"]

BATCH_S: Final = 5
"""Of rows in one batch, where nothing else bounds it."""


class Pace:
    """See the module's rules.  Times are in seconds of a monotonic clock."""

    def __init__(self, rows_per_second: int) -> None:
        assert rows_per_second > 0, "nothing would ever be read"
        self._rate: Final = rows_per_second
        self._free_at_s = 0.0

    @property
    def rows_at_once(self) -> int:
        """Of a batch that nothing else bounds."""
        return self._rate * BATCH_S

    def wait_s(self, now_s: float) -> float:
        """How long until more may be taken; 0: at once."""
        return max(self._free_at_s - now_s, 0.0)

    def took(self, rows: int, now_s: float) -> None:
        """So many were taken now."""
        self._free_at_s = max(self._free_at_s, now_s) + rows / self._rate
