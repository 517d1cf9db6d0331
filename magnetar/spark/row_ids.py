"""The bytes of many message ids of a segment at once: those of `MessageId.to_bytes`.

Pure.  Ids of one batch differ in the index alone, and so in one byte, or in two from the index 128
on; the first of each kind is encoded by the client, and the others are copies with their index.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from magnetar.message_id import EntryId, MessageId
from magnetar.reads.messages import EntryRun, MessageColumns

__all__ = ["row_ids"]

_SHORT: Final = 128
"""Indexes below it take one byte, and those below its square two."""
_ALONE: Final = 3
"""Rows of an entry up to which each is encoded by itself."""


def row_ids(columns: MessageColumns, segment_id: int) -> pa.Array:
    """The id of each row, as binary."""
    data: list[bytes] = []
    sizes: list[int] = []
    row = 0
    for run in columns.runs:
        indexes = columns.batch_indexes[row : row + run.messages]
        row += run.messages
        if len(indexes) <= _ALONE or indexes[-1] >= _SHORT * _SHORT:
            each = [_encode(run, index, segment_id) for index in indexes]
            data += each
            sizes += map(len, each)
            continue
        first_long = next((i for i, index in enumerate(indexes) if index >= _SHORT), len(indexes))
        for some in (indexes[:first_long], indexes[first_long:]):
            if some:
                copies = _copies(run, some, segment_id)
                data.append(copies.tobytes())
                sizes += [copies.shape[1]] * len(some)
    offsets = np.zeros(len(sizes) + 1, "i4")
    np.cumsum(np.array(sizes, "i4"), out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(data))]
    return pa.Array.from_buffers(pa.binary(), len(sizes), buffers)


def _encode(run: EntryRun, index: int, segment_id: int) -> bytes:
    where = EntryId(run.ledger_id, run.entry_id, index, run.batch_size, -1, run.first_piece)
    return MessageId(where, segment_id).to_bytes()


def _copies(run: EntryRun, indexes: Sequence[int], segment_id: int) -> np.ndarray:
    """One id in each row; all indexes take as many bytes as the first."""
    is_long = indexes[0] >= _SHORT
    # Two ids that differ in the index alone differ where it is.
    low, high = (_SHORT, 2 * _SHORT) if is_long else (0, 1)
    model = np.frombuffer(_encode(run, low, segment_id), "u1")
    other = np.frombuffer(_encode(run, high, segment_id), "u1")
    (at,) = np.flatnonzero(model != other)
    copies = np.tile(model, (len(indexes), 1))
    numbers = np.array(indexes, "u2")
    if is_long:
        copies[:, at - 1] = numbers & 0x7F | 0x80
        copies[:, at] = numbers >> 7
    else:
        copies[:, at] = numbers
    return copies
