"""Partitioned topics: a number of partitions under one name.

Rules: the record is Pulsar's, `/admin/partitioned-topics/<tenant>/<namespace>/persistent/<topic>`,
JSON; the number only ever grows.  Partitions themselves are ordinary topics, made on first use.
"""

import json
from http import HTTPStatus
from typing import ClassVar

from config.bounds import MAX_PARTITIONS
from protocol.names import NamespaceName, TopicDomain, TopicName, decode_name, encode_name
from protocol.server_error import PeerError, ServerError
from storage.metadata.store import ABSENT, MetadataStore, VersionConflict

ROOT = "/admin/partitioned-topics"


class PartitionedTopicExists(PeerError):
    """There is a partitioned topic of that name already."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class PartitionCountRefused(PeerError):
    """That number of partitions cannot be had."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_ACCEPTABLE


class PartitionedTopicNotFound(PeerError):
    """There is no partitioned topic of that name."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND


class PartitionedTopics:
    """See the module's rules.  Names are those of whole topics, in the persistent domain."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata

    async def count(self, name: TopicName) -> int:
        """Its partitions; 0 when it is not partitioned."""
        record = await self._metadata.get(_key(name))
        return int(json.loads(record.value)["partitions"]) if record is not None else 0

    async def create(self, name: TopicName, partitions: int) -> None:
        """Make it.  Raises `PartitionedTopicExists`, `PartitionCountRefused`."""
        _require_count(partitions)
        try:
            await self._metadata.put(_key(name), _encode(partitions), expect=ABSENT)
        except VersionConflict as error:
            raise PartitionedTopicExists(f"{name} is partitioned already.") from error

    async def grow(self, name: TopicName, partitions: int) -> None:
        """Raise the number.  Raises `PartitionedTopicNotFound`, `PartitionCountRefused`."""
        _require_count(partitions)
        record = await self._metadata.get(_key(name))
        if record is None:
            raise PartitionedTopicNotFound(f"{name} is not partitioned: create it first.")
        now = int(json.loads(record.value)["partitions"])
        if partitions <= now:
            raise PartitionCountRefused(f"{name} has {now} partitions: give a larger number.")
        await self._metadata.put(_key(name), _encode(partitions), expect=record.version)

    async def delete(self, name: TopicName) -> bool:
        """Remove the record; False if there was none."""
        return await self._metadata.delete(_key(name))

    async def list(self, namespace: NamespaceName) -> list[str]:
        """Full names of the partitioned topics of a namespace, sorted."""
        children = await self._metadata.children(partitioned_level(namespace))
        names = [decode_name(child) for child in children]
        return sorted(
            str(TopicName(TopicDomain.PERSISTENT, namespace.tenant, namespace.namespace, name))
            for name in names
        )


def partitioned_level(namespace: NamespaceName) -> str:
    """What the records of a namespace's partitioned topics are children of."""
    return f"{ROOT}/{namespace}/{TopicDomain.PERSISTENT.value}"


def _key(name: TopicName) -> str:
    return f"{partitioned_level(name.namespace_name)}/{encode_name(name.local_name)}"


def _encode(partitions: int) -> bytes:
    return json.dumps({"partitions": partitions}).encode()


def _require_count(partitions: int) -> None:
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise PartitionCountRefused(
            f"{partitions} partitions are not possible: give 1 to {MAX_PARTITIONS}."
        )
