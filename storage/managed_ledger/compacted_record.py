"""Pure: how the record of a stream names its compacted ledger, in two properties.

The form of a compacted ledger's entries is here too: it is Apache Pulsar's `RawMessage`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from magnetar.protocol.ids import Position
from magnetar.protocol.pulsar_pb2 import MessageIdData
from storage.managed_ledger.types import CorruptRecord, Entry

COMPACTION_CURSOR: Final = "__compaction"
"""Cursor that keeps entries until they are compacted."""
COMPACTED_PROPERTY: Final = "magnetar.compacted"
"""`<ledger>:<ledger and entry of the horizon>`; ledger -1: no message is left."""
UNUSED_PROPERTY: Final = "magnetar.compacted.unused"
"""Ledgers that are being written, or that were the compacted ledger before."""
NO_LEDGER: Final = -1
PULSAR_LEDGER: Final = "CompactedTopicLedger"
"""Property of the cursor's position in which Apache Pulsar notes the compacted ledger."""
_U32: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Compacted:
    """A compacted ledger (NO_LEDGER: of which nothing is left) and its horizon.

    Each message up to the horizon is in the ledger if it is the newest of its key.
    """

    ledger_id: int
    horizon: Position


def compacted_of(properties: Mapping[str, str]) -> Compacted | None:
    """The compacted ledger of a stream.  Raises `CorruptRecord`."""
    value = properties.get(COMPACTED_PROPERTY)
    if value is None:
        return None
    ledger_id, *horizon = _numbers(COMPACTED_PROPERTY, value, ":")
    if len(horizon) != 2:
        raise _corrupt(COMPACTED_PROPERTY, value)
    return Compacted(ledger_id, Position(*horizon))


def unused_of(properties: Mapping[str, str]) -> list[int]:
    """The ledgers of a stream that are named and not used.  Raises `CorruptRecord`."""
    value = properties.get(UNUSED_PROPERTY)
    return [] if value is None else _numbers(UNUSED_PROPERTY, value, ",")


def compaction_ledgers(properties: Mapping[str, str]) -> set[int]:
    """Every ledger that the record of a stream names for its compaction."""
    compacted = compacted_of(properties)
    found = set(unused_of(properties))
    if compacted is not None and compacted.ledger_id != NO_LEDGER:
        found.add(compacted.ledger_id)
    return found


def with_compaction(
    properties: Mapping[str, str], compacted: Compacted | None, unused: set[int]
) -> dict[str, str]:
    """The properties of a stream with that compacted ledger and these unused ones."""
    changed = {**properties}
    changed.pop(COMPACTED_PROPERTY, None)
    changed.pop(UNUSED_PROPERTY, None)
    if compacted is not None:
        ledger_id, entry_id = compacted.horizon
        changed[COMPACTED_PROPERTY] = f"{compacted.ledger_id}:{ledger_id}:{entry_id}"
    if unused:
        changed[UNUSED_PROPERTY] = ",".join(str(each) for each in sorted(unused))
    return changed


def encode_compacted(entry: Entry) -> bytes:
    """An entry of a compacted ledger: the original message id, and the entry."""
    ledger_id, entry_id = entry.position
    raw_id = MessageIdData(ledger_id=ledger_id, entry_id=entry_id).SerializeToString()
    sizes = _U32.pack(len(raw_id)), _U32.pack(len(entry.data))
    return b"".join((sizes[0], raw_id, sizes[1], entry.data))


def decode_compacted(data: bytes) -> Entry:
    """The entry at its original position.  Raises `CorruptRecord`."""
    try:
        (id_bytes,) = _U32.unpack_from(data)
        message_id = MessageIdData.FromString(data[4 : 4 + id_bytes])
        (size,) = _U32.unpack_from(data, 4 + id_bytes)
        body = data[8 + id_bytes :]
        if len(body) != size:
            raise ValueError(size)
    except (DecodeError, ValueError, struct.error) as error:
        raise CorruptRecord(
            "An entry of a compacted ledger cannot be read: compact the topic again."
        ) from error
    return Entry(Position(message_id.ledger_id, message_id.entry_id), body)


def _numbers(name: str, value: str, separator: str) -> list[int]:
    try:
        return [int(part) for part in value.split(separator)]
    except ValueError as error:
        raise _corrupt(name, value) from error


def _corrupt(name: str, value: str) -> CorruptRecord:
    return CorruptRecord(
        f"The property {name} of a topic's record is {value!r}: restore it from a backup."
    )
