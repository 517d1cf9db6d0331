"""`OutgoingEntry`: one entry of a segment, until all that is sent of it is written."""

from collections import deque
from collections.abc import Collection, Sequence
from functools import partial

from broker.replication.batch_opener import BatchOpener, unpacked_bytes
from broker.replication.segment_entries import Messages, Origin, divided_batch, outgoing_part
from broker.replication.segment_plan import MessageHashes
from broker.replication.segment_sender import Send
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from storage.managed_ledger.types import Entry


class OutgoingEntry:
    """The sends of an entry that are still to be written, in order.

    The chunks of a message are entries of their own, which are read and written one at a time: a
    chunked message may be larger than memory.  Nothing is held while it waits (see `wait`).
    """

    def __init__(
        self,
        entry: Entry,
        sends: Sequence[Send],
        origin: Origin,
        hashes: Sequence[MessageHashes] | None,
        messages: Messages | None,
    ) -> None:
        """`hashes` are of a batch that was opened.

        `messages` are those of one that is small enough to be divided on the loop.
        """
        self.position = entry.position
        self.sends = deque(sends)
        self._origin = origin
        self._hashes = hashes
        self._messages = messages
        self._divided: dict[tuple[int, int], bytes] = {}
        """The parts that were built in a thread, by segment and sequence id."""
        self._read: Entry | None = entry

    @property
    def can_divide(self) -> bool:
        """Whether its parts are built, or can be on the loop."""
        return bool(self._divided) or self._messages is not None

    def read(self, entry: Entry) -> None:
        """Take the entry of the next send."""
        self._read = entry

    def entry_of(self, send: Send) -> Entry | None:
        """The entry that a send is of; None if it has to be read."""
        read = self._read
        return read if read is not None and read.position == send.position else None

    def data_of(self, send: Send, entry: Entry, metadata: MessageMetadata) -> bytes:
        """The bytes to write for a send; `entry` is its entry.  Call if it `can_divide`."""
        divided = self._divided.get((send.segment_id, send.sequence))
        if divided is not None:
            return divided
        return outgoing_part(
            entry.data, metadata, send.part, self._origin, self._messages, self._hashes
        )

    async def divide(self, entry: Entry, metadata: MessageMetadata, batches: BatchOpener) -> None:
        """Build the parts of a batch in a thread."""
        sends = tuple(self.sends)
        parts = [each.part for each in sends]
        work = partial(divided_batch, entry.data, metadata, parts, self._origin, self._hashes)
        built = await batches.run(unpacked_bytes(entry.data, metadata), work)
        self._divided = {
            (send.segment_id, send.sequence): data for send, data in zip(sends, built, strict=True)
        }

    def wait(self) -> None:
        """Hold nothing: it has to be read and divided again."""
        self._read = self._messages = None
        self._divided = {}

    def drop(self, segment_ids: Collection[int]) -> None:
        """Write nothing more to these segments: their sessions have ended."""
        self.sends = deque(each for each in self.sends if each.segment_id not in segment_ids)
