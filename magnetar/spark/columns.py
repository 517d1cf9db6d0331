"""Rows of a segment as Arrow batches, in the schema that Spark expects."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from magnetar.reads.messages import EntryRun, MessageColumns
from magnetar.spark.errors import InvalidOption
from magnetar.spark.order_key import ORDER_KEY_BYTES, order_keys
from magnetar.spark.row_ids import row_ids

__all__ = [
    "BASE_SCHEMA",
    "CORRUPT",
    "DATA",
    "Values",
    "arrow_schema",
    "check_schema",
    "record_batch",
]

BASE_SCHEMA: Final = StructType(
    [
        StructField("key", StringType()),
        StructField("value", BinaryType()),
        StructField("properties", MapType(StringType(), StringType()), nullable=False),
        StructField("publish_time", TimestampType()),
        StructField("event_time", TimestampType()),
        StructField("segment_id", LongType(), nullable=False),
        StructField("message_id", BinaryType(), nullable=False),
        StructField("txn_id", StringType()),
        StructField("order_key", BinaryType(), nullable=False),
        StructField("schema_version", BinaryType()),
        StructField("producer", StringType(), nullable=False),
        StructField("sequence_id", LongType(), nullable=False),
    ]
)
"""The columns of a source without `decode`, in order.

`key` is the text of the partition key as it was sent: base64 where the producer gave bytes.  A null
`value` is a tombstone.  Times are of the producer's clock, null beyond the range of Spark.
"""
DATA: Final = "data"
"""The decoded value, a struct."""
CORRUPT: Final = "_corrupt"
"""Why a value could not be decoded."""

_MAX_MS: Final = (2**63 - 1) // 1000
_US: Final = pa.timestamp("us", "UTC")

Values = Callable[[MessageColumns], Mapping[str, pa.Array]]
"""The columns that are made of values: `data`, `_corrupt`."""


def arrow_schema(declared: StructType) -> pa.Schema:
    """The Arrow schema that Spark expects of each batch."""
    # Spark's own translation, so that the types are equal.
    return to_arrow_schema(declared, timezone="UTC")


def check_schema(declared: StructType, known: StructType) -> None:
    """Check declared columns: some of the known ones, in any order, with some of their fields.

    Raises `InvalidOption` for a column that is not known, or of another type.
    """
    types = {each.name: each.dataType for each in known}
    for each in declared:
        if each.name not in types:
            raise InvalidOption(
                f"The source has no column {each.name}; it has {', '.join(known.names)}. Leave the "
                "schema out to have all of them."
            )
        if not _is_of(each.dataType, types[each.name]):
            raise InvalidOption(
                f"The column {each.name} is of type {types[each.name].simpleString()}, not "
                f"{each.dataType.simpleString()}; declare it so, and cast it afterwards."
            )


def _is_of(declared: DataType, known: DataType) -> bool:
    """Whether it is that type, or a struct of some of its fields."""
    if not isinstance(declared, StructType) or not isinstance(known, StructType):
        return declared == known
    fields = {field.name: field for field in known}
    return all(
        each.name in fields
        and each.nullable >= fields[each.name].nullable
        and _is_of(each.dataType, fields[each.name].dataType)
        for each in declared
    )


def record_batch(
    columns: MessageColumns, segment_id: int, schema: pa.Schema, values: Values | None = None
) -> pa.RecordBatch:
    """The rows, of one segment, with the columns of `schema`."""
    decoded = {} if values is None else values(columns)
    arrays = [
        decoded[name] if name in decoded else _COLUMNS[name](columns, segment_id)
        for name in schema.names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _of_runs(
    columns: MessageColumns, value: Callable[[EntryRun], object], kind: pa.DataType
) -> pa.Array:
    """A column in which the rows of an entry share a value, made once for each entry."""
    counts = [run.messages for run in columns.runs]
    each = pa.array([value(run) for run in columns.runs], kind)
    if len(counts) == len(columns):
        return each
    return each.take(pa.array(np.repeat(np.arange(len(counts)), counts)))


def _moments(times_ms: Sequence[int | None]) -> pa.Array:
    try:
        micros = compute.multiply_checked(pa.array(times_ms, pa.int64()), 1000)
    except (OverflowError, pa.ArrowInvalid):
        # Spark has no time beyond 64 bits of microseconds: such a time is null.
        known = [time if time is not None and time <= _MAX_MS else None for time in times_ms]
        micros = compute.multiply_checked(pa.array(known, pa.int64()), 1000)
    return micros.view(_US)


def _keys(columns: MessageColumns, _: int) -> pa.Array:
    return pa.array(columns.keys, pa.string())


def _values(columns: MessageColumns, _: int) -> pa.Array:
    return pa.array(columns.values, pa.binary())


def _properties(columns: MessageColumns, _: int) -> pa.Array:
    counts = np.zeros(len(columns) + 1, "i4")
    names: list[str] = []
    values: list[str] = []
    for row in sorted(columns.properties):
        pairs = columns.properties[row]
        counts[row + 1] = len(pairs)
        names += [name for name, _ in pairs]
        values += [value for _, value in pairs]
    offsets = pa.array(np.cumsum(counts, dtype="i4"), pa.int32())
    return pa.MapArray.from_arrays(
        offsets, pa.array(names, pa.string()), pa.array(values, pa.string())
    )


def _publish_times(columns: MessageColumns, _: int) -> pa.Array:
    times = _moments([run.publish_time_ms for run in columns.runs])
    counts = [run.messages for run in columns.runs]
    return times.take(pa.array(np.repeat(np.arange(len(counts)), counts)))


def _event_times(columns: MessageColumns, _: int) -> pa.Array:
    return _moments(columns.event_times_ms)


def _segment_ids(columns: MessageColumns, segment_id: int) -> pa.Array:
    return pa.array(np.full(len(columns), segment_id, "i8"))


def _message_ids(columns: MessageColumns, segment_id: int) -> pa.Array:
    return row_ids(columns, segment_id)


def _transactions(columns: MessageColumns, _: int) -> pa.Array:
    def text(run: EntryRun) -> str | None:
        return None if run.txn_id is None else str(run.txn_id)

    return _of_runs(columns, text, pa.string())


def _order_keys(columns: MessageColumns, segment_id: int) -> pa.Array:
    entries = [(run.ledger_id, run.entry_id, run.messages) for run in columns.runs]
    data = order_keys(segment_id, entries, columns.batch_indexes)
    offsets = np.arange(len(columns) + 1, dtype="i4") * ORDER_KEY_BYTES
    return pa.Array.from_buffers(
        pa.binary(), len(columns), [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(data)]
    )


def _schema_versions(columns: MessageColumns, _: int) -> pa.Array:
    return _of_runs(columns, lambda run: run.schema_version, pa.binary())


def _producers(columns: MessageColumns, _: int) -> pa.Array:
    return _of_runs(columns, lambda run: run.producer, pa.string())


def _sequence_ids(columns: MessageColumns, _: int) -> pa.Array:
    return pa.array(columns.sequence_ids, pa.int64())


_COLUMNS: Final[Mapping[str, Callable[[MessageColumns, int], pa.Array]]] = MappingProxyType(
    {
        "key": _keys,
        "value": _values,
        "properties": _properties,
        "publish_time": _publish_times,
        "event_time": _event_times,
        "segment_id": _segment_ids,
        "message_id": _message_ids,
        "txn_id": _transactions,
        "order_key": _order_keys,
        "schema_version": _schema_versions,
        "producer": _producers,
        "sequence_id": _sequence_ids,
    }
)
