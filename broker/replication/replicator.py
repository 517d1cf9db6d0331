"""`Replicator`: sends the entries of one topic to one other cluster."""

from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from broker.replication.dispatch_rate import DispatchRate
from broker.replication.entries import Route, Skipped, outgoing, skipped
from broker.replication.errors import BROKER_FAILED, LoggedReasons, RemoteRefused
from broker.replication.on_demand_producer import OnDemandProducer
from broker.replication.refused_entries import POSITIONS_WENT_BACK, RefusedEntries
from broker.replication.remote_cluster import RemoteCluster
from broker.replication.remote_producer import ProducerOwner, RemoteProducer
from broker.replication.remote_schemas import RemoteSchemas
from broker.replication.send_turns import SendTurns
from broker.replication.sent_counts import SentCounts
from broker.replication.subscriptions import ReplicatedSubscriptions
from broker.topics.dispatch.entry_reader import EntryReader
from broker.topics.replication import OutboundStats
from broker.topics.subscription import Subscription
from broker.topics.subscription_markers import MARKER_TYPES
from broker.topics.topic import Topic
from config.bounds import REPLICATOR_WINDOW_ENTRIES
from magnetar.opening import completed
from magnetar.protocol.frame_error import FrameError
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.message import parse_metadata
from magnetar.protocol.names import TopicName
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.protocol.server_error import MagnetarError
from storage.managed_ledger.types import Entry

log = structlog.get_logger(__name__)


class Replicator(ProducerOwner):
    """Sends what is committed of one topic, or partition, to one other cluster, in order.

    Its position is a durable subscription without consumers, so that the stored entries are kept
    for it, and quotas and the time to live hold as for any other.  An entry is acknowledged when
    the other cluster has it.  Whatever fails, it goes on from the first entry that is not
    acknowledged: so the other cluster gets each entry, and may get it again, which it can tell by
    the position that comes with it.

    An entry that the other cluster refuses is sent again after a pause, which grows, and what is
    behind it only once it is stored: a cluster of Apache Pulsar stores what follows a refused
    entry, and takes this one for a duplicate afterwards.
    """

    def __init__(
        self,
        topic: Topic,
        subscription: Subscription,
        route: Route,
        cluster: RemoteCluster,
        schemas: RemoteSchemas,
        partitions: Callable[[TopicName], Awaitable[int]],
        subscriptions: ReplicatedSubscriptions,
        *,
        resends: bool,
    ) -> None:
        """`partitions` is asked for the number of those of a topic here; 0 for one without.

        `subscriptions` gets the markers that came from the other cluster.  `resends`: an earlier
        replicator may have sent what is not acknowledged.
        """
        self.route = route
        self.subscription = subscription
        self.counts = SentCounts(subscription)
        self._topic = topic
        self._cluster = cluster
        self._schemas = schemas
        self._partitions = partitions
        self._subscriptions = subscriptions
        self._turns = SendTurns(self.run)
        self._reader = EntryReader(
            topic.ledger,
            subscription.cursor.first_unacknowledged(EARLIEST),
            skip=subscription.cursor.first_unacknowledged,
            ready=self._turns.wake,
        )
        self._read_ahead = cluster.read_ahead.share(self._reader)
        self._producer = OnDemandProducer(
            self._make_producer(resends=resends),
            partial(self._make_producer, resends=True),
            subscription,
            self._left,
        )
        self._awaits_remote = False
        """Whether the next entry has to be sent: then nothing is read before it is attached."""
        self._rate = DispatchRate(topic, self._turns.wake)
        self._logged = LoggedReasons()
        """The last reason in the log why it is not attached."""
        self._refused = RefusedEntries(subscription.cursor)
        """While there are any, entries are sent one by one: not more than a window has."""
        self._sent_until = topic.ledger.last_confirmed
        """Entries up to here may have been sent before; those behind it certainly were not."""
        self._first_sent: set[Position] = set()
        """Messages in flight that were certainly not sent before."""
        self._stop_listening = (
            topic.ledger.on_append(self.run),
            topic.buffer.on_max_read_position(self._turns.wake),
        )

    @property
    def _names(self) -> dict[str, str]:
        return {"topic": str(self._topic.name), "cluster": self.route.remote}

    @property
    def producer(self) -> RemoteProducer:
        """The producer of now; another one takes its place when it has left."""
        return self._producer.current

    @property
    def connected(self) -> bool:
        """Whether it is attached at the other cluster."""
        return self._producer.is_attached

    @property
    def resting(self) -> bool:
        """Whether it has left the other cluster, as there is nothing to send."""
        return self._producer.has_left

    @property
    def failure(self) -> str | None:
        """Why nothing is sent; None while it sends, or was never refused."""
        self._refused.remove_acknowledged()
        error = self._refused.first_reason or (None if self.connected else self.producer.error)
        return None if error is None else str(error)

    def outbound_stats(self, now_s: float) -> OutboundStats:
        """What it has sent; `now_s` is the event loop's time."""
        producer = self.producer
        return self.counts.stats(
            now_s,
            connected=self.connected,
            oldest_s=producer.window.oldest_s,
            connection=producer.connection,
            connected_ms=producer.attached_ms,
            failure=self.failure,
        )

    def start(self) -> None:
        """Attach at the other cluster, and send."""
        self.apply_rate()
        self._producer.open()
        self._turns.wake()

    def _make_producer(self, *, resends: bool) -> RemoteProducer:
        context, topic = self._cluster.context, str(self._topic.name)
        return RemoteProducer(context, topic, self.route, self, resends=resends)

    async def close(self) -> None:
        """Send nothing more, and leave the other cluster; bounded in time.

        Cancelling it does not stop that.
        """
        self._turns.stop()
        await completed(self._close())

    async def _close(self) -> None:
        for stop in self._stop_listening:
            stop()
        self._rate.close()
        self._reader.close()
        self._read_ahead.release()
        await self._turns.ended()
        await self._producer.close()
        await self._refused.close()

    def apply_rate(self) -> None:
        """Send at the rate that the topic's policies give now."""
        self._rate.apply()

    # Events

    async def require_topic(self) -> None:
        """See `ProducerOwner`."""
        topic = self._topic.name.partitioned
        await self._cluster.require_partitions(topic, await self._partitions(topic))

    def attached(self) -> None:
        """Send from the first entry that is not acknowledged."""
        log.info("replicator_attached", **self._names)
        self._schemas.forget()
        self._first_sent.clear()
        self._reader.seek(self.subscription.cursor.first_unacknowledged(EARLIEST))
        self._refused.remove_acknowledged()
        if not self._refused:
            self._logged.forget()
        self._awaits_remote = False
        self._subscriptions.cluster_reached()
        self._turns.wake()

    def detached(self, error: MagnetarError) -> None:
        """Send no more until it is attached again."""
        log.warning("replicator_detached", error=str(error), **self._names)

    def refused(self, error: MagnetarError) -> None:
        """Log why it is not attached, each reason once until another one comes."""
        if self._logged.is_new(error):
            log.warning("replicator_refused", error=str(error), **self._names)

    def _left(self) -> None:
        """Go on with what came while it left: an entry, or the time of a snapshot."""
        self._subscriptions.cluster_reached()
        self.run()

    def stored(self, position: Position, *, before: bool) -> None:
        """Acknowledge an entry that the other cluster has.

        One that it claims to have had before it was sent at all is sent again: the positions of
        this topic went back, and it has another entry of this position.
        """
        first = position in self._first_sent
        self._first_sent.discard(position)
        if before and self._refused.is_certainly_missing(position):
            self._attach_again(self._refused.add_duplicate(position))
            return
        if before and first and self.producer.window.by_position:
            self.not_stored(position, RemoteRefused(POSITIONS_WENT_BACK, final=True))
            return
        self._refused.remove(position)
        self.subscription.skip(position)
        self._turns.wake()

    def not_stored(self, position: Position, error: RemoteRefused) -> None:
        """Send an entry again after a pause, alone."""
        self._refused.add(position, error)
        self._attach_again(error)

    def _attach_again(self, error: RemoteRefused) -> None:
        """Log why an entry is missing there, and attach again after a pause."""
        self.refused(error)
        self.producer.drain(error)

    def run(self) -> None:
        """Send what can be sent in one turn.

        Without a connection it deals with what is not to be sent, such as markers from the other
        cluster: that cluster may be lost.
        """
        if not self._turns.may_send:
            return
        if self._awaits_remote and not self.connected:
            self._producer.return_if_needed()
            return
        if not self._turns.send(self._send_next, self.counts):
            self._read_ahead.wait()

    # Sending

    def _send_next(self) -> bool:
        """Send or skip the next entry; False if there is none, or it has to wait."""
        reader = self._reader
        last = self._topic.max_read_position()
        if self.connected and not self._may_send():
            return False
        is_there = reader.fill(last, REPLICATOR_WINDOW_ENTRIES)
        if not (is_there and self._subscriptions.may_receive(self._turns.wake)):
            return False
        entry = reader.buffer[0]
        metadata = self._metadata_to_send(entry)
        if metadata is None:
            # Whatever was refused of it, nothing has to wait for it any more.
            self._refused.remove(entry.position)
            reader.buffer.popleft()
            return True
        if not self.connected:
            # No entries are kept in memory while the other cluster is away.
            self._awaits_remote = True
            reader.seek(entry.position)
            self._producer.return_if_needed()
            return False
        version = None
        if metadata.schema_version:
            version = self._schemas.known(metadata.schema_version)
            if version is None:
                learnt = self._schemas.learn(metadata.schema_version, self.producer)
                self._turns.wait_for(learnt, partial(self._schema_failed, entry.position))
                return False
        reader.buffer.popleft()
        self._send(entry, metadata, version)
        return True

    def _may_send(self) -> bool:
        """Whether the other cluster and the rates let another entry go; else `run` comes later."""
        producer, connection = self.producer, self.producer.connection
        most = REPLICATOR_WINDOW_ENTRIES if not self._refused else 1
        if connection is None or producer.is_draining:
            return False
        if not self._read_ahead.may_send_more(len(producer.window), most):
            return False
        if not connection.writable:
            self._turns.wait_for(connection.drained())
            return False
        return self._rate.allows()

    def _metadata_to_send(self, entry: Entry) -> MessageMetadata | None:
        """The metadata of an entry that is sent; None for one that is not, and is acknowledged.

        A marker from the other cluster is acknowledged when it was obeyed.
        """
        position = entry.position
        if self.subscription.cursor.is_acknowledged(position):
            return None
        try:
            metadata = parse_metadata(entry.data)
        except FrameError as error:
            log.warning("entry_not_replicated", position=position, error=str(error), **self._names)
            self.subscription.skip(position)
            return None
        if self._topic.is_aborted(entry):
            self.subscription.skip(position)
            return None
        if metadata.marker_type not in MARKER_TYPES:
            self._subscriptions.message_read(position)
        elif metadata.replicated_from == self.route.remote:
            done = partial(self.subscription.skip, position)
            self._subscriptions.received(self.route.remote, entry, metadata, done)
            return None
        ttl_s, now_ms = self._topic.policies.message_ttl_s, self.subscription.now_ms()
        why = skipped(metadata, self.route.remote, now_ms=now_ms, ttl_s=ttl_s)
        if why is not None:
            self.counts.skipped_expired += why is Skipped.EXPIRED
            self.subscription.skip(position)
            return None
        return metadata

    def _send(self, entry: Entry, metadata: MessageMetadata, version: bytes | None) -> None:
        data = outgoing(entry.data, metadata, entry.position, self.route.local, version)
        refusal = self.producer.refusal_of_size(str(self._topic.name), entry.position, len(data))
        if refusal is not None:
            self.not_stored(entry.position, refusal)
            return
        messages = metadata.num_messages_in_batch
        marker = metadata.marker_type in MARKER_TYPES
        self.producer.send(entry.position, data, messages, marker=marker)
        if entry.position > self._sent_until:
            self._sent_until = entry.position
            if not marker:
                self._first_sent.add(entry.position)
        self.counts.messages += messages
        self.counts.bytes += len(data)
        self._producer.used()
        self._rate.take(messages, len(data))

    def _schema_failed(self, position: Position, error: BaseException) -> None:
        if not self.connected:
            self.run()
        elif isinstance(error, MagnetarError):
            # An operator may have to change the other cluster's rules of compatibility.
            self.not_stored(position, RemoteRefused(str(error)))
        else:
            log.error("schema_not_replicated", exc_info=error, **self._names)
            self.not_stored(position, RemoteRefused(BROKER_FAILED))
