"""How many topics a namespace has, where their number is limited by `maxTopicsPerNamespace`.

Stored topics count: each topic without partitions and each partition, whether it was used yet or
not, and each scalable topic once, however many segments it has.  Non-persistent topics do not.

A namespace with a limit is read once, and followed from then on by watches.  A broker never
creates more topics than the limit leaves.  Of several brokers each may create some before it hears
of those of the others: the limit may be exceeded by what the others create within that time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import ClassVar

import structlog

from broker.policies.namespaces import Namespaces, Policies
from broker.topics.partitions import partitioned_level, partitions_in
from config.bounds import TOPIC_COUNT_REREAD_S
from config.settings import Settings
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import (
    NamespaceName,
    TopicDomain,
    TopicName,
    decode_name,
    parse_ledger_path,
)
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from storage.metadata.keys import children_range, name_of
from storage.metadata.store import Event, MetadataStore
from storage.metadata.watch_follower import WatchFollower

log = structlog.get_logger(__name__)


class TooManyTopics(PeerError):
    """The namespace has as many topics as its policy allows."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class TopicCount:
    """The topics of one namespace, counted as they come and go.  Pure."""

    def __init__(self) -> None:
        self.total = 0
        self._alone: set[str] = set()
        """Local names of topics that are no partitions."""
        self._scalable: set[str] = set()
        """Names of scalable topics, as in their records' keys."""
        self._stored: dict[str, set[int]] = {}
        """Indexes of the stored partitions, by local name of the whole topic."""
        self._partitions: dict[str, int] = {}
        """Numbers of partitions, by local name of the whole topic."""

    def set_topic(self, name: TopicName, *, exists: bool) -> None:
        """Note that a topic or a partition is stored, or is not any more."""
        index = name.partition_index
        if index is None:
            self._set(self._alone, name.local_name, exists=exists)
            return
        whole = name.partitioned.local_name
        before = self._of(whole)
        stored = self._stored.setdefault(whole, set())
        (stored.add if exists else stored.discard)(index)
        if not stored:
            del self._stored[whole]
        self.total += self._of(whole) - before

    def set_scalable(self, name: str, *, exists: bool) -> None:
        """Note that there is a scalable topic, or is not any more."""
        self._set(self._scalable, name, exists=exists)

    def set_partitions(self, whole: str, count: int) -> None:
        """Note the number of partitions of a topic; 0: it is not partitioned."""
        before = self._of(whole)
        if count:
            self._partitions[whole] = count
        else:
            self._partitions.pop(whole, None)
        self.total += self._of(whole) - before

    def size_of(self, name: TopicName) -> int:
        """The number of topics that a topic of that name counts for."""
        if name.domain is TopicDomain.TOPIC:
            return int(name.local_name in self._scalable)
        if name.partition_index is not None:
            return int(name.partition_index in self._stored.get(name.partitioned.local_name, ()))
        return int(name.local_name in self._alone) or self._of(name.local_name)

    def _of(self, whole: str) -> int:
        return max(self._partitions.get(whole, 0), len(self._stored.get(whole, ())))

    def _set(self, names: set[str], name: str, *, exists: bool) -> None:
        if (name in names) is exists:
            return
        (names.add if exists else names.discard)(name)
        self.total += 1 if exists else -1


class _Namespace:
    """The count of one followed namespace."""

    def __init__(self) -> None:
        self.count = TopicCount()
        self._reserved: dict[TopicName, list[int]] = {}
        """Places for what this broker is creating now, one number for each of its creators."""
        self.reading = asyncio.Lock()
        self.tasks = BackgroundTasks(log)
        self.is_followed = False
        self.read_s = 0.0
        """Time of the last read of all names."""
        self._changes_while_reading: list[Change] = []

    def total_with(self, name: TopicName, wanted: int, before: int) -> int:
        """The topics that there will be with `wanted` more of a name that had `before`.

        Several clients may be creating the same topic: it needs its places once.
        """
        others = sum(max(each) for other, each in self._reserved.items() if other != name)
        created_since = max(self.count.size_of(name) - before, 0)
        return self.count.total + others + max(wanted - created_since, 0)

    @contextmanager
    def reserved(self, name: TopicName, wanted: int) -> Iterator[None]:
        """Keep places while the block runs."""
        places = self._reserved.setdefault(name, [])
        places.append(wanted)
        try:
            yield
        finally:
            places.remove(wanted)
            if not places:
                del self._reserved[name]

    def begin_read(self) -> None:
        """Keep the changes from now on: those of a read that failed are older than the next one."""
        self._changes_while_reading = []

    def apply(self, change: "Change") -> None:
        """Apply a change, and keep it for the read in progress, which may not have it."""
        change(self.count)
        if self.reading.locked():
            self._changes_while_reading.append(change)

    def replace(self, count: TopicCount) -> None:
        """Use the result of a read, with what changed meanwhile."""
        # A change that the read has already is applied again, and one that is older than the read
        # is followed by the event of what came after it.
        for change in self._changes_while_reading:
            change(count)
        self.count = count
        self._changes_while_reading = []


Change = Callable[[TopicCount], None]


class TopicCounts:
    """Reserves places for the topics that this broker creates."""

    def __init__(
        self,
        metadata: MetadataStore,
        namespaces: Namespaces,
        settings: Settings,
        *,
        ledgers_of: Callable[[str], str],
        scalable_of: Callable[[NamespaceName], str],
    ) -> None:
        """`ledgers_of` maps a prefix of ledger paths to the parent key of their records.

        `scalable_of` maps a namespace to that of its scalable topics.
        """
        self._metadata = metadata
        self._namespaces = namespaces
        self._settings = settings
        self._ledgers_of = ledgers_of
        self._scalable_of = scalable_of
        self._followed: dict[NamespaceName, _Namespace] = {}
        namespaces.on_change(self._policies_changed)

    async def stop(self) -> None:
        """Follow nothing more."""
        followed = list(self._followed.values())
        self._followed.clear()
        for space in followed:
            await space.tasks.stop()

    async def limit(self, namespace: NamespaceName) -> int:
        """The most topics of a namespace; 0: any number.

        Raises `NamespaceNotFound`, `MetadataError`.
        """
        return self._limit_in(await self._namespaces.require(namespace))

    def known(self, namespace: NamespaceName) -> int | None:
        """The topics of a namespace that is followed; None for any other."""
        space = self._followed.get(namespace)
        return None if space is None else space.count.total

    @asynccontextmanager
    async def room(
        self, name: TopicName, *, partitions: int = 0, before: int = 0
    ) -> AsyncIterator[None]:
        """Keep places for the topic that the block creates, or for its partitions.

        `before` are the partitions that there are already.  Raises `TooManyTopics`,
        `NamespaceNotFound`, `MetadataError`.
        """
        namespace = name.namespace_name
        limit = await self.limit(namespace)
        if not limit or name.domain is TopicDomain.NON_PERSISTENT:
            yield
            return
        space = await self._follow(namespace)
        wanted = max(partitions, 1) - before
        if space.total_with(name, wanted, before) > limit:
            # A topic that another broker has just deleted may still be counted.
            await self._read_again(namespace, space)
        after = space.total_with(name, wanted, before)
        if after > limit:
            raise TooManyTopics(
                f"{name} is not created: with it {namespace} would have {after} topics, and the "
                f"maximum is {limit}. Delete some, or raise maxTopicsPerNamespace."
            )
        with space.reserved(name, wanted):
            yield
            space.apply(lambda count: _add(count, name, partitions))

    def deleted(self, name: TopicName) -> None:
        """Note that this broker has deleted a topic or a partition."""
        space = self._followed.get(name.namespace_name)
        if space is not None and name.domain is TopicDomain.PERSISTENT:
            space.apply(lambda count: count.set_topic(name, exists=False))

    def _policies_changed(self, text: str) -> None:
        """Stop following a namespace that has no limit any more, or is gone."""
        for namespace in [each for each in self._followed if str(each) == text]:
            policies = self._namespaces.known(namespace)
            if not policies.raw or not self._limit_in(policies):
                self._followed.pop(namespace).tasks.cancel()

    def _limit_in(self, policies: Policies) -> int:
        most = policies.max_topics
        return self._settings.max_topics_per_namespace if most is None else most

    async def _follow(self, namespace: NamespaceName) -> _Namespace:
        """The namespace, with all of its names; it is kept current from then on."""
        space = self._followed.setdefault(namespace, _Namespace())
        async with space.reading:
            if space.is_followed:
                return space
            followers = self._followers(namespace, space)
            for follower in followers.values():
                follower.watch()
            try:
                space.replace(await self._read(namespace, space))
            except BaseException:
                for follower in followers.values():
                    follower.close()
                raise
            if self._followed.get(namespace) is not space:
                # Its policies changed meanwhile: this one creation was counted.
                for follower in followers.values():
                    follower.close()
                return space
            space.is_followed = True
            for task_name, follower in followers.items():
                space.tasks.keep(task_name, follower.run)
        return space

    def _followers(self, namespace: NamespaceName, space: _Namespace) -> dict[str, WatchFollower]:
        prefix = f"{namespace}/{TopicDomain.PERSISTENT.value}"

        async def read() -> None:
            async with space.reading:
                space.replace(await self._read(namespace, space))

        async def take_ledger(event: Event) -> None:
            name, exists = _name_in(f"{prefix}/{name_of(event.key)}"), event.record is not None
            if name is not None:
                space.apply(lambda count: count.set_topic(name, exists=exists))

        async def take_partitioned(event: Event) -> None:
            whole = decode_name(name_of(event.key))
            number = 0 if event.record is None else partitions_in(event.record)
            space.apply(lambda count: count.set_partitions(whole, number))

        async def take_scalable(event: Event) -> None:
            name, exists = decode_name(name_of(event.key)), event.record is not None
            space.apply(lambda count: count.set_scalable(name, exists=exists))

        takes = {
            self._ledgers_of(prefix): ("counted_topics", take_ledger),
            partitioned_level(namespace): ("counted_partitions", take_partitioned),
            self._scalable_of(namespace): ("counted_scalable_topics", take_scalable),
        }

        def follower(parent: str, take: Callable[[Event], Awaitable[None]]) -> WatchFollower:
            return WatchFollower(lambda: self._metadata.watch_children(parent), read, take)

        return {task: follower(parent, take) for parent, (task, take) in takes.items()}

    async def _read_again(self, namespace: NamespaceName, space: _Namespace) -> None:
        """Read all names, unless that was done just now."""
        async with space.reading:
            if asyncio.get_running_loop().time() - space.read_s >= TOPIC_COUNT_REREAD_S:
                space.replace(await self._read(namespace, space))

    async def _read(self, namespace: NamespaceName, space: _Namespace) -> TopicCount:
        """Count all names anew.  Raises `MetadataError`."""
        space.begin_read()
        space.read_s = asyncio.get_running_loop().time()
        prefix = f"{namespace}/{TopicDomain.PERSISTENT.value}"
        ledgers = await self._metadata.children(self._ledgers_of(prefix))
        records = await self._metadata.scan(*children_range(partitioned_level(namespace)))
        scalable = await self._metadata.children(self._scalable_of(namespace))
        count = TopicCount()
        for child in ledgers:
            name = _name_in(f"{prefix}/{child}")
            if name is not None:
                count.set_topic(name, exists=True)
        for record in records:
            count.set_partitions(decode_name(name_of(record.key)), partitions_in(record))
        for child in scalable:
            count.set_scalable(decode_name(child), exists=True)
        return count


def _add(count: TopicCount, name: TopicName, partitions: int) -> None:
    if name.domain is TopicDomain.TOPIC:
        count.set_scalable(name.local_name, exists=True)
    elif partitions:
        count.set_partitions(name.local_name, partitions)
    else:
        count.set_topic(name, exists=True)


def _name_in(ledger_path: str) -> TopicName | None:
    try:
        return parse_ledger_path(ledger_path)
    except MagnetarError as error:
        log.error("topic_name_unreadable", ledger_path=ledger_path, error=str(error))
        return None
