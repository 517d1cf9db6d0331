"""The scalable topics that this process has in memory, each with its newest record."""

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import structlog

from broker.scalable.layout import CorruptLayout, Layout
from broker.scalable.records import segment_of
from broker.scalable.topic_store import ScalableTopicNotFound, StoredTopic, TopicStore
from config.bounds import RECORD_LOOK_RETRY_S
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import SegmentName, TopicDomain, TopicName, segment_name
from storage.metadata.store import Event, MetadataError
from storage.metadata.watch_follower import WatchFollower

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

NameListener = Callable[[TopicName], None]
LayoutListener = Callable[["LiveTopic"], None]


class LiveTopic:
    """One scalable topic in memory."""

    __slots__ = ("__weakref__", "name", "sealed_legacy", "sealing", "stored", "uses", "work")

    def __init__(self, stored: StoredTopic) -> None:
        self.name = stored.name
        self.stored = stored
        self.uses = 0
        """How often the topic was asked for; idle topics are known by it."""
        self.sealing: set[int] = set()
        """Segments SEALED in the layout whose subscriptions are not all carried over yet."""
        self.sealed_legacy: set[int] = set()
        """Legacy segments whose owners have said that they are terminated."""
        self.work = BackgroundTasks(log, failure_event="reshape_failed")
        """Background tasks for the topic; they are ended before it is deleted."""

    @property
    def layout(self) -> Layout:
        """The newest layout."""
        return self.stored.record.layout


class LiveTopics:
    """The scalable topics in memory, with the newest known record of each, and listeners.

    There is one `LiveTopic` for each name.  While anybody still refers to one that was unloaded,
    that same one is found again.  The epoch of its layout only rises, and layout listeners are
    called once for each rise, in order, in the turn of the loop in which the change became known.

    Creating, reshaping, pruning and deleting a topic hold `lock(name)`.

    With `shared`, where other brokers change topics too, the record of each topic in memory is
    followed by a watch.
    """

    def __init__(
        self,
        store: TopicStore,
        *,
        shared: bool = False,
        is_awaited: Callable[[TopicName], bool] = lambda name: False,
    ) -> None:
        """`is_awaited`: whether a deleted topic's name is watched, as it may be created again."""
        self._store = store
        self._shared = shared
        self._is_awaited = is_awaited
        self._tasks = BackgroundTasks(log)
        self._watching: dict[TopicName, asyncio.Task[None]] = {}
        self._renewal_listeners: list[NameListener] = []
        self._topics: dict[TopicName, LiveTopic] = {}
        self._held: WeakValueDictionary[TopicName, LiveTopic] = WeakValueDictionary()
        self._locks: WeakValueDictionary[TopicName, asyncio.Lock] = WeakValueDictionary()
        self._deleting: set[TopicName] = set()
        self._deletions = 0
        self._listeners: list[LayoutListener] = []
        self._incarnation_listeners: list[LayoutListener] = []

    def on_layout(self, listener: LayoutListener) -> None:
        """Call `listener` after each change of a layout."""
        self._listeners.append(listener)

    def on_incarnation(self, listener: LayoutListener) -> None:
        """Call `listener` when a topic in memory has another incarnation."""
        self._incarnation_listeners.append(listener)

    def on_renewal(self, listener: NameListener) -> None:
        """Call `listener` with an awaited name under which a topic was created by another broker.

        Before there was none, or one that is deleted.
        """
        self._renewal_listeners.append(listener)

    def all(self) -> list[LiveTopic]:
        """Every topic in memory."""
        return list(self._topics.values())

    def known(self, name: TopicName) -> LiveTopic | None:
        """The topic, if it is in memory."""
        return self._held.get(name)

    def segment_of(self, name: TopicName) -> SegmentName | None:
        """The segment that a topic is: one by its name, or a legacy one of a topic in memory."""
        if name.domain is TopicDomain.SEGMENT:
            return segment_name(name)
        if name.domain is not TopicDomain.PERSISTENT:
            return None
        live = self._held.get(twin(name.partitioned))
        found = None if live is None else live.layout.legacy.get(str(name))
        return None if live is None or found is None else segment_of(live.name, found)

    def unload(self, live: LiveTopic) -> None:
        """Drop a topic that nobody uses from memory; its next use reads its record again."""
        self._topics.pop(live.name, None)
        self._unwatch(live.name)

    def is_changing(self, name: TopicName) -> bool:
        """Whether the topic's lock is held."""
        lock = self._locks.get(name)
        return lock is not None and lock.locked()

    def lock(self, name: TopicName) -> asyncio.Lock:
        """The lock that serialises changes of a topic."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    async def get(self, name: TopicName) -> LiveTopic:
        """The topic of a name, or of its twin.  Raises `ScalableTopicNotFound`, `CorruptLayout`."""
        found = await self.find(name)
        if found is None:
            raise not_found(name)
        return found

    async def find(self, name: TopicName) -> LiveTopic | None:
        """Like `get`, but None if there is no such topic, or if it is being deleted.

        It takes no lock: changes hold the lock while they wait for segments whose loading calls
        this.
        """
        name = twin(name)
        while True:
            live = self._used(name)
            if live is not None or name in self._deleting:
                return live
            deletions = self._deletions
            stored = await self._store.load(name)
            if deletions != self._deletions:
                continue  # the topic may have been deleted while it was read
            live = self._used(name)
            if live is not None or stored is None:
                return live
            if not self._is_awaited(name):
                return self.add(stored)
            # Those who await it are told by whoever reads the record first.
            self._take_in(name, None, stored)

    def _used(self, name: TopicName) -> LiveTopic | None:
        live = self._held.get(name)
        if live is not None:
            live.uses += 1
            self._topics[name] = live
            self._watch(name)
        return live

    async def reload_locked(self, name: TopicName) -> LiveTopic | None:
        """As `find`, with the record read anew.  The caller holds the topic's lock."""
        live = self._used(name)
        stored = await self._store.load(name)
        if stored is None:
            self._drop(name)
            self.forget_name(name)
            return None
        if live is None:
            return self.add(stored)
        self.publish(live, stored)
        return live

    def add(self, stored: StoredTopic) -> LiveTopic:
        """Add a topic that was just created or loaded, unless its watch did."""
        known = self._held.get(stored.name)
        if known is not None and _follows(stored, known.stored):
            return known
        live = self._topics[stored.name] = self._held[stored.name] = LiveTopic(stored)
        self._watch(stored.name)
        return live

    def _drop(self, name: TopicName) -> None:
        self._topics.pop(name, None)
        self._held.pop(name, None)

    def publish(self, live: LiveTopic, stored: StoredTopic) -> None:
        """Take in a changed record; call the layout listeners if its epoch is higher.

        Those of the incarnation are called if that is another one.
        """
        newer = stored.record.layout.epoch > live.layout.epoch
        renewed = stored.record.incarnation != live.stored.record.incarnation
        live.stored = stored
        if renewed:
            for listener in self._incarnation_listeners:
                _call_listener(listener, live, name=live.name)
        if newer:
            for listener in self._listeners:
                _call_listener(listener, live, name=live.name)

    # Changes by other brokers

    async def refresh(self, name: TopicName) -> StoredTopic | None:
        """Read a topic's record, and take it in if the topic is in memory."""
        while True:
            before = self._known_record(name)
            stored = await self._store.load(name, before)
            if before is not None and not _follows(before, stored):
                # The read may be older than the known record.  A fresh one proves that the topic is
                # gone, or that another one has its name.
                stored = await self._store.load_fresh(name)
            if self._known_record(name) is before:
                self._take_in(name, before, stored)
                return stored

    def follow_name(self, name: TopicName) -> None:
        """Watch a name that is awaited, whether there is a topic or not."""
        self._watch(name)

    def forget_name(self, name: TopicName) -> None:
        """Stop watching a name, unless its topic is in memory or the name is awaited."""
        if name not in self._held and not self._is_awaited(name):
            self._unwatch(name)

    @property
    def watched(self) -> Collection[TopicName]:
        """The names whose records are watched."""
        return self._watching.keys()

    async def stop(self) -> None:
        """Stop all watches."""
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
            if before is None:
                self.add(stored)
            log.info("scalable_topic_renewed", topic=str(name))
            for listener in self._renewal_listeners:
                _call_listener(listener, name, name=name)
        self.forget_name(name)

    def _watch(self, name: TopicName) -> None:
        if not self._shared or name in self._watching:
            return

        async def read() -> None:
            await self._refresh_until_read(name)

        async def take(_: Event) -> None:
            # The event only says that the record is to be read.
            await self._refresh_until_read(name)

        following = WatchFollower(partial(self._store.watch, name), read, take)
        self._watching[name] = self._tasks.keep("topic_record", following.run)

    def _unwatch(self, name: TopicName) -> None:
        watching = self._watching.pop(name, None)
        if watching is not None:
            watching.cancel()

    async def _refresh_until_read(self, name: TopicName) -> None:
        while True:
            try:
                await self.refresh(name)
            except (MetadataError, CorruptLayout) as error:
                log.warning("topic_record_not_read", topic=str(name), error=str(error))
                await asyncio.sleep(RECORD_LOOK_RETRY_S)
            else:
                return

    def begin_deletion(self, live: LiveTopic) -> None:
        """Have the topic not found from now on."""
        self._deletions += 1
        self._deleting.add(live.name)
        self._drop(live.name)

    def end_deletion(self, name: TopicName) -> None:
        """Have the name found, or created, again."""
        self._deletions += 1
        self._deleting.discard(name)
        self.forget_name(name)


def twin(name: TopicName) -> TopicName:
    """The `topic://` name with the same local name."""
    if name.domain is TopicDomain.TOPIC:
        return name
    return TopicName(TopicDomain.TOPIC, name.tenant, name.namespace, name.local_name)


def not_found(name: TopicName) -> ScalableTopicNotFound:
    """The error for a topic that does not exist."""
    return ScalableTopicNotFound(
        f"Scalable topic not found: {twin(name)}. Create it, check its name, or migrate the "
        "ordinary topic of that name, if there is one."
    )


def _call_listener(listener: Callable[[_T], None], argument: _T, *, name: TopicName) -> None:
    try:
        listener(argument)
    except Exception:
        # The other listeners are called too: the change is known now and will not come again.
        log.exception("topic_record_listener_failed", topic=str(name))


def _follows(before: StoredTopic, stored: StoredTopic | None) -> bool:
    """Whether a record is the known one, or a later version of the same topic."""
    if stored is None:
        return False
    return stored.version == before.version or stored.modifications > before.modifications
