"""The log files of a store: their names, and which of them are sealed."""

from collections.abc import Callable

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
    """One log file.  `end` is its durable length in bytes; bytes behind it do not count."""

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
        """The index of the file.  Call it in jobs only.  Raises `OSError`, `LogFormatError`."""
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
    """All log files of a store.  Use it on the loop only.

    `memory` has the files whose index is in memory: the one being written, and those before it
    whose index file is not written yet.  `sealed` has the others.
    """

    def __init__(self) -> None:
        # Tuples that are replaced, never changed: a reader in another thread keeps a consistent
        # view, and caches compare `sealed` by identity.
        self.memory: tuple[LogFile, ...] = ()
        self.sealed: tuple[LogFile, ...] = ()
        self.active: LogFile | None = None
        self.max_ledger_at_start = -1
        self.on_change: Callable[[], None] = _no_listener
        """Called when a file with entries came, was sealed or was replaced."""
        self._next_number = 1

    def take_number(self) -> int:
        """A number that no file has or had since the start."""
        number = self._next_number
        self._next_number += 1
        return number

    def load(
        self, sealed: list[LogFile], memory: list[LogFile], next_number: int, max_ledger: int
    ) -> None:
        """Set the files that recovery found."""
        self.sealed = tuple(sealed)
        self.memory = tuple(memory)
        self._next_number = next_number
        self.max_ledger_at_start = max_ledger

    def activate(self, file: LogFile) -> None:
        """Make `file` the one that is written from now on."""
        self.memory = (*self.memory, file)
        self.active = file
        self.on_change()

    def retire_active(self) -> LogFile | None:
        """End the active file, which is not written any more; returns it."""
        file, self.active = self.active, None
        return file

    def seal(self, file: LogFile, header: IndexHeader | None) -> None:
        """Note that the file's index file exists; None: it has no records, and is forgotten."""
        if file is self.active or file not in self.memory:
            raise LedgerAssertion(f"Log file {file.name} cannot be sealed now: report it.")
        self.memory = tuple(other for other in self.memory if other is not file)
        if header is not None:
            self.sealed = (*self.sealed, LogFile.from_header(header))
        self.on_change()

    def replace(self, gone: list[LogFile], made: LogFile | None) -> None:
        """Remove sealed files that were merged or dropped; `made` is the merged file, if any."""
        numbers = {file.number for file in gone}
        kept = [file for file in self.sealed if file.number not in numbers]
        self.sealed = (*kept, made) if made is not None else tuple(kept)
        self.on_change()


def _no_listener() -> None:
    """Do nothing: nobody wants to know."""
