"""Percentiles of many durations in little memory.  Pure.

Rules: values are whole microseconds; values below 256 are counted exactly, above in buckets whose
width is at most 1/128 of the value, so that a percentile is at most that much above the truth.
However many values there are, there are at most `BUCKETS_MAX` counts.
"""

import math
from collections import Counter
from typing import Final

_BITS: Final = 7
_EXACT: Final = 1 << (_BITS + 1)
VALUE_MAX_US: Final = (1 << 42) - 1
"""Seven weeks; what is longer is counted as that long."""
BUCKETS_MAX: Final = _EXACT + (42 - _BITS - 1) * (1 << _BITS)


class Histogram:
    """Counts of durations.  `max_us` is exact."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.max_us = 0

    def record(self, value_us: int, times: int = 1) -> None:
        """Count a value; what is below 0 (clocks of two machines differ) counts as 0."""
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
