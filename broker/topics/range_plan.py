"""PLAN_RANGE: which entries of a topic to read next, and what they add up to.

Rules:

- Positions are those of the entry to be read next.  A range ends right after its last entry, in
  that entry's ledger, and where it begins if there is nothing in it: the end of a range, and so
  the offset of a reader, does not change because a ledger is rolled over.
- Nothing past the horizon is in a range.  Entries of aborted transactions are, and are counted:
  they are left out when the range is read.
- Of two bounds the lower one counts, to the entry; one entry is in the range if there is one.
- A time is looked for from the start on: the range begins at the first entry that was published
  then or later, by its producer's clock, and ends before the first such one.  Publish times need
  not rise, so later entries may be of an earlier time; but a range from a to b and one from b to c
  meet, without a gap and without an overlap.
- `lost` tells that entries at or after the start that was asked for were trimmed; the range then
  begins at the first one that is there.
"""

import asyncio
from dataclasses import dataclass

from broker.topics.topic import Topic, TopicUnavailable
from config.bounds import PLAN_BACKLOG_WAIT_S, PLAN_RANGE_TRIES
from magnetar.protocol.ids import LATEST, LONG_MAX, Position
from storage.managed_ledger.entry_index import Sums
from storage.managed_ledger.stream_ranges import after


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """What is asked.  None is no bound: the first retained entry, the horizon."""

    start: Position | None = None
    end: Position | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    from_ms: int | None = None
    before_ms: int | None = None


@dataclass(frozen=True, slots=True)
class RangePlan:
    """Plans the next range to read: where it ends, and its messages and bytes.

    `backlog` and `hidden` are None while indexes of it are made.
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
    """What comes before it may be read."""
    horizon, ledger = topic.max_read_position(), topic.ledger
    return ledger.ranges.end if horizon >= ledger.last_confirmed else after(horizon)


async def plan_range(topic: Topic, request: RangeRequest) -> RangePlan:
    """The range.  Raises `TopicUnavailable`, and what reading raises."""
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
    """As of one moment, but for what is trimmed meanwhile."""
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
    if request.from_ms is not None:
        found = await ranges.first_published(start, limit, request.from_ms)
        start = max(start, limit) if found is None else found
    if request.before_ms is not None:
        found = await ranges.first_published(start, limit, request.before_ms)
        limit = limit if found is None else found
    end, sums = await ranges.fitting(
        start, limit, _most(request.max_messages), _most(request.max_bytes)
    )
    backlog, hidden = await _rest(topic, start, horizon, raw_end)
    return RangePlan(start, end, sums, earliest, horizon, raw_end, sealed, lost, backlog, hidden)


def _most(bound: int | None) -> int:
    return LONG_MAX if bound is None else bound


async def _rest(
    topic: Topic, start: Position, horizon: Position, raw_end: Position
) -> tuple[Sums | None, Sums | None]:
    """From the start to the horizon, and from there to the end, if that can be said soon."""
    ranges = topic.ledger.ranges
    ranges.look_ahead(start)  # goes on when nobody waits any more
    try:
        async with asyncio.timeout(PLAN_BACKLOG_WAIT_S) as limit:
            backlog = await ranges.sums(start, horizon)
            return backlog, await ranges.sums(max(start, horizon), raw_end)
    except TimeoutError:
        if not limit.expired():
            raise
        return None, None
