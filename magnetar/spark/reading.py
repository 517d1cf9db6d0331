"""The questions that the source asks brokers, as a protocol: planning and tests need no broker."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from magnetar.layout import Layout
from magnetar.protocol.ids import Position
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import RangePlan

__all__ = ["Reading"]


class Reading(Protocol):
    """Layout, plans and entries of one topic."""

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
    ) -> RangePlan:
        """See `magnetar.Client.plan_range`."""

    def entries(
        self, segment_topic: str, start: Position, end: Position
    ) -> Iterator[Sequence[StoredEntry]]:
        """The entries that may be read, from `start` to before `end`, in order."""
