"""The data directory: its layout, its format version, and the lock that keeps others out.

FORMAT      one line, `magnetar-data 1`; written last when a directory is made
LOCK        locked (flock) by the process that uses the directory, with its pid
BACKUP      locked, shared, by running backups: no file is removed meanwhile
COPIED      in a copy alone: when it was made, in seconds since 1970; the first start removes it
ADDRESS     where the running broker serves REST, for commands on the same machine
security/   keys, tokens and certificates of `--secure`
metadata/   the metadata store (SQLite)
ledgers/    the ledger log
ledgers.mark  the newest log file and its durable length, outside of what it speaks of
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from magnetar.protocol.server_error import OperatorError, ServerError
from security.first_start_files import DIRECTORY as SECURITY_DIRECTORY

FORMAT_VERSION = 1
FORMAT_FILE = "FORMAT"
LOCK_FILE = "LOCK"
BACKUP_FILE = "BACKUP"
COPIED_FILE = "COPIED"
ADDRESS_FILE = "ADDRESS"
METADATA_DIRECTORY = "metadata"
METADATA_FILE = "metadata.db"
LEDGERS_DIRECTORY = "ledgers"
MARK_FILE = "ledgers.mark"

_COPIED = re.compile(r"(\d{1,12})\s*")
_FORMAT = re.compile(r"magnetar-data (\d{1,9})\n?")
_FOREIGN_BUT_HARMLESS = frozenset({LOCK_FILE, ADDRESS_FILE, f"{ADDRESS_FILE}.tmp", "lost+found"})
"""Names that a new directory may have: our lock, what a broker of a cluster wrote in there, and the
directory of a file system's root."""


class DataDirectoryError(OperatorError):
    """The data directory cannot be used."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


class DataDirectoryInUse(DataDirectoryError):
    """Another process uses the data directory."""


class DataDirectoryTooNew(DataDirectoryError):
    """A later version of Magnetar wrote the data directory."""


class NotADataDirectory(DataDirectoryError):
    """The directory has files and no format of Magnetar."""


class DataDirectoryUnusable(DataDirectoryError):
    """The operating system refuses to make, write or lock the data directory."""


class DataDirectory:
    """A locked data directory.  Made by `open`, unlocked by `close` or the end of the process."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        """Own the locked file `lock_fd`; use `open`."""
        self.path = path
        self._lock_fd = lock_fd

    @property
    def metadata_path(self) -> Path:
        """The metadata store's file."""
        return metadata_path(self.path)

    @property
    def ledgers_path(self) -> Path:
        """The directory of the ledger log."""
        return ledgers_path(self.path)

    @property
    def mark_path(self) -> Path:
        """The file that says how far the ledger log was durable."""
        return self.path / MARK_FILE

    @classmethod
    def open(cls, path: Path) -> "DataDirectory":
        """Lock the directory, making it if it is not there.

        Raises `DataDirectoryInUse`, `DataDirectoryTooNew`, `NotADataDirectory`,
        `DataDirectoryUnusable`.
        """
        path = path.absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            directory = cls(path, _lock(path))
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            directory._prepare()
        except OSError as error:
            directory.close()
            raise _unusable(path, error) from error
        except DataDirectoryError:
            directory.close()
            raise
        return directory

    def _prepare(self) -> None:
        """Check the format; lay out what is missing."""
        if not (self.path / FORMAT_FILE).exists():
            _refuse_foreign(self.path)
            make_layout(self.path)
            write_format(self.path)
        check_format(self.path)
        make_layout(self.path)

    def forget_copied(self) -> None:
        """Note that the copy has its own ids from now on.  Raises `OSError`."""
        (self.path / COPIED_FILE).unlink()
        sync_directory(self.path)

    @contextmanager
    def deletion_guard(self) -> Iterator[bool]:
        """Guard removals of files: yields True if no backup runs, and lets none begin inside."""
        fd = os.open(self.path / BACKUP_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            yield _try_lock(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unlock the directory.  Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def metadata_path(path: Path) -> Path:
    """The metadata store's file in the data directory at `path`."""
    return path / METADATA_DIRECTORY / METADATA_FILE


def ledgers_path(path: Path) -> Path:
    """The ledger log in the data directory at `path`."""
    return path / LEDGERS_DIRECTORY


def make_layout(path: Path) -> None:
    """Make the directories and files that must exist before the format is written."""
    metadata_path(path).parent.mkdir(exist_ok=True)
    ledgers_path(path).mkdir(exist_ok=True)
    (path / BACKUP_FILE).touch(mode=0o640)
    sync_directory(path)


def copied_s(path: Path) -> int | None:
    """When the data directory at `path` was copied, in seconds since 1970.

    None for one that is no copy, or that a broker has started on.  Raises `DataDirectoryError` for
    a file that does not say it, `OSError`.
    """
    file = path / COPIED_FILE
    try:
        text = file.read_text("ascii", errors="replace")
    except FileNotFoundError:
        return None
    found = _COPIED.fullmatch(text)
    if found is None:
        raise DataDirectoryError(
            f"{file} says {text[:40]!r}, which is no time in seconds since 1970: write into it "
            "when the copy was made."
        )
    return int(found[1])


def write_copied(path: Path, time_s: int) -> None:
    """Note when the copy at `path` was made."""
    with (path / COPIED_FILE).open("x", encoding="ascii") as file:
        file.write(f"{time_s}\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path)


def write_format(path: Path) -> None:
    """Write the format file, which marks the directory as complete."""
    temporary = path / f"{FORMAT_FILE}.tmp"
    with temporary.open("w", encoding="ascii") as file:
        file.write(f"magnetar-data {FORMAT_VERSION}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path / FORMAT_FILE)
    sync_directory(path)


def check_format(path: Path) -> None:
    """Check that this version can read the directory, before its data is touched.

    Raises `DataDirectoryTooNew`, `NotADataDirectory`.
    """
    try:
        text = (path / FORMAT_FILE).read_text("ascii", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise NotADataDirectory(
            f"{path} has no {FORMAT_FILE} file, so it is no data directory of Magnetar: name the "
            "one that your broker was started with."
        ) from None
    found = _FORMAT.fullmatch(text)
    if found is None:
        raise NotADataDirectory(
            f"{path / FORMAT_FILE} says {text[:40]!r}, which is no format of Magnetar: restore "
            "that file, or use another directory."
        )
    if int(found[1]) > FORMAT_VERSION:
        raise DataDirectoryTooNew(
            f"{path} has data format {found[1]}, and this version of Magnetar reads up to format "
            f"{FORMAT_VERSION}: start the version that wrote it, or a later one."
        )


@contextmanager
def hold_for_backup(path: Path) -> Iterator[None]:
    """Keep every process from removing files of the data directory at `path` meanwhile."""
    fd = os.open(path / BACKUP_FILE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(path: Path) -> int:
    fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        if not _try_lock(fd):
            pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            user = f"process {pid}" if pid.isdigit() else "another process"
            raise DataDirectoryInUse(
                f"{path} is in use by {user}: stop that broker first, or start this one with "
                "another --data-dir."
            )
        # The pid is only for people: a disk too full for it must not keep the broker from starting.
        with suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_foreign(path: Path) -> None:
    """Raise `NotADataDirectory` if there are other files, or an unfinished backup."""
    allowed = {
        *(METADATA_DIRECTORY, LEDGERS_DIRECTORY, SECURITY_DIRECTORY),
        *(BACKUP_FILE, f"{FORMAT_FILE}.tmp"),
    }
    names = {entry.name for entry in path.iterdir()} - _FOREIGN_BUT_HARMLESS
    data = [*metadata_path(path).parent.glob("*"), *ledgers_path(path).glob("*")]
    if names - allowed or data:
        raise NotADataDirectory(
            f"{path} is not empty and has no {FORMAT_FILE} file: it is no data directory, or a "
            "backup that was not finished. Use an empty directory, or make the backup again."
        )


def _unusable(path: Path, error: OSError) -> DataDirectoryUnusable:
    return DataDirectoryUnusable(
        f"The data directory {path} cannot be used ({error.strerror or error}: "
        f"{error.filename or path}): let the broker's user write there, or name another one with "
        "--data-dir."
    )
