"""Recovery of the log files at a start; see `scan` for torn tails and damage."""

from dataclasses import dataclass, field

import structlog

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
from storage.ledger.local.scan import LogScan, scan_log

# Damage is found before any peer is served, and an operator must see all of it.
_log = structlog.get_logger(__name__, every_line=True)


@dataclass(slots=True)
class RecoveredFiles:
    """The log files that a start found.

    `superfluous` are names of files that reclaim may remove, in this order.
    """

    sealed: list[LogFile] = field(default_factory=list)
    memory: list[LogFile] = field(default_factory=list)
    superfluous: list[str] = field(default_factory=list)
    next_number: int = 1
    max_ledger: int = -1


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


def recover(disk: Disk) -> RecoveredFiles:
    """Recover the log files.  Job side.  Raises `OSError`.

    Only the header of an index file is read.  Log files without an index file (the newest after a
    crash, rarely one or two before it) are read through, and get one.  They take no further groups:
    a start always writes into a new file.
    """
    return _Recovery(disk).run()


class _Recovery:
    """Recovery at one start."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.sizes = disk.sizes()
        self.found = RecoveredFiles()

    def run(self) -> RecoveredFiles:
        logs, indexes = self._numbers(LOG_SUFFIX), self._numbers(INDEX_SUFFIX)
        self.found.next_number = max([0, *logs, *indexes]) + 1
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
            if header is not None:
                self._take_sealed(header)
            else:
                self._take_unsealed(number, ends.get(number))
        self.found.superfluous += [index_name(number) for number in indexes if number not in logs]
        self._drop_replaced()
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
            _log.error("ledger_index_damaged", file=name, error=str(error), action="rebuilt")
            return None
        if header.number != number or header.end != self.sizes[name]:
            _log.error("ledger_index_damaged", file=name, error="wrong length", action="rebuilt")
            return None
        return header

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
        return ends

    def _take_sealed(self, header: IndexHeader) -> None:
        file = LogFile.from_header(header)
        missing = header.covers - self.sizes[file.name]
        if missing > 0:
            file.damaged = True
            _log.error("ledger_log_damaged", file=file.name, reason="shorter", missing=missing)
        self.found.sealed.append(file)

    def _take_unsealed(self, number: int, proven_end: int | None) -> None:
        name = log_name(number)
        data = self.disk.map(name)
        scan = scan_log(data, proven_end=proven_end)
        for damage in scan.damages:
            _log.error("ledger_log_damaged", file=name, **damage._asdict())
        if scan.unreadable:
            return
        self._remove_tail(name, data, scan)
        if not scan.index.records and not scan.damages:
            self.found.superfluous.append(name)
            return
        file = LogFile.growing(number, scan.nonce, scan.end, scan.index)
        # Reclaim leaves damaged files to the operator.
        file.damaged = bool(scan.damages)
        try:
            self.found.sealed.append(LogFile.from_header(write_index(self.disk, file)))
        except OSError as error:
            _log.warning("ledger_index_not_written", file=name, error=str(error), action="later")
            self.found.memory.append(file)

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
