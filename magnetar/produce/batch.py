"""What a segment was given and has not sent, and how it is cut into batches.  Pure.

Pure.  Rules:

- A batch has at most `max_messages` and `max_bytes`, one transaction or none, and messages of one
  entry bucket.  A delayed message, and whatever is larger than a batch, is alone.
- Batches leave in the order of their last messages, so the highest sequence ids rise: whenever one
  batch is closed, those of the other buckets are too.
- Where a topic is deduplicated, the broker drops a SEND whose highest sequence id it knows.  So
  what it may know (not above the last sequence id that it told) shares no batch with what is new,
  and messages with sequence ids of the user are cut at every change of the bucket: sent again by
  another process, cut otherwise, none is taken for known because one behind it is.
- Nothing overtakes a message that waits for its transaction.
- What nobody waits for any more is dropped, and holds nothing up.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magnetar.produce.outgoing import Outgoing


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much a batch holds.  `max_messages` 1: no batches."""

    max_messages: int
    max_bytes: int


class Queue:
    """Messages of one segment that are not sent yet, and how they become batches.

    Sequence ids are given here, when a message is cut.
    """

    __slots__ = ("_dropped", "_messages", "_splits", "known", "limits", "next_number", "size")

    def __init__(
        self,
        limits: BatchLimits,
        bucket_splits: Sequence[int] = (),
        dropped: Callable[[Outgoing], None] = lambda message: None,
    ) -> None:
        """`bucket_splits`: the first hashes of the segment's buckets but the first.

        `dropped` is told of each message that nobody waited for.
        """
        self._dropped = dropped
        self.limits = limits
        """Of what is cut from now on."""
        self._splits = tuple(bucket_splits)
        self._messages: deque[Outgoing] = deque()
        self.size = 0
        """Bytes that wait."""
        self.next_number = 0
        """The next sequence id."""
        self.known = -1
        """The last sequence id of which the broker said that it knows it."""

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Outgoing) -> bool:
        """Put it last.  Returns whether a batch is full."""
        self._messages.append(message)
        self.size += message.size
        limits = self.limits
        return len(self._messages) >= limits.max_messages or self.size >= limits.max_bytes

    def take_all(self) -> list[Outgoing]:
        """Everything that waits and is wanted; nothing waits afterwards."""
        taken: list[Outgoing] = []
        for message in self._messages:
            if message.outcome.done():
                self._dropped(message)
            else:
                taken.append(message)
        self._messages.clear()
        self.size = 0
        return taken

    def prune(self) -> None:
        """Drop what nobody waits for any more."""
        kept = self.take_all()
        self._messages.extend(kept)
        self.size = sum(message.size for message in kept)

    def cut(self) -> list[list[Outgoing]]:
        """Batches of everything that may be sent now, in the order in which they are to be."""
        ready = self._take_ready()
        if self._splits:
            return _cut_by_bucket(ready, self.limits, self._splits, self.known)
        return _cut_in_order(ready, self.limits, self.known)

    def _take_ready(self) -> list[Outgoing]:
        """What may be sent now, with its numbers."""
        ready: list[Outgoing] = []
        messages = self._messages
        number = self.next_number
        size = 0
        while messages:
            message = messages[0]
            unwanted = message.outcome.done()
            awaits = message.awaits
            if awaits is not None and not unwanted and not awaits.done():
                break
            messages.popleft()
            size += message.size
            if unwanted:
                self._dropped(message)
                continue
            if message.sequence_id is None:
                message.number = number
                number += 1
            else:
                message.number = message.sequence_id
                number = max(number, message.number + 1)
            ready.append(message)
        self.next_number = number
        self.size -= size
        return ready


def _cut_in_order(
    messages: Sequence[Outgoing], limits: BatchLimits, known: int
) -> list[list[Outgoing]]:
    """The batches of a segment with one bucket."""
    max_messages, max_bytes = limits.max_messages, limits.max_bytes
    batches: list[list[Outgoing]] = []
    batch: list[Outgoing] = []
    count, size = max_messages, 0
    txn: tuple[int, int] | None = None
    was_known = False
    for message in messages:
        size += message.size
        if (
            count >= max_messages
            or size > max_bytes
            or message.txn != txn
            or (message.number <= known) is not was_known
            or message.deliver_at_ms is not None
        ):
            batch = []
            batches.append(batch)
            count, size = 0, message.size
            txn, was_known = message.txn, message.number <= known
            if message.deliver_at_ms is not None:
                count = max_messages
        batch.append(message)
        count += 1
    return batches


def _cut_by_bucket(
    messages: Sequence[Outgoing], limits: BatchLimits, splits: tuple[int, ...], known: int
) -> list[list[Outgoing]]:
    """The batches of a segment with several buckets."""
    cutter = _Cutter(limits, known)
    for message in messages:
        cutter.put(message, bisect_right(splits, message.bucket_hash))
    cutter.close()
    return cutter.batches


class _Cutter:
    """The batches that are open: one for each bucket."""

    __slots__ = ("_known", "_limits", "_open", "_sizes", "_txn", "_was_known", "batches")

    def __init__(self, limits: BatchLimits, known: int) -> None:
        self.batches: list[list[Outgoing]] = []
        self._limits = limits
        self._known = known
        self._open: dict[int, list[Outgoing]] = {}
        self._sizes: dict[int, int] = {}
        self._txn: tuple[int, int] | None = None
        self._was_known = False

    def put(self, message: Outgoing, bucket: int) -> None:
        """Into the batch of its bucket; closes what it does not go with."""
        known = message.number <= self._known
        if message.deliver_at_ms is not None or message.size > self._limits.max_bytes:
            self.close()
            self.batches.append([message])
            return
        if self._open and self._must_close(message, bucket, known):
            self.close()
        self._txn, self._was_known = message.txn, known
        self._open.setdefault(bucket, []).append(message)
        self._sizes[bucket] = self._sizes.get(bucket, 0) + message.size

    def _must_close(self, message: Outgoing, bucket: int, known: bool) -> bool:
        if message.txn != self._txn or known is not self._was_known:
            return True
        batch = self._open.get(bucket)
        if batch is None:
            return message.sequence_id is not None
        limits = self._limits
        return (
            len(batch) >= limits.max_messages
            or self._sizes[bucket] + message.size > limits.max_bytes
            or (message.sequence_id is not None and len(self._open) > 1)
        )

    def close(self) -> None:
        """All open batches are complete."""
        self.batches += sorted(self._open.values(), key=_last_number)
        self._open.clear()
        self._sizes.clear()


def _last_number(batch: list[Outgoing]) -> int:
    return batch[-1].number
