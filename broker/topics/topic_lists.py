"""Changes of the topic names of namespaces, whichever broker creates or deletes a topic."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from broker.topics.partitions import partitioned_level
from magnetar.background_tasks import BackgroundTasks
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

log = structlog.get_logger(__name__)

TopicListener = Callable[[TopicName, bool], None]
"""Called with a name and whether that topic now exists."""
ListNames = Callable[[NamespaceName], Awaitable[list[str]]]


class _Namespace:
    """One followed namespace: its topic names and the listeners for their changes."""

    def __init__(self, name: NamespaceName) -> None:
        self.name = name
        self.listeners: dict[object, TopicListener] = {}
        self.names: set[str] = set()
        self.tasks = BackgroundTasks(log)
        self.begun = False
        self.ready = asyncio.Event()
        self._reading = asyncio.Lock()
        self._changed_while_reading: set[str] = set()
        """Names of which events came while the newest read was in progress."""

    async def read(self, list_names: ListNames) -> None:
        """Read all names, and report what changed.  Raises as `list_names`."""
        async with self._reading:
            self._changed_while_reading.clear()
            found = set(await list_names(self.name))
            # The list may be older than events that came meanwhile: for their names these count.
            for text in (found ^ self.names) - self._changed_while_reading:
                self._update(text, exists=text in found)
        self.ready.set()

    def take(self, text: str, *, exists: bool) -> None:
        """Report an event of the watch."""
        if self._reading.locked():
            self._changed_while_reading.add(text)
        self._update(text, exists=exists)

    def _update(self, text: str, *, exists: bool) -> None:
        """Call the listeners if a name was created or deleted."""
        # Records change with every ledger of a topic, so most events change no name.
        if (text in self.names) is exists:
            return
        (self.names.add if exists else self.names.discard)(text)
        for listener in list(self.listeners.values()):
            try:
                listener(parse_topic_name(text), exists)
            except Exception:
                log.exception("topic_listener_failed")


class TopicLists:
    """Follows the topic names of namespaces in the metadata store that all brokers share.

    Only namespaces with listeners are watched.
    """

    def __init__(self, metadata: MetadataStore, ledgers_of: Callable[[str], str]) -> None:
        """`ledgers_of` maps a prefix of ledger paths to the parent key of their records."""
        self._metadata = metadata
        self._ledgers_of = ledgers_of
        self._followed: dict[NamespaceName, _Namespace] = {}

    async def follow(
        self, name: NamespaceName, list_names: ListNames, listener: TopicListener
    ) -> Callable[[], None]:
        """Call `listener` for topics that are created or deleted from now on.

        Returns a function that removes it.  Waits until names could be read once; failures of that
        are tried again, and not raised.
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
            # At the start the watch of topics reads the names, those of partitions included.
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
