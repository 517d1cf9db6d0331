"""What the source asks of brokers, so that it can be planned and tested without any."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from magnetar.layout import Layout
from magnetar.reads.entries import StoredEntry
from protocol.ids import Position

__all__ = ["Plan", "Reading"]


class Plan(Protocol):
    """A range of a segment, and what is around it; `magnetar.RangePlan` is one.

    Positions are those of the next entry to be read.  Counts are None where a broker cannot tell.
    """

    @property
    def start(self) -> Position:
        """Where it begins: the place that was asked for, or the first entry that is retained."""

    @property
    def end(self) -> Position:
        """Where it ends, exclusive."""

    @property
    def entries(self) -> int | None:
        """In the range, and so are `messages` and `bytes`."""

    @property
    def messages(self) -> int | None:
        """Of all its entries, readable or not."""

    @property
    def bytes(self) -> int | None:
        """As they are stored."""

    @property
    def first_publish_time_ms(self) -> int | None:
        """Of its first entry."""

    @property
    def horizon(self) -> Position:
        """What comes before it may be read."""

    @property
    def raw_end(self) -> Position:
        """What comes before it is stored."""

    @property
    def sealed(self) -> bool:
        """Whether `raw_end` will not move."""

    @property
    def lost(self) -> bool:
        """Whether entries at or after the start that was asked for are gone."""

    @property
    def backlog_messages(self) -> int | None:
        """From the start to the horizon, and so is `backlog_bytes`."""

    @property
    def backlog_bytes(self) -> int | None:
        """As they are stored."""


class Reading(Protocol):
    """One topic."""

    def layout(self) -> Layout:
        """The DAG as it is now."""

    def plan(
        self,
        segment_topic: str,
        start: Position | None,
        *,
        end: Position | None = None,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        from_publish_time_ms: int | None = None,
        before_publish_time_ms: int | None = None,
    ) -> Plan:
        """As `magnetar.Client.plan_range`."""

    def entries(
        self, segment_topic: str, start: Position, end: Position
    ) -> Iterator[Sequence[StoredEntry]]:
        """What may be read from `start` to before `end`, in order."""
