"""Recovery of the log files at a start; see `scan` for torn tails and damage."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from storage.damage import DamageKind
from storage.ledger.local.codec import (
    FILE_HEADER_BYTES,
    FLAG_COMPACTED,
    GROUP_HEADER_BYTES,
    LogFormatError,
    Mapped,
    decode_file_header,
    encode_group_header,
)
from storage.ledger.local.disk import TEMPORARY, Disk
from storage.ledger.local.index import (
    FLAG_DAMAGED,
    INDEX_HEAD_BYTES,
    IndexHeader,
    decode_index_header,
    encode_index,
)
from storage.ledger.local.log_files import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    LogFile,
    index_name,
    log_name,
    number_of,
)
from storage.ledger.local.log_listing import ListedFile
from storage.ledger.local.scan import UNATTRIBUTED, LogScan, scan_log

# Damage is found before any peer is served, and an operator must see all of it.
_log = structlog.get_logger(__name__, every_line=True)


@dataclass(slots=True)
class RecoveredFiles:
    """The log files that a start found.

    `superfluous` are names of files that reclaim may remove, in this order; among them may be
    indexes without a log, which are all that is left of a lost file.  `unattributed` has
    the offset of the last lost bytes of which nothing says whose entries they were, by file.
    """

    sealed: list[LogFile] = field(default_factory=list)
    memory: list[LogFile] = field(default_factory=list)
    superfluous: list[str] = field(default_factory=list)
    findings: list["FileFinding"] = field(default_factory=list)
    missing: list[ListedFile] = field(default_factory=list)
    unattributed: dict[int, int] = field(default_factory=dict)
    next_number: int = 1
    max_ledger: int = -1


class FileFinding(NamedTuple):
    """A file that is damaged or missing, and a sentence about it; `lost`: not to be rebuilt."""

    kind: DamageKind
    number: int
    sentence: str
    lost: bool


def index_rebuilt(number: int, reason: str) -> FileFinding:
    """The finding of an index that was rebuilt from its log."""
    sentence = (
        f"Index file {index_name(number)} was damaged ({reason}) and was rebuilt from "
        f"{log_name(number)}."
    )
    return FileFinding(DamageKind.INDEX, number, sentence, lost=False)


def write_index(disk: Disk, file: LogFile, replaces: tuple[int, ...] = ()) -> IndexHeader:
    """Make the index file of a file whose index is in memory durable.  Job side."""
    if file.memory is None:
        raise ValueError(f"{file.name} has no index in memory")
    pieces = encode_index(
        file.memory,
        number=file.number,
        nonce=file.nonce,
        covers=file.end,
        flags=FLAG_DAMAGED if file.damaged else 0,
        replaces=replaces,
    )
    disk.write_whole(index_name(file.number), pieces)
    return decode_index_header(pieces[0])


def recover(
    disk: Disk, listed: Mapping[int, ListedFile], durable: tuple[int, int] = (0, 0)
) -> RecoveredFiles:
    """Recover the log files.  Job side.  Raises `OSError`.

    `listed` are the files that must be there, `durable` the number of the newest file and the
    length up to which it was durable at least.

    Only the header of an index file is read.  Log files without an index file (the newest after a
    crash, rarely one or two before it) are read through, and get one.  They take no further groups:
    a start always writes into a new file.
    """
    return _Recovery(disk, listed, durable).run()


class _Recovery:
    """Recovery at one start."""

    def __init__(
        self, disk: Disk, listed: Mapping[int, ListedFile], durable: tuple[int, int]
    ) -> None:
        self.disk = disk
        self.durable_number, self.durable_to = durable
        self.listed = {**listed}
        if self.durable_number:
            self.listed.setdefault(self.durable_number, ListedFile(self.durable_number))
        self.sizes = disk.sizes()
        self.found = RecoveredFiles()

    def run(self) -> RecoveredFiles:
        logs, indexes = self._numbers(LOG_SUFFIX), self._numbers(INDEX_SUFFIX)
        self.found.next_number = max([0, *logs, *indexes, *self.listed]) + 1
        # Other files are left to reclaim, which knows whether a backup is running.
        for name in self.sizes:
            if name.endswith(TEMPORARY):
                self.disk.unlink(name)
        headers = {number: self._index_header(number) for number in logs if number in indexes}
        ends = (
            self._proven_ends(logs) if len(headers) < len(logs) or None in headers.values() else {}
        )
        for number in logs:
            header = headers.get(number)
            if header is None:
                self._take_unsealed(number, ends.get(number))
            elif header.flags & FLAG_DAMAGED:
                # Read through at each start, so that each says the same about it.
                self._take_unsealed(number, header.covers, header.replaces)
            else:
                self._take_sealed(header)
        self.found.superfluous += [index_name(number) for number in indexes if number not in logs]
        self._drop_replaced()
        self._miss_listed(logs)
        every = self.found.sealed + self.found.memory
        self.found.max_ledger = max((self._max_ledger(file) for file in every), default=-1)
        return self.found

    def _numbers(self, suffix: str) -> list[int]:
        names = (name for name in self.sizes if name.endswith(suffix))
        return sorted(number for name in names if (number := number_of(name)) is not None)

    @staticmethod
    def _max_ledger(file: LogFile) -> int:
        if file.memory is not None:
            return file.memory.max_ledger
        return -1 if file.header is None else file.header.max_ledger

    def _index_header(self, number: int) -> IndexHeader | None:
        name = index_name(number)
        try:
            header = decode_index_header(self.disk.pread(name, 0, INDEX_HEAD_BYTES))
        except LogFormatError as error:
            reason = str(error)
        else:
            if header.number == number and header.end == self.sizes[name]:
                return header
            reason = "its length is wrong"
        self.found.findings.append(index_rebuilt(number, reason))
        return None

    def _proven_ends(self, logs: list[int]) -> dict[int, int]:
        """The durable length of each file, from the header of the file after it."""
        ends: dict[int, int] = {}
        for number in logs:
            try:
                header = decode_file_header(self.disk.pread(log_name(number), 0, FILE_HEADER_BYTES))
            except LogFormatError:
                continue
            if header.flags & FLAG_COMPACTED:
                ends[number] = self.sizes[log_name(number)]
            elif header.previous:
                ends[header.previous] = header.previous_end
        for number in logs:
            end = self.listed[number].end if number in self.listed else None
            if end is not None:
                ends.setdefault(number, end)
        return ends

    def _take_sealed(self, header: IndexHeader) -> None:
        file = LogFile.from_header(header)
        missing = header.covers - self.sizes[file.name]
        if missing > 0:
            file.damaged = True
            self._lost(file.number, f"lacks its last {missing} bytes")
        self.found.sealed.append(file)

    def _take_unsealed(
        self, number: int, proven_end: int | None, replaces: tuple[int, ...] = ()
    ) -> None:
        name = log_name(number)
        data = self.disk.map(name)
        durable_to = self.durable_to if number == self.durable_number else 0
        scan = scan_log(data, proven_end=proven_end, durable_to=durable_to)
        if scan.unreadable or (number in self.listed and not scan.index.records):
            # Nothing of it can be read, and it had entries: it is missed, and left as it is.
            return
        if scan.damages:
            lost = sum(damage.length for damage in scan.damages)
            at, _, reason = scan.damages[0]
            unknown = [each.offset for each in scan.damages if each.reason in UNATTRIBUTED]
            if unknown:
                self.found.unattributed[number] = max(unknown)
            self._lost(number, f"has {lost} damaged bytes (at {at}: {reason})")
        listed = self.listed.get(number)
        if listed is not None and listed.end is not None and index_name(number) not in self.sizes:
            self.found.findings.append(index_rebuilt(number, "it is missing"))
        self._remove_tail(name, data, scan)
        if not scan.index.records and not scan.damages:
            self.found.superfluous.append(name)
            return
        file = LogFile.growing(number, scan.nonce, scan.end, scan.index)
        # Reclaim leaves damaged files to the operator.
        file.damaged = bool(scan.damages)
        try:
            self.found.sealed.append(LogFile.from_header(write_index(self.disk, file, replaces)))
        except OSError as error:
            _log.warning("ledger_index_not_written", file=name, error=str(error), action="later")
            self.found.memory.append(file)

    def _lost(self, number: int, reason: str) -> None:
        sentence = f"Log file {log_name(number)} {reason}."
        self.found.findings.append(FileFinding(DamageKind.LOG, number, sentence, lost=True))

    def _miss_listed(self, logs: list[int]) -> None:
        """Note the files that must be there and are not, or of which nothing can be read."""
        files = [*self.found.sealed, *self.found.memory]
        known = {file.number for file in files}
        known |= {each for file in files if file.header for each in file.header.replaces}
        for number, file in sorted(self.listed.items()):
            if number not in known:
                self.found.missing.append(file)
                self._lost(number, "is unreadable" if number in logs else "is missing")
        for number in logs:
            if (
                number not in known
                and number not in self.listed
                and (log_name(number) not in self.found.superfluous)
            ):
                self._lost(number, "is unreadable")

    def _remove_tail(self, name: str, data: Mapped, scan: LogScan) -> None:
        """Truncate the tail, and make the last group durable."""
        if scan.tail_bytes or not scan.last_group_whole:
            _log.warning("ledger_log_tail_cut", file=name, at=scan.end, bytes=scan.tail_bytes)
        group = scan.last_group
        # Nothing proves this group durable: it may have been read from memory that never reached
        # the disk.  It is written again and synced before any of its entries counts.
        if group is not None:
            body = data[group.offset + GROUP_HEADER_BYTES : group.end]
            count = len(group.records)
            header = encode_group_header(scan.nonce, group.offset, len(body), count)
            self.disk.write(name, group.offset, [header, body])
        if scan.tail_bytes:
            self.disk.truncate(name, scan.end)
        if len(data):
            self.disk.sync(name)

    def _drop_replaced(self) -> None:
        """Drop files that a compacted file replaces, left by a crash before their removal."""
        replaced = {
            number
            for file in self.found.sealed
            if file.header is not None
            for number in file.header.replaces
        }
        for kept in (self.found.sealed, self.found.memory):
            for file in [file for file in kept if file.number in replaced]:
                kept.remove(file)
                self.found.superfluous += [file.name, index_name(file.number)]
