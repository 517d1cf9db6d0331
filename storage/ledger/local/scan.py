"""Reads a log file through from its bytes alone: its records, a torn tail, damage.  Pure.

Bytes that do not verify are damage (the disk lost or changed durable data) or the tail: a group
that was being written when the process or the machine stopped, so that none of it was
acknowledged.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from storage.ledger.local.codec import (
    FILE_HEADER_BYTES,
    GROUP_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    FileHeader,
    LogFormatError,
    Mapped,
    crc32c,
    decode_file_header,
    decode_group_header,
    find_group,
    has_any_group,
    iter_records,
    nonce_of_first_group,
    record_seed,
)
from storage.ledger.local.index import MemoryIndex

ScannedRecord = tuple[int, int, int, int]
"""Ledger id, entry id, offset, size."""


LOST_BYTES = "durable bytes are missing or unreadable"
LOST_RECORDS = "record headers do not verify"
UNATTRIBUTED = frozenset({LOST_BYTES, LOST_RECORDS})
"""Reasons of damage to entries of which nothing is known."""


class Damage(NamedTuple):
    """Durable bytes that do not verify."""

    offset: int
    length: int
    reason: str


class Group(NamedTuple):
    """The last group: where it begins, its records, and where the last of them ends."""

    offset: int
    records: list[ScannedRecord]
    end: int


@dataclass(slots=True)
class LogScan:
    """The content of a log file.

    `unreadable`: it has groups, but neither its header nor its first group gives its nonce.
    `end` is where its usable content ends; the `tail_bytes` behind it are to be removed.
    `last_group` is the only group that no later one proves durable; None if all are proven.
    """

    header: FileHeader | None
    nonce: int = 0
    index: MemoryIndex = field(default_factory=MemoryIndex)
    end: int = 0
    tail_bytes: int = 0
    last_group: Group | None = None
    last_group_whole: bool = True
    unreadable: bool = False
    damages: list[Damage] = field(default_factory=list)


def scan_log(data: Mapped, *, proven_end: int | None = None, durable_to: int = 0) -> LogScan:
    """Read a log file through.

    `proven_end` is its durable length in bytes, if the next file or an index tells: all bytes
    before it were durable, and those behind it do not count.  `durable_to` is a length up to which
    it was durable at least: more may follow.
    """
    limit = len(data) if proven_end is None else min(len(data), proven_end)
    scan = _scan_header(data)
    if scan.end:
        _Scanner(data, scan, limit, proven_end is not None, durable_to).run()
    if proven_end is None and scan.index.records and scan.end < durable_to:
        proven_end = durable_to
    if proven_end is not None and scan.end < proven_end:
        lost = proven_end - scan.end
        scan.damages.append(Damage(scan.end, lost, LOST_BYTES))
        scan.end = proven_end
    scan.tail_bytes = max(0, len(data) - scan.end)
    return scan


def _scan_header(data: Mapped) -> LogScan:
    try:
        header = decode_file_header(data[:FILE_HEADER_BYTES])
    except LogFormatError as error:
        nonce = nonce_of_first_group(data)
        if nonce is None:
            damage = Damage(0, len(data), f"{error}, and the first group does not verify")
            lost = has_any_group(data)
            return LogScan(None, unreadable=lost, damages=[damage] if lost else [])
        damage = Damage(0, FILE_HEADER_BYTES, str(error))
        return LogScan(None, nonce, end=FILE_HEADER_BYTES, damages=[damage])
    return LogScan(header, header.nonce, end=FILE_HEADER_BYTES)


class _Scanner:
    """One pass over the groups."""

    def __init__(
        self, data: Mapped, scan: LogScan, limit: int, proven: bool, durable_to: int
    ) -> None:
        self.durable_to = min(durable_to, limit)
        self.data = data
        self.scan = scan
        self.limit = limit
        self.proven = proven
        self.seed = record_seed(scan.nonce)

    def run(self) -> None:
        """Read group by group up to the end or the tail."""
        scan = self.scan
        while scan.end < self.limit:
            group = self._whole_group(scan.end)
            if group is None and not self._step_over_damage():
                return
            if group is not None:
                self._keep(group)
        if self.proven:
            scan.last_group = None

    def _whole_group(self, offset: int) -> Group | None:
        """The group at `offset`, None if anything about it does not verify."""
        data = self.data
        head = data[offset : offset + GROUP_HEADER_BYTES]
        header = decode_group_header(head, self.scan.nonce, offset)
        start = offset + GROUP_HEADER_BYTES
        if header is None or start + header.body_bytes > self.limit:
            return None
        group = self._good_records(offset, start + header.body_bytes)
        if group.end != start + header.body_bytes or len(group.records) != header.records:
            return None
        return group

    def _good_records(self, offset: int, end: int) -> Group:
        """The records of the group at `offset` up to the first that does not verify."""
        data = self.data
        after = offset + GROUP_HEADER_BYTES
        records: list[ScannedRecord] = []
        for ledger_id, entry_id, at, size, crc in iter_records(data, after, end, self.seed):
            payload = at + RECORD_HEADER_BYTES
            if crc32c(data[payload : payload + size]) != crc:
                break
            records.append((ledger_id, entry_id, at, size))
            after = payload + size
        return Group(offset, records, after)

    def _keep(self, group: Group) -> None:
        add = self.scan.index.add
        for record in group.records:
            add(*record)
        self.scan.last_group = group
        self.scan.end = group.end

    def _step_over_damage(self) -> bool:
        """Go on behind bytes that do not verify.  False: they are the tail."""
        scan, offset = self.scan, self.scan.end
        # A group is begun only after all before it was durable.  So a valid group behind these
        # bytes, or a proven end, makes them damage.
        behind = find_group(self.data, offset + 1, self.limit, scan.nonce)
        if behind is None and offset < self.durable_to:
            behind = self.durable_to
        if behind is None and not self.proven:
            # Records of a tail that verify are kept: an append of unknown outcome may be stored.
            group = self._good_records(offset, self.limit)
            if group.records:
                self._keep(group)
                scan.last_group_whole = False
            return False
        end = self.limit if behind is None else behind
        self._salvage(offset, end)
        scan.end = end
        return True

    def _salvage(self, offset: int, end: int) -> None:
        """Index the records of a damaged group whose headers verify, and note the damage."""
        after = offset + GROUP_HEADER_BYTES
        damages = self.scan.damages
        head = self.data[offset:after]
        if decode_group_header(head, self.scan.nonce, offset) is None:
            damages.append(Damage(offset, GROUP_HEADER_BYTES, "group header does not verify"))
        for ledger_id, entry_id, at, size, crc in iter_records(self.data, after, end, self.seed):
            payload = at + RECORD_HEADER_BYTES
            if crc32c(self.data[payload : payload + size]) != crc:
                what = f"payload of entry {entry_id} of ledger {ledger_id} does not verify"
                damages.append(Damage(at, RECORD_HEADER_BYTES + size, what))
            # With a bad payload too: then reading the entry raises `CorruptEntry`.
            self.scan.index.add(ledger_id, entry_id, at, size)
            after = payload + size
        if after < end:
            damages.append(Damage(after, end - after, LOST_RECORDS))
