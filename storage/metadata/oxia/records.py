"""Records as Oxia stores them: notes, index keys, requests, answers.  Pure."""

import json
from typing import NamedTuple

from storage.metadata import group
from storage.metadata.keys import LAST, KeyFamilies
from storage.metadata.operations import Delete, Put, SequencePut
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.routing import version_of
from storage.metadata.store import IndexEntry, InvalidMetadataRequest, Record

# The store's own keys begin without a slash, so that no range of users' keys reaches them.
OWN_PREFIX = "magnetar/"
SEQUENCES = f"{OWN_PREFIX}sequences/"
PROOF = f"{OWN_PREFIX}proof"
"""The key of a put that proves, when it is acknowledged, that a server leads a shard."""
SERVERS_PREFIX = "__oxia/"

_NOTE = "magnetar:"
# Servers order slashes in a way of their own.  A dot and `LAST`, which no key has, in place of a
# slash keep the bytewise order of secondary keys.
_SLASH = f".{LAST}"


class Note(NamedTuple):
    """The text that Oxia stores as the client's identity, beside a value that others may read.

    No answer of a server names a record's partition and index keys, so the note has them.  By
    `put_id` a put is recognised when its answer was lost.  `identity` is the session's, of
    ephemerals.
    """

    put_id: str
    partition: str | None = None
    identity: str | None = None
    indexes: tuple[IndexEntry, ...] = ()


class ShardRecord(NamedTuple):
    """A record with its shard, and the put id and index entries of its note."""

    record: Record
    shard_id: int
    version_id: int
    put_id: str | None
    indexes: tuple[IndexEntry, ...]
    session_id: int | None

    @property
    def stored(self) -> group.Stored:
        """The record in the form in which changes compare it."""
        record = self.record
        return group.Stored(
            record.version,
            record.modifications,
            record.created_ms,
            record.modified_ms,
            record.partition,
            self.session_id,
            self.indexes,
        )


def write_note(note: Note) -> str:
    """The note as text."""
    if note.partition is None and note.identity is None and not note.indexes:
        return _NOTE + note.put_id
    parts: list[str | None] = [note.partition, note.identity]
    for entry in note.indexes:
        parts += entry.index, entry.key
    return f"{_NOTE}{note.put_id} {json.dumps(parts, ensure_ascii=False)}"


def read_note(text: str) -> Note | None:
    """The note in a client's identity; None if it is another program's."""
    if not text.startswith(_NOTE):
        return None
    put_id, _, rest = text[len(_NOTE) :].partition(" ")
    if not rest:
        return Note(put_id)
    try:
        partition, identity, *entries = json.loads(rest)
        pairs = zip(entries[::2], entries[1::2], strict=True)
        return Note(put_id, partition, identity, tuple(IndexEntry(*pair) for pair in pairs))
    except (ValueError, TypeError):
        return None


def escape_index_key(key: str) -> str:
    """A secondary key, or a bound of a range of them, as the server stores it."""
    return key.replace("/", _SLASH)


def put_request(
    put: Put | SequencePut,
    note: Note,
    *,
    expected: int | None = None,
    session_id: int | None = None,
) -> pb.PutRequest:
    """The request of a put; `expected` is the version id it must find (-1: none at all).

    Raises `InvalidMetadataRequest` for a request on which servers break or do not start again.
    """
    request = pb.PutRequest(
        key=put.prefix if isinstance(put, SequencePut) else put.key,
        value=put.value,
        expected_version_id=expected,
        session_id=session_id,
        client_identity=write_note(note),
        partition_key=put.partition,
    )
    if isinstance(put, SequencePut):
        request.sequence_key_delta.append(1)
    elif not put.indexes:
        return request
    for entry in put.indexes:
        key = escape_index_key(entry.key)
        request.secondary_indexes.add(index_name=entry.index, secondary_key=key)
    check_put(request)
    return request


def check_put(request: pb.PutRequest) -> None:
    """Refuse a put that would end a server, now or whenever it replays its log.

    Such puts are refused already when an operation is made; this is the last check.
    """
    deltas = request.sequence_key_delta
    if deltas and not (
        request.HasField("partition_key")
        and request.partition_key
        and not request.HasField("expected_version_id")
        and not request.HasField("session_id")
        and len(deltas) == 1
        and deltas[0] >= 1
        and request.key.endswith("/")
    ):
        raise InvalidMetadataRequest(
            f"The sequence put on {request.key!r} would harm an Oxia server: give it a partition, "
            "one delta from 1 up, a prefix that ends in a slash, and neither condition nor session."
        )
    for entry in request.secondary_indexes:
        if not entry.secondary_key or "\x01" in entry.secondary_key or "/" in entry.index_name:
            raise InvalidMetadataRequest(
                f"The index entry {entry.secondary_key!r} of {request.key!r} would harm an Oxia "
                "server: secondary keys are not empty, and names of indexes have no slash."
            )


def delete_request(delete: Delete, *, expected: int | None) -> pb.DeleteRequest:
    """The request of a delete."""
    return pb.DeleteRequest(
        key=delete.key, expected_version_id=expected, partition_key=delete.partition
    )


def found_record(
    key: str, value: bytes, version: pb.Version, shard_id: int, families: KeyFamilies
) -> ShardRecord:
    """The record in an answer of a shard.

    `families` give the partition and index keys of a record of another program, without a note.
    """
    note = read_note(version.client_identity)
    if note is None:
        partition = families.partition(key, value)
        indexes, put_id = families.indexes(key, value), None
    else:
        partition, indexes, put_id = note.partition, note.indexes, note.put_id
    session_id = version.session_id if version.HasField("session_id") else None
    record = Record(
        key,
        value,
        version_of(version.version_id, shard_id),
        version.modifications_count,
        version.created_timestamp,
        version.modified_timestamp,
        session_id is not None,
        partition,
    )
    return ShardRecord(record, shard_id, version.version_id, put_id, indexes, session_id)
