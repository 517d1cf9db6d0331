"""Sends rows by a producer, and counts from its receipts how many are in which segment."""

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

import magnetar
from magnetar.errors import InvalidMessage
from magnetar.layout import Layout
from magnetar.spark.sink_rows import Rows
from magnetar.spark.task_report import RowCount
from magnetar.transactions.work import Work

__all__ = ["RowSender"]


class RowSender:
    """The `Sender` of one attempt, or of none (`transaction` None).

    Rows are sent in order, so those of a key are stored in that order.  `send` waits while the
    producer's queue is full, which bounds the memory of rows without receipt.
    """

    def __init__(
        self,
        producer: magnetar.Producer[bytes],
        transaction: Work | None,
        ask_layout: Callable[[], Awaitable[Layout]],
    ) -> None:
        """Take over the producer; `ask_layout` fetches the layout of its topic."""
        self._ask_layout = ask_layout
        self._producer = producer
        self._transaction = transaction
        self._sent: deque[tuple[magnetar.Receipts, Sequence[int]]] = deque()
        self._messages: Counter[int] = Counter()
        self._hashes: Counter[int] = Counter()
        """Sums of row hashes, by segment."""

    async def send(self, rows: Rows) -> None:
        """See `Sender.send`."""
        receipts = await self._producer.send_many(
            # A message without value is None, whatever the producer's type of values is.
            cast("Sequence[bytes]", rows.values),
            keys=rows.keys,
            properties=rows.properties,
            event_times_ms=rows.event_times_ms,
            transaction=self._transaction,
        )
        self._sent.append((receipts, rows.hashes))
        while self._sent and self._sent[0][0].outcome.done():
            await self._count()

    async def settle(self) -> Mapping[str, RowCount]:
        """See `Sender.settle`."""
        while self._sent:
            await self._count()
        if not self._messages:
            return {}
        layout = await self._ask_layout()
        return {
            _topic_of(layout, segment): RowCount(messages, self._hashes[segment] % 2**64)
            for segment, messages in self._messages.items()
        }

    async def close(self) -> None:
        """See `Sender.close`."""
        await self._producer.close()
        for receipts, _ in self._sent:
            if receipts.outcome.done():
                # Retrieved, so that asyncio does not log it: the attempt has failed and says why.
                receipts.outcome.exception()

    async def _count(self) -> None:
        """Wait for the oldest rows to be stored, and count them.  Raises why they are not."""
        # By receipt (W2): rows for a segment that is sealed meanwhile go to its children.
        receipts, hashes = self._sent[0]
        await receipts.stored()
        self._sent.popleft()
        segments = Counter(receipts.segment_ids)
        self._messages.update(segments)
        if len(segments) == 1:
            self._hashes[receipts.segment_ids[0]] += sum(hashes)
            return
        for segment, row_hash in zip(receipts.segment_ids, hashes, strict=True):
            self._hashes[segment] += row_hash


def _topic_of(layout: Layout, segment_id: int) -> str:
    segment = layout.segments.get(segment_id)
    if segment is None:
        raise InvalidMessage(
            f"Rows were stored in segment {segment_id}, which the topic does not have any more: it "
            "was deleted meanwhile, and they with it. The task is tried again."
        )
    return segment.topic
