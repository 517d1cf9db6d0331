"""What is told of a segment to those who are not at it: values, and their JSON.  Pure.

Rule: a subscription has drained a sealed segment when no transaction is open there and its backlog
is 0; one that does not exist there has nothing to drain only if the segment holds no entry at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Members = dict[str, object]


class MalformedView(ValueError):
    """JSON that tells of no segment."""


@dataclass(frozen=True, slots=True)
class SubscriptionView:
    """One subscription of a segment.  `at_end`: it has nothing more to get, were it sealed."""

    durable: bool
    backlog: int
    at_end: bool
    consumers: int
    """How many are attached."""
    properties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment at one moment."""

    sealed: bool
    entries: int
    producers: int
    """How many are attached."""
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
        """Whether a subscription has nothing more to get here, now and for ever."""
        found = self.subscriptions.get(subscription)
        at_end = None if found is None else found.at_end
        return is_drained(sealed=self.sealed, empty=not self.entries, at_end=at_end)

    def to_json(self) -> Members:
        """As it travels between brokers."""
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
        """The view in an answer.  Raises `MalformedView`."""
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
            raise MalformedView(f"{members!r} tells of no segment: {error!r}") from error


def is_drained(*, sealed: bool, empty: bool, at_end: bool | None) -> bool:
    """The module's rule; `at_end` is None for a subscription that does not exist there."""
    return sealed and (empty if at_end is None else at_end)
