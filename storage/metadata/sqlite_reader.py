"""The reading side of the SQLite store: committed state through a connection of its own.

Rules:
- A read starts after it was asked for, so it sees every write acknowledged before.
- What a statement finds comes back as one row (JSON for the columns, one hexadecimal text for all
  values): every row fetched would have to win the interpreter back from a busy event loop.
- Each answer says the revision that it saw (or a later one), so that it can be kept back until
  watchers know as much.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from config import bounds
from storage.metadata.keys import LAST, level_of
from storage.metadata.sqlite_file import metadata_error
from storage.metadata.store import IndexHit, Record, Version

_RECORD = """r.key, r.version, r.modifications, r.created_ms, r.modified_ms,
    r.session_id IS NOT NULL, r.partition, length(r.value)"""

_GET = f"""
SELECT json_group_array(json_array({_RECORD})), group_concat(hex(r.value), '')
FROM json_each(:keys) AS w CROSS JOIN record AS r
ON r.depth = json_extract(w.value, '$[0]') AND r.key = json_extract(w.value, '$[1]')
"""

_CHILDREN = """
SELECT json_group_array(substr(r.key, :name_at)) FROM (
    SELECT key FROM record WHERE depth = :depth AND key > :level AND key < :end ORDER BY key) AS r
"""

_SCAN = f"""
SELECT json_group_array(json_array({_RECORD})), group_concat(hex(r.value), '') FROM (
    SELECT * FROM record WHERE depth = :depth AND key >= :lo AND key < :hi
    ORDER BY key LIMIT :limit) AS r
"""

_SCAN_INDEX = f"""
SELECT json_group_array(json_array(r.index_key, {_RECORD})), group_concat(hex(r.value), '') FROM (
    SELECT e.index_key, record.* FROM index_entry AS e CROSS JOIN record
    ON record.depth = e.depth AND record.key = e.key
    WHERE e.name = :index AND (e.index_key, e.key) > (:lo, :after) AND e.index_key < :hi
        AND (:partition IS NULL OR record.partition = :partition)
    ORDER BY e.index_key, e.key LIMIT :limit) AS r
"""

_REVISION = "SELECT revision FROM store"

_Columns: TypeAlias = tuple[str, int, int, int, int, int, str | None, int]
"""As in `_RECORD`."""


@dataclass(frozen=True, slots=True)
class Children:
    """Names of the direct children of a level."""

    level: str


@dataclass(frozen=True, slots=True)
class Scan:
    """Records of one level."""

    lo: str
    hi: str


@dataclass(frozen=True, slots=True)
class IndexScan:
    """Hits of an index."""

    index: str
    lo: str
    hi: str
    partition: str | None
    limit: int | None


RangeRead = Children | Scan | IndexScan
RangeResult = list[str] | list[Record] | list[IndexHit]


class SqliteReader:
    """Reads committed state.  Not for two threads at once."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    def get(self, keys: Iterable[str]) -> tuple[int, dict[str, Record]]:
        """The records there are of these keys, and a revision not before what was seen.

        Raises `MetadataError`.
        """
        wanted = sorted({(key.count("/"), key) for key in keys})
        records: dict[str, Record] = {}
        try:
            for start in range(0, len(wanted), bounds.METADATA_SCAN_PAGE):
                page = json.dumps(wanted[start : start + bounds.METADATA_SCAN_PAGE])
                columns, values = self._row(_GET, {"keys": page})
                for record in _records(json.loads(columns), values):
                    records[record.key] = record
            return self._revision(), records
        except sqlite3.Error as error:
            raise metadata_error(error, self._path) from error

    def read_range(self, read: RangeRead) -> tuple[int, RangeResult]:
        """A range as of one moment, and that moment's revision.  Raises `MetadataError`."""
        try:
            self._connection.execute("BEGIN")
            try:
                return self._revision(), self._read_range(read)
            finally:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise metadata_error(error, self._path) from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _read_range(self, read: RangeRead) -> RangeResult:
        match read:
            case Children(level=level):
                return self._children(level)
            case Scan(lo=lo, hi=hi):
                return self._scan(lo, hi)
            case IndexScan():
                return self._scan_index(read)

    def _children(self, level: str) -> list[str]:
        parameters = {
            "depth": level.count("/"),
            "level": level,
            "end": f"{level}{LAST}",
            "name_at": len(level) + 1,
        }
        (names,) = self._row(_CHILDREN, parameters)
        return sorted(json.loads(names))

    def _scan(self, lo: str, hi: str) -> list[Record]:
        level = level_of(lo)
        end = f"{level}{LAST}" if hi == f"{level}/" else hi
        found: list[Record] = []
        while True:
            parameters = {
                "depth": level.count("/"),
                "lo": f"{found[-1].key}\x01" if found else lo,
                "hi": end,
                "limit": bounds.METADATA_SCAN_PAGE,
            }
            columns, values = self._row(_SCAN, parameters)
            page = sorted(_records(json.loads(columns), values), key=lambda record: record.key)
            found += page
            if len(page) < bounds.METADATA_SCAN_PAGE:
                return found

    def _scan_index(self, read: IndexScan) -> list[IndexHit]:
        found: list[IndexHit] = []
        left = read.limit
        while left is None or left > 0:
            limit = (
                bounds.METADATA_SCAN_PAGE if left is None else min(left, bounds.METADATA_SCAN_PAGE)
            )
            parameters = {
                "index": read.index,
                "lo": found[-1].index_key if found else read.lo,
                "after": found[-1].record.key if found else "",
                "hi": read.hi,
                "partition": read.partition,
                "limit": limit,
            }
            columns, values = self._row(_SCAN_INDEX, parameters)
            rows = json.loads(columns)
            index_keys = [row.pop(0) for row in rows]
            page = list(map(IndexHit, index_keys, _records(rows, values)))
            found += sorted(page, key=lambda hit: (hit.index_key, hit.record.key))
            if len(page) < limit:
                break
            left = None if left is None else left - len(page)
        return found

    def _row(self, statement: str, parameters: Mapping[str, object]) -> tuple[str, ...]:
        row: tuple[str, ...] = self._connection.execute(statement, parameters).fetchone()
        return row

    def _revision(self) -> int:
        return int(self._connection.execute(_REVISION).fetchone()[0])


def _records(rows: list[_Columns], values: str | None) -> Iterator[Record]:
    """Records from their columns and the hexadecimal text of all their values."""
    buffer = bytes.fromhex(values or "")
    offset = 0
    for key, version, modifications, created_ms, modified_ms, ephemeral, partition, size in rows:
        yield Record(
            key,
            buffer[offset : offset + size],
            Version(version),
            modifications,
            created_ms,
            modified_ms,
            bool(ephemeral),
            partition,
        )
        offset += size
