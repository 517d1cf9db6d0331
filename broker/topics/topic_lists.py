"""The topics of namespaces as they come and go, whichever broker makes or deletes them.

Rules:

- Only namespaces that somebody follows are watched: the records of their topics, and those of
  partitioned topics.  Watches are taken before the names are read.
- Records change with every ledger of a topic; what is told is whether a name is there or not.
- After a resync, when a watch broke, or when a partitioned topic changes, names are read again and
  compared, one read after another.  A list takes long and may be older than what is told meanwhile:
  of such names the watch's word counts, and its last word is the newest state.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from broker.topics.partitions import partitioned_level
from magnetar.protocol.names import (
    NamespaceName,
    TopicDomain,
    TopicName,
    parse_ledger_path,
    parse_topic_name,
)
from magnetar.protocol.server_error import MagnetarError
from storage.metadata.keys import name_of
from storage.metadata.store import Event, MetadataStore
from storage.metadata.watch_follower import WatchFollower
from storage.supervised import Supervised

log = structlog.get_logger(__name__)

TopicListener = Callable[[TopicName, bool], None]
"""Called with a name and whether that topic now exists."""
ListNames = Callable[[NamespaceName], Awaitable[list[str]]]


class _Namespace:
    """One namespace that is followed."""

    def __init__(self, name: NamespaceName) -> None:
        self.name = name
        self.listeners: dict[object, TopicListener] = {}
        self.names: set[str] = set()
        self.tasks = Supervised()
        self.begun = False
        self.ready = asyncio.Event()
        self._reading = asyncio.Lock()
        self._told_meanwhile: set[str] = set()
        """Names that the watch told of while the newest read was under way."""

    async def read(self, list_names: ListNames) -> None:
        """Compare with what is there now.  Raises as `list_names`."""
        async with self._reading:
            self._told_meanwhile.clear()
            found = set(await list_names(self.name))
            for text in (found ^ self.names) - self._told_meanwhile:
                self._tell(text, exists=text in found)
        self.ready.set()

    def take(self, text: str, *, exists: bool) -> None:
        """The watch's word of one name."""
        if self._reading.locked():
            self._told_meanwhile.add(text)
        self._tell(text, exists=exists)

    def _tell(self, text: str, *, exists: bool) -> None:
        """Somebody made or deleted it."""
        if (text in self.names) is exists:
            return
        (self.names.add if exists else self.names.discard)(text)
        for listener in list(self.listeners.values()):
            try:
                listener(parse_topic_name(text), exists)
            except Exception:
                log.exception("topic_listener_failed")


class TopicLists:
    """Follows which topics a namespace has, at all brokers."""

    def __init__(self, metadata: MetadataStore, ledgers_of: Callable[[str], str]) -> None:
        """`ledgers_of` is the level that has the records under a ledger path."""
        self._metadata = metadata
        self._ledgers_of = ledgers_of
        self._followed: dict[NamespaceName, _Namespace] = {}

    async def follow(
        self, name: NamespaceName, list_names: ListNames, listener: TopicListener
    ) -> Callable[[], None]:
        """Call `listener` for what is made or deleted from now on; returns its removal.

        Waits until names could be read once: what fails is tried again, and raises nothing here.
        """
        space = self._followed.get(name)
        token = object()
        if space is None:
            space = self._followed[name] = _Namespace(name)
            space.listeners[token] = listener
            self._begin(space, list_names)
        space.listeners[token] = listener
        try:
            await space.ready.wait()
        except BaseException:
            self._leave(space, token)
            raise
        return lambda: self._leave(space, token)

    def close(self) -> None:
        """Follow nothing more."""
        for space in list(self._followed.values()):
            self._end(space)

    def _begin(self, space: _Namespace, list_names: ListNames) -> None:
        prefix = f"{space.name}/{TopicDomain.PERSISTENT.value}"
        topics, partitioned = self._ledgers_of(prefix), partitioned_level(space.name)

        async def read() -> None:
            await space.read(list_names)

        async def take(event: Event) -> None:
            _take(space, prefix, event)

        async def read_again(_: Event) -> None:
            await read()

        async def read_unless_first() -> None:
            # What follows topics begins after this, and reads what there is of either kind.
            if space.begun:
                await read()
            space.begun = True

        watch = self._metadata.watch_children
        of_partitioned = WatchFollower(partial(watch, partitioned), read_unless_first, read_again)
        of_topics = WatchFollower(partial(watch, topics), read, take)
        space.tasks.keep("partitioned_topic_names", of_partitioned.run)
        space.tasks.keep("topic_names", of_topics.run)

    def _leave(self, space: _Namespace, token: object) -> None:
        space.listeners.pop(token, None)
        if not space.listeners:
            self._end(space)

    def _end(self, space: _Namespace) -> None:
        if self._followed.get(space.name) is space:
            del self._followed[space.name]
        space.ready.set()
        space.tasks.cancel()


def _take(space: _Namespace, prefix: str, event: Event) -> None:
    try:
        name = parse_ledger_path(f"{prefix}/{name_of(event.key)}")
    except MagnetarError as error:
        log.error("topic_name_unreadable", key=event.key, error=str(error))
        return
    space.take(str(name), exists=event.record is not None)
