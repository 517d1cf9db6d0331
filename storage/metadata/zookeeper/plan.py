"""Plans: the operations of ZooKeeper, taking effect together, that make one write.  Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from config import bounds
from storage.metadata.group import Sequence, Stored, check_partition_of
from storage.metadata.keys import level_of, sequence_key
from storage.metadata.operations import Delete, Put, SequencePut
from storage.metadata.store import (
    ABSENT,
    IndexEntry,
    InvalidMetadataRequest,
    PartitionMismatch,
    RecordTooLarge,
    Version,
    VersionConflict,
)
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.layout import (
    Directory,
    Layout,
    Node,
    encode_record,
    encode_sequence,
)
from storage.metadata.zookeeper.requests import ANY_VERSION, REQUEST_OVERHEAD_BYTES, Request

IN_FLIGHT = Version(-2)
"""The version of a record whose last write has not been answered."""
LAST_NODE_VERSION = 2**31 - 2**16
"""ZooKeeper counts 31 bits: a node that was written so often is made anew."""

Write = Put | SequencePut | Delete


class Plan(NamedTuple):
    """The requests of one write, and the state once they have taken effect.

    It names the versions of all nodes that it builds on, so a plan made on an old state changes
    nothing.  An error made of such a state must be verified by a newer read.
    """

    requests: tuple[Request, ...]
    key: str
    after: Node | None
    data: bytes
    """The data of the record's node then."""
    size: int
    """Upper bound of the size of the requests, in bytes."""
    directory: Directory | None = None
    """The directory of the key's level, if the plan changes it."""


class _Parts:
    """Operations and their size."""

    __slots__ = ("_layout", "made", "size")

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.made: list[Request] = []
        self.size = 0

    def create(self, path: str, data: bytes, ephemeral: bool) -> None:
        self.add(requests.create(path, data, ephemeral=ephemeral), path, data)

    def add(self, request: Request, path: str, data: bytes = b"") -> None:
        self.made.append(request)
        self.size += REQUEST_OVERHEAD_BYTES + len(path.encode()) + len(data)

    def create_record(self, key: str, node: Node, data: bytes) -> None:
        ephemeral = node.stored.session_id is not None
        self.create(self._layout.record(key), data, ephemeral)
        self.create(self._layout.life(node.life), b"", ephemeral)
        for entry in node.stored.indexes:
            self.create(self._layout.entry(entry, key), b"", ephemeral)

    def delete_record(self, key: str, node: Node) -> None:
        path, life = self._layout.record(key), self._layout.life(node.life)
        self.add(requests.delete(path, node.node_version), path)
        self.add(requests.delete(life, 0), life)
        self.delete_entries(key, node.stored.indexes)

    def delete_entries(self, key: str, entries: Iterable[IndexEntry]) -> None:
        for entry in entries:
            path = self._layout.entry(entry, key)
            # Entries change only together with their record, so they need no version.
            self.add(requests.delete(path, ANY_VERSION), path)

    def set_record(self, key: str, before: Node, after: Node, data: bytes) -> None:
        path, life = self._layout.record(key), self._layout.life(before.life)
        ephemeral = after.stored.session_id is not None
        self.add(requests.check(life, 0), life)
        self.add(requests.set_data(path, data, before.node_version), path, data)
        old, new = set(before.stored.indexes), set(after.stored.indexes)
        self.delete_entries(key, (entry for entry in before.stored.indexes if entry not in new))
        for entry in after.stored.indexes:
            if entry not in old:
                self.create(self._layout.entry(entry, key), b"", ephemeral)

    def checked(self, key: str) -> tuple[Request, ...]:
        """The operations.  Raises `RecordTooLarge`."""
        if self.size > bounds.ZOOKEEPER_REQUEST_BYTES:
            raise RecordTooLarge(
                f"The write of {key!r} has {self.size} bytes with its index entries and "
                f"ZooKeeper takes {bounds.ZOOKEEPER_REQUEST_BYTES} at once: store less in it."
            )
        return tuple(self.made)


def plan_put(
    layout: Layout, put: Put, current: Node | None, directory: Directory, life: str
) -> Plan:
    """Plan a put.  `life` is a new random name, for the case that a node is made.

    Raises `PartitionMismatch`, `VersionConflict`, `InvalidMetadataRequest`, `RecordTooLarge`.
    """
    _check(put.key, current, put.partition, put.expect)
    before = None if current is None else current.stored
    stored = _stored(put, before, put.session_id)
    parts = _Parts(layout)
    if current is None:
        _check_no_sequence(put.key, directory)
        path = layout.directory(level_of(put.key))
        parts.add(requests.check(path, directory.node_version), path)
        after = Node(stored, life, 0)
        data = encode_record(stored, life, put.value)
        parts.create_record(put.key, after, data)
    elif current.stored.session_id == put.session_id and current.node_version < LAST_NODE_VERSION:
        after = Node(stored, current.life, current.node_version + 1)
        data = encode_record(stored, current.life, put.value)
        parts.set_record(put.key, current, after, data)
    else:
        # An ephemeral node belongs to the session that made it: a put of another session, or of
        # none, makes it anew.
        after = Node(stored, life, 0)
        data = encode_record(stored, life, put.value)
        parts.delete_record(put.key, current)
        parts.create_record(put.key, after, data)
    return Plan(parts.checked(put.key), put.key, after, data, parts.size)


def plan_sequence_put(
    layout: Layout, put: SequencePut, directory: Directory, others: bool, life: str
) -> Plan:
    """Plan a put under the next number.  `others`: the level has records, and is no sequence.

    Raises `PartitionMismatch`, `InvalidMetadataRequest`, `RecordTooLarge`.
    """
    sequence = directory.sequence
    if sequence is None and others:
        raise InvalidMetadataRequest(
            f"The prefix {put.prefix!r} has other keys under it: give the sequence a level of "
            "its own."
        )
    if sequence is not None and sequence.partition != put.partition:
        raise PartitionMismatch(
            f"The sequence {put.prefix!r} lives in partition {sequence.partition!r} and was asked "
            f"for in {put.partition!r}: derive the partition from its key family."
        )
    following = Sequence(put.partition, 1 if sequence is None else sequence.last + 1)
    key = sequence_key(put.prefix, following.last)
    stored = _stored(put, None, None)
    after = Node(stored, life, 0)
    data = encode_record(stored, life, put.value)
    path, counter = layout.directory(put.prefix), encode_sequence(following)
    parts = _Parts(layout)
    parts.add(requests.set_data(path, counter, directory.node_version), path, counter)
    parts.create_record(key, after, data)
    changed = Directory(directory.node_version + 1, following)
    return Plan(parts.checked(key), key, after, data, parts.size, changed)


def plan_delete(layout: Layout, delete: Delete, current: Node | None) -> Plan | None:
    """Plan a delete; None if there is no record.

    Raises `PartitionMismatch`, `VersionConflict`.
    """
    _check(delete.key, current, delete.partition, delete.expect)
    if current is None:
        return None
    parts = _Parts(layout)
    parts.delete_record(delete.key, current)
    return Plan(parts.checked(delete.key), delete.key, None, b"", parts.size)


def _stored(put: Put | SequencePut, before: Stored | None, session_id: int | None) -> Stored:
    return Stored(
        version=IN_FLIGHT,
        modifications=0 if before is None else before.modifications + 1,
        created_ms=put.now_ms if before is None else before.created_ms,
        modified_ms=put.now_ms,
        partition=put.partition,
        session_id=session_id,
        indexes=put.indexes,
    )


def _check(key: str, current: Node | None, partition: str | None, expect: Version | None) -> None:
    if current is not None:
        check_partition_of(key, current.stored.partition, partition)
    actual = ABSENT if current is None else current.stored.version
    if expect is not None and actual != expect:
        raise VersionConflict(
            f"{key!r} is at version {actual}, not {expect} ({ABSENT}: absent): "
            "read it again and decide anew."
        )


def _check_no_sequence(key: str, directory: Directory) -> None:
    if directory.sequence is not None:
        raise InvalidMetadataRequest(
            f"{key!r} cannot be made under the sequence {level_of(key)!r}: only the sequence makes "
            "keys there, put it elsewhere."
        )
