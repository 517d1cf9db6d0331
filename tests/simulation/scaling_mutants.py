"""Brokers that break one rule of automatic changes (S) or migrations (M) each.

The rules are in `broker/scalable/README.md`.
"""

from collections.abc import Sequence

from broker.scalable import assignment
from broker.scalable.auto_scaler import AutoScaler
from broker.scalable.key_sample import KeySample
from broker.scalable.layout import Layout, Segment
from broker.scalable.live_topics import LiveTopic
from broker.scalable.migration import Migrator
from broker.scalable.reshape import Reshaper
from broker.scalable.scale_decision import Cause, Refusal, Rule, _Rules
from broker.scalable.segments import Segments
from broker.scalable.steps import Step
from magnetar.protocol.names import SegmentName, TopicName

_cooling_down = _Rules._cooling_down
_sample = AutoScaler._sample
_readable_in_order = assignment._readable_in_order
_require_managed = Migrator._require_managed


def takes_none_for_young(self: _Rules, segment: Segment) -> bool:
    """S1 broken: what a split has just made is merged."""
    return False


def splits_at_once(
    self: _Rules, rule: Rule, cause: Cause, last_ms: int | None, cooldown_s: int
) -> Refusal | None:
    """S2 broken: there is no pause between two splits."""
    kept = rule in (Rule.MERGE, Rule.REBUCKET)
    return _cooling_down(self, rule, cause, last_ms, cooldown_s * kept)


def merges_at_once(
    self: _Rules, rule: Rule, cause: Cause, last_ms: int | None, cooldown_s: int
) -> Refusal | None:
    """S2 broken: there is no pause between two merges."""
    return _cooling_down(self, rule, cause, last_ms, cooldown_s * (rule is not Rule.MERGE))


def rebuckets_at_once(
    self: _Rules, rule: Rule, cause: Cause, last_ms: int | None, cooldown_s: int
) -> Refusal | None:
    """S2 broken: there is no pause between two rebuckets."""
    return _cooling_down(self, rule, cause, last_ms, cooldown_s * (rule is not Rule.REBUCKET))


def takes_any_split_for_helpful(
    self: KeySample, segment: Segment, wanted: int, most: int
) -> int | None:
    """S3 broken: a segment is split, though one key has all of its load."""
    return wanted


async def takes_all_for_loaded(
    self: AutoScaler, live: LiveTopic, before: Layout, segment_id: int
) -> tuple[KeySample | None, bool]:
    """S4 broken: the last report of a broker that died counts as the load of now."""
    sample, _ = await _sample(self, live, before, segment_id)
    return sample, True


def reads_partitions_beside(layout: Layout, drained: frozenset[int]) -> list[Segment]:
    """M1 broken: the children of a migration are read beside the partitions."""
    legacy = {each.segment_id: each for each in layout.legacy.values()}
    found = _readable_in_order(layout, drained | legacy.keys())
    return [*found, *(each for number, each in legacy.items() if number not in drained)]


async def asks_for_no_clients(
    self: Migrator, name: TopicName, partitions: Sequence[TopicName]
) -> None:
    """M2 broken: v4 clients that are attached do not matter."""


async def asks_for_clients_once(
    self: Migrator, name: TopicName, partitions: Sequence[TopicName]
) -> None:
    """M2 broken: v4 clients that come while the children are made do not matter."""
    if not await self._store.begun_for(name):
        await _require_managed(self, name, partitions)


async def undoes_nothing(self: Reshaper, step: Step) -> None:
    """M3 broken: what a migration had made when its broker died stays."""
    await self._store.end(step)
    self._leftovers.discard(step)


async def finishes_nothing_late(self: Migrator, live: LiveTopic) -> None:
    """M4 broken: partitions of a record that came late are never sealed."""


def refuses_no_producers(self: Segments, segment: SegmentName) -> None:
    """M5 broken: a partition takes new producers when its topic is scalable already."""
