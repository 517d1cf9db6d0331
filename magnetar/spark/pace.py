"""The rate limit of a source: when the next rows may be read.  Pure."""

from typing import Final

__all__ = ["Pace"]

BATCH_S: Final = 5
"""A batch that nothing else bounds has the rows of this many seconds."""


class Pace:
    """Spreads rows over time, at most `rows_per_second`.

    Each batch takes the time of its rows, one after the other.  Times are seconds of a monotonic
    clock.
    """

    def __init__(self, rows_per_second: int) -> None:
        assert rows_per_second > 0, "nothing would ever be read"
        self._rate: Final = rows_per_second
        self._free_at_s = 0.0

    @property
    def rows_at_once(self) -> int:
        """Rows of a batch that nothing else bounds."""
        return self._rate * BATCH_S

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next batch may be planned; 0: at once."""
        return max(self._free_at_s - now_s, 0.0)

    def took(self, rows: int, now_s: float) -> None:
        """Count the rows of a batch that is planned now."""
        # From `now_s` after a pause: a burst must not make up for time without rows.
        self._free_at_s = max(self._free_at_s, now_s) + rows / self._rate
