"""Rows to be written, from Arrow to what a producer takes.  Pure."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import pyarrow as pa

from magnetar.spark.errors import InvalidRows
from magnetar.spark.row_hash import row_hash

__all__ = ["RowColumns", "Rows"]

_TYPES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "value": ("binary", "string"),
        "key": ("string", "binary"),
        "properties": ("map<string,string>",),
        "event_time": ("timestamp",),
    }
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows, by columns of the same length; a missing column is None.

    Keys are as producers take them, event times in ms since 1970; `hashes` are `row_hash`.
    """

    values: Sequence[bytes | None]
    keys: Sequence[str | bytes | None] | None
    properties: Sequence[Mapping[str, str] | None] | None
    event_times_ms: Sequence[int | None] | None
    hashes: Sequence[int]

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The indexes of the columns of a batch; -1: the column is missing.

    `value` is required, and null is a message without value.  `key`, `properties` and `event_time`
    may be missing or null.  Other columns are ignored.
    """

    value: int
    key: int
    bytes_keys: bool
    properties: int
    event_time: int

    @classmethod
    def of(cls, schema: Sequence[tuple[str, str]]) -> "RowColumns":
        """Find the columns in names and Spark's types, given in order.

        Raises `InvalidRows` if `value` is missing, or a column has another type than its name has.
        """
        places: dict[str, int] = {}
        for place, (given, type_name) in enumerate(schema):
            name = given.lower()
            if name not in _TYPES:
                continue
            if name in places:
                raise InvalidRows(f"There are two columns {name}; leave one of them out.")
            if type_name.split(" ")[0] not in _TYPES[name]:
                raise InvalidRows(
                    f"The column {given} is of type {type_name}; cast it to "
                    f"{' or '.join(_TYPES[name])}."
                )
            places[name] = place
        if "value" not in places:
            raise InvalidRows(
                "There is no column value; select one, binary or string, for example "
                "to_json(struct(*)) AS value."
            )
        key = places.get("key", -1)
        return cls(
            value=places["value"],
            key=key,
            bytes_keys=key >= 0 and schema[key][1] == "binary",
            properties=places.get("properties", -1),
            event_time=places.get("event_time", -1),
        )

    def rows(self, batch: pa.RecordBatch) -> Rows:
        """The rows of a batch.  Raises `InvalidRows`."""
        values = _bytes(batch.column(self.value))
        keys = batch.column(self.key).to_pylist() if self.key >= 0 else None
        if keys is None:
            hashes = [row_hash(None, value) for value in values]
        else:
            # The hash is of the key as it is stored: clients send bytes as base64.
            encode = b64encode if self.bytes_keys else str.encode
            stored = (None if key is None else encode(key) for key in keys)
            hashes = list(map(row_hash, stored, values))
        return Rows(
            values=values,
            keys=keys,
            properties=_maps(batch.column(self.properties)) if self.properties >= 0 else None,
            event_times_ms=_times(batch.column(self.event_time)) if self.event_time >= 0 else None,
            hashes=hashes,
        )


def _bytes(column: pa.Array) -> list[bytes | None]:
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        column = column.cast(pa.large_binary())
    found: list[bytes | None] = column.to_pylist()
    return found


def _maps(column: pa.Array) -> list[Mapping[str, str] | None]:
    found: list[Mapping[str, str] | None] = []
    for pairs in column.to_pylist():
        one = None if pairs is None else dict(pairs)
        if one and None in one.values():
            names = [name for name, value in one.items() if value is None]
            raise InvalidRows(
                f"The properties {names} of a row are null; give them texts, or leave them out "
                "with map_filter."
            )
        found.append(one)
    return found


def _times(column: pa.Array) -> list[int | None]:
    micros = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64()).to_pylist()
    return [None if us is None else us // 1000 for us in micros]
