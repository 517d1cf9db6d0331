"""The filters of a query that save a batch reading.

Pure.  Filters of `segment_id`, `key` and `publish_time` narrow what is read; all hold together.
Spark applies every filter again to the rows, except those of `segment_id`, which are exact.
"""

import datetime
import operator
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from magnetar.layout import Segment
from magnetar.protocol.key_hash import segment_hash, segment_hash_m1

__all__ = ["NO_FILTERS", "PushedFilters", "push_filters"]

_Comparison = EqualTo | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual
_OPERATORS: Final[Mapping[type[Filter], Callable[[int, int], bool]]] = MappingProxyType(
    {
        EqualTo: operator.eq,
        GreaterThan: operator.gt,
        GreaterThanOrEqual: operator.ge,
        LessThan: operator.lt,
        LessThanOrEqual: operator.le,
    }
)
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MS: Final = datetime.timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """The filters that were taken, and the segments and entries that they leave to be read."""

    segments: tuple[tuple[type[Filter], int], ...] = ()
    """Comparisons of `segment_id`, all of which hold."""
    among: frozenset[int] | None = None
    """Ids of `segment_id in (...)`; None: any."""
    keys: tuple[str, ...] = ()
    """Keys that a row must have, all of them."""
    from_ms: int | None = None
    """A range begins at the first entry published then or later; the ones before are earlier."""
    before_ms: int | None = None
    """Rows published then or later are not wanted.

    Clocks of producers differ, so entries after the first later one may be earlier again.  A range
    ends there only with `clockSkewMs`, at the first entry that is later by more than that.
    """

    def wants(self, segment: Segment) -> bool:
        """Whether a segment may have rows that pass; a partition may have any key."""
        number = segment.segment_id
        if self.among is not None and number not in self.among:
            return False
        if not all(_OPERATORS[kind](number, value) for kind, value in self.segments):
            return False
        return segment.legacy or all(_may_have(segment, key) for key in self.keys)


NO_FILTERS: Final = PushedFilters()


def push_filters(filters: Iterable[Filter]) -> tuple[PushedFilters, list[Filter]]:
    """The filters that narrow reading, and those that Spark has to apply."""
    pushed, left = NO_FILTERS, list[Filter]()
    for each in filters:
        column = getattr(each, "attribute", None)
        done = False
        if column == ("segment_id",):
            pushed, done = _by_segment(pushed, each)
        elif column == ("key",) and isinstance(each, EqualTo) and isinstance(each.value, str):
            pushed = replace(pushed, keys=(*pushed.keys, each.value))
        elif column == ("publish_time",):
            pushed = _by_time(pushed, each)
        if not done:
            left.append(each)
    return pushed, left


def _by_segment(pushed: PushedFilters, given: Filter) -> tuple[PushedFilters, bool]:
    if isinstance(given, In) and all(isinstance(value, int) for value in given.value):
        among = frozenset(given.value)
        known = pushed.among
        return replace(pushed, among=among if known is None else known & among), True
    if isinstance(given, _Comparison) and isinstance(given.value, int):
        return replace(pushed, segments=(*pushed.segments, (type(given), given.value))), True
    return pushed, False


def _by_time(pushed: PushedFilters, given: Filter) -> PushedFilters:
    if not isinstance(given, _Comparison) or not isinstance(given.value, datetime.datetime):
        return pushed
    moment = given.value
    if moment.tzinfo is None:
        return pushed
    floor = (moment - _EPOCH) // _MS
    if isinstance(given, EqualTo | GreaterThan | GreaterThanOrEqual):
        pushed = replace(pushed, from_ms=max(floor, pushed.from_ms or 0, 0))
    if isinstance(given, EqualTo | LessThan | LessThanOrEqual):
        # A time from which on surely no row passes.
        known = pushed.before_ms
        before = max(floor + 1, 0)
        pushed = replace(pushed, before_ms=before if known is None else min(before, known))
    return pushed


def _may_have(segment: Segment, key: str) -> bool:
    # The generations of clients choose a segment by the high or by the low half of the hash.
    return any(
        segment.hash_start <= found <= segment.hash_end
        for raw in _bytes_of(key)
        for found in (segment_hash(raw), segment_hash_m1(raw))
    )


def _bytes_of(key: str) -> Iterator[bytes]:
    """The bytes that producers may have hashed: the text, or what it decodes to from base64."""
    yield key.encode()
    try:
        yield b64decode(key, validate=True)
    except ValueError:
        return
