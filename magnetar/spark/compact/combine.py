"""Reduces the rows of one range, in order, to the last one of each key.  Pure."""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["combine", "last_of_each_key"]

COMBINED_BYTES: Final = 64 * 1024 * 1024
"""The most bytes of reduced rows in memory."""
PENDING_ROWS: Final = 100_000
PENDING_BYTES: Final = 16 * 1024 * 1024
"""Rows, or bytes of them, after which they are reduced."""
ROWS_OF_A_BATCH: Final = 16_384


def combine(
    batches: Iterable[pa.RecordBatch], most_bytes: int = COMBINED_BYTES
) -> Iterator[pa.RecordBatch]:
    """The last row of each key and all rows without key, in order; `key` is a column.

    A range whose reduced rows exceed `most_bytes` may give a key several times, in order.
    """
    kept: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        kept.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows < PENDING_ROWS and size < min(PENDING_BYTES, most_bytes):
            continue
        table = last_of_each_key(pa.Table.from_batches(kept))
        kept, rows, size = table.to_batches(), 0, 0
        # The shuffle that follows keeps one row of each key, so memory may be freed at any time.
        if table.nbytes >= most_bytes:
            yield from table.to_batches(max_chunksize=ROWS_OF_A_BATCH)
            kept = []
    if kept:
        table = last_of_each_key(pa.Table.from_batches(kept))
        yield from table.to_batches(max_chunksize=ROWS_OF_A_BATCH)


def last_of_each_key(rows: pa.Table) -> pa.Table:
    """The last row of each key and all rows without key, in the order of the rows."""
    numbered = pa.table({"key": rows["key"], "row": pa.array(np.arange(rows.num_rows))})
    has_key = pc.is_valid(numbered["key"])
    last = numbered.filter(has_key).group_by("key").aggregate([("row", "max")])["row_max"]
    without = numbered.filter(pc.invert(has_key))["row"]
    chosen = np.concatenate([last.to_numpy(), without.to_numpy()])
    chosen.sort()
    return rows.take(pa.array(chosen))
