"""WATCH_TOPIC_LIST: send a client the topics of a namespace that match its pattern."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

import structlog

from broker.topics.topic_changes import FollowedChanges
from broker.topics.topic_listing import NO_MATCHING_TOPICS, MatchingTopics, TopicListing, parts_of
from broker.wire.connection import Connection
from broker.wire.topic_pattern import compiled, select
from config.bounds import TOPIC_LIST_WATCHERS
from magnetar.background_tasks import RESTART_PAUSE_MAX_S, RESTART_PAUSE_MIN_S
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.names import parse_namespace_name, parse_topic_name
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandWatchTopicList,
    CommandWatchTopicListSuccess,
    CommandWatchTopicUpdate,
)
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from storage.callbacks import ignore

log = structlog.get_logger(__name__)


class TooManyWatchers(PeerError):
    """The connection has the most watches that it may have: close one first."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


def without_domain(name: str) -> str:
    """The part of a topic name that patterns are matched with."""
    return name.partition("://")[2] or name


async def matching_topics(listing: TopicListing, pattern: str) -> MatchingTopics:
    """The names of a listing that match a pattern without domain.

    Raises `UnsupportedPattern`.
    """
    return await listing.matching(pattern, partial(_select, pattern))


async def _select(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that match; a partition does if its whole topic does."""
    by_whole: dict[str, list[str]] = {}
    for part in parts_of(tuple(names)):
        for name in part:
            whole = without_domain(str(parse_topic_name(name).partitioned))
            by_whole.setdefault(whole, []).append(name)
        await asyncio.sleep(0)
    found = await select(pattern, by_whole)
    return sorted(name for whole in found for name in by_whole[whole])


class TopicListWatch:
    """One watch of one connection, which ends with it, or by `close`.

    The first answer has all names, or none if the client's hash is the present one; later ones have
    several changes together.  Names are matched in the connection's turns among costly requests, as
    many watches have much to work out at each change.
    """

    def __init__(self, connection: Connection, request: CommandWatchTopicList) -> None:
        """Compile the pattern.  Raises `UnsupportedPattern`, `InvalidNamespaceName`."""
        self._connection = connection
        self._watcher_id = request.watcher_id
        self._namespace = parse_namespace_name(request.namespace)
        self._pattern = without_domain(request.topics_pattern)
        compiled(self._pattern)
        self.known = NO_MATCHING_TOPICS
        """The names that the client was sent."""
        self._changes: FollowedChanges | None = None
        self._sending: asyncio.Future[None] | None = None
        self._answered = False
        self._missed = False
        """Whether changes were taken that the client was not told of."""
        self._closed = False
        self._forget_connection: Callable[[], None] = ignore

    async def start(self, request: CommandWatchTopicList) -> None:
        """Answer, and begin to follow."""
        topics = self._connection.broker.topics
        self._forget_connection = self._connection.on_close(self.close)
        changes = await topics.changes.follow(self._namespace, self._wake)
        if self._closed or self._connection.closing:
            changes.close()
            self.close()
            return
        self._changes = changes
        # Not before: to follow may take until the metadata store answers.
        async with self._connection.costly():
            await self._answer(request, changes)
        self._wake()

    async def _answer(self, request: CommandWatchTopicList, changes: FollowedChanges) -> None:
        self.known = await self._list()
        added, removed = await self._take_changes(changes)
        self._answered = True
        matching = self._change(added, removed)
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
        self._closed = True
        self._forget_connection()
        if self._changes is not None:
            self._changes.close()
        if self._sending is not None:
            self._sending.cancel()

    async def _list(self) -> MatchingTopics:
        """The names that match now."""
        listing = await self._connection.broker.topics.listings.get(self._namespace)
        return await matching_topics(listing, self._pattern)

    async def _take_changes(
        self, changes: FollowedChanges
    ) -> tuple[frozenset[str], frozenset[str]]:
        """The names that were added to and removed from the known ones."""
        known, changed = self.known, None
        if self._missed:
            changes.skip()
        else:
            self._missed = True
            changed = await changes.take(self._pattern, partial(_select, self._pattern))
        if changed is None:
            now, before = frozenset((await self._list()).names), frozenset(known.names)
            self._missed = False
            return now - before, before - now
        self._missed = False
        added = frozenset(
            each for each, exists in changed.items() if exists and not known.has(each)
        )
        removed = frozenset(each for each, exists in changed.items() if not exists)
        return added, frozenset(filter(known.has, removed))

    def _change(self, added: frozenset[str], removed: frozenset[str]) -> MatchingTopics:
        if added or removed:
            listings = self._connection.broker.topics.listings
            self.known = listings.changed(self.known, added, removed)
        return self.known

    def _wake(self) -> None:
        """Send the changes, unless that is in progress or not to be done."""
        changes = self._changes
        if self._closed or not self._answered or changes is None or not changes.behind:
            return
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_changes(changes))

    async def _send_changes(self, changes: FollowedChanges) -> None:
        backoff = Backoff(RESTART_PAUSE_MIN_S, RESTART_PAUSE_MAX_S)
        while (changes.behind or self._missed) and not self._closed:
            try:
                async with self._connection.costly():
                    added, removed = await self._take_changes(changes)
                    if added or removed:
                        self._send_update(added, removed)
            except MagnetarError as error:
                # The client hears of these changes later: it does not ask for them.
                log.debug("topic_watch_behind", error=str(error), remote=self._connection.remote)
                await asyncio.sleep(backoff.pause_s())

    def _send_update(self, added: frozenset[str], removed: frozenset[str]) -> None:
        update = CommandWatchTopicUpdate(
            watcher_id=self._watcher_id,
            new_topics=sorted(added),
            deleted_topics=sorted(removed),
            topics_hash=self._change(added, removed).hash,
        )
        self._connection.send(
            BaseCommand(type=BaseCommand.WATCH_TOPIC_UPDATE, watch_topic_update=update)
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
