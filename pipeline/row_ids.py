"""The bytes of many message ids of a segment at once: those of `MessageId.to_bytes`.

Pure.  Ids of one batch differ in the index alone, so the first is encoded by the client, and the
others are put together from its parts.
"""

from collections.abc import Iterator
from struct import Struct
from typing import Final

from magnetar.message_id import EntryId, MessageId
from magnetar.reads.messages import EntryRun, MessageColumns

__all__ = ["row_ids"]

_INDEX_TAG: Final = b"\x20"
"""Field 4 of `MessageIdData`."""
_HEAD: Final = Struct(">qi")
_SHORT: Final = 128
"""Indexes below it take one byte, and those below its square two."""


def row_ids(columns: MessageColumns, segment_id: int) -> list[bytes]:
    """The id of each row."""
    found: list[bytes] = []
    for run in columns.runs:
        indexes = columns.batch_indexes[len(found) : len(found) + run.messages]
        found += _of_run(run, indexes, segment_id)
    return found


def _of_run(run: EntryRun, indexes: list[int], segment_id: int) -> Iterator[bytes]:
    if len(indexes) < 3 or indexes[-1] >= _SHORT * _SHORT:
        for index in indexes:
            where = EntryId(run.ledger_id, run.entry_id, index, run.batch_size, -1, run.first_piece)
            yield MessageId(where, segment_id).to_bytes()
        return
    bare = EntryId(run.ledger_id, run.entry_id, -1, run.batch_size).to_bytes()
    start = EntryId(run.ledger_id, run.entry_id).to_bytes()
    # `start` ends with a batch size of 0, which is two bytes: before them the index goes.
    at = len(start) - 2
    before, behind = bare[:at] + _INDEX_TAG, bare[at:]
    rest = MessageId(EntryId(0, 0), segment_id).to_bytes()
    tail = behind + rest[_HEAD.size + _HEAD.unpack_from(rest)[1] :]
    size = len(bare) + 2
    short, long = _HEAD.pack(segment_id, size) + before, _HEAD.pack(segment_id, size + 1) + before
    for index in indexes:
        if index < _SHORT:
            yield short + bytes((index,)) + tail
        else:
            yield long + bytes((index & 0x7F | 0x80, index >> 7)) + tail
