"""Reads entries of the ledger log: finds their places, reads neighbours together, verifies all.

All of it runs inside jobs (see `disk`).  `FileNotFoundError` means that compaction moved the
entries: take the new list of files and read again.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import structlog

from storage.ledger.local.codec import (
    RECORD_HEADER_BYTES,
    LogFormatError,
    crc32c,
    decode_record_header,
)
from storage.ledger.local.disk import Disk
from storage.ledger.local.index import Index, MemoryIndex, Place, Run
from storage.ledger.local.log_files import LogFile
from storage.ledger.local.scan import scan_log
from storage.ledger.store import CorruptEntry

_log = structlog.get_logger(__name__)

GAP_BYTES = 4096
"""Records closer together than this are read by one call."""
SPAN_BYTES = 1024 * 1024
"""One call reads no more than this, unless a single record is larger."""


class Stretch(NamedTuple):
    """The part of a run from which entries first..last of the ledger are read."""

    first: int
    last: int
    file: LogFile
    run: Run


class LocatedEntry(NamedTuple):
    """An entry, its file, and its place there."""

    entry_id: int
    file: LogFile
    place: Place


def _first(stretch: Stretch) -> int:
    return stretch.first


class Stretches:
    """The places of one ledger's entries in some files, without overlaps.  Never changed."""

    __slots__ = ("_stretches", "files")

    def __init__(self, disk: Disk, ledger_id: int, files: tuple[LogFile, ...]) -> None:
        self.files = files
        self._stretches: list[Stretch] = []
        # Newer files first: an entry that compaction copied is read from its copy.
        for file in sorted(files, key=lambda file: file.number, reverse=True):
            if file.header is None or file.header.max_ledger >= ledger_id:
                for run in usable_index(disk, file).runs_of(ledger_id):
                    self._cover(file, run)

    def _cover(self, file: LogFile, run: Run) -> None:
        """Add the parts of `run` that no stretch covers yet."""
        first, last = run.first, run.last
        for known in list(self._stretches):
            if known.last < first:
                continue
            if known.first > last:
                break
            if first < known.first:
                insort(self._stretches, Stretch(first, known.first - 1, file, run), key=_first)
            first = known.last + 1
        if first <= last:
            insort(self._stretches, Stretch(first, last, file, run), key=_first)

    def find(self, entry_id: int) -> LocatedEntry | None:
        """The place of an entry, or None."""
        at = bisect_right(self._stretches, entry_id, key=_first) - 1
        if at < 0 or self._stretches[at].last < entry_id:
            return None
        stretch = self._stretches[at]
        return LocatedEntry(entry_id, stretch.file, stretch.run.place(entry_id))

    def last(self) -> int:
        """Highest entry id, -1 if there is none."""
        return self._stretches[-1].last if self._stretches else -1

    def payload_bytes(self) -> int:
        """Sum of the entry sizes."""
        total = 0
        for first, last, _, run in self._stretches:
            if first == run.first and last == run.last:
                total += run.payload_bytes
            else:
                total += sum(run.place(entry_id).size for entry_id in range(first, last + 1))
        return total


def usable_index(disk: Disk, file: LogFile) -> Index:
    """The file's index, rebuilt from the log if the index file is damaged."""
    try:
        return file.index(disk)
    except LogFormatError as error:
        _log.error("ledger_index_damaged", file=file.name, error=str(error), action="rebuilt")
        return rebuild_index(disk, file)


def rebuild_index(disk: Disk, file: LogFile) -> MemoryIndex:
    """Read the log file through, and keep the index of its records in memory from now on."""
    scan = scan_log(disk.map(file.name), proven_end=file.end)
    for damage in scan.damages:
        _log.error("ledger_log_damaged", file=file.name, **damage._asdict())
    file.damaged = file.damaged or bool(scan.damages)
    file.memory = scan.index
    return scan.index


class EntryReader:
    """Reads of one ledger in one list of files."""

    def __init__(
        self, disk: Disk, ledger_id: int, memory: tuple[LogFile, ...], sealed: Stretches
    ) -> None:
        self._disk = disk
        self._ledger_id = ledger_id
        self._memory = memory
        self._sealed = sealed

    def read(self, first: int, last: int, max_bytes: int) -> list[bytes]:
        """Entries first..last up to `max_bytes`, at least one; stops before a corrupt one.

        Raises `CorruptEntry` if that is the first.
        """
        wanted = self._locate(first, last, max_bytes)
        entries: list[bytes] = []
        for span in spans(wanted):
            for found, entry in self._read_span(span):
                if entry is None:
                    entry = self._read_without_index(found)
                if entry is None:
                    if entries:
                        return entries
                    raise self._corrupt(found.entry_id, found.file)
                entries.append(entry)
        return entries

    def _find(self, entry_id: int) -> LocatedEntry | None:
        for file in reversed(self._memory):
            if file.memory is not None:
                place = file.memory.find(self._ledger_id, entry_id)
                if place is not None:
                    return LocatedEntry(entry_id, file, place)
        return self._sealed.find(entry_id)

    def _locate(self, first: int, last: int, max_bytes: int) -> list[LocatedEntry]:
        found: list[LocatedEntry] = []
        size = 0
        for entry_id in range(first, last + 1):
            one = self._find(entry_id)
            if one is None:
                if not found:
                    raise self._corrupt(entry_id, None)
                break
            size += one.place.size
            if found and size > max_bytes:
                break
            found.append(one)
        return found

    def _read_span(
        self, span: Sequence[LocatedEntry]
    ) -> Iterable[tuple[LocatedEntry, bytes | None]]:
        file, start = span[0].file, span[0].place.offset
        end = span[-1].place.offset + RECORD_HEADER_BYTES + span[-1].place.size
        end = min(end, max(start, file.end))
        data = self._disk.pread(file.name, start, end - start)
        for found in span:
            yield found, self._verified(found, data, found.place.offset - start)

    def _verified(self, found: LocatedEntry, data: bytes, at: int) -> bytes | None:
        """The entry, if it is the wanted one and both checksums hold; else None."""
        header = decode_record_header(data[at : at + RECORD_HEADER_BYTES], found.file.seed)
        if header is None:
            return None
        if header[:3] != (self._ledger_id, found.entry_id, found.place.size):
            return None
        start = at + RECORD_HEADER_BYTES
        entry = data[start : start + header.size]
        if len(entry) != header.size or crc32c(entry) != header.payload_crc:
            return None
        return entry

    def _read_without_index(self, found: LocatedEntry) -> bytes | None:
        """Read an entry whose place did not verify: find it in the log itself."""
        # The index or the log may be wrong.  So a damaged index costs time, and no data.
        file = found.file
        if file.memory is None:
            _log.error("ledger_record_damaged", file=file.name, offset=found.place.offset)
            rebuild_index(self._disk, file)
        # The index may have been rebuilt for another entry: places taken before are still wrong.
        place = None if file.memory is None else file.memory.find(self._ledger_id, found.entry_id)
        if place is None or place == found.place:
            return None
        return next(iter(self._read_span([LocatedEntry(found.entry_id, file, place)])))[1]

    def _corrupt(self, entry_id: int, file: LogFile | None) -> CorruptEntry:
        where = "no log file" if file is None else f"{file.name} only with wrong checksums"
        _log.error("ledger_entry_corrupt", ledger=self._ledger_id, entry=entry_id, found_in=where)
        return CorruptEntry(
            f"Entry {entry_id} of ledger {self._ledger_id} was stored and is now in {where}: the "
            "disk lost or changed it. Check the disk, and restore the data directory from a backup."
        )


def spans(wanted: Sequence[LocatedEntry]) -> Iterable[Sequence[LocatedEntry]]:
    """Divide into pieces that one read fetches."""
    start = 0
    for at in range(1, len(wanted) + 1):
        if at < len(wanted):
            first, before, here = wanted[start], wanted[at - 1], wanted[at]
            end = before.place.offset + RECORD_HEADER_BYTES + before.place.size
            near = 0 <= here.place.offset - end <= GAP_BYTES
            small = here.place.offset + here.place.size - first.place.offset <= SPAN_BYTES
            if here.file is before.file and near and small:
                continue
        yield wanted[start:at]
        start = at
