"""Merges sparse log files into one that has only the entries of living ledgers."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from storage.ledger.local.codec import (
    FILE_HEADER_BYTES,
    FLAG_COMPACTED,
    GROUP_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    FileHeader,
    Mapped,
    crc32c,
    decode_record_header,
    encode_file_header,
    encode_group_header,
    encode_record_header,
)
from storage.ledger.local.disk import TEMPORARY, Disk
from storage.ledger.local.entry_reader import usable_index
from storage.ledger.local.index import MemoryIndex, Place
from storage.ledger.local.log_files import LogFile
from storage.ledger.local.recovery import write_index

LiveRecord = tuple[int, int, bytes, int]
"""Ledger id, entry id, payload, payload checksum."""


class DamagedSource(Exception):
    """The record of an entry in a source does not verify."""

    def __init__(self, file: LogFile, place: Place, ledger_id: int, entry_id: int) -> None:
        super().__init__(f"{file.name} at {place.offset}")
        self.file = file
        self.place = place
        self.ledger_id = ledger_id
        self.entry_id = entry_id


class Compaction:
    """One merge, in steps of bounded size, so that the caller can pace it.  Job side.

    Every record is verified while it is copied.  Reclaim removes the sources after `finish`.
    """

    def __init__(
        self,
        disk: Disk,
        header: tuple[int, int],
        sources: Sequence[LogFile],
        live: AbstractSet[int],
        step_bytes: int,
    ) -> None:
        """`header`: number and nonce of the new file; `live`: ids of ledgers to keep."""
        self._disk = disk
        self._number, self._nonce = header
        self._sources = sources
        self._live = live
        self._step_bytes = step_bytes
        self._file = LogFile.growing(self._number, self._nonce, FILE_HEADER_BYTES, MemoryIndex())
        self._temporary = self._file.name + TEMPORARY
        self._records = self._live_records()
        self._started = False

    def step(self) -> int:
        """Copy the next records; returns the bytes written, 0 when all are copied.

        Raises `DamagedSource`: that file is to be left as it is, for the operator.
        """
        buffers: list[bytes] = []
        if not self._started:
            header = FileHeader(self._number, self._nonce, FLAG_COMPACTED)
            self._disk.unlink(self._temporary)
            self._disk.write(self._temporary, 0, [encode_file_header(header)])
            self._started = True
        offset = self._file.end + GROUP_HEADER_BYTES
        start = offset
        count = 0
        memory = self._memory()
        for ledger_id, entry_id, entry, crc in self._records:
            memory.add(ledger_id, entry_id, offset, len(entry))
            buffers.append(
                encode_record_header(self._file.seed, ledger_id, entry_id, len(entry), crc)
            )
            buffers.append(entry)
            offset += RECORD_HEADER_BYTES + len(entry)
            count += 1
            if offset - start >= self._step_bytes:
                break
        if not count:
            return 0
        group = encode_group_header(self._nonce, self._file.end, offset - start, count)
        self._disk.write(self._temporary, self._file.end, [group, *buffers])
        self._file.end = offset
        return offset - start

    def finish(self) -> LogFile:
        """Make the new file durable and give it its name."""
        # A crash before the rename leaves a temporary file, which a start removes.  After it a
        # start finds in the index which files the new one replaces, and drops those.
        self._disk.sync(self._temporary)
        replaces = tuple(source.number for source in self._sources)
        header = write_index(self._disk, self._file, replaces)
        self._disk.rename(self._temporary, self._file.name)
        self._disk.sync_directory()
        return LogFile.from_header(header)

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._disk.unlink(self._temporary)

    def _memory(self) -> MemoryIndex:
        if self._file.memory is None:
            raise ValueError("a compaction keeps its index in memory")
        return self._file.memory

    def _live_records(self) -> Iterator[LiveRecord]:
        """The entries of living ledgers in the sources, each once."""
        # Newer sources first, so that of two copies of an entry the newer one is kept.
        for source in sorted(self._sources, key=lambda file: file.number, reverse=True):
            data = self._disk.map(source.name)
            for run in usable_index(self._disk, source).runs():
                if run.ledger_id not in self._live:
                    continue
                for entry_id in range(run.first, run.last + 1):
                    if self._memory().find(run.ledger_id, entry_id) is None:
                        entry, crc = self._verified(
                            source, data, run.ledger_id, entry_id, run.place(entry_id)
                        )
                        yield run.ledger_id, entry_id, entry, crc

    @staticmethod
    def _verified(
        source: LogFile, data: Mapped, ledger_id: int, entry_id: int, place: Place
    ) -> tuple[bytes, int]:
        start = place.offset + RECORD_HEADER_BYTES
        header = decode_record_header(data[place.offset : start], source.seed)
        entry = data[start : start + place.size]
        if (
            header is None
            or header[:3] != (ledger_id, entry_id, len(entry))
            or crc32c(entry) != header.payload_crc
        ):
            raise DamagedSource(source, place, ledger_id, entry_id)
        return entry, header.payload_crc
