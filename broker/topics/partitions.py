"""Records of partitioned topics: the number of partitions under one name, and its properties.

The record is Pulsar's: JSON at `/admin/partitioned-topics/<tenant>/<namespace>/<domain>/<topic>`.
"""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import ClassVar, TypeVar

from broker.policies.namespaces import confirm_creation
from config.bounds import MAX_PARTITIONS, PARTITIONS_AT_ONCE, RECORD_CHANGE_TRIES
from magnetar.protocol.names import NamespaceName, TopicDomain, TopicName, decode_name, encode_name
from magnetar.protocol.server_error import PeerError, ServerError
from storage.metadata.store import ABSENT, MetadataStore, Record, VersionConflict

ROOT = "/admin/partitioned-topics"

T = TypeVar("T")


class PartitionedTopicExists(PeerError):
    """There is a partitioned topic of that name already."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class PartitionCountRefused(PeerError):
    """The number of partitions is out of bounds, or not above the present one."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_ACCEPTABLE


class PartitionedTopicNotFound(PeerError):
    """There is no partitioned topic of that name."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND


@dataclass(frozen=True, slots=True)
class PartitionedTopic:
    """A decoded record."""

    partitions: int
    properties: Mapping[str, str] = field(default_factory=dict)


class PartitionedTopics:
    """Creates, grows and reads the records of partitioned topics.

    Names are those of whole topics, persistent or not.  The partitions are topics of their own,
    made on first use.
    """

    def __init__(self, metadata: MetadataStore, max_partitions: int = MAX_PARTITIONS) -> None:
        """`max_partitions` is the bound for one topic."""
        self._metadata = metadata
        self._max_partitions = max_partitions

    async def find(self, name: TopicName) -> PartitionedTopic | None:
        """The record of a topic; None when it is not partitioned."""
        record = await self._metadata.get(_key(name))
        if record is None:
            return None
        value = _decode(record)
        return PartitionedTopic(_count(value), _properties(value))

    async def count(self, name: TopicName) -> int:
        """The number of a topic's partitions; 0 when it is not partitioned."""
        found = await self.find(name)
        return found.partitions if found is not None else 0

    async def create(
        self, name: TopicName, partitions: int, properties: Mapping[str, str] | None = None
    ) -> None:
        """Create the record.

        Raises `PartitionedTopicExists`, `PartitionCountRefused`, `NamespaceNotFound`.
        """
        self._require_count(partitions)
        value: dict[str, object] = {"partitions": partitions}
        if properties:
            value["properties"] = dict(properties)
        try:
            made = await self._metadata.put(_key(name), _encode(value), expect=ABSENT)
        except VersionConflict as error:
            raise PartitionedTopicExists(f"{name} is partitioned already.") from error

        async def undo() -> None:
            with suppress(VersionConflict):
                await self._metadata.delete(_key(name), expect=made.version)

        await confirm_creation(self._metadata, name.namespace_name, undo)

    async def grow(self, name: TopicName, partitions: int) -> None:
        """Increase the number.  Raises `PartitionedTopicNotFound`, `PartitionCountRefused`."""
        self._require_count(partitions)

        def grown(value: dict[str, object]) -> None:
            now = _count(value)
            if partitions <= now:
                raise PartitionCountRefused(f"{name} has {now} partitions: give a larger number.")
            value["partitions"] = partitions

        await self._change(name, grown)

    async def set_properties(self, name: TopicName, changes: Mapping[str, str | None]) -> None:
        """Change properties; None removes one.  Raises `PartitionedTopicNotFound`."""

        def changed(value: dict[str, object]) -> None:
            merged = {**_properties(value), **changes}
            value["properties"] = {key: text for key, text in merged.items() if text is not None}

        await self._change(name, changed)

    def _require_count(self, partitions: int) -> None:
        if not 1 <= partitions <= self._max_partitions:
            raise PartitionCountRefused(
                f"{partitions} partitions are not possible: give 1 to {self._max_partitions}."
            )

    async def _change(self, name: TopicName, change: Callable[[dict[str, object]], None]) -> None:
        for tries_left in reversed(range(RECORD_CHANGE_TRIES)):
            record = await self._metadata.get(_key(name))
            if record is None:
                raise PartitionedTopicNotFound(f"{name} is not partitioned: create it first.")
            # The decoded record is changed, so members that this broker does not know are kept.
            value = _decode(record)
            change(value)
            try:
                await self._metadata.put(_key(name), _encode(value), expect=record.version)
            except VersionConflict:
                if not tries_left:
                    raise
            else:
                return

    async def delete(self, name: TopicName) -> bool:
        """Remove the record; False if there was none."""
        return await self._metadata.delete(_key(name))

    async def list(
        self, namespace: NamespaceName, domain: TopicDomain = TopicDomain.PERSISTENT
    ) -> list[str]:
        """Full names of the partitioned topics of a namespace, sorted."""
        children = await self._metadata.children(partitioned_level(namespace, domain))
        names = [decode_name(child) for child in children]
        return sorted(
            str(TopicName(domain, namespace.tenant, namespace.namespace, name)) for name in names
        )


class PartitionWork:
    """Runs work on many partitions: a bounded number at a time, over all requests.

    So neither a large topic nor several requests fill the queue of the metadata store, and other
    clients are served in between.
    """

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(PARTITIONS_AT_ONCE)

    async def run(
        self, partitions: Sequence[TopicName], work: Callable[[TopicName], Awaitable[T]]
    ) -> list[T]:
        """Run `work` on each partition; returns the results in order.

        After the first error nothing more is begun; it is raised when what is in progress has
        ended.
        """
        results: dict[int, T] = {}
        waiting = deque(enumerate(partitions))

        async def run_some() -> None:
            while waiting:
                index, partition = waiting.popleft()
                try:
                    async with self._slots:
                        results[index] = await work(partition)
                except BaseException:
                    waiting.clear()
                    raise
                # Work that waited for nothing would keep the loop.
                await asyncio.sleep(0)

        count = min(PARTITIONS_AT_ONCE, len(partitions))
        ends = await asyncio.gather(*(run_some() for _ in range(count)), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return [results[index] for index in range(len(partitions))]


def partitioned_level(
    namespace: NamespaceName, domain: TopicDomain = TopicDomain.PERSISTENT
) -> str:
    """The parent key of the records of a namespace's partitioned topics."""
    return f"{ROOT}/{namespace}/{domain.value}"


def partitions_in(record: Record) -> int:
    """The number of partitions in a record."""
    return _count(_decode(record))


def _key(name: TopicName) -> str:
    # Persistent topics are asked for by their twins of other domains too.
    non_persistent = name.domain is TopicDomain.NON_PERSISTENT
    domain = TopicDomain.NON_PERSISTENT if non_persistent else TopicDomain.PERSISTENT
    return f"{partitioned_level(name.namespace_name, domain)}/{encode_name(name.local_name)}"


def _encode(value: Mapping[str, object]) -> bytes:
    return json.dumps(value).encode()


def _decode(record: Record) -> dict[str, object]:
    value = json.loads(record.value)
    return value if isinstance(value, dict) else {}


def _count(value: Mapping[str, object]) -> int:
    count = value.get("partitions")
    return count if isinstance(count, int) else 0


def _properties(value: Mapping[str, object]) -> dict[str, str]:
    found = value.get("properties")
    return {str(key): str(text) for key, text in found.items()} if isinstance(found, dict) else {}
