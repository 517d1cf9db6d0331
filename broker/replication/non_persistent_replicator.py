"""`NonPersistentReplicator`: sends one non-persistent topic to one other cluster."""

from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from broker.replication.entries import Route, skipped, with_origin
from broker.replication.errors import LoggedReasons, RemoteRefused
from broker.replication.on_demand_producer import OnDemandProducer
from broker.replication.remote_cluster import RemoteCluster
from broker.replication.remote_producer import ProducerOwner, RemoteProducer
from broker.replication.remote_schemas import RemoteSchemas
from broker.replication.send_turns import SendTurns
from broker.replication.sent_counts import SentCounts
from broker.topics.replication import OutboundStats
from config.bounds import NON_PERSISTENT_QUEUE_BYTES, NON_PERSISTENT_QUEUE_ENTRIES
from magnetar.protocol.frame_error import FrameError
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_entry, parse_metadata, payload_of
from magnetar.protocol.names import TopicName
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)


class EntryQueue:
    """Entries that wait until they can be sent, within a bound."""

    expired_total = 0
    """No entry waits long enough to expire."""

    def __init__(self) -> None:
        self._entries: deque[tuple[bytes, MessageMetadata]] = deque()
        self._size_bytes = 0

    @property
    def backlog(self) -> int:
        """The number of entries that wait."""
        return len(self._entries)

    @property
    def first(self) -> tuple[bytes, MessageMetadata]:
        """The one that waits longest, with its metadata."""
        return self._entries[0]

    def add(self, entry: bytes, metadata: MessageMetadata) -> bool:
        """Add an entry; False, and it is not added, if there is no room."""
        size_bytes = self._size_bytes + len(entry)
        # The largest one has room too, alone.
        has_bytes = size_bytes <= NON_PERSISTENT_QUEUE_BYTES or not self._entries
        if self.backlog >= NON_PERSISTENT_QUEUE_ENTRIES or not has_bytes:
            return False
        self._entries.append((entry, metadata))
        self._size_bytes = size_bytes
        return True

    def remove(self) -> None:
        """Remove the first one."""
        entry, _ = self._entries.popleft()
        self._size_bytes -= len(entry)

    def clear(self) -> int:
        """Remove all; returns how many messages were in them."""
        messages = sum(metadata.num_messages_in_batch for _, metadata in self._entries)
        self._entries.clear()
        self._size_bytes = 0
        return messages


class NonPersistentReplicator(ProducerOwner):
    """Sends each message once, or drops it: nothing is stored, and nothing is sent again.

    Messages wait in a small queue while it attaches, while the socket takes no bytes, and while a
    schema is registered there.  What has no room is dropped, and so is what is published while the
    other cluster cannot be reached, as with Apache Pulsar.
    """

    def __init__(
        self,
        topic: TopicName,
        route: Route,
        cluster: RemoteCluster,
        schemas: RemoteSchemas,
        partitions: Callable[[TopicName], Awaitable[int]],
        after: Awaitable[object] | None,
    ) -> None:
        """`partitions` is asked for the number of those of a topic here; 0 for one without.

        It attaches when `after` is done: an earlier one of the same name has left by then.
        """
        self.route = route
        self._name = topic
        self._cluster = cluster
        self._schemas = schemas
        self._partitions = partitions
        self._after = after
        self._queue = EntryQueue()
        self.counts = SentCounts(self._queue)
        self._numbers = 0
        self._failed = False
        """Whether the last attempt to attach failed: then messages are dropped."""
        self._logged = LoggedReasons()
        self._turns = SendTurns(self._run)
        self._producer = OnDemandProducer(
            self._make_producer(), self._make_producer, self._queue, self._left
        )

    def _make_producer(self) -> RemoteProducer:
        context, topic = self._cluster.context, str(self._name)
        return RemoteProducer(context, topic, self.route, self, resends=False, stores=False)

    @property
    def _names(self) -> dict[str, str]:
        return {"topic": str(self._name), "cluster": self.route.remote}

    @property
    def connected(self) -> bool:
        """Whether it is attached at the other cluster."""
        return self._producer.is_attached

    @property
    def resting(self) -> bool:
        """Whether it has left the other cluster, as there is nothing to send."""
        return self._producer.has_left

    def start(self) -> None:
        """Attach at the other cluster."""
        self._producer.open()

    async def close(self) -> None:
        """Send nothing more, and leave the other cluster; bounded in time."""
        self._turns.stop()
        self._drop_all()
        await self._turns.ended()
        await self._producer.close()

    def outbound_stats(self, now_s: float) -> OutboundStats:
        """What it has sent; `now_s` is the event loop's time."""
        producer = self._producer.current
        return self.counts.stats(
            now_s,
            connected=self.connected,
            oldest_s=producer.window.oldest_s,
            connection=producer.connection,
            connected_ms=producer.attached_ms,
            failure=None if self.connected or producer.error is None else str(producer.error),
        )

    # Messages

    def send(self, entry: bytes) -> None:
        """Send an entry that was published, or drop it."""
        if self._turns.stopped:
            return
        try:
            metadata = parse_metadata(entry)
        except FrameError:
            # Consumers cannot read it either.
            self._count_dropped(1)
            return
        if skipped(metadata, self.route.remote) is not None:
            return
        if self._failed or not self._queue.add(entry, metadata):
            self._count_dropped(metadata.num_messages_in_batch)
            return
        self._producer.return_if_needed()
        self._run()

    def _run(self) -> None:
        """Send what waits, as far as that goes now."""
        while self._queue.backlog and self._may_send():
            entry, metadata = self._queue.first
            version = None
            if metadata.schema_version:
                version = self._schemas.known(metadata.schema_version)
                if version is None:
                    producer = self._producer.current
                    learnt = self._schemas.learn(metadata.schema_version, producer)
                    self._turns.wait_for(learnt, self._wait_failed)
                    return
            self._queue.remove()
            self._send(entry, metadata, version)

    def _left(self) -> None:
        """Come back for what was published while it left."""
        self._failed = False
        self._producer.return_if_needed()

    def _may_send(self) -> bool:
        producer = self._producer.current
        connection = producer.connection
        if (
            not self._turns.may_send
            or not self.connected
            or connection is None
            or len(producer.window) >= NON_PERSISTENT_QUEUE_ENTRIES
        ):
            return False
        if not connection.writable:
            self._turns.wait_for(connection.drained(), self._wait_failed)
            return False
        return True

    def _send(self, entry: bytes, metadata: MessageMetadata, version: bytes | None) -> None:
        producer, messages = self._producer.current, metadata.num_messages_in_batch
        sent = with_origin(metadata, self.route.local, version)
        data = build_entry(sent, bytes(payload_of(entry)))
        if len(data) > producer.largest_entry:
            self._count_dropped(messages)
            return
        self._numbers += 1
        producer.send(Position(0, self._numbers), data, messages)
        self.counts.messages += messages
        self.counts.bytes += len(data)
        self._producer.used()

    def _wait_failed(self, error: BaseException) -> None:
        if not isinstance(error, MagnetarError):
            log.error("schema_not_replicated", exc_info=error, **self._names)
        else:
            self.refused(RemoteRefused(str(error)))
        # The messages with this schema are not taken there.  Those that follow try again.
        self._drop_all()

    def _count_dropped(self, messages: int) -> None:
        self.counts.dropped += messages

    def _drop_all(self) -> None:
        self._count_dropped(self._queue.clear())

    # What the producer tells: see `ProducerOwner`

    async def require_topic(self) -> None:
        """See `ProducerOwner`.  An earlier replicator of this name has left first."""
        if self._after is not None:
            await self._after
            self._after = None
        topic = self._name.partitioned
        await self._cluster.require_partitions(topic, await self._partitions(topic))

    def attached(self) -> None:
        """Send what waits."""
        self._failed = False
        self._logged.forget()
        self._schemas.forget()
        log.info("replicator_attached", **self._names)
        # Its state is "attached" in the next turn.
        self._turns.wake()

    def detached(self, error: MagnetarError) -> None:
        """Keep what is published for the next attempt."""
        log.warning("replicator_detached", error=str(error), **self._names)

    def refused(self, error: MagnetarError) -> None:
        """Drop what waits, and what is published until it attaches."""
        if not self.connected:
            self._failed = True
            self._drop_all()
        if self._logged.is_new(error):
            log.warning("replicator_refused", error=str(error), **self._names)

    def stored(self, position: Position, *, before: bool) -> None:
        """Send more: the window has room."""
        self._run()

    def not_stored(self, position: Position, error: RemoteRefused) -> None:
        """Go on: nothing is sent again."""
        self.refused(error)
        self._run()
