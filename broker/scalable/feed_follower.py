"""Follows topics at all other brokers, over the channel to each of them."""

import asyncio
import contextlib
from functools import partial

import structlog

from broker.placement import BrokerAddress, Placement
from broker.placement.peer_failed import PeerFailed
from broker.placement.placement import PeerConnection
from broker.scalable.feed import FEED_EVENT, FeedRequest, FollowTopic, UnfollowTopic
from broker.scalable.mirror import MalformedFeed, Mirrors
from config.bounds import FEED_RETRY_MAX_S, FEED_RETRY_S, FEED_SNAPSHOT_WAIT_S, PEER_TIMEOUT_S
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)


class FeedFollower:
    """Applies the events of followed topics at all other live brokers to the mirrors.

    A lost connection is opened again after a pause, and each topic gets a new snapshot; until then
    the last reports stand.  A broker that is not live any more has no segments loaded.
    """

    def __init__(self, placement: Placement, mirrors: Mirrors) -> None:
        self._placement = placement
        self._mirrors = mirrors
        self._tasks = BackgroundTasks(log)
        self._peers: dict[str, asyncio.Task[None]] = {}
        self._connected: dict[str, PeerConnection] = {}
        self._changed: asyncio.Future[None] | None = None
        self._requests = BackgroundTasks()
        self._forget = placement.on_brokers(self._brokers_changed)

    async def follow(self, topic: TopicName) -> None:
        """Follow a topic at every live broker, also at those that have none of its segments.

        Returns when all have sent a snapshot, or after FEED_SNAPSHOT_WAIT_S.  Later ones are
        applied all the same.
        """
        self._mirrors.follow(topic)
        self._brokers_changed()
        for connection in list(self._connected.values()):
            self._send_soon(connection, FollowTopic(topic))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FEED_SNAPSHOT_WAIT_S):
                while not all(self._mirrors.has_heard(peer, topic) for peer in self._peers):
                    await self._next_change()

    def unfollow(self, topic: TopicName) -> None:
        """Follow a topic no more: another broker leads it, or none."""
        self._mirrors.unfollow(topic)
        for connection in list(self._connected.values()):
            self._send_soon(connection, UnfollowTopic(topic))

    async def stop(self) -> None:
        """Follow nothing any more."""
        self._forget()
        self._peers.clear()
        await self._tasks.stop()
        await self._requests.end()

    def _brokers_changed(self) -> None:
        live = self._placement.brokers
        for gone in self._peers.keys() - live.keys():
            self._peers.pop(gone).cancel()
            self._mirrors.owner_gone(gone)
            self._note_change()
        if not self._mirrors.followed:
            return
        for broker_id, address in live.items():
            if broker_id != self._placement.broker_id and broker_id not in self._peers:
                following = partial(self._keep_following, address)
                self._peers[broker_id] = self._tasks.keep("segment_feed", following)

    async def _keep_following(self, peer: BrokerAddress) -> None:
        # Any other error is a defect here: the task fails, and begins again with new snapshots.
        backoff = Backoff(FEED_RETRY_S, FEED_RETRY_MAX_S)
        while True:
            try:
                connection = await self._placement.connect(peer)
                backoff.reset()
                await self._follow_all(peer.broker_id, connection)
            except (PeerFailed, MalformedFeed) as error:
                log.info("feed_lost", broker=peer.broker_id, error=repr(error))
            await asyncio.sleep(backoff.pause_s())

    async def _follow_all(self, broker_id: str, connection: PeerConnection) -> None:
        connection.on_event(FEED_EVENT, lambda message: self._apply(broker_id, message))
        try:
            # First: topics that are followed from now on are asked for by `follow`.
            self._connected[broker_id] = connection
            for topic in self._mirrors.followed:
                self._send_soon(connection, FollowTopic(topic))
            await connection.wait_lost()
        finally:
            self._connected.pop(broker_id, None)
            connection.on_event(FEED_EVENT, None)
            # So the other broker forgets what was followed, and the next connection begins anew.
            await connection.close()

    def _apply(self, broker_id: str, message: object) -> None:
        self._mirrors.apply(broker_id, message)
        self._note_change()

    def _send_soon(self, connection: PeerConnection, request: FeedRequest) -> None:
        self._requests.start(_send(connection, request))

    def _note_change(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def _next_change(self) -> None:
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)


async def _send(connection: PeerConnection, request: FeedRequest) -> None:
    try:
        await connection.ask(request, timeout_s=PEER_TIMEOUT_S)
    except MagnetarError as error:
        # The next connection asks for everything that is followed then.
        log.info("feed_request_failed", topic=str(request.topic), error=str(error))
        await connection.close()
