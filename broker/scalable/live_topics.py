"""The scalable topics that this process has looked at, each with its newest record.

Rules:

- One `LiveTopic` for each name, loaded once, dropped when the topic is deleted, let go of when
  nobody uses it.  While somebody still holds one that was let go of, that same one is found again.
- Its record only ever moves to a higher epoch, and listeners hear of each such move once, in order,
  in the same turn of the loop in which the change became known.  One that fails is told in the log
  and hides the change from no other: it is known already, so nothing would tell it again.
- Who changes a topic (create, reshape, prune, delete) holds `lock(name)`.  Finding one takes no
  lock, as those who change it wait for segments whose loading asks for the topic; a topic that is
  being deleted is not found, and one that was deleted while it was read is looked for again.
- Where other brokers change topics too, the record of each topic in memory is followed by watch.
  An event only says that the record is to be read; what is read and seems to be of the past is read
  again, so that it proves that the topic is gone, or that another one has its name.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import structlog

from broker.scalable.layout import CorruptLayout, Layout
from broker.scalable.topic_store import ScalableTopicNotFound, StoredTopic, TopicStore
from config.bounds import RECORD_LOOK_RETRY_S
from magnetar.protocol.names import TopicDomain, TopicName
from storage.metadata.store import Event, MetadataError
from storage.metadata.watch_follower import WatchFollower
from storage.supervised import Supervised

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

NameListener = Callable[[TopicName], None]
LayoutListener = Callable[["LiveTopic"], None]


class LiveTopic:
    """One scalable topic in memory."""

    __slots__ = ("__weakref__", "name", "sealing", "stored", "uses", "work")

    def __init__(self, stored: StoredTopic) -> None:
        self.name = stored.name
        self.stored = stored
        self.uses = 0
        """How often it was asked for."""
        self.sealing: set[int] = set()
        """Segments SEALED in the layout whose subscriptions are not all carried over yet."""
        self.work: set[asyncio.Task[None]] = set()
        """What goes on for it in the background; ended before it is deleted."""

    @property
    def layout(self) -> Layout:
        """The newest layout."""
        return self.stored.record.layout


class LiveTopics:
    """The newest known record of each scalable topic that this process uses, with listeners."""

    def __init__(
        self,
        store: TopicStore,
        *,
        shared: bool = False,
        is_awaited: Callable[[TopicName], bool] = lambda name: False,
    ) -> None:
        """`shared`: others change topics too.  `is_awaited`: a deleted name's next life matters."""
        self._store = store
        self._shared = shared
        self._is_awaited = is_awaited
        self._tasks = Supervised()
        self._watching: dict[TopicName, asyncio.Task[None]] = {}
        self._renewal_listeners: list[NameListener] = []
        self._topics: dict[TopicName, LiveTopic] = {}
        self._held: WeakValueDictionary[TopicName, LiveTopic] = WeakValueDictionary()
        self._locks: WeakValueDictionary[TopicName, asyncio.Lock] = WeakValueDictionary()
        self._deleting: set[TopicName] = set()
        self._deletions = 0
        self._listeners: list[LayoutListener] = []

    def on_layout(self, listener: LayoutListener) -> None:
        """Call `listener` after each change of a layout."""
        self._listeners.append(listener)

    def on_renewal(self, listener: NameListener) -> None:
        """Call `listener` when another topic of a name is there than the one known before."""
        self._renewal_listeners.append(listener)

    def all(self) -> list[LiveTopic]:
        """Every topic in memory."""
        return list(self._topics.values())

    def known(self, name: TopicName) -> LiveTopic | None:
        """The topic, if it is in memory."""
        return self._held.get(name)

    def let_go(self, live: LiveTopic) -> None:
        """Nobody uses it: the next one who asks for it reads its record again."""
        self._topics.pop(live.name, None)
        self._unwatch(live.name)

    def is_changing(self, name: TopicName) -> bool:
        """Whether somebody holds the topic's lock."""
        lock = self._locks.get(name)
        return lock is not None and lock.locked()

    def lock(self, name: TopicName) -> asyncio.Lock:
        """What serializes changes of a topic."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    async def get(self, name: TopicName) -> LiveTopic:
        """The topic of that name, or the twin of a persistent one.  `ScalableTopicNotFound`."""
        found = await self.find(name)
        if found is None:
            raise not_found(name)
        return found

    async def find(self, name: TopicName) -> LiveTopic | None:
        """As `get`, but None when there is none."""
        name = twin(name)
        while True:
            live = self._used(name)
            if live is not None or name in self._deleting:
                return live
            deletions = self._deletions
            stored = await self._store.load(name)
            if deletions != self._deletions:
                continue
            live = self._used(name)
            if live is not None or stored is None:
                return live
            return self.add(stored)

    def _used(self, name: TopicName) -> LiveTopic | None:
        live = self._held.get(name)
        if live is not None:
            live.uses += 1
            self._topics[name] = live
            self._watch(name)
        return live

    async def reload_locked(self, name: TopicName) -> LiveTopic | None:
        """As `find`, with the record as it is stored now, for a holder of the lock."""
        live = self._used(name)
        stored = await self._store.load(name)
        if stored is None:
            self._drop(name)
            return None
        if live is None:
            return self.add(stored)
        self.publish(live, stored)
        return live

    def add(self, stored: StoredTopic) -> LiveTopic:
        """Take in a topic that was just created or loaded and is not in memory."""
        live = self._topics[stored.name] = self._held[stored.name] = LiveTopic(stored)
        self._watch(stored.name)
        return live

    def _drop(self, name: TopicName) -> None:
        self._topics.pop(name, None)
        self._held.pop(name, None)

    def publish(self, live: LiveTopic, stored: StoredTopic) -> None:
        """The record has changed: tell everybody, if the layout is a newer one."""
        newer = stored.record.layout.epoch > live.layout.epoch
        live.stored = stored
        if newer:
            for listener in self._listeners:
                _told(listener, live, name=live.name)

    # What others do

    async def refresh(self, name: TopicName) -> StoredTopic | None:
        """The record as it is stored now, taken in if the topic is in memory."""
        while True:
            before = self._known_record(name)
            stored = await self._store.load(name)
            if before is not None and not _follows(before, stored):
                stored = await self._store.load_fresh(name)
            if self._known_record(name) is before:
                self._take_in(name, before, stored)
                return stored

    def forget_names(self) -> None:
        """Watch no longer what is deleted and awaited by nobody."""
        for name in list(self._watching):
            if name not in self._held and not self._is_awaited(name):
                self._unwatch(name)

    async def stop(self) -> None:
        """Follow nothing more."""
        self._watching.clear()
        await self._tasks.stop()

    def _known_record(self, name: TopicName) -> StoredTopic | None:
        live = self._held.get(name)
        return None if live is None else live.stored

    def _take_in(
        self, name: TopicName, before: StoredTopic | None, stored: StoredTopic | None
    ) -> None:
        live = self._held.get(name)
        if name in self._deleting or before == stored:
            return
        if (
            live is not None
            and before is not None
            and stored is not None
            and (_follows(before, stored))
        ):
            self.publish(live, stored)
            return
        self._drop(name)
        if stored is not None and (before is not None or self._is_awaited(name)):
            log.info("scalable_topic_renewed", topic=str(name))
            for listener in self._renewal_listeners:
                _told(listener, name, name=name)

    def _watch(self, name: TopicName) -> None:
        if not self._shared or name in self._watching:
            return

        async def look() -> None:
            await self._look(name)

        async def take(_: Event) -> None:
            await self._look(name)

        following = WatchFollower(partial(self._store.watch, name), look, take)
        self._watching[name] = self._tasks.keep("topic_record", following.run)

    def _unwatch(self, name: TopicName) -> None:
        watching = self._watching.pop(name, None)
        if watching is not None:
            watching.cancel()

    async def _look(self, name: TopicName) -> None:
        while True:
            try:
                await self.refresh(name)
            except (MetadataError, CorruptLayout) as error:
                log.warning("topic_record_not_read", topic=str(name), error=str(error))
                await asyncio.sleep(RECORD_LOOK_RETRY_S)
            else:
                return

    def begin_deletion(self, live: LiveTopic) -> None:
        """From now on the topic is not found."""
        self._deletions += 1
        self._deleting.add(live.name)
        self._drop(live.name)

    def end_deletion(self, name: TopicName) -> None:
        """The name is free again."""
        self._deletions += 1
        self._deleting.discard(name)


def twin(name: TopicName) -> TopicName:
    """The `topic://` name with the same local name."""
    if name.domain is TopicDomain.TOPIC:
        return name
    return TopicName(TopicDomain.TOPIC, name.tenant, name.namespace, name.local_name)


def not_found(name: TopicName) -> ScalableTopicNotFound:
    """The error for a topic that is not there."""
    return ScalableTopicNotFound(
        f"Scalable topic not found: {twin(name)}. Create it, or check its name."
    )


def _told(listener: Callable[[_T], None], what: _T, *, name: TopicName) -> None:
    try:
        listener(what)
    except Exception:
        log.exception("topic_record_listener_failed", topic=str(name))


def _follows(before: StoredTopic, stored: StoredTopic | None) -> bool:
    """Whether a record is the same as before, or what became of it."""
    if stored is None:
        return False
    return stored.version == before.version or stored.modifications > before.modifications
