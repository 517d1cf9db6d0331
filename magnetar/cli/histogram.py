"""Percentiles of many durations in little memory.  Pure."""

import math
from collections import Counter
from typing import Final

_BITS: Final = 7
_EXACT: Final = 1 << (_BITS + 1)
VALUE_MAX_US: Final = (1 << 42) - 1
"""The largest value that is counted, seven weeks; longer durations count as this one."""
BUCKETS_MAX: Final = _EXACT + (42 - _BITS - 1) * (1 << _BITS)


class Histogram:
    """Counts of durations in whole microseconds.  `max_us` is exact.

    Values below 256 are counted exactly.  Others are counted in buckets whose width is at most
    1/128 of the value, so a percentile is at most that much too high.  There are at most
    `BUCKETS_MAX` counts.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.max_us = 0

    def record(self, value_us: int, times: int = 1) -> None:
        """Count a value `times` times.  A negative one, from clocks that differ, counts as 0."""
        value_us = min(max(value_us, 0), VALUE_MAX_US)
        shift = max(value_us.bit_length() - _BITS - 1, 0)
        self._counts[(shift << _BITS) + (value_us >> shift)] += times
        self.count += times
        self.max_us = max(self.max_us, value_us)

    def percentile_us(self, percent: float) -> int:
        """The least value that this many percent of the values do not exceed; 0 without values."""
        rank = max(1, math.ceil(self.count * percent / 100))
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return min(_highest(bucket), self.max_us)
        return self.max_us


def _highest(bucket: int) -> int:
    """The highest value that falls into a bucket."""
    if bucket < _EXACT:
        return bucket
    shift = (bucket >> _BITS) - 1
    return ((bucket - (shift << _BITS) + 1) << shift) - 1
