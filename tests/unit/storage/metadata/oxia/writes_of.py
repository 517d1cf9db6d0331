"""Writes without a loop, for tests of pure parts."""

from unittest.mock import Mock

from storage.metadata.operations import Delete, Put, SequencePut
from storage.metadata.oxia.records import Note, ShardRecord, delete_request, put_request
from storage.metadata.oxia.routing import version_of
from storage.metadata.oxia.writes import Write, WriteOperation
from storage.metadata.store import IndexEntry, Record

SHARD = 1


def write_of(operation: WriteOperation, put_id: str = "me-1", expected: int | None = None) -> Write:
    write = Write(operation, Mock(), put_id=put_id, deadline=0.0)
    write.expected = expected
    if isinstance(operation, Delete):
        write.request = delete_request(operation, expected=expected)
    else:
        write.request = put_request(operation, Note(put_id), expected=expected)
    return write


def put(key: str = "/a", put_id: str = "me-1", expected: int | None = None, size: int = 1) -> Write:
    return write_of(Put(key, b"", None, None, None, (), 0, size), put_id, expected)


def sequence_put(prefix: str = "/s/", put_id: str = "me-1") -> Write:
    return write_of(SequencePut(prefix, b"", "p", (), 0, 1), put_id)


def delete(key: str = "/a", expected: int | None = None) -> Write:
    return write_of(Delete(key, None, None, 1), "", expected)


def found(
    version_id: int,
    put_id: str | None = "other",
    key: str = "/a",
    indexes: tuple[IndexEntry, ...] = (),
    value: bytes = b"",
    partition: str | None = None,
) -> ShardRecord:
    version = version_of(version_id, SHARD)
    record = Record(key, value, version, 3, 1, 2, False, partition)
    return ShardRecord(record, SHARD, version_id, put_id, indexes, None)
