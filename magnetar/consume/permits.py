"""How many more messages a segment consumer asks its broker for.

Pure.  Rules:

- The broker sends an entry while it has a permit left, and takes one for each message of it, so a
  batch may bring more than was asked for.  All messages of a batch count, also those that were
  acknowledged before; Apache Pulsar does not count these.  So a broker may have more permits than
  is known here, never less: else a consumer would wait for ever.  When something comes though no
  permit should be left, what is known is put right.
- What the broker may send and what waits in the inbox are together at most the queue's size, but
  for batches.  Half of it is asked for at a time, when the application has taken as much.
"""

__all__ = ["Permits"]


class Permits:
    """Of one segment consumer."""

    __slots__ = ("_at_broker", "_size", "_threshold", "_waiting")

    def __init__(self, queue_size: int) -> None:
        """`queue_size` in messages, at least 1."""
        self._size = queue_size
        self._threshold = max(1, queue_size // 2)
        self._at_broker = 0
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Messages in the inbox."""
        return self._waiting

    def reset(self) -> None:
        """The broker knows nothing of this consumer any more, and nothing waits."""
        self._at_broker = 0
        self._waiting = 0

    def keep(self, messages: int) -> None:
        """So many wait in the inbox that were not counted."""
        self._waiting += messages

    def arrived(self, messages: int, kept: int) -> None:
        """An entry of so many messages came, of which `kept` go into the inbox."""
        self._at_broker = max(self._at_broker, 1) - messages
        self._waiting += kept

    def taken(self, messages: int = 1) -> bool:
        """So many left the inbox; whether to ask for more."""
        self._waiting -= messages
        return self._size - self._waiting - self._at_broker >= self._threshold

    def to_ask(self) -> int:
        """The permits to send with FLOW now; 0 if it is not time.  They are counted as sent."""
        # What a batch brought beyond the permits is a debt at the broker, which is filled up too.
        missing = self._size - self._waiting - self._at_broker
        if missing < self._threshold or self._waiting >= self._size:
            return 0
        self._at_broker += missing
        return missing
