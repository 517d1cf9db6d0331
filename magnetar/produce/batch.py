"""The queue of a segment's messages that are not sent yet, and their batches.  Pure."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magnetar.produce.outgoing import OutgoingMessage


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch; with `max_messages` 1 there are no batches."""

    max_messages: int
    max_bytes: int


class Queue:
    """Messages of one segment that are not sent yet; makes batches of them.

    A batch has messages of one transaction or of none, and of one entry bucket.  A delayed message,
    and one larger than a batch, is alone.  Batches come in the order of their last messages, so
    their highest sequence ids rise.  A message gets its sequence id when its batch is made.
    """

    __slots__ = ("_dropped", "_messages", "_splits", "known", "limits", "next_number", "size")

    def __init__(
        self,
        limits: BatchLimits,
        bucket_splits: Sequence[int] = (),
        dropped: Callable[[OutgoingMessage], None] = lambda message: None,
    ) -> None:
        """`bucket_splits` are the first hashes of the segment's buckets, without that of the first.

        `dropped` is called with each message whose caller no longer waits for it.
        """
        self._dropped = dropped
        self.limits = limits
        """The limits of batches from now on."""
        self._splits = tuple(bucket_splits)
        self._messages: deque[OutgoingMessage] = deque()
        self.size = 0
        """Bytes of the queued messages."""
        self.next_number = 0
        """The next sequence id."""
        self.known = -1
        """The last sequence id that the broker had when the producer was attached."""

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: OutgoingMessage) -> bool:
        """Append a message.  Returns whether a batch is full."""
        self._messages.append(message)
        self.size += message.size
        limits = self.limits
        return len(self._messages) >= limits.max_messages or self.size >= limits.max_bytes

    def take_all(self) -> list[OutgoingMessage]:
        """Remove all messages; returns those whose callers still wait."""
        taken: list[OutgoingMessage] = []
        for message in self._messages:
            if message.outcome.done():
                self._dropped(message)
            else:
                taken.append(message)
        self._messages.clear()
        self.size = 0
        return taken

    def prune(self) -> None:
        """Drop messages whose callers no longer wait."""
        kept = self.take_all()
        self._messages.extend(kept)
        self.size = sum(message.size for message in kept)

    def take_batches(self) -> list[list[OutgoingMessage]]:
        """Remove all messages that can be sent now; returns them in batches, in sending order."""
        ready = self._take_ready()
        if self._splits:
            return _batches_by_bucket(ready, self.limits, self._splits, self.known)
        return _batches_in_order(ready, self.limits, self.known)

    def _take_ready(self) -> list[OutgoingMessage]:
        """Remove the messages that can be sent now, and give them their sequence ids."""
        ready: list[OutgoingMessage] = []
        messages = self._messages
        number = self.next_number
        size = 0
        while messages:
            message = messages[0]
            unwanted = message.outcome.done()
            awaits = message.awaits
            if awaits is not None and not unwanted and not awaits.done():
                break  # No message overtakes one that waits for its transaction.
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


def _batches_in_order(
    messages: Sequence[OutgoingMessage], limits: BatchLimits, known: int
) -> list[list[OutgoingMessage]]:
    """The batches of a segment with one bucket."""
    max_messages, max_bytes = limits.max_messages, limits.max_bytes
    batches: list[list[OutgoingMessage]] = []
    batch: list[OutgoingMessage] = []
    count, size = max_messages, 0
    txn: tuple[int, int] | None = None
    for message in messages:
        size += message.size
        # A deduplicating broker drops or stores a SEND as a whole.  It may have some of the
        # messages up to `known`, depending on their keys, so each of these is sent alone.
        alone = message.number <= known or message.deliver_at_ms is not None
        if count >= max_messages or size > max_bytes or message.txn != txn or alone:
            batch = []
            batches.append(batch)
            count, size = 0, message.size
            txn = message.txn
            if alone:
                count = max_messages
        batch.append(message)
        count += 1
    return batches


def _batches_by_bucket(
    messages: Sequence[OutgoingMessage], limits: BatchLimits, splits: tuple[int, ...], known: int
) -> list[list[OutgoingMessage]]:
    """The batches of a segment with several buckets."""
    builder = _BatchBuilder(limits, known)
    for message in messages:
        builder.put(message, bisect_right(splits, message.bucket_hash))
    builder.close()
    return builder.batches


class _BatchBuilder:
    """Builds batches, one open batch for each bucket."""

    __slots__ = ("_known", "_limits", "_open", "_sizes", "_txn", "batches")

    def __init__(self, limits: BatchLimits, known: int) -> None:
        self.batches: list[list[OutgoingMessage]] = []
        self._limits = limits
        self._known = known
        self._open: dict[int, list[OutgoingMessage]] = {}
        self._sizes: dict[int, int] = {}
        self._txn: tuple[int, int] | None = None

    def put(self, message: OutgoingMessage, bucket: int) -> None:
        """Add a message to the batch of its bucket; first closes batches that exclude it."""
        # The broker may have some of the messages up to `known`, depending on their keys.
        alone = message.number <= self._known or message.deliver_at_ms is not None
        if alone or message.size > self._limits.max_bytes:
            self.close()
            self.batches.append([message])
            return
        if self._open and self._must_close(message, bucket):
            self.close()
        self._txn = message.txn
        self._open.setdefault(bucket, []).append(message)
        self._sizes[bucket] = self._sizes.get(bucket, 0) + message.size

    def _must_close(self, message: OutgoingMessage, bucket: int) -> bool:
        if message.txn != self._txn:
            return True
        batch = self._open.get(bucket)
        # Sequence ids of the user: another process may send the same messages again in other
        # batches.  A change of the bucket closes the batch, so that a deduplicating broker takes
        # no message for one it has because a later message of its batch is one.
        if batch is None:
            return message.sequence_id is not None
        limits = self._limits
        return (
            len(batch) >= limits.max_messages
            or self._sizes[bucket] + message.size > limits.max_bytes
            or (message.sequence_id is not None and len(self._open) > 1)
        )

    def close(self) -> None:
        """Close all open batches."""
        # All together, so that the highest sequence ids rise from batch to batch.
        self.batches += sorted(self._open.values(), key=_last_number)
        self._open.clear()
        self._sizes.clear()


def _last_number(batch: list[OutgoingMessage]) -> int:
    return batch[-1].number
