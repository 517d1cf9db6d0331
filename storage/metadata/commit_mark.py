"""The newest commit of the metadata file, noted outside of it.

SQLite ends its write-ahead log at the first frame that does not verify, and drops what is behind it
without a word.  So the revision of each commit is also in a file of its own, once the commit is
durable: a start that finds a lower revision knows that commits were lost.
"""

import mmap
import os
import struct
from pathlib import Path

import google_crc32c

crc32c = google_crc32c.value
_SLOT = struct.Struct("<8sQQ")
_CRC = struct.Struct("<I")
_MAGIC = b"MGCOMMIT"
_FILE_BYTES = 4096
_SLOT_BYTES = 512
"""Slots are written in turn and lie in different disk blocks, so one of them is always whole."""


def mark_path(path: Path) -> Path:
    """The file beside the metadata file."""
    return path.with_name(f"{path.name}.commit")


class CommitMark:
    """The revision of the newest commit, in a mapped file.

    A note costs no call into the system: the process may die right after it and the file has it.
    After a power cut it may be older than the metadata file, and never newer, so it never says
    that commits are lost which are not.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file.  Raises `OSError`."""
        descriptor = os.open(mark_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            missing = _FILE_BYTES - os.fstat(descriptor).st_size
            if missing > 0:
                # Real bytes: a hole in a mapped file would need space at a time when none is left.
                os.pwrite(descriptor, bytes(missing), _FILE_BYTES - missing)
                os.fsync(descriptor)
            self._data = mmap.mmap(descriptor, _FILE_BYTES)
        finally:
            os.close(descriptor)
        self._sequence, self.revision = max(self._slot(0), self._slot(1))

    def _slot(self, number: int) -> tuple[int, int]:
        """Sequence number and revision in a slot; zeros if it does not verify."""
        at = number * _SLOT_BYTES
        body = self._data[at : at + _SLOT.size]
        magic, sequence, revision = _SLOT.unpack(body)
        (crc,) = _CRC.unpack_from(self._data, at + _SLOT.size)
        return (sequence, revision) if magic == _MAGIC and crc == crc32c(body) else (0, 0)

    def note(self, revision: int) -> None:
        """Note the revision of a commit that is durable."""
        self._sequence += 1
        at = self._sequence % 2 * _SLOT_BYTES
        body = _SLOT.pack(_MAGIC, self._sequence, revision)
        self._data[at : at + _SLOT.size + _CRC.size] = body + _CRC.pack(crc32c(body))

    def close(self) -> None:
        """Make the file durable and release it.  Raises `OSError`."""
        try:
            self._data.flush()
        finally:
            self._data.close()
