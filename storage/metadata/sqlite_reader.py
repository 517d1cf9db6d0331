"""The reading side of the SQLite store: committed state through a connection of its own."""

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from storage.metadata.keys import LAST, level_of
from storage.metadata.sqlite_file import metadata_error
from storage.metadata.store import IndexHit, Record, Version

_RECORD = """r.key, r.value, r.version, r.modifications, r.created_ms, r.modified_ms,
    r.session_id IS NOT NULL, r.partition"""

_GET = f"""
SELECT {_RECORD} FROM json_each(:keys) AS w CROSS JOIN record AS r
ON r.depth = json_extract(w.value, '$[0]') AND r.key = json_extract(w.value, '$[1]')
"""

_CHILDREN = """
SELECT substr(key, :name_at) FROM record
WHERE depth = :depth AND key > :level AND key < :end ORDER BY key
"""

_SCAN = f"""
SELECT {_RECORD} FROM record AS r
WHERE r.depth = :depth AND r.key >= :lo AND r.key < :hi ORDER BY r.key
"""

_SCAN_INDEX = f"""
SELECT e.index_key, {_RECORD} FROM index_entry AS e CROSS JOIN record AS r
ON r.depth = e.depth AND r.key = e.key
WHERE e.name = :index AND e.index_key >= :lo AND e.index_key < :hi
    AND (:partition IS NULL OR r.partition = :partition)
ORDER BY e.index_key, e.key LIMIT :limit
"""

_REVISION = "SELECT revision FROM store"
_NO_LIMIT = -1

_Row: TypeAlias = tuple[str, bytes, int, int, int, int, int, str | None]
"""The columns of `_RECORD`."""


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
    max_bytes: int | None


RangeRead = Children | Scan | IndexScan
RangeResult = list[str] | list[Record] | list[IndexHit]


class SqliteReader:
    """Reads committed state.  Not for two threads at once.

    A read starts after it was asked for, so it sees every write acknowledged before.  Each answer
    comes with the revision that it saw, or a later one: the caller holds it back until watchers
    have got the events up to there.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    def get(self, keys: Iterable[str]) -> tuple[int, dict[str, Record]]:
        """The records there are of these keys, and a revision not older than they are.

        Raises `MetadataError`.
        """
        wanted = json.dumps(sorted({(key.count("/"), key) for key in keys}))
        try:
            rows: Iterable[_Row] = self._connection.execute(_GET, {"keys": wanted}).fetchall()
            return self._revision(), {row[0]: _record(*row) for row in rows}
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
        return [name for (name,) in self._connection.execute(_CHILDREN, parameters).fetchall()]

    def _scan(self, lo: str, hi: str) -> list[Record]:
        level = level_of(lo)
        parameters = {
            "depth": level.count("/"),
            "lo": lo,
            "hi": f"{level}{LAST}" if hi == f"{level}/" else hi,
        }
        return [_record(*row) for row in self._connection.execute(_SCAN, parameters).fetchall()]

    def _scan_index(self, read: IndexScan) -> list[IndexHit]:
        parameters = {
            "index": read.index,
            "lo": read.lo,
            "hi": read.hi,
            "partition": read.partition,
            "limit": _NO_LIMIT if read.limit is None else max(0, read.limit),
        }
        rows = self._connection.execute(_SCAN_INDEX, parameters)
        if read.max_bytes is None:
            return [IndexHit(index_key, _record(*row)) for index_key, *row in rows.fetchall()]
        hits: list[IndexHit] = []
        size = 0
        for index_key, *row in rows:
            hits.append(IndexHit(index_key, _record(*row)))
            size += len(hits[-1].record.value)
            if size >= read.max_bytes:
                break
        rows.close()
        return hits

    def _revision(self) -> int:
        return int(self._connection.execute(_REVISION).fetchone()[0])


def _record(
    key: str,
    value: bytes,
    version: int,
    modifications: int,
    created_ms: int,
    modified_ms: int,
    ephemeral: int,
    partition: str | None,
) -> Record:
    return Record(
        key,
        value,
        Version(version),
        modifications,
        created_ms,
        modified_ms,
        bool(ephemeral),
        partition,
    )
