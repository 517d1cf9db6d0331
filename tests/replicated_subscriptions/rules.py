"""The rules of replicated subscriptions, and how each is broken on purpose."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from broker.replication.subscription_backlog import SubscriptionBacklog
from broker.topics.replicated_ranges import SourceSegment
from broker.topics.subscription_positions import FirstCopy, first_left
from magnetar.protocol.ids import LATEST, Position

BROKEN: Mapping[str, str] = {
    "F1": "a segment tells how far its last acknowledged entry is",
    "F2": "a segment tells how far its last acknowledged copy is",
    "F2-part": "an entry counts as acknowledged with the first copy of a part of it",
    "F3": "all that is answered when the answer comes is acknowledged",
    "F3-sent": "what was never sent counts as answered",
    "F4-active": "sealed segments of the other cluster are not asked",
    "F4-ended": "a segment that ended counts as the newest of its hashes",
    "F4-silent": "a segment that does not answer has no copies",
    "F5": "a segment tells that no copy is left when it has not read all of its log",
    "F6": "positions are those of any incarnation of the topic",
    "F7": "each chunk of a message counts as an entry of its own",
    "F8": "copies from pruned segments stay",
    "F8-epoch": "a question with an older layout is answered",
    "F9": "a segment tells what it has told before no more",
    "F10": "a segment without the subscription has nothing of it left",
}
"""What is done wrong, by the name of the rule that it breaks."""
LATE: Mapping[str, str] = {
    "F11": "a subscription that lacks copies tells that they are consumed",
    "F11-ancestors": "only what is in a segment's own log may be missing in it",
    "F11-child": "a child is complete whatever its parents are",
    "F11-gone": "a subscription that begins at the first entry that is left is complete",
    "F11-pruned": "a subscription is complete though segments were pruned before it",
}
"""The same of a subscription that is deleted in one cluster and made anew."""


@dataclass(frozen=True)
class Rules:
    """The rules as they are, but for one that is broken; "" for none."""

    broken: str = ""

    def breaks(self, rule: str) -> bool:
        """Whether this one is broken."""
        return self.broken == rule

    @property
    def backlog(self) -> type[SubscriptionBacklog]:
        """What the owner of a segment decides with."""
        return _BACKLOGS.get(self.broken, SubscriptionBacklog)

    def first_left(
        self, active: Collection[int], segments: Collection[int], answers: Mapping[int, FirstCopy]
    ) -> Position | None:
        """The first copy that is left, of the answers of all segments."""
        if self.breaks("F4-active"):
            segments = active
            answers = {each: answers[each] for each in active if each in answers}
        if self.breaks("F4-silent"):
            segments = answers.keys()
            active = [each for each in active if each in answers]
        if self.breaks("F4-ended"):
            active = ()
        return first_left(active, segments, answers)


class _LastOwnBacklog(SubscriptionBacklog):
    def acknowledged_below(self, cluster: str, answered: Position) -> Position:
        """Tell what is behind the last entry that is acknowledged."""
        below = super().acknowledged_below(cluster, answered)
        own = [each for each in self._messages.get(None, ()) if self._is_done(each)]
        return max(own[-1].at, below) if own else below


class _LastCopyBacklog(SubscriptionBacklog):
    def first_copy(self, source: SourceSegment, *, is_all_read: bool) -> Position:
        """Tell what is behind the last copy that is acknowledged."""
        first = super().first_copy(source, is_all_read=is_all_read)
        copies = [each for each in self._messages.get(source, ()) if self._is_done(each)]
        return max(copies[-1].at, first) if copies else first


class _EagerBacklog(SubscriptionBacklog):
    def first_copy(self, source: SourceSegment, *, is_all_read: bool) -> Position:
        """Take no notice of what was not read."""
        return super().first_copy(source, is_all_read=True)


class _PartBacklog(SubscriptionBacklog):
    def acknowledge_own(
        self, cluster: str, below: Position, sent_after: Position, answered: Position
    ) -> list[Position]:
        """Acknowledge the entry of the first copy that is left too, if another part of it is."""
        if below != LATEST:
            below = below._replace(entry_id=below.entry_id + 1)
        return super().acknowledge_own(cluster, below, sent_after, answered)


class _UnprunedBacklog(SubscriptionBacklog):
    def acknowledge_pruned(
        self, cluster: str, incarnation: int, segments: Collection[int]
    ) -> list[Position]:
        """Keep them."""
        return []


_BACKLOGS: Mapping[str, type[SubscriptionBacklog]] = {
    "F1": _LastOwnBacklog,
    "F2": _LastCopyBacklog,
    "F2-part": _PartBacklog,
    "F5": _EagerBacklog,
    "F8": _UnprunedBacklog,
}
