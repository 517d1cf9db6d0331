"""PLAN_RANGE: choose the entries of a topic that a bulk reader reads next, and count them."""

import asyncio
from dataclasses import dataclass

from broker.topics.topic import Topic, TopicUnavailable
from config.bounds import PLAN_BACKLOG_WAIT_S, PLAN_RANGE_TRIES
from magnetar.protocol.ids import LATEST, LONG_MAX, Position
from storage.managed_ledger.entry_index import Sums
from storage.managed_ledger.stream_ranges import after


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """A decoded PLAN_RANGE.  None is no bound: the first retained entry, the max read position.

    Of `max_messages` and `max_bytes` the lower bound counts; one entry always fits.  `from_ms`
    moves the start to the first entry that was published then or later, by its producer's clock;
    `before_ms` ends the range before such an entry.
    """

    start: Position | None = None
    end: Position | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    from_ms: int | None = None
    before_ms: int | None = None


@dataclass(frozen=True, slots=True)
class RangePlan:
    """The next range to read: its bounds, and its messages and bytes.

    Positions are those of the entry to be read next.  A range ends right after its last entry, in
    that entry's ledger, so a rollover of the ledger does not change a reader's offset.  An empty
    range ends where it begins.  `horizon` is right after the max read position.  Entries of aborted
    transactions are in the range and are counted; reading leaves them out.

    `lost` tells that entries at or after the requested start were trimmed; the range then begins at
    the first retained entry.  `backlog` (from the start to the horizon) and `hidden` (from there to
    the end) are None while their indexes are built.
    """

    start: Position
    end: Position
    sums: Sums
    earliest: Position
    horizon: Position
    raw_end: Position
    sealed: bool
    lost: bool
    backlog: Sums | None
    hidden: Sums | None


def horizon_of(topic: Topic) -> Position:
    """The position right after the max read position: entries before it may be read."""
    horizon, ledger = topic.max_read_position(), topic.ledger
    return ledger.ranges.end if horizon >= ledger.last_confirmed else after(horizon)


async def plan_range(topic: Topic, request: RangeRequest) -> RangePlan:
    """Plan a range.  Raises `TopicUnavailable`, and the errors of reading."""
    ranges = topic.ledger.ranges
    for _ in range(PLAN_RANGE_TRIES):
        topic.require_readable()
        earliest = ranges.first_retained
        plan = await _plan(topic, request)
        if ranges.first_retained == earliest or plan.start >= ranges.first_retained:
            return plan
    raise TopicUnavailable(
        f"{topic.name} is trimmed faster than a range of it is planned: try again."
    )


async def _plan(topic: Topic, request: RangeRequest) -> RangePlan:
    """Plan for the present state of the topic, except for what is trimmed meanwhile."""
    ledger, ranges = topic.ledger, topic.ledger.ranges
    sealed, raw_end = topic.sealed, ranges.end
    horizon = horizon_of(topic)
    earliest = min(ranges.first_retained, raw_end)
    start, lost = earliest, False
    if request.start is not None:
        lost = ledger.has_lost(request.start)
        start = earliest if lost else request.start
        if start == LATEST:
            start = raw_end
    limit = horizon if request.end is None else min(request.end, horizon)
    # Publish times need not rise, so later entries may be of an earlier time.  The search from the
    # start on makes the ranges from a to b and from b to c meet, without a gap or an overlap.
    if request.from_ms is not None:
        found = await ranges.first_published(start, limit, request.from_ms)
        start = max(start, limit) if found is None else found
    if request.before_ms is not None:
        found = await ranges.first_published(start, limit, request.before_ms)
        limit = limit if found is None else found
    end, sums = await ranges.fitting(
        start, limit, _or_unbounded(request.max_messages), _or_unbounded(request.max_bytes)
    )
    backlog, hidden = await _backlog_and_hidden(topic, start, horizon, raw_end)
    return RangePlan(start, end, sums, earliest, horizon, raw_end, sealed, lost, backlog, hidden)


def _or_unbounded(bound: int | None) -> int:
    return LONG_MAX if bound is None else bound


async def _backlog_and_hidden(
    topic: Topic, start: Position, horizon: Position, raw_end: Position
) -> tuple[Sums | None, Sums | None]:
    """The sums up to the horizon, and behind it; None if they are not known in time."""
    ranges = topic.ledger.ranges
    ranges.look_ahead(start)  # it goes on after the timeout
    try:
        async with asyncio.timeout(PLAN_BACKLOG_WAIT_S) as limit:
            backlog = await ranges.sums(start, horizon)
            return backlog, await ranges.sums(max(start, horizon), raw_end)
    except TimeoutError:
        if not limit.expired():
            raise
        return None, None
