"""Compares the log with the records of ledgers: which entries must be there and are not.

A closed ledger's record has its last entry.  For one that was open when the process ended, the
entries found say up to where it must be whole; and if a whole log file is missing, its newest
entries may have been there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from storage.damage import EntryRange
from storage.ledger.local.codec import (
    RECORD_HEADER_BYTES,
    LogFormatError,
    Mapped,
    crc32c,
    decode_record_header,
)
from storage.ledger.local.disk import Disk
from storage.ledger.local.entry_reader import rebuild_index
from storage.ledger.local.index import (
    INDEX_HEAD_BYTES,
    Place,
    Run,
    SealedIndex,
    decode_index_header,
)
from storage.ledger.local.ledger_records import LedgerSummary
from storage.ledger.local.log_files import INDEX_SUFFIX, LogFile, log_name, number_of
from storage.ledger.local.log_listing import ListedFile
from storage.ledger.local.recovery import (
    FileFinding,
    RecoveredFiles,
    index_rebuilt,
    write_index,
)


class Loss(NamedTuple):
    """Entries that a ledger lost; `end_unknown` as in `LedgerDamage`."""

    missing: list[EntryRange]
    end_unknown: bool


@dataclass(slots=True)
class Inspection:
    """The outcome: findings about files, losses by ledger id, and what is not to be removed.

    `missing` are the listed files whose loss still matters.
    """

    findings: list[FileFinding] = field(default_factory=list)
    losses: dict[int, Loss] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    missing: list[ListedFile] = field(default_factory=list)


class _Ledger:
    """What is known of one living ledger while the files are gone through.

    Entries below `following` are readable, those in `readable` too; `end` is the last one found.
    `newest_file` is the newest file with entries of it, and `newest_offset` the place of the last
    one there, if bytes of that file are lost.
    """

    __slots__ = ("end", "following", "newest_file", "newest_offset", "readable")

    def __init__(self) -> None:
        self.following = 0
        self.readable: list[EntryRange] = []
        self.end = -1
        self.newest_file = 0
        self.newest_offset = 0

    def missing(self, last: int) -> list[EntryRange]:
        """The entries up to `last` that are not readable."""
        return holes(self.readable, last, self.following) if self.following <= last else []


def inspect(disk: Disk, found: RecoveredFiles, records: Mapping[int, LedgerSummary]) -> Inspection:
    """Compare the recovered files with the records of all ledgers.  Job side.  Raises `OSError`.

    Every index is verified, and rebuilt if it is damaged.  Of log files only those that are damaged
    already are read.
    """
    result = Inspection()
    ledgers = {ledger_id: _Ledger() for ledger_id in records}
    for file in [*found.sealed, *found.memory]:
        _verify_index(disk, file, result)
        _add_file(disk, file, ledgers)
    explained = _add_lone_indexes(disk, found, ledgers, result)
    unexplained = [each for each in found.missing if each.number not in explained]
    for ledger_id, ledger in ledgers.items():
        record = records[ledger_id]
        missing = ledger.missing(record.last_entry_id if record.is_closed else ledger.end)
        unsure = not record.is_closed and (
            any(_may_hold_end(each, ledger_id, ledger) for each in unexplained)
            or any(
                (ledger.newest_file, ledger.newest_offset) < lost
                for lost in found.unattributed.items()
            )
        )
        if missing or unsure:
            result.losses[ledger_id] = Loss(missing, unsure)
    if result.losses:
        result.missing = found.missing
    else:
        result.kept.clear()
    gone = {each.number for each in found.missing}
    known = {file.number for file in [*found.sealed, *found.memory]} | gone
    for finding in found.findings:
        # A file of which no living ledger lost anything has lost nothing that anybody wants.
        matters = bool(result.losses) or finding.number not in known
        result.findings.append(finding._replace(lost=finding.lost and matters))
    return result


def count_above(disk: Disk, found: RecoveredFiles, last_id: int) -> tuple[int, int]:
    """Number of ledgers in the log with an id above `last_id`, and of their entries.  Job side.

    Raises `OSError`.  Call it after `inspect`, which verifies the indexes.
    """
    ledgers: set[int] = set()
    entries = 0
    for file in [*found.sealed, *found.memory]:
        for ledger_id, first, last in _runs_of(disk, file):
            if ledger_id > last_id:
                ledgers.add(ledger_id)
                entries += last - first + 1
    return len(ledgers), entries


def _verify_index(disk: Disk, file: LogFile, result: Inspection) -> None:
    """Map the file's index; one that is damaged is rebuilt from the log and written again."""
    try:
        file.index(disk)
    except (LogFormatError, FileNotFoundError) as error:
        replaces = () if file.header is None else file.header.replaces
        rebuild_index(disk, file)
        result.findings.append(index_rebuilt(file.number, str(error)))
        try:
            file.header = write_index(disk, file, replaces)
        except OSError:
            return  # A full disk: the index in memory serves, and the next start tries again.
        file.sealed, file.memory = None, None


def _add_file(disk: Disk, file: LogFile, ledgers: Mapping[int, _Ledger]) -> None:
    # A merged file has a high number and old entries.
    merged = file.header is not None and bool(file.header.replaces)
    number = 0 if merged else file.number
    alive = False
    for ledger_id, first, last in _runs_of(disk, file):
        ledger = ledgers.get(ledger_id)
        if ledger is None:
            continue
        alive = True
        if last > ledger.end:  # noqa: PLR1730 - max() takes four times as long
            ledger.end = last
        if number > ledger.newest_file:  # noqa: PLR1730
            ledger.newest_file = number
        if file.damaged:
            continue
        if first <= ledger.following:
            if last >= ledger.following:
                ledger.following = last + 1
        else:
            ledger.readable.append((first, last))
    if alive and file.damaged:
        _add_damaged(disk, file, ledgers)


def _runs_of(disk: Disk, file: LogFile) -> Iterator[tuple[int, int, int]]:
    """Ledger id, first and last entry of each run."""
    index = file.index(disk)
    if isinstance(index, SealedIndex):
        return ((run[0], run[1], run[1] + run[2] - 1) for run in index.run_table())
    return ((run.ledger_id, run.first, run.last) for run in index.runs())


def _add_damaged(disk: Disk, file: LogFile, ledgers: Mapping[int, _Ledger]) -> None:
    """Add what is readable of a damaged file."""
    for run in file.index(disk).runs():
        ledger = ledgers.get(run.ledger_id)
        if ledger is not None:
            bad = [(entry_id, entry_id) for entry_id in unreadable_entries(disk, file, run)]
            ledger.readable += holes(bad, run.last, run.first)
            if ledger.newest_file == file.number:
                ledger.newest_offset = max(ledger.newest_offset, run.place(run.last).offset)


def _add_lone_indexes(
    disk: Disk, found: RecoveredFiles, ledgers: Mapping[int, _Ledger], result: Inspection
) -> set[int]:
    """Take from indexes without a log which entries must be there; returns their numbers."""
    explained: set[int] = set()
    for name in found.superfluous:
        number = number_of(name)
        if not name.endswith(INDEX_SUFFIX) or number is None:
            continue
        if log_name(number) in found.superfluous:
            continue  # Its entries are in the file that it was merged into.
        try:
            header = decode_index_header(disk.pread(name, 0, INDEX_HEAD_BYTES))
            index = SealedIndex(header, disk.map(name))
        except (LogFormatError, FileNotFoundError):
            continue
        explained.add(number)
        for run in index.runs():
            ledger = ledgers.get(run.ledger_id)
            if ledger is not None:
                ledger.end = max(ledger.end, run.last)
                result.kept.add(name)
    return explained


def _may_hold_end(missing: ListedFile, ledger_id: int, ledger: _Ledger) -> bool:
    """Whether the newest entries of an open ledger may have been in a missing file."""
    if missing.max_ledger is not None and ledger_id > missing.max_ledger:
        return False
    return ledger.newest_file < missing.number


def holes(readable: Sequence[EntryRange], last: int, first: int = 0) -> list[EntryRange]:
    """The parts of `first`..`last` that no range covers, in order."""
    found: list[EntryRange] = []
    for start, end in sorted(readable):
        if start > last:
            break
        if start > first:
            found.append((first, start - 1))
        first = max(first, end + 1)
    if first <= last:
        found.append((first, last))
    return found


def unreadable_entries(disk: Disk, file: LogFile, run: Run) -> Iterator[int]:
    """The entries of a run whose records do not verify.  Job side.  Raises `OSError`."""
    data = disk.map(file.name)
    for entry_id in range(run.first, run.last + 1):
        if not is_readable(disk, file, data, run.ledger_id, entry_id, run.place(entry_id)):
            yield entry_id


def is_readable(
    disk: Disk, file: LogFile, data: Mapped, ledger_id: int, entry_id: int, place: Place
) -> bool:
    """Whether the entry can be read, at `place` or where the log itself has it.  Job side."""
    if verifies(data, file, ledger_id, entry_id, place):
        return True
    if file.header is None or file.header.rows_crc is not None:
        return False
    # The rows of an old index have no checksum, so the place may be wrong.
    index = file.memory or rebuild_index(disk, file)
    found = index.find(ledger_id, entry_id)
    return found is not None and found != place and verifies(data, file, ledger_id, entry_id, found)


def verifies(data: Mapped, file: LogFile, ledger_id: int, entry_id: int, place: Place) -> bool:
    """Whether the record at `place` is that entry, with both checksums right."""
    start = place.offset + RECORD_HEADER_BYTES
    header = decode_record_header(data[place.offset : start], file.seed)
    if header is None or header[:3] != (ledger_id, entry_id, place.size):
        return False
    entry = data[start : start + place.size]
    return len(entry) == place.size and crc32c(entry) == header.payload_crc
