"""Rows to a producer, and from its receipts how many of them are in which segment.

Rules: rows go in their order, so those of a key are stored in that order.  Rows are sent as long as
the producer has room; who sends more waits.  A row is counted by the segment that its receipt
names.  What has its receipt is forgotten, so memory follows the producer's room, not the rows.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypedDict, cast

import magnetar
from magnetar.errors import InvalidMessage, ProducerQueueFull
from magnetar.layout import Layout
from magnetar.transactions.work import Work
from pipeline.sink_rows import Rows
from pipeline.task_report import RowCount

__all__ = ["RowSender"]

TURN: Final = 256
"""Rows that are given to the producer before others on the loop have their turn."""


class _Message(TypedDict):
    key: str | bytes | None
    properties: Mapping[str, str] | None
    event_time_ms: int | None
    transaction: Work | None


class RowSender:
    """See the module's rules.  `transaction` is what all rows are sent in, if any."""

    def __init__(
        self,
        producer: magnetar.Producer[bytes],
        transaction: Work | None,
        layout_of: Callable[[str], Awaitable[Layout]],
    ) -> None:
        """The producer is closed with the sender; `layout_of` asks for that of a topic."""
        self._layout_of = layout_of
        self._producer = producer
        self._transaction = transaction
        self._sent: deque[tuple[asyncio.Future[magnetar.MessageId], int]] = deque()
        self._messages: dict[int, int] = {}
        self._hashes: dict[int, int] = {}
        """By segment."""

    async def send(self, rows: Rows) -> None:
        """As `Sender.send`."""
        for start in range(0, len(rows), TURN):
            await self._send(rows, start, min(start + TURN, len(rows)))
            self._count()
            await asyncio.sleep(0)

    async def settle(self) -> Mapping[str, RowCount]:
        """As `Sender.settle`."""
        await self._producer.flush()
        self._count()
        assert not self._sent, "what is flushed has its receipt"
        if not self._messages:
            return {}
        layout = await self._layout_of(self._producer.topic)
        return {
            _topic_of(layout, segment): RowCount(messages, self._hashes[segment] % 2**64)
            for segment, messages in self._messages.items()
        }

    async def close(self) -> None:
        """As `Sender.close`."""
        await self._producer.close()
        for future, _ in self._sent:
            if future.done() and not future.cancelled():
                future.exception()  # seen: the attempt has failed, and says why

    async def _send(self, rows: Rows, start: int, end: int) -> None:
        """Those from `start` to before `end`, each as soon as there is room for it."""
        producer, sent = self._producer, self._sent
        for place in range(start, end):
            message = _Message(
                key=None if rows.keys is None else rows.keys[place],
                properties=None if rows.properties is None else rows.properties[place],
                event_time_ms=None if rows.event_times_ms is None else rows.event_times_ms[place],
                transaction=self._transaction,
            )
            # What has no value is sent as None, whatever the producer's type of values is.
            value = cast(bytes, rows.values[place])
            try:
                future = producer.send_nowait(value, **message)
            except ProducerQueueFull:
                await producer.room()
                future = producer.send_nowait(value, **message)
            sent.append((future, rows.hashes[place]))

    def _count(self) -> None:
        """Take what has its receipt.  Raises the first failure."""
        sent = self._sent
        while sent and sent[0][0].done():
            future, row_hash = sent.popleft()
            segment = future.result().segment_id
            self._messages[segment] = self._messages.get(segment, 0) + 1
            self._hashes[segment] = self._hashes.get(segment, 0) + row_hash


def _topic_of(layout: Layout, segment_id: int) -> str:
    segment = layout.segments.get(segment_id)
    if segment is None:
        raise InvalidMessage(
            f"Rows were stored in segment {segment_id}, which the topic does not have any more: it "
            "was deleted meanwhile, and they with it. The task is tried again."
        )
    return segment.topic
