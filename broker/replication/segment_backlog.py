"""`SegmentBacklog`: the entries of one segment that one other cluster does not have yet."""

from collections.abc import Callable

import structlog

from broker.replication.chunk_groups import ChunkGroups
from broker.replication.entries import Skipped, skipped
from broker.replication.remote_cluster import RemoteCluster
from broker.replication.sent_counts import SentCounts
from broker.replication.sent_positions import SentPositions
from broker.topics.deduplication import chunk_of
from broker.topics.dispatch.entry_reader import EntryReader
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from config.bounds import REPLICATED_CHUNKS_WAIT_S, REPLICATOR_WINDOW_ENTRIES
from magnetar.protocol.frame_error import FrameError
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.message import parse_metadata
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from storage.managed_ledger.types import Entry

log = structlog.get_logger(__name__)


class SegmentBacklog:
    """Reads what is committed of a segment, and acknowledges what the other cluster has.

    It passes over what that does not get.  The chunks of a message are acknowledged together.
    """

    def __init__(
        self,
        topic: Topic,
        subscription: Subscription,
        cluster: RemoteCluster,
        counts: SentCounts,
        sent: SentPositions,
        ready: Callable[[], None],
    ) -> None:
        """`ready` is called when an entry can be read after `next_entry` was None."""
        self._topic = topic
        self._subscription = subscription
        self._cluster = cluster.name
        self._counts = counts
        self._sent = sent
        self._chunks = ChunkGroups()
        self._reader = EntryReader(
            topic.ledger,
            subscription.cursor.first_unacknowledged(EARLIEST),
            skip=subscription.cursor.first_unacknowledged,
            ready=ready,
        )
        self._read_ahead = cluster.read_ahead.share(self._reader)
        self.sent_as: int | None = None
        """The incarnation of the topic as which the entries are sent; None before any is."""

    # Reading

    def seek(self, position: Position) -> None:
        """Go on with the first entry from here on that is not acknowledged."""
        self._reader.seek(self._subscription.cursor.first_unacknowledged(position))

    def next_entry(self) -> Entry | None:
        """The next entry that is committed, until `take`; None if there is none now."""
        filled = self._reader.fill(self._topic.max_read_position(), REPLICATOR_WINDOW_ENTRIES)
        return self._reader.buffer[0] if filled else None

    def take(self) -> Entry:
        """Read on behind the next entry."""
        entry = self._reader.buffer.popleft()
        self._sent.passed(entry.position)
        return entry

    def trim_read_ahead(self) -> None:
        """Drop what was read ahead if there is no memory for it: nothing is sent for now."""
        self._read_ahead.wait()

    def may_send_more(self, in_flight: int, most: int) -> bool:
        """See `ReadAheadShare`."""
        return self._read_ahead.may_send_more(in_flight, most)

    def close(self) -> None:
        """Read no more."""
        self._reader.close()
        self._read_ahead.release()

    # What is sent

    def metadata_to_send(self, entry: Entry) -> MessageMetadata | None:
        """The metadata of an entry that is sent; None for one that is not, and is acknowledged."""
        position = entry.position
        if self._subscription.cursor.is_acknowledged(position):
            return None
        try:
            metadata = parse_metadata(entry.data)
        except FrameError as error:
            self._log("entry_not_replicated", position, error=str(error))
            self.acknowledge(position)
            return None
        ttl_s, now_ms = self._topic.policies.message_ttl_s, self._subscription.now_ms()
        why = skipped(metadata, self._cluster, now_ms=now_ms, ttl_s=ttl_s)
        if why is None and metadata.marker_type:
            why = Skipped.MARKER
        if why is None and not self._topic.is_aborted(entry):
            return metadata
        if why is Skipped.EXPIRED:
            self._counts.skipped_expired += 1
            self.pass_over(position)
        else:
            self.acknowledge(position)
        return None

    def earlier_chunks(
        self, position: Position, metadata: MessageMetadata
    ) -> tuple[Position, ...] | None:
        """The chunks before the last one, of a whole message; none for what is no chunk.

        None for a chunk that waits for the last one of its message.
        """
        if chunk_of(metadata) is None:
            return ()
        found = self._chunks.add(
            position,
            metadata.uuid,
            metadata.chunk_id,
            metadata.num_chunks_from_msg,
            self._subscription.now_ms(),
        )
        self._pass_over_dropped()
        return found

    def give_up_chunks(self) -> None:
        """At the end of the log give up messages that never become whole.

        In a backlog the other chunks may follow, however old it is.
        """
        reader, topic = self._reader, self._topic
        if not reader.busy and reader.next_position > topic.ledger.last_confirmed:
            # Of a sealed segment that is all there ever is.
            oldest_ms = self._subscription.now_ms() - int(REPLICATED_CHUNKS_WAIT_S * 1000)
            self._chunks.give_up(None if topic.sealed else oldest_ms)
            self._pass_over_dropped()

    # Acknowledging

    def acknowledge(self, position: Position) -> None:
        """Acknowledge an entry, with the chunks before it."""
        cursor = self._subscription.cursor
        if self.sent_as is not None and cursor.sent_as not in (None, self.sent_as):
            # Its owner knows already that the topic has another incarnation.
            cursor.pass_over(position)
        for each in self._chunks.done(position):
            self._subscription.skip(each)

    def pass_over(self, position: Position) -> None:
        """Acknowledge an entry that the other cluster would get, and does not.

        That it has no copy of it left says nothing: consumers here may still get the message.
        """
        self._subscription.cursor.pass_over(position)
        self.acknowledge(position)

    def _pass_over_dropped(self) -> None:
        for position in self._chunks.dropped():
            why = "The other chunks of its message are missing: the producer has to send it again."
            self._log("chunk_not_replicated", position, error=why)
            self.pass_over(position)

    def _log(self, event: str, position: Position, *, error: str) -> None:
        log.warning(
            event,
            segment=str(self._topic.name),
            cluster=self._cluster,
            position=position,
            error=error,
        )
