"""The view of a segment that its owner sends to other brokers: values, and their JSON.  Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

Members = dict[str, object]


class MalformedView(ValueError):
    """The JSON is not that of a segment's view."""


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


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment at one moment.  `producers` counts those that are attached."""

    sealed: bool
    entries: int
    producers: int
    subscriptions: Mapping[str, SubscriptionView]

    @property
    def in_use(self) -> bool:
        """Whether a producer or consumer is attached."""
        return bool(self.producers) or any(s.consumers for s in self.subscriptions.values())

    @property
    def durable(self) -> dict[str, Mapping[str, str]]:
        """The subscriptions that outlive their consumers, with their properties."""
        return {name: s.properties for name, s in self.subscriptions.items() if s.durable}

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
                }
                for name, each in self.subscriptions.items()
            },
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
                    )
                    for name, each in members["subscriptions"].items()
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
