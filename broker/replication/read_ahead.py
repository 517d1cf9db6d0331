"""`ReadAhead`: the entries that replicators to one cluster hold and cannot send now."""

from broker.topics.dispatch.entry_reader import EntryReader
from config.bounds import REPLICATION_READ_AHEAD_BYTES


class ReadAhead:
    """A budget for all replicators to one cluster.

    What a replicator has read waits while the socket takes no bytes, or answers are missing.  Above
    the budget it is dropped, and read again when it can be sent.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        """The bytes that all replicators hold which wait."""

    def share(self, reader: EntryReader) -> "ReadAheadShare":
        """The share of one replicator."""
        return ReadAheadShare(self, reader)

    def has_room(self, more_bytes: int) -> bool:
        """Whether so many bytes more may be held."""
        return self.held_bytes + more_bytes <= REPLICATION_READ_AHEAD_BYTES


class ReadAheadShare:
    """The entries that one replicator holds while it waits."""

    __slots__ = ("_all", "_dropped", "_held_bytes", "_reader")

    def __init__(self, all_of_them: ReadAhead, reader: EntryReader) -> None:
        self._all = all_of_them
        self._reader = reader
        self._held_bytes = 0
        self._dropped = False
        """Whether entries were dropped the last time."""

    def wait(self) -> None:
        """Count what the reader holds, or drop it: nothing more is sent for now."""
        self.release()
        if not (buffer := self._reader.buffer):
            return
        size_bytes = sum(len(entry.data) for entry in buffer)
        self._dropped = not self._all.has_room(size_bytes)
        if self._dropped:
            self._reader.seek(self._reader.next_position)
        else:
            self._held_bytes = size_bytes
            self._all.held_bytes += size_bytes

    def may_send_more(self, in_flight: int, most: int) -> bool:
        """Whether another entry may be in flight, of so many at most.

        If entries were dropped, not before half of them are answered: what is read again is worth
        it then.
        """
        return in_flight < most and (not self._dropped or in_flight <= most // 2)

    def release(self) -> None:
        """Count nothing: entries are sent, or were given up."""
        self._all.held_bytes -= self._held_bytes
        self._held_bytes = 0
