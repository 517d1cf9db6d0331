"""Records as Oxia keeps them: notes, index keys, requests, answers.  Pure.

Rules:
- No answer of the server names a record's partition key or index keys.  A put carries them in the
  *note*, the text that Oxia keeps as the client's identity beside the value, so the value itself
  stays as others expect it.  The note also has the id of the put, by which its effect is known
  again when an answer got lost.
- A record without a note was put by somebody else: its partition and index keys are what the
  declared key families derive.
- Servers order slashes in their own way, and up to 0.17.1 break on empty secondary keys.  Here
  slashes of secondary keys become a dot and the last character there is, which no key holds: that
  keeps the bytewise order.
- Keys of ours that are no records of users begin without a slash, so no range reaches them.
"""

import json
from typing import NamedTuple

from storage.metadata import group
from storage.metadata.keys import LAST, KeyFamilies
from storage.metadata.operations import Delete, Put, SequencePut
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.routing import version_of
from storage.metadata.store import IndexEntry, InvalidMetadataRequest, Record

OWN_PREFIX = "magnetar/"
SEQUENCES = f"{OWN_PREFIX}sequences/"
PROOF = f"{OWN_PREFIX}proof"
"""Put by whoever wants to know that a shard's leader is one; its value says nothing."""
SERVERS_PREFIX = "__oxia/"

_NOTE = "magnetar:"
_SLASH = f".{LAST}"


class Note(NamedTuple):
    """What is kept beside a value.  `identity` is the session's, of ephemerals."""

    put_id: str
    partition: str | None = None
    identity: str | None = None
    indexes: tuple[IndexEntry, ...] = ()


class Found(NamedTuple):
    """A record as it was found, where, and what its note says."""

    record: Record
    shard_id: int
    version_id: int
    put_id: str | None
    indexes: tuple[IndexEntry, ...]
    session_id: int | None

    @property
    def stored(self) -> group.Stored:
        """As watchers compare it."""
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
    """The note in a client's identity; None: it is no note of ours."""
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
    """A secondary key, or a bound of a range of them, as the server has it."""
    return key.replace("/", _SLASH)


def put_request(
    put: Put | SequencePut,
    note: Note,
    *,
    expected: int | None = None,
    session_id: int | None = None,
) -> pb.PutRequest:
    """The request of a put; `expected` is the version id it must find (-1: none at all).

    Raises `InvalidMetadataRequest` for what servers break on, or never start again from.
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
    """Refuse a put that would end a server or stay in its log as a poison.

    Everything here is refused when an operation is made already; this is the last look.
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
) -> Found:
    """What an answer of a shard tells of a record."""
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
    return Found(record, shard_id, version.version_id, put_id, indexes, session_id)
