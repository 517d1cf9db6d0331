"""The view of a segment that its owner sends to other brokers: values, and their JSON.  Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from broker.topics.completeness import INCOMPLETE, Completeness

Members = dict[str, object]


class MalformedView(ValueError):
    """The JSON is not that of a segment's view."""


@dataclass(frozen=True, slots=True)
class CarriedSubscription:
    """What children of a segment get of a durable subscription, beside its name.

    That of a replicator's cursor has nothing beside it.
    """

    properties: Mapping[str, str]
    replicated: bool = False
    """Whether users asked for its replication to other clusters."""
    completeness: Completeness = INCOMPLETE
    """Of which clusters it has had every copy."""

    @classmethod
    def of_child(cls, parents: Sequence[Self | None]) -> Self:
        """What a child gets, of one parent or more that have it; None for one that does not.

        It is replicated if it is in one of them.
        """
        known = [each for each in parents if each is not None]
        properties = known[-1].properties
        if not any(each.replicated for each in known):
            return cls(properties)
        completeness = Completeness.inherited(
            each.completeness if each is not None and each.replicated else None for each in parents
        )
        return cls(properties, replicated=True, completeness=completeness)


@dataclass(frozen=True, slots=True)
class SubscriptionView:
    """One subscription of a segment.

    `at_end`: its backlog is 0 and no transaction is open on the segment, so that it has drained the
    segment if that is sealed.  `consumers` counts those that are attached.
    """

    durable: bool
    backlog: int
    at_end: bool
    consumers: int
    properties: Mapping[str, str]
    replicated: bool
    completeness: Completeness = INCOMPLETE


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment at one moment.  `producers` counts those that are attached.

    `replicator_cursors` says by name whether each is at the end: then the other cluster has all of
    the segment, if that is sealed.
    """

    sealed: bool
    entries: int
    producers: int
    subscriptions: Mapping[str, SubscriptionView]
    replicator_cursors: Mapping[str, bool]

    @property
    def in_use(self) -> bool:
        """Whether a producer or consumer is attached."""
        return bool(self.producers) or any(s.consumers for s in self.subscriptions.values())

    @property
    def carried(self) -> dict[str, CarriedSubscription]:
        """What children get: subscriptions that outlive their consumers, replicators' cursors.

        A child has the cursors of all its parents before it is published (R1 of
        `../../docs/decisions/replicated-segments.md`): producers may write to it from then on.
        """
        subscriptions = {
            name: CarriedSubscription(each.properties, each.replicated, each.completeness)
            for name, each in self.subscriptions.items()
            if each.durable
        }
        return subscriptions | {name: CarriedSubscription({}) for name in self.replicator_cursors}

    def drained(self, subscription: str) -> bool:
        """Whether a subscription has drained the segment; see `is_drained`."""
        found = self.subscriptions.get(subscription)
        at_end = None if found is None else found.at_end
        return is_drained(sealed=self.sealed, empty=not self.entries, at_end=at_end)

    def to_json(self) -> Members:
        """The JSON that brokers send each other."""
        return {
            "sealed": self.sealed,
            "entries": self.entries,
            "producers": self.producers,
            "subscriptions": {
                name: {
                    "durable": each.durable,
                    "backlog": each.backlog,
                    "atEnd": each.at_end,
                    "consumers": each.consumers,
                    "properties": dict(each.properties),
                    "replicated": each.replicated,
                    "completeness": each.completeness.to_json(),
                }
                for name, each in self.subscriptions.items()
            },
            "replicatorCursors": dict(self.replicator_cursors),
        }

    @classmethod
    def from_json(cls, members: object) -> "SegmentView":
        """Decode the JSON of another broker.  Raises `MalformedView`."""
        if not isinstance(members, dict):
            raise MalformedView(f"{members!r} is no object")
        try:
            return cls(
                sealed=bool(members["sealed"]),
                entries=int(members["entries"]),
                producers=int(members["producers"]),
                subscriptions={
                    str(name): SubscriptionView(
                        durable=bool(each["durable"]),
                        backlog=int(each["backlog"]),
                        at_end=bool(each["atEnd"]),
                        consumers=int(each["consumers"]),
                        properties={str(k): str(v) for k, v in each["properties"].items()},
                        replicated=bool(each["replicated"]),
                        completeness=Completeness.from_json(each["completeness"]),
                    )
                    for name, each in members["subscriptions"].items()
                },
                replicator_cursors={
                    str(name): bool(end) for name, end in members["replicatorCursors"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MalformedView(f"{members!r} is no view of a segment: {error!r}") from error


def is_drained(*, sealed: bool, empty: bool, at_end: bool | None) -> bool:
    """Whether a subscription has drained a segment: it has nothing more to read, now and for ever.

    `at_end` is None for a subscription that the segment does not have.  Such a one has drained it
    only if the segment is empty.
    """
    return sealed and (empty if at_end is None else at_end)
