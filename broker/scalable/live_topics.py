"""The scalable topics that this process has looked at, each with its newest record.

Rules:

- One `LiveTopic` for each name, loaded once, dropped when the topic is deleted, let go of when
  nobody uses it.  While somebody still holds one that was let go of, that same one is found again.
- Its record only ever moves to a higher epoch, and listeners hear of each such move once, in order,
  in the same turn of the loop in which the change became known.
- Who changes a topic (create, reshape, prune, delete) holds `lock(name)`.  Finding one takes no
  lock, as those who change it wait for segments whose loading asks for the topic; a topic that is
  being deleted is not found, and one that was deleted while it was read is looked for again.
"""

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from broker.scalable.layout import Layout
from broker.scalable.topic_store import ScalableTopicNotFound, StoredTopic, TopicStore
from protocol.names import TopicDomain, TopicName

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
    """See the module's rules."""

    def __init__(self, store: TopicStore) -> None:
        self._store = store
        self._topics: dict[TopicName, LiveTopic] = {}
        self._held: WeakValueDictionary[TopicName, LiveTopic] = WeakValueDictionary()
        self._locks: WeakValueDictionary[TopicName, asyncio.Lock] = WeakValueDictionary()
        self._deleting: set[TopicName] = set()
        self._deletions = 0
        self._listeners: list[LayoutListener] = []

    def on_layout(self, listener: LayoutListener) -> None:
        """Call `listener` after each change of a layout."""
        self._listeners.append(listener)

    def all(self) -> list[LiveTopic]:
        """Every topic in memory."""
        return list(self._topics.values())

    def known(self, name: TopicName) -> LiveTopic | None:
        """The topic, if it is in memory."""
        return self._held.get(name)

    def let_go(self, live: LiveTopic) -> None:
        """Nobody uses it: the next one who asks for it reads its record again."""
        self._topics.pop(live.name, None)

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
                listener(live)

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
