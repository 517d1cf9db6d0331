"""WATCH_TOPIC_LIST: send a client the topics of a namespace that match its pattern."""

import asyncio
from collections.abc import Callable
from typing import ClassVar

from broker.topics.topic_listing import NO_MATCHING_TOPICS, MatchingTopics
from broker.wire.connection import Connection
from broker.wire.topic_pattern import TopicPattern
from config.bounds import TOPIC_LIST_PAUSE_S, TOPIC_LIST_WATCHERS
from magnetar.protocol.names import TopicName, parse_namespace_name
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandWatchTopicList,
    CommandWatchTopicListSuccess,
    CommandWatchTopicUpdate,
)
from magnetar.protocol.server_error import PeerError, ServerError


class TooManyWatchers(PeerError):
    """The connection has the most watches that it may have: close one first."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


def without_domain(name: str) -> str:
    """The part of a topic name that patterns are matched with."""
    return name.partition("://")[2] or name


class TopicListWatch:
    """One watch of one connection, which ends with it, or by `close`.

    The first answer has all names, or none if the client's hash is the present one; later ones have
    several changes together.
    """

    def __init__(self, connection: Connection, request: CommandWatchTopicList) -> None:
        """Compile the pattern.  Raises `UnsupportedPattern`, `InvalidNamespaceName`."""
        self._connection = connection
        self._watcher_id = request.watcher_id
        self._namespace = parse_namespace_name(request.namespace)
        self._pattern_text = without_domain(request.topics_pattern)
        self._pattern = TopicPattern(self._pattern_text)
        self.known = NO_MATCHING_TOPICS
        """The names that the client was sent."""
        self._added: set[str] = set()
        self._removed: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Future[None] | None = None
        self._answered = False
        self._forget: list[Callable[[], None]] = []

    async def start(self, request: CommandWatchTopicList) -> None:
        """Answer, and begin to follow."""
        topics = self._connection.broker.topics
        self._forget.append(self._connection.on_close(self.close))
        self._forget.append(await topics.follow(self._namespace, self._changed))
        if self._connection.closing:
            self.close()
            return
        # Not before: to follow may take until the metadata store answers.
        async with self._connection.costly():
            await self._answer(request)

    async def _answer(self, request: CommandWatchTopicList) -> None:
        listings = self._connection.broker.topics.listings
        listing = await listings.get(self._namespace)
        matching = await listing.matching(self._pattern_text, self._matches)
        added, removed = self._take_changes(matching)
        if added or removed:
            matching = listings.changed(matching, added, removed)
        self.known = matching
        self._answered = True
        answer = CommandWatchTopicListSuccess(
            request_id=request.request_id, watcher_id=self._watcher_id, topics_hash=matching.hash
        )
        if request.topics_hash != matching.hash:
            answer.topic.extend(matching.names)
        self._connection.send(
            BaseCommand(type=BaseCommand.WATCH_TOPIC_LIST_SUCCESS, watch_topic_list_success=answer)
        )

    def close(self) -> None:
        """Send nothing more."""
        for forget in self._forget:
            forget()
        self._forget.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _matches(self, name: TopicName) -> bool:
        whole = without_domain(str(name.partitioned))
        return name.namespace_name == self._namespace and self._pattern.matches(whole)

    def _changed(self, name: TopicName, exists: bool) -> None:
        if not self._matches(name):
            return
        arrived, gone = (self._added, self._removed) if exists else (self._removed, self._added)
        arrived.add(str(name))
        gone.discard(str(name))
        if self._answered and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TOPIC_LIST_PAUSE_S, self._begin_sending)

    def _take_changes(self, known: MatchingTopics) -> tuple[frozenset[str], frozenset[str]]:
        """The names that were added to and removed from `known` since the last call."""
        added = frozenset(self._added - known.members)
        removed = frozenset(self._removed & known.members)
        self._added.clear()
        self._removed.clear()
        return added, removed

    def _begin_sending(self) -> None:
        self._sending = asyncio.ensure_future(self._send_changes())

    async def _send_changes(self) -> None:
        # In a turn of the connection: many watches have much to work out at each change.
        async with self._connection.costly():
            self._timer = None
            added, removed = self._take_changes(self.known)
            if not added and not removed:
                return
            listings = self._connection.broker.topics.listings
            self.known = listings.changed(self.known, added, removed)
            self._connection.send(
                BaseCommand(
                    type=BaseCommand.WATCH_TOPIC_UPDATE,
                    watch_topic_update=CommandWatchTopicUpdate(
                        watcher_id=self._watcher_id,
                        new_topics=sorted(added),
                        deleted_topics=sorted(removed),
                        topics_hash=self.known.hash,
                    ),
                )
            )


def require_watch_capacity(connection: Connection, watcher_id: int) -> None:
    """Close a watch that has the id.  Raises `TooManyWatchers` above the bound."""
    former = connection.topic_watches.pop(watcher_id, None)
    if former is not None:
        former.close()
    if len(connection.topic_watches) >= TOPIC_LIST_WATCHERS:
        raise TooManyWatchers(
            f"This connection has {TOPIC_LIST_WATCHERS} topic watches: close one first."
        )
