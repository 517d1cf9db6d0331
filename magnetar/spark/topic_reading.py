"""One topic at real brokers, as the source asks for it."""

import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Final

import magnetar
from magnetar.layout import Layout
from magnetar.protocol.ids import Position
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import RangePlan
from magnetar.spark.connecting import process_client
from magnetar.spark.options import Connection

__all__ = ["TopicReading"]

LAYOUT_PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class TopicReading:
    """The `Reading` of a topic at brokers.

    It finds the client of its process at each call, so it can be pickled and forked.  Calls raise
    what the client raises, which retries for the operation timeout.
    """

    connection: Connection
    topic: str

    def layout(self) -> Layout:
        """The DAG as it is now."""
        return process_client(self.connection).run(magnetar.Client.layout, self.topic)

    def layout_with(self, newest: int) -> Layout:
        """The DAG; asks again while the broker does not know segment `newest` yet."""
        end = time.monotonic() + self.connection.operation_timeout_ms / 1000
        while True:
            layout = self.layout()
            if max(layout.segments) >= newest or time.monotonic() >= end:
                return layout
            time.sleep(LAYOUT_PAUSE_S)

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
        """See `Client.plan_range`."""
        return process_client(self.connection).run(
            magnetar.Client.plan_range,
            segment_topic,
            start,
            end=end,
            max_messages=max_messages,
            max_bytes=max_bytes,
            from_publish_time_ms=from_publish_time_ms,
            before_publish_time_ms=before_publish_time_ms,
        )

    def entries(
        self, segment_topic: str, start: Position, end: Position
    ) -> Iterator[list[StoredEntry]]:
        """See `Client.read_range`."""

        def read(client: magnetar.Client) -> AsyncGenerator[list[StoredEntry], None]:
            return client.read_range(segment_topic, start, end)

        return process_client(self.connection).iterate(read)
