"""Following topics at other brokers: one connection to each of them, for as long as there are any.

Rules:

- A connection begins with what is followed and gets a snapshot of each topic; a lost one is made
  again, with a bounded pause, and means new snapshots.  Until then what was told last stands.
- A broker that is no longer among the live ones has nothing any more.
- A defect of this broker is told as one; it costs no more than the connection and new snapshots.
- A topic is followed at every broker, so what is loaded by surprise is heard of too.
"""

import asyncio
import contextlib
import json
from functools import partial

import aiohttp
import structlog

from broker.placement import BrokerAddress, Placement
from broker.scalable.feed import FEED_PATH
from broker.scalable.mirror import MalformedFeed, Mirrors
from config.bounds import (
    FEED_BATCH_BYTES,
    FEED_CONNECT_S,
    FEED_HEARTBEAT_S,
    FEED_RETRY_MAX_S,
    FEED_RETRY_S,
    FEED_SNAPSHOT_WAIT_S,
)
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.names import TopicName

log = structlog.get_logger(__name__)


class FeedFollower:
    """Keeps a connection to every other broker and applies what their feeds say to the mirrors."""

    def __init__(self, placement: Placement, mirrors: Mirrors) -> None:
        self._placement = placement
        self._mirrors = mirrors
        self._http: aiohttp.ClientSession | None = None
        self._tasks = BackgroundTasks(log)
        self._peers: dict[str, asyncio.Task[None]] = {}
        self._connected: dict[str, aiohttp.ClientWebSocketResponse] = {}
        self._heard: asyncio.Future[None] | None = None
        self._says = BackgroundTasks()
        self._forget = placement.on_brokers(self._look_at_brokers)

    async def follow(self, topic: TopicName) -> None:
        """Follow a topic everywhere; returns when every live broker has told of it, or too late.

        Who tells later is heard all the same.
        """
        self._mirrors.follow(topic)
        self._look_at_brokers()
        for socket in list(self._connected.values()):
            self._say_soon(socket, "follow", topic)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FEED_SNAPSHOT_WAIT_S):
                while not all(self._mirrors.has_heard(peer, topic) for peer in self._peers):
                    await self._next_word()

    def unfollow(self, topic: TopicName) -> None:
        """The topic is led by somebody else, or by nobody."""
        self._mirrors.unfollow(topic)
        for socket in list(self._connected.values()):
            self._say_soon(socket, "unfollow", topic)

    async def stop(self) -> None:
        """Follow nothing any more."""
        self._forget()
        self._peers.clear()
        await self._tasks.stop()
        await self._says.end()
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _look_at_brokers(self) -> None:
        live = self._placement.brokers
        for gone in self._peers.keys() - live.keys():
            self._peers.pop(gone).cancel()
            self._mirrors.owner_gone(gone)
            self._word()
        if not self._mirrors.followed:
            return
        for broker_id, address in live.items():
            if broker_id != self._placement.broker_id and broker_id not in self._peers:
                following = partial(self._keep_following, address)
                self._peers[broker_id] = self._tasks.keep("segment_feed", following)

    async def _keep_following(self, peer: BrokerAddress) -> None:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        backoff = Backoff(FEED_RETRY_S, FEED_RETRY_MAX_S)
        while True:
            try:
                async with asyncio.timeout(FEED_CONNECT_S):
                    socket = await self._http.ws_connect(
                        peer.web_url + FEED_PATH,
                        heartbeat=FEED_HEARTBEAT_S,
                        max_msg_size=FEED_BATCH_BYTES,
                    )
                try:
                    backoff.reset()
                    await self._listen(peer.broker_id, socket)
                finally:
                    self._connected.pop(peer.broker_id, None)
                    await socket.close()
            except (aiohttp.ClientError, OSError, TimeoutError, MalformedFeed) as error:
                log.info("feed_lost", broker=peer.broker_id, error=repr(error))
            await asyncio.sleep(backoff.pause_s())

    async def _listen(self, broker_id: str, socket: aiohttp.ClientWebSocketResponse) -> None:
        # First: what is followed from now on is said by `follow`.  Twice does no harm.
        self._connected[broker_id] = socket
        for topic in self._mirrors.followed:
            await _say(socket, "follow", topic)
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise MalformedFeed(f"a message of type {message.type.name}")
            self._hear(broker_id, str(message.data))

    def _hear(self, broker_id: str, text: str) -> None:
        try:
            batch = json.loads(text)
        except ValueError as error:
            raise MalformedFeed("no JSON") from error
        for each in batch if isinstance(batch, list) else [batch]:
            self._mirrors.apply(broker_id, each)
        self._word()

    def _say_soon(
        self, socket: aiohttp.ClientWebSocketResponse, what: str, topic: TopicName
    ) -> None:
        self._says.start(_say(socket, what, topic))

    def _word(self) -> None:
        if self._heard is not None and not self._heard.done():
            self._heard.set_result(None)

    async def _next_word(self) -> None:
        if self._heard is None or self._heard.done():
            self._heard = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._heard)


async def _say(socket: aiohttp.ClientWebSocketResponse, what: str, topic: TopicName) -> None:
    # Who is gone meanwhile is connected to anew, and told everything then.
    with contextlib.suppress(aiohttp.ClientError, OSError, RuntimeError):
        await socket.send_str(json.dumps({what: str(topic)}))
