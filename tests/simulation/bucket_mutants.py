"""Brokers that break one rule of entry buckets (B) each.

The rules are in `docs/decisions/entry-buckets.md`.
"""

from collections.abc import Collection, Mapping, Sequence

from broker.scalable.assignment import Holdings, planned
from broker.scalable.scale_decision import Cause, Refusal, Rule, _Rules
from broker.topics.consumer import Consumer, SubscribeRequest
from broker.topics.dispatch.entry_bucket_dispatcher import EntryBucketDispatcher
from broker.topics.dispatch.entry_buckets import EntryBuckets
from broker.topics.dispatch.key_order import KeyOrder
from broker.topics.dispatch.redelivery import ReplayQueue
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from magnetar.protocol.ids import Position


def holds_nothing(self: KeyOrder[Consumer], key_hash: int, consumer: Consumer) -> None:
    """B1 broken: a bucket moves at once, though its former consumer has batches of it."""


def newest_first(self: ReplayQueue) -> Position | None:
    """B2 broken: the newest of the waiting batches is sent first."""
    return max(self._waiting, default=None)


def grants_at_once(
    holdings: Holdings,
    segments: Sequence[int],
    consumers: Collection[str],
    places: Mapping[int, int] | None = None,
) -> Holdings:
    """B3 broken: a segment is granted for its new use before its consumers have detached."""
    plan = planned(holdings.plan, segments, consumers, places or {})
    shared = frozenset(each for each, owners in plan.items() if len(owners) > 1)
    return Holdings(plan, {}, shared, plan)


def refuses_the_other_use(self: Subscription, request: SubscribeRequest) -> bool:
    """B3 broken: a SUBSCRIBE for the other use is refused, and does not wait."""
    return False


def sends_among_others(self: EntryBucketDispatcher, position: Position) -> bool:
    """B4 broken: a batch of several buckets is sent by the key of its first message."""
    return False


def takes_all_for_sharers(client_version: str) -> bool:
    """B5 broken: every client is taken for one that can share."""
    return True


def marks_nothing(self: Topic) -> None:
    """B6 broken: a segment is shared, though it has batches without hashes."""


def blocks_nothing(self: EntryBucketDispatcher, position: Position, bucket: int) -> None:
    """B7 broken: others get more of a bucket while a transaction holds messages of it."""


def gives_all_to_one(self: EntryBuckets[Consumer]) -> None:
    """B8 broken: one of the sharing consumers has all buckets."""
    first = min(self._consumers, key=lambda each: (each.name, each.consumer_id), default=None)
    self._owners = [] if first is None else [first] * len(self._table)


def deals_one_each(
    before: Mapping[int, frozenset[str]],
    segments: Sequence[int],
    names: Sequence[str],
    places: Mapping[int, int],
) -> dict[int, int]:
    """B8 broken: consumers beyond the number of segments have none."""
    return dict.fromkeys(segments, 1)


def lacks_no_buckets(self: _Rules) -> Refusal:
    """B8 broken: the policy never raises the number of buckets."""
    return Refusal(Rule.REBUCKET, Cause.ENOUGH_BUCKETS, "", {})
