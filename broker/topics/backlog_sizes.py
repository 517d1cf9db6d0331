"""Messages, bytes and age of the backlogs of a topic's subscriptions, from the entry indexes."""

import asyncio
from typing import NamedTuple

from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from config.bounds import PLAN_BACKLOG_WAIT_S, SUBSCRIPTIONS_SHOWN_AT_ONCE
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.server_error import MagnetarError
from storage.managed_ledger.stream_ranges import after


class BacklogSize(NamedTuple):
    """What a subscription has not acknowledged.

    Exact while its entries are acknowledged in their order; entries behind the oldest one that were
    acknowledged singly count in proportion.
    """

    messages: int
    size_bytes: int
    earliest_ms: int | None
    """Publish time of its oldest message, by the producer's clock; None if it has none."""

    def as_members(self) -> dict[str, int]:
        """The numbers under Pulsar's names; `messagesInBacklog` is ours."""
        found = {"messagesInBacklog": self.messages, "backlogSize": self.size_bytes}
        if self.earliest_ms is not None:
            found["earliestMsgPublishTimeInBacklog"] = self.earliest_ms
        return found


async def backlog_sizes(topic: Topic) -> dict[str, BacklogSize]:
    """The sizes by subscription, as far as they are known within PLAN_BACKLOG_WAIT_S.

    Indexes that are not in memory are built meanwhile, and are there for the next call.
    """
    found: dict[str, BacklogSize] = {}
    try:
        async with asyncio.timeout(PLAN_BACKLOG_WAIT_S):
            subscriptions = list(topic.subscriptions.items())
            for number, (name, subscription) in enumerate(subscriptions, start=1):
                if subscription.durable:
                    found[name] = await _size_of(topic, subscription)
                if number % SUBSCRIPTIONS_SHOWN_AT_ONCE == 0:
                    await asyncio.sleep(0)
    except (TimeoutError, MagnetarError):
        # Statistics are shown without what cannot be counted now.
        return found
    return found


async def _size_of(topic: Topic, subscription: Subscription) -> BacklogSize:
    ranges, backlog = topic.ledger.ranges, subscription.backlog
    if not backlog:
        return BacklogSize(0, 0, None)
    first = subscription.cursor.first_unacknowledged(EARLIEST)
    ranges.look_ahead(first)  # it goes on after the timeout
    sums = await ranges.sums(first, ranges.end)
    oldest = await ranges.sums(first, after(first))
    part = min(1.0, backlog / sums.entries) if sums.entries else 0.0
    return BacklogSize(round(sums.messages * part), round(sums.size_bytes * part), oldest.least_ms)


def earliest_of(sizes: dict[str, BacklogSize]) -> int | None:
    """The earliest publish time of all backlogs; None without any."""
    return min((each.earliest_ms for each in sizes.values() if each.earliest_ms), default=None)
