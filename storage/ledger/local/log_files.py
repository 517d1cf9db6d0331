"""The log files of a store: which there are, and which of them are sealed.

Loop side only.  `memory` holds the files whose index is in memory (the one being written, and
those before it whose index file is not written yet), `sealed` the others.  Both are tuples that
are replaced, never changed, so a reader in another thread keeps a consistent view, and whoever
caches something about `sealed` sees by identity whether it still holds.
"""

from storage.ledger.local.codec import record_seed
from storage.ledger.local.disk import Disk
from storage.ledger.local.index import (
    FLAG_DAMAGED,
    Index,
    IndexHeader,
    MemoryIndex,
    SealedIndex,
)
from storage.ledger.store import LedgerAssertion

LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".index"


def log_name(number: int) -> str:
    """The file name of a log file."""
    return f"{number:010d}{LOG_SUFFIX}"


def index_name(number: int) -> str:
    """The file name of its index."""
    return f"{number:010d}{INDEX_SUFFIX}"


def number_of(name: str) -> int | None:
    """The number in the name of a log or index file, None for other files."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix not in (LOG_SUFFIX, INDEX_SUFFIX) or not stem.isascii() or not stem.isdigit():
        return None
    return int(stem)


class LogFile:
    """One log file.  `end`: its durable length in bytes, behind which nothing counts."""

    __slots__ = ("damaged", "end", "header", "memory", "name", "nonce", "number", "sealed", "seed")

    def __init__(self, number: int, nonce: int, end: int) -> None:
        self.number = number
        self.name = log_name(number)
        self.nonce = nonce
        self.seed = record_seed(nonce)
        self.end = end
        self.damaged = False
        self.memory: MemoryIndex | None = None
        self.header: IndexHeader | None = None
        self.sealed: SealedIndex | None = None

    @classmethod
    def growing(cls, number: int, nonce: int, end: int, memory: MemoryIndex) -> "LogFile":
        """A file with its index in memory."""
        file = cls(number, nonce, end)
        file.memory = memory
        return file

    @classmethod
    def from_header(cls, header: IndexHeader) -> "LogFile":
        """A sealed file; its index is mapped when it is first needed."""
        file = cls(header.number, header.nonce, header.covers)
        file.header = header
        file.damaged = bool(header.flags & FLAG_DAMAGED)
        return file

    def index(self, disk: Disk) -> Index:
        """Its index.  Call it in jobs only.  Raises `OSError`, `LogFormatError`."""
        if self.memory is not None:
            return self.memory
        sealed = self.sealed
        if sealed is None:
            if self.header is None:
                raise LedgerAssertion(f"Log file {self.name} has no index: report it.")
            sealed = SealedIndex(self.header, disk.map(index_name(self.number)))
            self.sealed = sealed
        return sealed


class LogFiles:
    """All log files of a store."""

    def __init__(self) -> None:
        self.memory: tuple[LogFile, ...] = ()
        self.sealed: tuple[LogFile, ...] = ()
        self.active: LogFile | None = None
        self.max_ledger_at_start = -1
        self._next_number = 1

    def take_number(self) -> int:
        """A number that no file has or had since the start."""
        number = self._next_number
        self._next_number += 1
        return number

    def load(
        self, sealed: list[LogFile], memory: list[LogFile], next_number: int, max_ledger: int
    ) -> None:
        """What recovery found."""
        self.sealed = tuple(sealed)
        self.memory = tuple(memory)
        self._next_number = next_number
        self.max_ledger_at_start = max_ledger

    def activate(self, file: LogFile) -> None:
        """`file` is the one being written from now on."""
        self.memory = (*self.memory, file)
        self.active = file

    def retire_active(self) -> LogFile | None:
        """Nothing is written to the active file any more; returns it."""
        file, self.active = self.active, None
        return file

    def seal(self, file: LogFile, header: IndexHeader | None) -> None:
        """Its index file is there (None: it had no records, and counts no longer)."""
        if file is self.active or file not in self.memory:
            raise LedgerAssertion(f"Log file {file.name} cannot be sealed now: report it.")
        self.memory = tuple(other for other in self.memory if other is not file)
        if header is not None:
            self.sealed = (*self.sealed, LogFile.from_header(header))

    def replace(self, gone: list[LogFile], made: LogFile | None) -> None:
        """Compaction or reclaim took these sealed files out, and maybe put one in."""
        numbers = {file.number for file in gone}
        kept = [file for file in self.sealed if file.number not in numbers]
        self.sealed = (*kept, made) if made is not None else tuple(kept)
