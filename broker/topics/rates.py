"""Pure: rates per second of counters that only grow, over a sliding window."""

from typing import Final

from config.bounds import RATE_SHORTEST_S, RATE_WINDOW_S

Counts = tuple[int, ...]
"""The values of some counters, read at the same time; always in the same order."""

_Point = tuple[float, Counts]
_OLDEST: Final = 0


class RateSampler:
    """Turns readings of counters into rates per second.

    The counters were 0 at `start_s`.  `sample` stores a reading, about every RATE_SAMPLE_S; `rates`
    compares the counters of now with those at the beginning of the window, between the two samples
    around that time.  So the rate of a new counter is right at once, and that of one that stopped
    falls to 0 within the window.  Counters that do not change cost one comparison for each sample,
    and no memory.

    Times are seconds of one monotonic clock, such as that of the event loop.
    """

    __slots__ = ("_changed_s", "_counts", "_points", "_read_s")

    def __init__(self, start_s: float, counters: int) -> None:
        """`counters` is the length of `Counts`."""
        self._points: list[_Point] | None = None
        """Readings before the last change, oldest first; at most one is older than the window."""
        self._counts: Counts = (0,) * counters
        self._changed_s = start_s
        """Time of the first reading of the present counts."""
        self._read_s = start_s
        """Time of the last reading."""

    @property
    def stored(self) -> int:
        """Number of readings before the present one that are in memory."""
        return 0 if self._points is None else len(self._points)

    def sample(self, now_s: float, counts: Counts) -> None:
        """Store a reading."""
        if counts == self._counts:
            self._read_s = now_s
            if self._points is not None and now_s - self._changed_s >= RATE_WINDOW_S:
                self._points = None
            return
        points = self._points
        if points is None:
            points = self._points = []
        points.append((self._changed_s, self._counts))
        if self._read_s > self._changed_s:
            points.append((self._read_s, self._counts))
        while len(points) > 1 and points[_OLDEST + 1][0] <= now_s - RATE_WINDOW_S:
            del points[_OLDEST]
        self._counts = counts
        self._changed_s = self._read_s = now_s

    def rates(
        self, now_s: float, counts: Counts, *, over_s: float | None = None
    ) -> tuple[float, ...]:
        """Return how much each counter grew per second, in the order of `counts`.

        `counts` are the counters of now.  The rates cover the last `over_s` seconds (default and at
        most: the window), or the time since `start_s` if that is shorter, but not less than
        RATE_SHORTEST_S.
        """
        window_s = RATE_WINDOW_S if over_s is None else min(over_s, RATE_WINDOW_S)
        begin_s, before = self._at(now_s - window_s, now_s, counts)
        took_s = max(now_s - begin_s, RATE_SHORTEST_S)
        return tuple(
            max(0.0, (after - then) / took_s) for after, then in zip(counts, before, strict=True)
        )

    def _at(self, time_s: float, now_s: float, counts: Counts) -> tuple[float, tuple[float, ...]]:
        """Return the counters at a time, and that time; not before the oldest reading."""
        later: _Point = (now_s, counts)
        for point in self._newest_first():
            if point[0] <= time_s:
                return time_s, _between(point, later, time_s)
            later = point
        return later

    def _newest_first(self) -> list[_Point]:
        points = [(self._read_s, self._counts), (self._changed_s, self._counts)]
        if self._points is not None:
            points.extend(reversed(self._points))
        return points


def _between(first: _Point, second: _Point, time_s: float) -> tuple[float, ...]:
    """Interpolate the counters at a time between two readings."""
    (first_s, before), (second_s, after) = first, second
    if second_s <= first_s:
        return after
    share = (time_s - first_s) / (second_s - first_s)
    return tuple(then + (now - then) * share for then, now in zip(before, after, strict=True))
