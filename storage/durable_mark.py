"""How far durable data reached, noted outside of the files that have the data.

A log that lost its end looks like one that ended earlier: SQLite drops what is behind the first
frame that does not verify, and the ledger log what looks like a group that was not finished.  So
the end of what is durable is also in a small file of its own.  A start that finds less knows that
something was lost.
"""

import mmap
import os
import struct
from pathlib import Path

import google_crc32c
import structlog

_log = structlog.get_logger(__name__)

crc32c = google_crc32c.value
_SLOT = struct.Struct("<8sQQQ")
_CRC = struct.Struct("<I")
_MAGIC = b"MGMARK01"
_FILE_BYTES = 4096
_SLOT_BYTES = 512
"""Slots are written in turn and lie in different disk blocks, so one of them is always whole."""


class DurableMark:
    """Two numbers that say how far durable data reached, in a mapped file.

    A note costs no call into the system, and outlives the process.  After a power cut the file may
    be older than the data, and never newer: it never says that something is lost which is not.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file.  Raises `OSError`."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            missing = _FILE_BYTES - os.fstat(descriptor).st_size
            if missing > 0:
                # Real bytes: a hole in a mapped file would need space at a time when none is left.
                os.pwrite(descriptor, bytes(missing), _FILE_BYTES - missing)
                os.fsync(descriptor)
            self._data = mmap.mmap(descriptor, _FILE_BYTES)
        finally:
            os.close(descriptor)
        self._sequence, *values = max(self._slot(0), self._slot(1))
        self.values: tuple[int, int] = (values[0], values[1])
        """The numbers at the opening; zeros if nothing was noted."""

    @classmethod
    def open(cls, path: Path) -> "DurableMark | None":
        """Open or make the file; None if the disk does not allow it."""
        # A disk too full for this file must not keep the broker from starting.
        try:
            return cls(path)
        except OSError as error:
            _log.warning("durable_mark_not_opened", file=str(path), error=str(error))
            return None

    def _slot(self, number: int) -> tuple[int, int, int]:
        """Sequence number and values in a slot; zeros if it does not verify."""
        at = number * _SLOT_BYTES
        body = self._data[at : at + _SLOT.size]
        magic, sequence, first, second = _SLOT.unpack(body)
        (crc,) = _CRC.unpack_from(self._data, at + _SLOT.size)
        return (sequence, first, second) if magic == _MAGIC and crc == crc32c(body) else (0, 0, 0)

    def note(self, first: int, second: int = 0) -> None:
        """Note numbers of data that is durable."""
        self._sequence += 1
        at = self._sequence % 2 * _SLOT_BYTES
        body = _SLOT.pack(_MAGIC, self._sequence, first, second)
        self._data[at : at + _SLOT.size + _CRC.size] = body + _CRC.pack(crc32c(body))

    def sync(self) -> None:
        """Make what was noted durable.  Raises `OSError`."""
        self._data.flush()

    def close(self) -> None:
        """Make the file durable and release it.  Raises `OSError`."""
        try:
            self._data.flush()
        finally:
            self._data.close()
