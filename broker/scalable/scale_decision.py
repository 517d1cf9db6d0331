"""Decides on automatic splits, merges and rebuckets of a topic, and explains it.  Pure.

The rules are tried in this order (sources: Apache Pulsar 5.0.0-M1; for rebuckets, later versions):

split by consumers   more ordered consumers than segments: split the one with most messages in
rebucket             they cannot be split, and consumers that can share segments lack buckets
split by rate        a rate above its limit: split the segment furthest above
merge                neighbours that have been quiet for the merge window

The first one that applies is the decision, and each one before it is refused with a reason.  Some
limits are not Pulsar's.  A segment is split only if a sample of its keys shows that this moves load
away.  Segments are not merged soon after a split, nor with so much traffic together that the merge
would cause one.  No segment is merged that an ordered consumer needs, or that consumers have a
large backlog in.  What consumers need is decided for each group (`consumer_groups`): one that can
share segments needs entry buckets, any other one needs segments.
"""

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from broker.scalable.auto_scale_policy import RATE_NAMES, AutoScalePolicy, Rates
from broker.scalable.consumer_groups import (
    ConsumerGroup,
    largest,
    need_buckets,
    need_segments,
    unable_to_share,
)
from broker.scalable.key_sample import KeySample
from broker.scalable.last_changes import LastChanges, last_changes
from broker.scalable.layout import Layout, Segment
from broker.scalable.load_report import SegmentLoad
from config.bounds import (
    MAX_ENTRY_BUCKETS,
    MERGE_BACKLOG_MAX,
    MERGE_PARENTS_MAX,
    SPLIT_CANDIDATES,
    SPLIT_PARTS_MAX,
)
from magnetar.protocol.key_hash import KEY_SPACE

SECOND_MS: Final = 1000
MERGED_SHARE_MAX: Final = 0.5
"""Share of the limits of splits that merged segments may have together: a load that doubles does
not split them again."""

Figures = Mapping[str, float]
"""The numbers that a decision or refusal was made of."""


class Action(enum.Enum):
    """The kind of a change of a topic."""

    SPLIT = "split"
    MERGE = "merge"
    REBUCKET = "rebucket"


class Rule(enum.Enum):
    """The rules, in the order in which they are tried."""

    POLICY = "policy"
    CONSUMERS = "consumer-count"
    REBUCKET = "rebucket"
    RATE = "rate"
    MERGE = "merge"


class Cause(enum.Enum):
    """The kind of reason for which a rule does not apply."""

    DISABLED = "disabled"
    INVALID_POLICY = "invalid-policy"
    ENOUGH_SEGMENTS = "enough-segments"
    WITHIN_LIMITS = "within-limits"
    ENOUGH_BUCKETS = "enough-buckets"
    NO_SHARING = "no-sharing"
    LITTLE_TRAFFIC = "little-traffic"
    MAX_SEGMENTS = "max-segments"
    MAX_BUCKETS = "max-buckets"
    SPLIT_COOLDOWN = "split-cooldown"
    REBUCKET_COOLDOWN = "rebucket-cooldown"
    HOT_KEY = "hot-key"
    MIN_SEGMENTS = "min-segments"
    MERGE_COOLDOWN = "merge-cooldown"
    CONSUMERS_NEED_THEM = "consumers-need-them"
    NOT_REPORTED = "not-reported"
    NOT_QUIET = "not-quiet"
    RECENT_SPLIT = "recent-split"
    DAG_DEPTH = "dag-depth"
    BACKLOG = "backlog"
    TOO_BUSY_TOGETHER = "too-busy-together"


@dataclass(frozen=True, slots=True)
class Decision:
    """A change to make, the rule that asks for it, and the reason."""

    action: Action
    rule: Rule
    segment_ids: tuple[int, ...]
    why: str
    figures: Figures
    parts: int = 2
    """Number of parts of a split."""
    bucket_count: int = 0
    """Entry buckets of each segment after a rebucket."""

    def to_json(self) -> dict[str, object]:
        """The decision, as REST shows it."""
        members: dict[str, object] = {
            "action": self.action.value,
            "rule": self.rule.value,
            "segments": list(self.segment_ids),
            "reason": self.why,
            "figures": dict(self.figures),
        }
        if self.action is Action.SPLIT:
            members["parts"] = self.parts
        if self.action is Action.REBUCKET:
            members["bucketCount"] = self.bucket_count
        return members


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rule that does not apply.  `wanted`: its condition holds, and something else forbids it."""

    rule: Rule
    cause: Cause
    why: str
    figures: Figures = field(default_factory=dict)
    wanted: bool = False

    def to_json(self) -> dict[str, object]:
        """The refusal, as REST shows it."""
        return {
            "rule": self.rule.value,
            "cause": self.cause.value,
            "wanted": self.wanted,
            "reason": self.why,
            "figures": dict(self.figures),
        }


@dataclass(frozen=True, slots=True)
class SampleWanted:
    """The keys of a segment have to be sampled before anything can be decided."""

    segment_id: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of an evaluation: a decision or none, and the refusals before it.

    With `sample_wanted` it is no outcome yet.
    """

    decision: Decision | None
    refusals: tuple[Refusal, ...]
    sample_wanted: SampleWanted | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of a decision.

    `loads` lacks segments without a report.  `groups` has the registered ordered consumers of each
    subscription.  `reserved` is the number of consumers that may come back, of a topic that none is
    connected to.  `max_buckets` are the entry buckets that a segment may have.  `samples` has None
    for a segment whose keys cannot be sampled.  Times are wall-clock milliseconds.
    """

    layout: Layout
    policy: AutoScalePolicy
    now_ms: int
    loads: Mapping[int, SegmentLoad] = field(default_factory=dict)
    groups: tuple[ConsumerGroup, ...] = ()
    reserved: int = 0
    max_buckets: int = MAX_ENTRY_BUCKETS
    samples: Mapping[int, KeySample | None] = field(default_factory=dict)
    kept_changes: LastChanges | None = None
    """Times of changes whose parents were pruned; see `last_changes`."""


def merge_depths(layout: Layout) -> dict[int, int]:
    """The number of merges that led to each segment, along the line of parents with most merges."""
    depths: dict[int, int] = {}
    for segment_id, segment in layout.segments.items():  # parents have lower ids
        above = max((depths[parent] for parent in segment.parent_ids), default=0)
        depths[segment_id] = above + (len(segment.parent_ids) > 1)
    return depths


def decide(situation: Situation) -> Verdict:
    """Try the rules in their order."""
    policy = situation.policy
    if not policy.enabled:
        why = "Automatic splits and merges are switched off by the policy."
        return Verdict(None, (Refusal(Rule.POLICY, Cause.DISABLED, why),))
    problem = policy.problem()
    if problem is not None:
        why = f"The policy is off, because its values do not fit together: {problem}."
        refusal = Refusal(Rule.POLICY, Cause.INVALID_POLICY, why, wanted=True)
        return Verdict(None, (refusal,))
    refusals: list[Refusal] = []
    rules = _Rules(situation)
    for rule in (rules.by_consumers, rules.by_buckets, rules.by_rate, rules.merge):
        outcome = rule()
        if isinstance(outcome, SampleWanted):
            return Verdict(None, tuple(refusals), outcome)
        if isinstance(outcome, Decision):
            return Verdict(outcome, tuple(refusals))
        refusals.append(outcome)
    return Verdict(None, tuple(refusals))


_Outcome = Decision | Refusal | SampleWanted


class _Rules:
    """The rules over one situation."""

    def __init__(self, situation: Situation) -> None:
        self._now_ms = situation.now_ms
        self._policy = situation.policy
        self._layout = situation.layout
        self._active = situation.layout.active
        self._situation = situation
        self._last = last_changes(situation.layout, situation.kept_changes)

    def _rates(self, segment: Segment) -> Rates:
        known = self._situation.loads.get(segment.segment_id)
        return Rates() if known is None else known.rates

    def _age_s(self, time_ms: int) -> float:
        return (self._now_ms - time_ms) / SECOND_MS

    def _cooling_down(
        self, rule: Rule, cause: Cause, last_ms: int | None, cooldown_s: int
    ) -> Refusal | None:
        if last_ms is None or self._age_s(last_ms) >= cooldown_s:
            return None
        age_s = self._age_s(last_ms)
        name = cause.value.split("-")[0]
        return Refusal(
            rule,
            cause,
            f"The last {name} was {age_s:.0f} s ago, and {name}CooldownSeconds is {cooldown_s}.",
            {"ageSeconds": round(age_s, 3), "cooldownSeconds": cooldown_s},
            wanted=True,
        )

    # Splits

    def by_consumers(self) -> _Outcome:
        """Split the segment with most messages in, if ordered consumers lack segments."""
        groups, segments = self._situation.groups, len(self._active)
        consumers, alone = largest(groups), need_segments(groups)
        figures = {"consumers": consumers, "activeSegments": segments}
        if consumers <= segments:
            why = f"A subscription has {_count(consumers, 'ordered consumer')} at most, and the "
            why += f"topic has {_count(segments, 'segment')}: each can have one."
            return Refusal(Rule.CONSUMERS, Cause.ENOUGH_SEGMENTS, why, figures)
        ranked = sorted(self._active, key=lambda s: (-self._rates(s).msg_in, s.segment_id))
        if alone > segments:
            # They need segments however little traffic there is, whatever others can share.
            figures["consumers"] = alone
            return self._split_for(alone, ranked, figures)
        least = self._policy.split_vs_rebucket_msg_in
        busiest = self._rates(ranked[0]).msg_in
        if busiest < least:
            return Refusal(
                Rule.CONSUMERS,
                Cause.LITTLE_TRAFFIC,
                f"{consumers} ordered consumers have {_count(segments, 'segment')}, but the "
                f"busiest gets {busiest:.0f} messages/s, less than the "
                f"{least:.0f} from which a split is better than sharing it.",
                figures | {"msgRateIn": busiest, "splitVsRebucketMinMsgRateInThreshold": least},
                wanted=True,
            )
        busy = [segment for segment in ranked if self._rates(segment).msg_in >= least]
        return self._split_for(consumers, busy, figures)

    def _split_for(
        self, consumers: int, ranked: list[Segment], figures: Mapping[str, float]
    ) -> _Outcome:
        segments = len(self._active)
        why = f"{consumers} ordered consumers have only {_count(segments, 'segment')}"

        def parts(segment: Segment) -> int:
            return self._parts_for_consumers(segment, consumers)

        return self._split(Rule.CONSUMERS, ranked, parts, why, figures)

    def _parts_for_consumers(self, segment: Segment, consumers: int) -> int:
        """One part for each consumer that this segment would keep busy if all had the same load."""
        total = sum(self._rates(each).msg_in for each in self._active)
        if total:
            share = self._rates(segment).msg_in / total
        else:
            share = (segment.hash_end - segment.hash_start + 1) / KEY_SPACE
        return min(round(share * consumers), consumers - len(self._active) + 1)

    def by_rate(self) -> _Outcome:
        """Split the segment that is furthest above a limit."""
        limits = self._policy.split
        scored = [(self._rates(segment).share_of(limits), segment) for segment in self._active]
        scored.sort(key=lambda each: (-each[0], each[1].segment_id))
        best, busiest = scored[0]
        name, rate, limit = self._nearest(busiest)
        figures = {"segment": busiest.segment_id, name: round(rate, 3), "limit": limit}
        text = f"segment {busiest.segment_id} has {name} = {rate:.0f}, and the limit is {limit:.0f}"
        if best <= 1:
            why = f"No rate is above its limit: {text}."
            return Refusal(Rule.RATE, Cause.WITHIN_LIMITS, why, figures)
        hot = [segment for score, segment in scored if score > 1]
        return self._split(
            Rule.RATE,
            hot,
            lambda segment: -int(-self._rates(segment).share_of(limits) // 1),
            text[0].upper() + text[1:],
            figures,
        )

    def _nearest(self, segment: Segment) -> tuple[str, float, float]:
        """The rate that is furthest above its limit, or least below."""
        limits = self._policy.split
        rates = zip(RATE_NAMES, self._rates(segment), limits, strict=True)
        return max(rates, key=lambda each: each[1] / each[2])

    def _split(
        self,
        rule: Rule,
        ranked: list[Segment],
        wanted_parts: Callable[[Segment], int],
        why: str,
        figures: Mapping[str, float],
    ) -> _Outcome:
        """Split the first segment that a split helps, unless splits are forbidden now."""
        policy, active = self._policy, len(self._active)
        if active >= policy.max_segments:
            full = f"{why}, but there are {active}, and maxSegments is {policy.max_segments}."
            numbers = {**figures, "maxSegments": policy.max_segments}
            return Refusal(rule, Cause.MAX_SEGMENTS, full, numbers, wanted=True)
        cooling = self._cooling_down(
            rule, Cause.SPLIT_COOLDOWN, self._last.split_ms, policy.split_cooldown_s
        )
        if cooling is not None:
            return cooling
        most = min(policy.max_segments - active + 1, SPLIT_PARTS_MAX)
        unhelped: list[str] = []
        for segment in ranked[:SPLIT_CANDIDATES]:
            if segment.segment_id not in self._situation.samples:
                return SampleWanted(segment.segment_id)
            width = segment.hash_end - segment.hash_start + 1
            parts = self._helpful_parts(rule, segment, wanted_parts(segment), min(most, width))
            if parts is not None:
                text = f"{why}: segment {segment.segment_id} is split into {parts}."
                numbers = {**figures, "segment": segment.segment_id, "parts": parts}
                return Decision(Action.SPLIT, rule, (segment.segment_id,), text, numbers, parts)
            unhelped.append(self._unhelped(rule, segment))
        return Refusal(
            rule,
            Cause.HOT_KEY,
            f"{why}, but a split would not help: {'; '.join(unhelped)}.",
            figures,
            wanted=True,
        )

    def _by_bytes(self, rule: Rule, segment: Segment) -> bool:
        """Whether a split has to move bytes away: the limit that is exceeded most is of bytes."""
        return rule is Rule.RATE and self._nearest(segment)[0].startswith("bytes")

    def _sample(self, rule: Rule, segment: Segment) -> KeySample | None:
        """A segment's sample, weighed by what the split has to move away."""
        sample = self._situation.samples[segment.segment_id]
        if sample is None or not self._by_bytes(rule, segment):
            return sample
        return sample.by_bytes

    def _helpful_parts(self, rule: Rule, segment: Segment, wanted: int, most: int) -> int | None:
        if most < 2:
            return None
        wanted = max(2, min(wanted, most))
        sample = self._sample(rule, segment)
        return wanted if sample is None else sample.helpful_parts(segment, wanted, most)

    def _unhelped(self, rule: Rule, segment: Segment) -> str:
        sample = self._sample(rule, segment)
        if sample is None or not sample.tells:
            return f"segment {segment.segment_id} has a single hash"
        load = "bytes" if self._by_bytes(rule, segment) else "messages"
        return (
            f"one key has {sample.top_share:.0%} of the {load} of segment {segment.segment_id}, "
            f"and half of it would keep {sample.largest_share(segment, 2):.0%}"
        )

    # Rebuckets

    def by_buckets(self) -> _Outcome:
        """Give all segments more entry buckets, if consumers that can share them lack some."""
        situation, policy = self._situation, self._policy
        consumers, segments = need_buckets(situation.groups), len(self._active)
        buckets = self._buckets
        figures = {"streamConsumers": consumers, "entryBuckets": buckets}
        if consumers <= buckets:
            unable = unable_to_share(situation.groups)
            figures["streamConsumers"] = most = max(consumers, unable)
            if unable > buckets:
                why = "The clients of the ordered consumers, or the stored batches, do not allow "
                why += "them to share a segment."
                return Refusal(Rule.REBUCKET, Cause.NO_SHARING, why, figures, wanted=True)
            why = f"A subscription has {_count(most, 'stream consumer')} at most, and the "
            why += f"topic {_count(segments, 'segment')} with {_count(buckets, 'entry bucket')}."
            return Refusal(Rule.REBUCKET, Cause.ENOUGH_BUCKETS, why, figures)
        cooling = self._cooling_down(
            Rule.REBUCKET,
            Cause.REBUCKET_COOLDOWN,
            self._last.rebucket_ms,
            policy.rebucket_cooldown_s,
        )
        if cooling is not None:
            return cooling
        needed = -(-consumers // segments)
        count = min(self._situation.max_buckets, 1 << (needed - 1).bit_length())
        few = tuple(s.segment_id for s in self._active if s.entry_buckets < count)
        if not few:
            why = f"Each segment has {count} entry buckets already, and may not have more."
            return Refusal(Rule.REBUCKET, Cause.MAX_BUCKETS, why, figures, wanted=True)
        why = f"{consumers} stream consumers have only {_count(buckets, 'entry bucket')}: "
        why += f"segments {_listed(few)} get {count} each."
        return Decision(Action.REBUCKET, Rule.REBUCKET, few, why, figures, bucket_count=count)

    # Merges

    def merge(self) -> _Outcome:
        """Merge the neighbours that have been quiet and have the lowest rates together."""
        policy, active = self._policy, len(self._active)
        if active <= policy.min_segments:
            why = f"The topic has {_count(active, 'segment')}, and minSegments is "
            why += f"{policy.min_segments}."
            figures = {"activeSegments": active, "minSegments": policy.min_segments}
            return Refusal(Rule.MERGE, Cause.MIN_SEGMENTS, why, figures)
        obstacles = list(self._obstacles())
        ranked = sorted(range(active - 1), key=lambda place: (self._pair_rates(place).total, place))
        free = [place for place in ranked if obstacles[place] is None]
        quietest = obstacles[ranked[0]]
        if not free and quietest is not None:
            return quietest
        spare = self._spare_segments()
        if spare < 1:
            needed = self._needed
            why = f"Segments could be merged, but {needed} ordered consumers have {active}."
            numbers = {"consumers": needed, "activeSegments": active}
            return Refusal(Rule.MERGE, Cause.CONSUMERS_NEED_THEM, why, numbers, wanted=True)
        free = [place for place in free if self._keeps_buckets(self._active[place : place + 2])]
        if not free:
            return self._buckets_needed()
        cooling = self._cooling_down(
            Rule.MERGE, Cause.MERGE_COOLDOWN, self._last.merge_ms, policy.merge_cooldown_s
        )
        if cooling is not None:
            return cooling
        run = self._extended(free[0], obstacles, min(spare + 1, MERGE_PARENTS_MAX))
        return self._merged(run)

    def _pair_rates(self, place: int) -> Rates:
        """The rates of the ACTIVE segment at a place and of the next one, together."""
        return self._rates(self._active[place]) + self._rates(self._active[place + 1])

    def _merged(self, run: tuple[Segment, ...]) -> Decision:
        ids = tuple(segment.segment_id for segment in run)
        rates = sum((self._rates(segment) for segment in run), Rates())
        window = self._policy.merge_window_s
        why = f"Segments {_listed(ids)} have been below the limits of merges for at least "
        why += f"{window} s: {rates.msg_in:.0f} messages/s in and {rates.msg_out:.0f} out together."
        figures = {**rates.to_json(), "mergeWindowSeconds": window}
        return Decision(Action.MERGE, Rule.MERGE, ids, why, figures)

    def _spare_segments(self) -> int:
        """Number of segments that merges may remove."""
        active = len(self._active)
        return active - max(self._policy.min_segments, self._needed)

    @property
    def _needed(self) -> int:
        """The segments that ordered consumers need, or may when they come back."""
        return max(need_segments(self._situation.groups), self._situation.reserved)

    @property
    def _buckets(self) -> int:
        return sum(segment.entry_buckets for segment in self._active)

    def _keeps_buckets(self, run: tuple[Segment, ...]) -> bool:
        """Whether consumers that share segments lack no buckets after a merge of these."""
        before = sum(segment.entry_buckets for segment in run)
        lost = before - min(before, self._situation.max_buckets)
        # What is lacking already is not made worse.
        needed = min(need_buckets(self._situation.groups), self._buckets)
        return self._buckets - lost >= needed

    def _buckets_needed(self) -> Refusal:
        consumers, most = need_buckets(self._situation.groups), self._situation.max_buckets
        why = f"Segments could be merged, but {consumers} ordered consumers share {self._buckets} "
        why += f"entry buckets, and a merged segment may have only {most}."
        figures = {"consumers": consumers, "entryBuckets": self._buckets, "maxBuckets": most}
        return Refusal(Rule.MERGE, Cause.CONSUMERS_NEED_THEM, why, figures, wanted=True)

    def _extended(
        self, first: int, obstacles: list[Refusal | None], most: int
    ) -> tuple[Segment, ...]:
        """A pair of neighbours, and those next to it that can be merged as well."""
        low, high = first, first + 1
        total = self._pair_rates(first)
        while high - low + 1 < most:
            found = [
                (self._rates(self._active[place]).total, place)
                for place, pair in ((low - 1, low - 1), (high + 1, high))
                if 0 <= pair < len(obstacles) and obstacles[pair] is None
            ]
            found = [
                (rate, place)
                for rate, place in found
                if self._fits(total + self._rates(self._active[place]))
                and self._keeps_buckets(self._active[min(low, place) : max(high, place) + 1])
            ]
            if not found:
                break
            place = min(found)[1]
            total += self._rates(self._active[place])
            low, high = min(low, place), max(high, place)
        return self._active[low : high + 1]

    def _fits(self, together: Rates) -> bool:
        return together.share_of(self._policy.split) <= MERGED_SHARE_MAX

    def _obstacles(self) -> Iterator[Refusal | None]:
        """For each pair of neighbours the reason why they cannot be merged, None if they can."""
        depths = merge_depths(self._layout)
        own = [self._obstacle(segment, depths[segment.segment_id]) for segment in self._active]
        for place, (first, second) in enumerate(pairwise(own)):
            together = self._pair_rates(place)
            if first is not None or second is not None:
                yield first or second
            elif not self._fits(together):
                ids = tuple(each.segment_id for each in self._active[place : place + 2])
                why = f"Segments {_listed(ids)} are quiet, but together too near to the limits of "
                why += f"splits: {together.share_of(self._policy.split):.0%} of one."
                yield Refusal(Rule.MERGE, Cause.TOO_BUSY_TOGETHER, why, together.to_json())
            else:
                yield None

    def _obstacle(self, segment: Segment, depth: int) -> Refusal | None:
        """The first reason why a segment cannot be merged with any other."""
        load = self._situation.loads.get(segment.segment_id)
        if load is None:
            why = f"Segment {segment.segment_id} has no load report yet."
            return Refusal(Rule.MERGE, Cause.NOT_REPORTED, why)
        return next(self._obstacles_of(segment, load, depth), None)

    def _obstacles_of(self, segment: Segment, load: SegmentLoad, depth: int) -> Iterator[Refusal]:
        policy, own = self._policy, segment.segment_id
        quiet_s = -1.0 if load.quiet_since_ms is None else self._age_s(load.quiet_since_ms)
        if quiet_s < 0:
            why = f"Segment {own} is not below the limits of merges."
            yield Refusal(Rule.MERGE, Cause.NOT_QUIET, why, load.rates.to_json())
        if quiet_s < policy.merge_window_s:
            why = f"Segment {own} has been quiet for {quiet_s:.0f} s, and mergeWindowSeconds is "
            why += f"{policy.merge_window_s}."
            figures = {"quietSeconds": quiet_s, "mergeWindowSeconds": policy.merge_window_s}
            yield Refusal(Rule.MERGE, Cause.NOT_QUIET, why, figures)
        age_s = self._age_s(segment.created_at_ms)
        if self._may_come_from_a_split(segment) and age_s < policy.keep_split_s:
            why = f"Segment {own} is {age_s:.0f} s old, and what a split made stands for "
            why += f"{policy.keep_split_s} s (splitCooldownSeconds + mergeWindowSeconds)."
            figures = {"ageSeconds": age_s, "standsSeconds": policy.keep_split_s}
            yield Refusal(Rule.MERGE, Cause.RECENT_SPLIT, why, figures)
        if depth >= policy.max_dag_depth:
            why = f"Segment {own} comes from {depth} merges, and maxDagDepth is "
            why += f"{policy.max_dag_depth}: drained segments are pruned, which lowers it."
            numbers = {"merges": depth, "maxDagDepth": policy.max_dag_depth}
            yield Refusal(Rule.MERGE, Cause.DAG_DEPTH, why, numbers, wanted=True)
        if load.backlog > MERGE_BACKLOG_MAX:
            why = f"Consumers of segment {own} lack {load.backlog} entries, and would read those "
            why += "of a merged segment only after all of its parents."
            yield Refusal(Rule.MERGE, Cause.BACKLOG, why, {"backlog": load.backlog}, wanted=True)

    def _may_come_from_a_split(self, segment: Segment) -> bool:
        return segment.created_at_epoch > 0 and len(segment.parent_ids) < 2


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listed(segment_ids: tuple[int, ...]) -> str:
    return ", ".join(str(each) for each in segment_ids)
