"""`ReplicatedSubscriptions`: the subscriptions of one topic, where other clusters have them too."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

import structlog

from broker.replication.errors import LoggedReasons
from broker.replication.snapshots import NextRound, Snapshots
from broker.topics.compaction.reserved import require_of_clients
from broker.topics.source_positions import REPLICATOR_PREFIX
from broker.topics.subscription import Subscription
from broker.topics.subscription_markers import (
    Snapshot,
    SnapshotRequest,
    SnapshotResponse,
    SubscriptionMarker,
    SubscriptionUpdate,
    marker_entry,
    parse_marker,
)
from broker.topics.topic import Topic
from broker.topics.weak_references import require_present
from config.bounds import (
    PENDING_SNAPSHOTS,
    REPLICATION_RETRY_MAX_S,
    REPLICATION_RETRY_MIN_S,
    SUBSCRIPTION_UPDATES_WAITING,
)
from config.settings import Settings
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.message import payload_of
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.protocol.server_error import MagnetarError
from storage.ledger.store import LedgerError
from storage.managed_ledger.types import Entry
from storage.metadata.store import MetadataError

log = structlog.get_logger(__name__)

Connected = Callable[[], "frozenset[str] | None"]
"""The other clusters of a topic's list; None unless its replicators reach all of them."""


def _none() -> None:
    """Reach no other cluster: the topic is closed."""


@dataclass(slots=True)
class SnapshotCounts:
    """Counts of the snapshots of all topics of a broker."""

    completed: int = 0
    took_s: float = 0.0
    """The time that all completed snapshots took together."""
    timed_out: int = 0


class ReplicatedSubscriptions:
    """Takes snapshots of one topic, and moves its replicated subscriptions in all clusters.

    Here: a snapshot is taken when something was stored since the last one, once in a period.  When
    a subscription has passed one, the other clusters are told by an UPDATE.  There: the replicator
    to a cluster hands over the markers from it, in the order of the local log.
    """

    def __init__(
        self,
        topic: Topic,
        local: str,
        connected: Connected,
        settings: Settings,
        counts: SnapshotCounts,
        rng: random.Random,
    ) -> None:
        self._reference = ref(topic)
        self._local = local
        self._connected = connected
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._enabled = settings.enable_replicated_subscriptions
        self._period_s = settings.replicated_subscriptions_snapshot_frequency_ms / 1000
        self._snapshots = Snapshots(
            lambda: f"{rng.getrandbits(128):032x}",
            timeout_s=settings.replicated_subscriptions_snapshot_timeout_s,
            max_pending=PENDING_SNAPSHOTS,
        )
        self._updates = _Updates(topic)
        self._newest = EARLIEST
        """The newest entry that is no marker, as far as the replicators have read."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.cached_snapshots = (
            settings.replicated_subscriptions_snapshot_max_cached_per_subscription
            if self._enabled
            else 0
        )

    @property
    def _topic(self) -> Topic:
        return require_present(self._reference)

    @property
    def pending(self) -> int:
        """Snapshots that wait for answers of other clusters."""
        return 0 if self._closed else len(self._snapshots)

    @property
    def quiet(self) -> bool:
        """Whether it takes no snapshot and moves nothing until something happens."""
        return self._timer is None and not self.pending and not self._updates.busy

    def close(self) -> None:
        """Take no more snapshots, and leave subscriptions where they are."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._updates.close()
        # Its owner has it: a circle would wait for a garbage collection.
        self._connected = _none

    # What happens here

    def changed(self) -> None:
        """Take a snapshot soon: replication has begun, or a subscription is replicated now."""
        # Nothing tells which of the stored entries are markers: one snapshot too many is harmless.
        self._newest = max(self._newest, self._topic.ledger.last_confirmed)
        self._snapshots.renew()
        self._arm()

    def cluster_reached(self) -> None:
        """Take the snapshot that waited for a cluster, or for one that is to be left out now."""
        self._arm()

    def message_read(self, position: Position) -> None:
        """Note that a replicator read an entry that is no marker."""
        if position > self._newest:
            self._newest = position
            self._arm()

    def passed(self, subscription: str, snapshot: Snapshot) -> None:
        """Tell the other clusters that a subscription has consumed all up to a snapshot."""
        if not self._closed and self._connected() != frozenset():
            self._write(SubscriptionUpdate(subscription, snapshot.remote))

    def _arm(self) -> None:
        if self._timer is None and self._enabled and not self._closed:
            self._timer = self._loop.call_later(self._period_s, self._begin_snapshot)

    def _begin_snapshot(self) -> None:
        """Begin a snapshot if there is something to be included, and come again while it waits."""
        self._timer = None
        now_s, snapshots = self._loop.time(), self._snapshots
        self._counts.timed_out += snapshots.drop_late(now_s)
        topic, remotes = self._topic, self._connected()
        wanted = (
            remotes != frozenset()
            and not topic.sealed
            and any(each.cursor.replicated for each in topic.subscriptions.values())
        )
        # With a cluster that is not reached no snapshot would be complete.
        if wanted and remotes is not None:
            request_id = snapshots.begin(now_s, self._newest, remotes)
            if request_id is not None:
                self._write(SnapshotRequest(request_id, self._local))
        # While a cluster is away, `cluster_reached` comes when it is back, or leaves the list.
        waits = wanted and remotes is not None and not snapshots.includes(self._newest)
        if self.pending or waits:
            self._arm()

    # What other clusters wrote

    def may_receive(self, then: Callable[[], None]) -> bool:
        """Whether another marker may be received now; if not, `then` is called when it may."""
        return self._updates.has_room(then)

    def received(
        self, remote: str, entry: Entry, metadata: MessageMetadata, done: Callable[[], None]
    ) -> None:
        """Do what a marker from `remote` says, and call `done` then.

        It may come again: after a restart, and when its replicator attaches anew.
        """
        if self._enabled and not self._closed:
            try:
                marker = parse_marker(metadata.marker_type, bytes(payload_of(entry.data)))
            except MagnetarError as error:
                log.warning("marker_skipped", topic=str(self._topic.name), error=str(error))
            else:
                if isinstance(marker, SubscriptionUpdate):
                    self._update(remote, marker, done)
                    return
                if isinstance(marker, SnapshotRequest):
                    last = self._topic.ledger.last_confirmed
                    answer = SnapshotResponse(marker.snapshot_id, self._local, last)
                    self._write(answer, only_to=remote)
                elif isinstance(marker, SnapshotResponse) and marker.cluster == remote:
                    self._take_response(marker, entry.position)
        done()

    def _take_response(self, response: SnapshotResponse, here: Position) -> None:
        answer = self._snapshots.answer(
            response.snapshot_id, response.cluster, response.position, here, self._loop.time()
        )
        if isinstance(answer, NextRound):
            self._write(SnapshotRequest(answer.request_id, self._local))
        elif answer is not None:
            self._counts.completed += 1
            self._counts.took_s += answer.took_s
            # It is for this cluster's subscriptions, which read it in its place in the log.
            self._write(answer.snapshot, only_to=self._local)

    def _update(self, remote: str, update: SubscriptionUpdate, done: Callable[[], None]) -> None:
        position = update.positions.get(self._local)
        if position is None:
            done()
        else:
            self._updates.add(remote, update.subscription, position, done)

    def _write(self, marker: SubscriptionMarker, *, only_to: str | None = None) -> None:
        topic = self._topic
        try:
            entry = marker_entry(marker, topic.context.clock.now_ms(), only_to=only_to)
            topic.append_marker(entry)
        except MagnetarError as error:
            # A topic that has ended takes no marker; other losses are made up for by the next one.
            log.debug("marker_not_written", topic=str(topic.name), error=str(error))


class _Updates:
    """Moves subscriptions as other clusters say, one after the other."""

    def __init__(self, topic: Topic) -> None:
        self._reference = ref(topic)
        self._waiting: dict[tuple[str, str], tuple[Position, list[Callable[[], None]]]] = {}
        """The furthest position, and what to call there, by cluster and subscription."""
        self._held_up: dict[Callable[[], None], None] = {}
        """What to call when there is room for another subscription."""
        self._task: asyncio.Task[None] | None = None
        self._logged = LoggedReasons()

    @property
    def busy(self) -> bool:
        """Whether a subscription is being moved."""
        return self._task is not None

    def has_room(self, then: Callable[[], None]) -> bool:
        """Whether another subscription may wait; if not, `then` is called when it may."""
        if len(self._waiting) < SUBSCRIPTION_UPDATES_WAITING:
            return True
        self._held_up[then] = None
        return False

    def add(
        self, remote: str, subscription: str, position: Position, done: Callable[[], None]
    ) -> None:
        """Move a subscription; `done` is called when that is durable, or has failed.

        Call it while there `has_room`.
        """
        waiting = self._waiting.get((remote, subscription))
        furthest, callbacks = waiting or (position, [])
        self._waiting[remote, subscription] = max(furthest, position), callbacks
        if len(callbacks) < SUBSCRIPTION_UPDATES_WAITING:
            callbacks.append(done)
        else:
            # It is moved, unless the broker dies before.
            done()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Move no more: what waits comes again."""
        self._waiting.clear()
        self._held_up.clear()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            while self._waiting:
                remote, subscription = next(iter(self._waiting))
                position, callbacks = self._waiting.pop((remote, subscription))
                try:
                    await self._move(remote, subscription, position)
                except Exception as error:  # noqa: BLE001 - one subscription holds up no other
                    self._log(subscription, error)
                held_up, self._held_up = self._held_up, {}
                for call in (*callbacks, *held_up):
                    call()
        finally:
            self._task = None

    def _log(self, subscription: str, error: Exception) -> None:
        """Log why a subscription is not moved, each reason once until another one comes."""
        if self._logged.is_new(error):
            log.warning(
                "subscription_not_moved",
                subscription=subscription,
                error=str(error),
                exc_info=None if isinstance(error, MagnetarError) else error,
            )

    async def _move(self, remote: str, name: str, position: Position) -> None:
        topic = require_present(self._reference)
        sent = topic.replicator_cursors.get(REPLICATOR_PREFIX + remote)
        if sent is None or (began := sent.cursor.began) is None:
            # The cluster has left the list: nothing tells any more what it got.
            return
        subscription = topic.subscriptions.get(name)
        if subscription is None:
            require_of_clients(name)
            # What the other cluster never got was never to be consumed by this subscription.
            subscription = await self._make(topic, name, min(began, position))
            log.info("subscription_created_for_cluster", topic=str(topic.name), subscription=name)
        if subscription.cursor.replicated:
            await subscription.consumed_elsewhere(position, began)

    async def _make(self, topic: Topic, name: str, start: Position) -> Subscription:
        """Make a subscription, as soon as the store works: no other UPDATE may come."""
        pauses = Backoff(REPLICATION_RETRY_MIN_S, REPLICATION_RETRY_MAX_S)
        while True:
            try:
                return await topic.create_subscription(name, start, replicated=True)
            except (LedgerError, MetadataError) as error:
                self._log(name, error)
            await asyncio.sleep(pauses.pause_s())
