"""The column `order_key`: bytes that sort as rows of one key were written.

Pure.  28 bytes, big-endian: segment, ledger, entry, index in the batch.  Ids of segments rise along
every path of the DAG, and are never used again.  So the key needs no depth, which would change as
retention deletes parents.  The index is 0 in an entry without a batch.  A message in pieces has the
key of its last piece.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Final

import numpy as np

__all__ = ["ORDER_KEY_BYTES", "order_key", "order_keys"]

_ONE: Final = Struct(">QQQI")
_MANY: Final = np.dtype([("segment", ">u8"), ("ledger", ">u8"), ("entry", ">u8"), ("index", ">u4")])
ORDER_KEY_BYTES: Final = _ONE.size


def order_key(segment_id: int, ledger_id: int, entry_id: int, batch_index: int) -> bytes:
    """The order key of one row; index -1: its entry is no batch."""
    return _ONE.pack(segment_id, ledger_id, entry_id, max(batch_index, 0))


def order_keys(
    segment_id: int, entries: Sequence[tuple[int, int, int]], batch_indexes: Sequence[int]
) -> bytes:
    """The order keys of many rows of a segment, one after the other.

    `entries` are ledger, entry and number of rows, in their order.
    """
    keys = np.empty(len(batch_indexes), _MANY)
    counts = [count for _, _, count in entries]
    keys["segment"] = segment_id
    keys["ledger"] = np.repeat(np.array([each[0] for each in entries], "u8"), counts)
    keys["entry"] = np.repeat(np.array([each[1] for each in entries], "u8"), counts)
    keys["index"] = np.maximum(np.array(batch_indexes, "i8"), 0)
    return keys.tobytes()
