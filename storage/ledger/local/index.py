"""The index of one log file: in memory while the file grows, mapped afterwards.  Pure.

Both forms have runs: entries of one ledger with consecutive ids.  An index file is a header, the
numbers of the files that it replaces (compaction), the run table sorted by ledger and first entry,
and one row (offset, size) for each entry, in the order of the runs.  Little-endian.

The header, the run table and the rows have a checksum each.  Version 1 had none over the rows.  It
is still read: the record header at the offset of a row has the ledger and entry id, so a wrong row
is detected when it is used.
"""

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from storage.ledger.local.codec import LogFormatError, Mapped, crc32c, extend_crc32c

INDEX_MAGIC = b"MGLEDIDX"
INDEX_VERSION = 2
INDEX_HEAD_BYTES = 4096
"""The header and the numbers of replaced files fit into this many bytes."""

_PREFIX = struct.Struct("<8sI")
"""Magic and version, which tell the form of the header."""
_HEADER_1 = struct.Struct("<8sIIQQQQQqII")
_HEADER = struct.Struct("<8sIIQQQQQqIII")
_RUN = struct.Struct("<qqIIQ")
_ROW = struct.Struct("<II")
_NUMBER = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_LEDGER = struct.Struct("<q")

FLAG_DAMAGED = 1
"""Some durable bytes of the log file could not be read when the index was made."""

MAX_REPLACES = (INDEX_HEAD_BYTES - _HEADER.size - _CRC.size) // _NUMBER.size


class Place(NamedTuple):
    """Offset of a record in its file, and size of its payload in bytes."""

    offset: int
    size: int


class Run(Protocol):
    """Consecutive entries of one ledger in one file."""

    @property
    def ledger_id(self) -> int:
        """Id of the ledger."""
        ...

    @property
    def first(self) -> int:
        """First entry id."""
        ...

    @property
    def last(self) -> int:
        """Last entry id."""
        ...

    @property
    def payload_bytes(self) -> int:
        """Sum of the entry sizes."""
        ...

    def place(self, entry_id: int) -> Place:
        """The place of an entry of the run."""
        ...


class Index(Protocol):
    """Interface of both forms of an index."""

    def runs_of(self, ledger_id: int) -> Sequence[Run]:
        """The runs of one ledger, by first entry."""
        ...

    def runs(self) -> Iterator[Run]:
        """All runs."""
        ...


class MemoryRun:
    """A run that may still grow at its end."""

    __slots__ = ("first", "ledger_id", "offsets", "payload_bytes", "sizes")

    def __init__(self, ledger_id: int, first: int) -> None:
        self.ledger_id = ledger_id
        self.first = first
        self.offsets = array("I")
        self.sizes = array("I")
        self.payload_bytes = 0

    @property
    def last(self) -> int:
        """Last entry id."""
        return self.first + len(self.sizes) - 1

    def place(self, entry_id: int) -> Place:
        """The place of an entry of the run."""
        at = entry_id - self.first
        return Place(self.offsets[at], self.sizes[at])


class MemoryIndex:
    """The index of a file that is being written, or whose index file is not written yet."""

    __slots__ = ("_runs", "max_ledger", "records")

    def __init__(self) -> None:
        self._runs: dict[int, list[MemoryRun]] = {}
        self.records = 0
        self.max_ledger = -1

    def add(self, ledger_id: int, entry_id: int, offset: int, size: int) -> None:
        """Add one record.  An entry that is in the index already keeps its place."""
        runs = self._runs.get(ledger_id)
        if runs is None:
            runs = self._runs[ledger_id] = [MemoryRun(ledger_id, entry_id)]
            self.max_ledger = max(self.max_ledger, ledger_id)
        run = runs[-1]
        follows = entry_id == run.first + len(run.sizes)
        if not follows or len(runs) > 1:
            if self.find(ledger_id, entry_id) is not None:
                return
            if not follows:
                run = MemoryRun(ledger_id, entry_id)
                runs.append(run)
        run.offsets.append(offset)
        run.sizes.append(size)
        run.payload_bytes += size
        self.records += 1

    def find(self, ledger_id: int, entry_id: int) -> Place | None:
        """The place of an entry, None if it is not in this file."""
        for run in self._runs.get(ledger_id, ()):
            if run.first <= entry_id <= run.last:
                return run.place(entry_id)
        return None

    def runs_of(self, ledger_id: int) -> Sequence[Run]:
        """The runs of one ledger, in the order in which they were begun."""
        return self._runs.get(ledger_id, [])

    def runs(self) -> Iterator[Run]:
        """All runs, by ledger and first entry."""
        for ledger_id in sorted(self._runs):
            yield from sorted(self._runs[ledger_id], key=lambda run: run.first)

    def memory_runs(self) -> list[MemoryRun]:
        """All runs with their rows, by ledger and first entry."""
        return [
            run
            for ledger_id in sorted(self._runs)
            for run in sorted(self._runs[ledger_id], key=lambda run: run.first)
        ]


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The header of an index file; a start reads no more of a sealed file.

    `covers` is the durable length of the log file in bytes; `rows_crc` is None in version 1.
    """

    number: int
    nonce: int
    covers: int
    flags: int = 0
    max_ledger: int = -1
    records: int = 0
    runs: int = 0
    runs_crc: int = 0
    rows_crc: int | None = None
    replaces: tuple[int, ...] = ()

    @property
    def runs_at(self) -> int:
        """Offset of the run table."""
        form = _HEADER_1 if self.rows_crc is None else _HEADER
        return form.size + _CRC.size + len(self.replaces) * _NUMBER.size

    @property
    def rows_at(self) -> int:
        """Offset of the rows."""
        return self.runs_at + self.runs * _RUN.size

    @property
    def end(self) -> int:
        """Length of the index file."""
        return self.rows_at + self.records * _ROW.size


def encode_index(
    index: MemoryIndex,
    *,
    number: int,
    nonce: int,
    covers: int,
    flags: int = 0,
    replaces: Sequence[int] = (),
) -> list[bytes]:
    """Encode an index file, in pieces."""
    if len(replaces) > MAX_REPLACES:
        raise ValueError(f"an index file can replace at most {MAX_REPLACES} files")
    runs = index.memory_runs()
    table = bytearray()
    rows: list[bytes] = []
    row = rows_crc = 0
    for run in runs:
        table += _RUN.pack(run.ledger_id, run.first, len(run.sizes), row, run.payload_bytes)
        rows.append(_encode_rows(run))
        rows_crc = extend_crc32c(rows_crc, rows[-1])
        row += len(run.sizes)
    body = _HEADER.pack(
        INDEX_MAGIC,
        INDEX_VERSION,
        flags,
        number,
        nonce,
        covers,
        row,
        len(replaces),
        index.max_ledger,
        len(runs),
        crc32c(bytes(table)),
        rows_crc,
    ) + b"".join(map(_NUMBER.pack, replaces))
    head = body[: _HEADER.size] + _CRC.pack(crc32c(body)) + body[_HEADER.size :]
    return [head, bytes(table), *rows]


def _encode_rows(run: MemoryRun) -> bytes:
    rows = array("I", bytes(8 * len(run.sizes)))
    rows[0::2] = run.offsets
    rows[1::2] = run.sizes
    if sys.byteorder == "big":
        rows.byteswap()
    return rows.tobytes()


def decode_index_header(head: bytes) -> IndexHeader:
    """Decode the header in the first `INDEX_HEAD_BYTES`.  Raises `LogFormatError`."""
    if len(head) < _PREFIX.size:
        raise LogFormatError("the index file is too short")
    magic, version = _PREFIX.unpack_from(head)
    form = _HEADER_1 if version == 1 else _HEADER
    if len(head) < form.size + _CRC.size:
        raise LogFormatError("the index file is too short")
    _, _, flags, number, nonce, covers, records, replaced, max_ledger, runs, crc, *rest = (
        form.unpack_from(head)
    )
    if magic != INDEX_MAGIC or replaced > MAX_REPLACES:
        raise LogFormatError("the file does not begin as a ledger index does")
    numbers = head[form.size + _CRC.size :][: replaced * _NUMBER.size]
    if _CRC.unpack_from(head, form.size)[0] != crc32c(head[: form.size] + numbers):
        raise LogFormatError("the checksum of the index header is wrong")
    if version not in (1, INDEX_VERSION):
        raise LogFormatError(f"index version {version} is above {INDEX_VERSION}")
    replaces = tuple(number for (number,) in _NUMBER.iter_unpack(numbers))
    rows_crc = rest[0] if rest else None
    return IndexHeader(
        number, nonce, covers, flags, max_ledger, records, runs, crc, rows_crc, replaces
    )


class SealedRun:
    """A run of a sealed file; a row is read when its place is needed."""

    __slots__ = ("_data", "_rows_at", "first", "last", "ledger_id", "payload_bytes")

    def __init__(self, data: Mapped, rows_at: int, fields: tuple[int, int, int, int, int]) -> None:
        self.ledger_id, self.first, count, row, self.payload_bytes = fields
        self.last = self.first + count - 1
        self._data = data
        self._rows_at = rows_at + row * _ROW.size

    def place(self, entry_id: int) -> Place:
        """The place of an entry of the run."""
        at = self._rows_at + (entry_id - self.first) * _ROW.size
        return Place._make(_ROW.unpack_from(self._data, at))


class SealedIndex:
    """The mapped index file of a log file that is no longer written.  Use it only in jobs."""

    __slots__ = ("_data", "header")

    def __init__(self, header: IndexHeader, data: Mapped) -> None:
        """Raises `LogFormatError` if the file is short, or its run table or rows are damaged."""
        if len(data) < header.end:
            raise LogFormatError("the index file is shorter than its header says")
        if crc32c(data[header.runs_at : header.rows_at]) != header.runs_crc:
            raise LogFormatError("the checksum of the index's run table is wrong")
        if header.rows_crc is not None and (
            crc32c(data[header.rows_at : header.end]) != header.rows_crc
        ):
            raise LogFormatError("the checksum of the index's rows is wrong")
        self.header = header
        self._data = data

    def _ledger_at(self, place: int) -> int:
        at = self.header.runs_at + place * _RUN.size
        return int(_LEDGER.unpack_from(self._data, at)[0])

    def _run_at(self, place: int) -> SealedRun:
        fields = _RUN.unpack_from(self._data, self.header.runs_at + place * _RUN.size)
        return SealedRun(self._data, self.header.rows_at, fields)

    def runs_of(self, ledger_id: int) -> Sequence[Run]:
        """The runs of one ledger, by first entry."""
        low, high = 0, self.header.runs
        while low < high:
            middle = (low + high) // 2
            if self._ledger_at(middle) < ledger_id:
                low = middle + 1
            else:
                high = middle
        found = []
        while low < self.header.runs and self._ledger_at(low) == ledger_id:
            found.append(self._run_at(low))
            low += 1
        return found

    def run_table(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Ledger id, first entry, number of entries, row, and payload bytes of each run."""
        # Ten times as fast as objects: a start goes through the tables of all files.
        return _RUN.iter_unpack(self._data[self.header.runs_at : self.header.rows_at])

    def runs(self) -> Iterator[Run]:
        """All runs, by ledger and first entry."""
        for place in range(self.header.runs):
            yield self._run_at(place)
