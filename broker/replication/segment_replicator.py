"""`SegmentReplicator`: sends the entries of one segment to the segments of one other cluster."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Final

import structlog

from broker.replication.batch_opener import BatchOpener, is_large, unpacked_bytes
from broker.replication.dispatch_rate import DispatchRate
from broker.replication.errors import BROKER_FAILED, LoggedReasons, RemoteRefused
from broker.replication.outgoing_entry import OutgoingEntry
from broker.replication.remote_cluster import RemoteCluster
from broker.replication.remote_schemas import RemoteSchemas
from broker.replication.remote_sessions import RemoteSessions, SessionsOwner
from broker.replication.segment_backlog import SegmentBacklog
from broker.replication.segment_entries import (
    OpenedBatch,
    Origin,
    SourceRange,
    opened_batch,
    source_entry_of,
)
from broker.replication.segment_plan import SourceEntry, Unattached, Unplanned
from broker.replication.segment_sender import SegmentSender, Send
from broker.replication.send_turns import SendTurns
from broker.replication.sending_segment import SendingSegment
from broker.replication.sent_counts import SentCounts
from broker.replication.sent_positions import SentPositions
from broker.topics.replicated_ranges import ReplicatedRanges
from broker.topics.replication import OutboundStats
from broker.topics.segment_sources import SourceState
from broker.topics.source_topics import SourceTopics
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from config.bounds import (
    REPLICATION_RETRY_MAX_S,
    REPLICATION_RETRY_MIN_S,
    REPLICATOR_IDLE_S,
    REPLICATOR_WINDOW_ENTRIES,
)
from magnetar.opening import completed
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.key_hash import segment_hash, segment_hash_m1
from magnetar.protocol.message import parse_metadata
from magnetar.protocol.names import segment_name
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.protocol.server_error import MagnetarError
from magnetar.wire.connection import Connection
from storage.managed_ledger.types import Entry

log = structlog.get_logger(__name__)


class SegmentReplicator(SessionsOwner):
    """Sends what is committed of one segment to one other cluster, by a `SegmentSender`.

    Nothing is attached there as long as there is nothing to send: before, all ancestors of the
    segment are to be drained for that cluster (R2 of
    `../../docs/decisions/replicated-segments.md`).  Whatever fails is tried again after a pause,
    which grows, and statistics say why.
    """

    def __init__(
        self,
        topic: Topic,
        subscription: Subscription,
        local: str,
        cluster: RemoteCluster,
        schemas: RemoteSchemas,
        sources: SourceTopics,
        batches: BatchOpener,
        sent: SentPositions,
        drained: Callable[[Topic], None],
    ) -> None:
        """`local` is the name of this cluster.

        `drained` is called when the other cluster has all of the sealed segment.
        """
        self.subscription = subscription
        self.counts = SentCounts(subscription)
        self.segment: Final = segment_name(topic.name)
        self._topic = topic
        self._cluster = cluster
        self._schemas = schemas
        self._sending = SendingSegment(topic, subscription, local, sources)
        self._batches = batches
        self._sent = sent
        self._on_drained = drained
        self._range = _range_of(topic)
        self._loop = asyncio.get_running_loop()
        self._turns = SendTurns(self.run)
        wake = self._turns.wake
        self._rate = DispatchRate(topic, wake)
        self._backlog = SegmentBacklog(topic, subscription, cluster, self.counts, sent, wake)
        self._sessions = RemoteSessions(cluster.context, cluster.name)
        self._following: asyncio.Task[None] | None = None
        self._idle_check: asyncio.TimerHandle | None = None
        self._used_s = self._loop.time()
        self._pauses = Backoff(REPLICATION_RETRY_MIN_S, REPLICATION_RETRY_MAX_S)
        self._drained = False
        self._reasons = LoggedReasons()
        """Why nothing is sent to a segment there, or under None to any."""
        self._sender: SegmentSender | None = None
        self._begin_reading()
        self._stop_listening = (
            topic.ledger.on_append(self.run),
            topic.buffer.on_max_read_position(wake),
        )

    def _begin_reading(self) -> None:
        """Make the state of the entry that is sent next: nothing is known of it."""
        self._awaits_remote = False
        """Whether the next entry has to be sent: nothing is read before the layout is known."""
        self._unattached: frozenset[int] = frozenset()
        """The segments there without which the next entry cannot be sent."""
        self._full: Connection | None = None
        """A connection that takes no more bytes now."""
        self._opened: OpenedBatch | None = None
        self._outgoing: OutgoingEntry | None = None
        """The entry that is being sent: before that is done no other one is."""

    # Statistics

    @property
    def connected(self) -> bool:
        """Whether it follows the topic at the other cluster."""
        return self._sessions.is_following

    @property
    def resting(self) -> bool:
        """Whether it is not attached, as there is nothing to send."""
        return self._sessions.topic is None and self._following is None

    @property
    def failure(self) -> str | None:
        """Why nothing is sent; None while it sends, or was never refused."""
        return self._reasons.first

    def outbound_stats(self, now_s: float) -> OutboundStats:
        """What it has sent; `now_s` is the event loop's time."""
        sessions = self._sessions
        return self.counts.stats(
            now_s,
            connected=self.connected,
            oldest_s=sessions.oldest_s,
            connection=sessions.connection,
            connected_ms=sessions.attached_ms,
            failure=self.failure,
        )

    # For its owner

    def start(self) -> None:
        """Send what there is."""
        self.apply_rate()
        self._idle_check = self._loop.call_later(REPLICATOR_IDLE_S, self._leave_if_idle)
        self._turns.wake()

    def apply_rate(self) -> None:
        """Send at the rate that the topic's policies give now."""
        self._rate.apply()

    def ancestor_drained(self) -> None:
        """Look again whether all ancestors are drained."""
        self._sending.ancestor_drained()

    def incarnation_changed(self, incarnation: int | None) -> None:
        """Begin anew unless the other cluster knows the topic by this number already."""
        source = self._sending.source
        if source is not None and source.incarnation != incarnation and not self._turns.stopped:
            self._begin_anew("the topic here has another incarnation")

    async def close(self) -> None:
        """Send nothing more, and leave the other cluster; bounded in time.

        Cancelling it does not stop that.
        """
        self._turns.stop()
        await completed(self._close())

    async def _close(self) -> None:
        for stop in self._stop_listening:
            stop()
        if self._idle_check is not None:
            self._idle_check.cancel()
        self._rate.close()
        self._backlog.close()
        await self._turns.ended()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))
        self._sender = None
        await self._sessions.close()

    # Events

    def wake(self) -> None:
        """Look soon whether there is something to send."""
        self._turns.wake()

    def layout_changed(self, *, anew: bool) -> None:
        """Send to the segments of the newest layout there (R4)."""
        remote = self._sessions.topic
        if remote is None or self._turns.stopped:
            return
        layout, sender = remote.segments, self._sender
        if sender is None:
            own = (self._range.hash_start, self._range.hash_end)
            self._sender = SegmentSender(own, layout)
            log.info("segment_replicator_attached", **self._names)
        elif anew or (layout.epoch <= sender.layout.epoch and layout != sender.layout):
            # Another layout of an epoch that is known is not of the topic that is known.
            self._begin_anew("the topic there was deleted and created again")
            return
        else:
            self._drop_sends(sender.learn(layout))
            self._sessions.keep(layout.ids)
        self._reasons.keep(layout.ids)
        self._rewind()

    def refused(self, error: MagnetarError, segment_id: int | None = None) -> None:
        """Note why nothing is sent, and log each reason once until another one comes."""
        if self._reasons.is_new(error, segment_id):
            log.warning("segment_replicator_refused", error=str(error), **self._names)

    def failed(self, error: Exception) -> None:
        """See `SessionOwner`."""
        if self._turns.stopped:
            return
        # What counts as sent may not have been.
        self._begin_anew("it failed")
        self._note_failure(error)
        if self._turns.may_send:
            self._pause(self._wait_to_retry())

    async def source_state(self) -> SourceState:
        """See `SessionOwner`."""
        state = await self._sending.state()
        if state is None:
            self._begin_anew("the topic here has another incarnation")
            raise RemoteRefused(f"{self.segment.parent} has a new incarnation: attach anew.")
        return state

    async def accept(self, segment_id: int, stored: ReplicatedRanges) -> None:
        """See `SessionOwner`."""
        if self._topic.sealed and self.subscription.at_end:
            # Its children may know that before `run` does, and have told the other cluster.
            self._sent.drained()
        if self._sent.went_back(stored, self.subscription.cursor.mark_delete):
            self._renew_incarnation(f"segment {segment_id} there has more than was sent")

    async def fenced(self, state: SourceState) -> None:
        """See `SessionOwner`.  Epochs go back with a restore too (R12)."""
        if await self._sending.is_newest(state):
            self._renew_incarnation("a newer layout or owner is known there, and none here")

    def _renew_incarnation(self, why: str) -> None:
        """Send the topic anew, as one that the other cluster does not know (R12)."""
        source = self._sending.source
        if source is None:
            return
        log.warning("segment_positions_went_back", reason=why, **self._names)
        # This ends the attempt as well in which it is called.
        self._begin_anew("positions here went back, as after a restore")
        error = RemoteRefused(
            f"Positions of {self.segment} went back, as after a restore ({why} in cluster "
            f"{self._cluster.name!r}): its topic gets a new incarnation, and is sent anew."
        )
        self.refused(error)
        if self._turns.may_send:
            self._pause(self._renew(source.incarnation))
        raise error

    async def _renew(self, incarnation: int) -> None:
        await self._sending.renew_incarnation(incarnation)
        # A cluster that says so of each incarnation must not have them drawn without end.
        await self._wait_to_retry()

    def session_begun(self, segment_id: int, stored: ReplicatedRanges) -> None:
        """See `SessionOwner`."""
        if self._sender is not None and segment_id in self._sender.layout.ids:
            self._drop_sends((segment_id,))
            # The cluster may have been restored, to before it got them.
            self._schemas.forget()
            self._sender.attached(segment_id, stored)
            self._rewind()

    def session_ended(self, segment_id: int, error: MagnetarError) -> None:
        """See `SessionOwner`."""
        log.info(
            "segment_session_ended", remote_segment=segment_id, error=str(error), **self._names
        )
        if self._sender is not None:
            self._drop_sends((segment_id,))
            self._sender.detached(segment_id)
            self._rewind()

    def _drop_sends(self, segment_ids: Collection[int]) -> None:
        """Write nothing more to these segments, whose sessions have ended."""
        if self._outgoing is not None:
            self._outgoing.drop(segment_ids)
            if not self._outgoing.sends:
                self._outgoing = None

    def stored(self, segment_id: int) -> None:
        """See `SessionOwner`.  The cursor moves over an entry when all of it is stored (R9)."""
        if self._sender is None:
            return
        self._reasons.forget(segment_id)
        self._reasons.forget()
        self._pauses.reset()
        done = self._sender.answered(segment_id)
        if done is not None:
            self._backlog.acknowledge(done)
        self._turns.wake()

    def run(self) -> None:
        """Send what can be sent in one turn.

        Without a connection it deals with what is not to be sent.
        """
        if not self._turns.may_send:
            return
        try:
            self._send_some()
        except Exception as error:  # noqa: BLE001 - called by the ledger, and tried again
            self.failed(error)

    def _send_some(self) -> None:
        if self._awaits_remote and self._sender is None:
            self._look_for_end()
        elif not self._turns.send(self._send_next, self.counts):
            self._look_for_end()
            self._backlog.trim_read_ahead()

    # Sending

    @property
    def _names(self) -> dict[str, str]:
        return {"segment": str(self.segment), "cluster": self._cluster.name}

    def _send_next(self) -> bool:
        """Send or skip the next entry; False if there is none, or it has to wait."""
        sender = self._sender
        if sender is not None and not self._may_send(sender):
            # Others may send meanwhile, who need the memory.
            self._opened = None
            if self._outgoing is not None:
                self._outgoing.wait()
            return False
        if self._outgoing is not None:
            return self._send_more(self._outgoing)
        return self._begin_next(sender)

    def _begin_next(self, sender: SegmentSender | None) -> bool:
        """Begin with the next entry, or skip it; False if there is none, or it has to wait."""
        entry = self._backlog.next_entry()
        if entry is None:
            return False
        metadata = self._backlog.metadata_to_send(entry)
        if metadata is None:
            self._skip_next(sender)
            return True
        if sender is None:
            # No entries are kept in memory while the other cluster is away.
            self._awaits_remote = True
            self._backlog.seek(entry.position)
            self._follow_topic()
            return False
        source_entry = self._source_entry(entry, metadata)
        if source_entry is None:
            self._skip_next(sender)
            return True
        if not self._knows_schema(metadata):
            return False
        return self._take(sender, entry, metadata, source_entry)

    def _skip_next(self, sender: SegmentSender | None) -> None:
        """Read on behind the next entry, of which nothing more is to be sent."""
        position = self._backlog.take().position
        if sender is not None:
            sender.skip(position)

    def _knows_schema(self, metadata: MessageMetadata) -> bool:
        """Whether the version there of an entry's schema is known; else `run` comes when it is."""
        version, remote = metadata.schema_version, self._sessions.topic
        if version and remote is not None and self._schemas.known(version) is None:
            self._pause(self._schemas.learn(version, remote))
            return False
        return True

    def _may_send(self, sender: SegmentSender) -> bool:
        """Whether the other cluster and the rates let another entry go; else `run` comes later."""
        window = sender.in_flight, REPLICATOR_WINDOW_ENTRIES
        if self._outgoing is None and not self._backlog.may_send_more(*window):
            return False
        if self._unattached - sender.attached_to:
            return False
        full, self._full = self._full, None
        if full is not None and not full.writable:
            self._pause(full.drained())
            return False
        return self._rate.allows()

    def _source_entry(self, entry: Entry, metadata: MessageMetadata) -> SourceEntry | None:
        """The entry for the plan; None for a chunk before the last one of its message."""
        earlier = self._backlog.earlier_chunks(entry.position, metadata)
        if earlier is None:
            return None
        opened = self._opened
        if opened is not None and opened.source_entry.position == entry.position:
            return opened.source_entry
        return source_entry_of(metadata, entry.position, self._range, earlier=earlier)

    def _take(
        self,
        sender: SegmentSender,
        entry: Entry,
        metadata: MessageMetadata,
        source_entry: SourceEntry,
    ) -> bool:
        """Send what the other cluster lacks of an entry; False if that has to wait."""
        planned = sender.take(source_entry)
        if isinstance(planned, Unplanned):
            self._open(entry, metadata)
            return self._turns.may_send
        if isinstance(planned, Unattached):
            self._unattached, self._opened = planned.segment_ids, None
            self._sessions.begin(sender.layout, planned.segment_ids, self)
            return False
        self._backlog.take()
        self._sent.sent(entry.position)
        opened, self._opened = self._opened, None
        if planned.done:
            self._backlog.acknowledge(entry.position)
        if not planned.sends:
            return True
        source = self._sending.source
        assert source is not None, "parts are sent by a sender, which has a source"
        is_opened = opened is not None and opened.messages is not None
        self._outgoing = OutgoingEntry(
            entry,
            planned.sends,
            Origin(source, self._schemas.known(metadata.schema_version)),
            source_entry.hashes if is_opened else None,
            None if opened is None or is_large(entry.data, metadata) else opened.messages,
        )
        return self._send_more(self._outgoing)

    def _send_more(self, outgoing: OutgoingEntry) -> bool:
        """Write the parts of an entry, or its next chunk; False if that has to wait."""
        while outgoing.sends:
            send = outgoing.sends[0]
            entry = outgoing.entry_of(send)
            if entry is None:
                self._pause(self._read(outgoing, send))
                return False
            metadata = parse_metadata(entry.data)
            chosen = None if send.part is None else send.part.indexes
            if chosen is not None and not outgoing.can_divide:
                self._pause(outgoing.divide(entry, metadata, self._batches))
                return False
            outgoing.sends.popleft()
            messages = metadata.num_messages_in_batch if chosen is None else len(chosen)
            self._send_part(send, outgoing.data_of(send, entry, metadata), messages)
            if send.part is None:
                break  # the other chunks in later turns
        if not outgoing.sends and self._outgoing is outgoing:
            self._outgoing = None
        return True

    async def _read(self, outgoing: OutgoingEntry, send: Send) -> None:
        """Read the entry of a send.  If it is gone its message is given up."""
        entries = await self._topic.ledger.read(send.position, max_entries=1, max_bytes=1)
        if entries and entries[0].position == send.position:
            outgoing.read(entries[0])
        elif self._outgoing is outgoing:
            self._backlog.pass_over(outgoing.position)
            gone = RemoteRefused(
                f"The entry {send.position.text} of {self.segment} was acknowledged and deleted "
                "before it was sent, as it expired or was skipped: its message is left out."
            )
            for segment_id in {each.segment_id for each in outgoing.sends}:
                self._sessions.producers[segment_id].end_session(gone)

    def _send_part(self, send: Send, data: bytes, messages: int) -> None:
        producer = self._sessions.producers[send.segment_id]
        connection = producer.connection
        assert connection is not None, "sends are dropped when their session ends"
        refusal = producer.refusal_of_size(str(self.segment), send.position, len(data))
        if refusal is not None:
            producer.end_session(refusal)
            return
        producer.send(send.sequence, data, messages)
        if not connection.writable:
            self._full = connection
        self.counts.messages += messages
        self.counts.bytes += len(data)
        self._rate.take(messages, len(data))
        self._used_s = self._loop.time()

    def _open(self, entry: Entry, metadata: MessageMetadata) -> None:
        """Open a batch that is for several segments or entry buckets there."""
        if is_large(entry.data, metadata):
            self._pause(self._open_in_thread(entry, metadata))
        else:
            opened = opened_batch(entry.data, metadata, entry.position, self._range)
            self._note_opened(opened)

    async def _open_in_thread(self, entry: Entry, metadata: MessageMetadata) -> None:
        work = partial(opened_batch, entry.data, metadata, entry.position, self._range)
        size_bytes = unpacked_bytes(entry.data, metadata)
        self._note_opened(await self._batches.run(size_bytes, work))

    def _note_opened(self, opened: OpenedBatch) -> None:
        if opened.messages is None:
            log.warning(
                "batch_not_opened",
                position=opened.source_entry.position,
                error="It cannot be read, and goes whole, by its first key: consumers of other "
                "keys there do not get it in order. Look for the producer that wrote it.",
                **self._names,
            )
        else:
            self.counts.opened_batches += 1
        self._opened = opened

    def _look_for_end(self) -> None:
        """Give up chunks of messages that never become whole, and note if the segment is drained.

        What is acknowledged without being sent, as it expired, ends a sealed segment as well.
        """
        topic = self._topic
        self._backlog.give_up_chunks()
        if topic.sealed and self.subscription.at_end and not self._drained:
            self._drained = True
            self._sent.drained()
            self._leave()
            self._on_drained(topic)

    def _rewind(self) -> None:
        """Read from where the sender wants to go on."""
        self._awaits_remote, self._unattached = False, frozenset()
        if self._sender is not None:
            self._backlog.seek(self._sender.read_from)
            self._turns.wake()

    # Attaching

    def _follow_topic(self) -> None:
        if self._following is None and self._sessions.topic is None and not self._turns.stopped:
            self._following = self._loop.create_task(self._begin())
            self._following.add_done_callback(self._followed)

    def _followed(self, task: "asyncio.Task[None]") -> None:
        self._following = None
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.failed(error)

    async def _begin(self) -> None:
        """Follow the topic there once the ancestors of the segment are drained (R2)."""
        source = await self._sending.begin(self._note_failure)
        self._backlog.sent_as = source.incarnation
        self._schemas.forget()
        self._sessions.follow(str(self.segment.parent), source, self)

    async def make_topic(self) -> None:
        """See `TopicFollower`."""
        active = await self._sending.active_segments()
        await self._cluster.make_scalable_topic(self.segment.parent, active)

    def _leave(self) -> None:
        """End all sessions, and follow the topic there no more."""
        self._sender = self._outgoing = None
        # Else nobody would follow it again for the next entry.
        self._awaits_remote = False
        self._sessions.leave()
        self._reasons.keep(())

    def _begin_anew(self, reason: str) -> None:
        """End all sessions, and begin with the cursor."""
        log.warning("segment_replicator_begins_anew", reason=reason, **self._names)
        self._leave()
        self._backlog.seek(EARLIEST)
        self._turns.wake()

    def _leave_if_idle(self) -> None:
        self._look_for_end()
        if self.subscription.backlog or self._sessions.topic is None:
            self._used_s = self._loop.time()
        wait_s = self._used_s + REPLICATOR_IDLE_S - self._loop.time()
        if wait_s <= 0:
            log.info("segment_replicator_idle", **self._names)
            self._leave()
            wait_s = REPLICATOR_IDLE_S
        self._idle_check = self._loop.call_later(wait_s, self._leave_if_idle)

    # Waiting

    def _pause(self, until: Coroutine[None, None, None]) -> None:
        """Send nothing until this has ended."""
        self._turns.wait_for(until, self._wait_failed)

    def _wait_failed(self, error: BaseException) -> None:
        self._note_failure(error)
        self._pause(self._wait_to_retry())

    async def _wait_to_retry(self) -> None:
        """Wait, longer each time until the other cluster stores something."""
        await asyncio.sleep(self._pauses.pause_s())

    def _note_failure(self, error: BaseException) -> None:
        if not isinstance(error, MagnetarError):
            log.error("segment_replicator_failed", exc_info=error, **self._names)
            error = RemoteRefused(BROKER_FAILED)
        self.refused(error)


def _range_of(topic: Topic) -> SourceRange:
    """The hashes of a segment, and the hash by which clients choose one, here and there.

    The policy is not changed while the topic is replicated.
    """
    segment = segment_name(topic.name)
    hash_of = segment_hash_m1 if topic.policies.replication_key_hash == "low" else segment_hash
    return SourceRange(segment.hash_start, segment.hash_end, hash_of)
