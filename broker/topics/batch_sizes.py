"""Messages of the batches that a subscription delivered, so that acknowledged ones are counted."""

from collections.abc import Sequence
from itertools import takewhile

from config.bounds import DELIVERED_BATCHES
from magnetar.protocol.ids import Position

_WORD = 2**64 - 1


class BatchSizes:
    """The messages of each delivered batch that are not acknowledged yet.

    An acknowledgement names an entry, and metrics count messages (Pulsar's rate of acknowledgements
    does too).  Entries of one message are not kept.  At most DELIVERED_BATCHES are: the oldest one
    goes first, and counts as one message then.
    """

    __slots__ = ("_batches",)

    def __init__(self) -> None:
        self._batches: dict[Position, tuple[int, int]] = {}
        """All messages of the batch, and those left."""

    def delivered(self, position: Position, messages: int, ack_set: Sequence[int]) -> None:
        """Note a delivered batch; with `ack_set`, only messages whose bits are in it are left."""
        self._batches[position] = (messages, _bits(ack_set) if ack_set else messages)
        if len(self._batches) > DELIVERED_BATCHES:
            del self._batches[next(iter(self._batches))]

    def take(self, position: Position) -> int:
        """The messages of an entry that is wholly acknowledged now."""
        return self._batches.pop(position, (1, 1))[1]

    def narrow(self, position: Position, left: int) -> int:
        """The messages acknowledged now, of a batch that has `left` ones left."""
        size, before = self._batches.get(position, (left, left))
        if before <= left:
            return 0
        self._batches[position] = (size, left)
        return before - left

    def take_all_but(self, position: Position, ack_set: Sequence[int]) -> int:
        """The messages acknowledged now, of a batch: those whose bits are not in `ack_set`."""
        size, before = self._batches.get(position, (0, 0))
        return self.narrow(position, before - max(0, min(before, size - _bits(ack_set))))

    def take_up_to(self, position: Position, entries: int) -> int:
        """The messages of `entries` ones that end with `position` and are acknowledged now."""
        # Only consumers that get entries in their order acknowledge so, thus they are sorted.
        found = list(takewhile(lambda each: each <= position, self._batches))
        messages = sum(self.take(each) for each in found)
        return messages + max(0, entries - len(found))

    def clear(self) -> None:
        """Forget all: the cursor was moved."""
        self._batches.clear()


def _bits(words: Sequence[int]) -> int:
    return sum((word & _WORD).bit_count() for word in words)
