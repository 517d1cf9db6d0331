"""Pure: the metadata records of transaction keys: paths, JSON and index.

    /txn/key/<owner>&<key>      epoch, its opener, times, the last transactions, committed batches
    /txn/key-floor/<tc>         the highest epoch that a deleted key of the coordinator had

`<owner>` and `<key>` are URL-encoded, so the first ampersand separates them.  Every key is indexed
by coordinator and name, which never change.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from magnetar.protocol.names import decode_name, encode_name
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.metadata.keys import number
from storage.metadata.store import IndexEntry
from txn.group_records import (
    decode_batches,
    decode_group_record,
    encode_batches,
    encode_group_record,
)
from txn.record_json import decode_members, decode_or_raise, integer, json_bytes, text
from txn.records import TxnState
from txn.transaction_key import KeyName, KeyRecord, KeyTransaction

KEYS = "/txn/key/"
FLOORS = "/txn/key-floor/"
KEY_INDEX = "idx:txn-keys-by-coordinator"


def key_path(name: KeyName) -> str:
    """The path of a key's record."""
    return f"{KEYS}{encoded_name(name)}"


def encoded_name(name: KeyName) -> str:
    """Encode owner and key as one part of a path."""
    return f"{encode_name(name.owner)}&{encode_name(name.key)}"


def name_at(path: str) -> KeyName:
    """Decode owner and key from a path.  Raises `CorruptTransactionRecord`."""

    def decode() -> KeyName:
        owner, _, key = path.removeprefix(KEYS).partition("&")
        return KeyName(decode_name(owner), decode_name(key))

    return decode_or_raise(path, decode)


def floor_path(coordinator: CoordinatorId) -> str:
    """The path of the floor of a coordinator's keys."""
    return f"{FLOORS}{coordinator}"


def partition_of(coordinator: CoordinatorId) -> str:
    """The partition of a coordinator's keys and of their floor (K7)."""
    # K7: in one partition a read of the floor after the put of a key is not older than that put.
    return f"key-{coordinator}"


def index_key(coordinator: CoordinatorId, encoded: str) -> str:
    """The secondary key of a key's record."""
    return f"{number(coordinator)}:{encoded}"


def key_indexes(coordinator: CoordinatorId, name: KeyName) -> tuple[IndexEntry, ...]:
    """Index a key by coordinator and name."""
    return (IndexEntry(KEY_INDEX, index_key(coordinator, encoded_name(name))),)


def encode_key(record: KeyRecord) -> bytes:
    """Encode a key's record; members without a value are left out."""
    members: dict[str, object] = {
        "epoch": record.epoch,
        "opener": record.opener,
        "createdMs": record.created_ms,
        "lastUsedMs": record.last_used_ms,
    }
    if record.transaction is not None:
        members["transaction"] = _encoded(record.transaction)
        members["beginner"] = record.beginner
    if record.before is not None:
        members["before"] = _encoded(record.before)
    if record.committed is not None:
        members["committed"] = encode_group_record(record.committed)
    if record.earlier:
        members["earlier"] = encode_batches(record.earlier)
    if record.nonces:
        members["nonces"] = record.nonces
    return json_bytes(members)


def decode_key(path: str, value: bytes) -> KeyRecord:
    """Decode the key stored at `path`.  Raises `CorruptTransactionRecord`."""

    def decode() -> KeyRecord:
        members = decode_members(value)
        return KeyRecord(
            integer(members["epoch"]),
            text(members["opener"]),
            integer(members["createdMs"]),
            integer(members["lastUsedMs"]),
            _decoded(members.get("transaction")),
            text(members.get("beginner", "")),
            _decoded(members.get("before")),
            decode_group_record(members["committed"]) if "committed" in members else None,
            decode_batches(members.get("earlier", [])),
            tuple(text(each) for each in cast("Sequence[object]", members.get("nonces", ()))),
        )

    return decode_or_raise(path, decode)


def _encoded(named: KeyTransaction) -> Mapping[str, object]:
    members: dict[str, object] = {"id": str(named.txn)}
    if named.ended is not None:
        members["state"] = named.ended.value
    if named.is_group:
        members["group"] = True
    return members


def _decoded(value: object) -> KeyTransaction | None:
    if value is None:
        return None
    members = cast("Mapping[str, object]", value)
    state = members.get("state")
    return KeyTransaction(
        TxnId.parse(text(members["id"])),
        None if state is None else TxnState(text(state)),
        members.get("group") is True,
    )
