"""The disk under the ledger log: what a simulation replaces, and the real one.

The interface has two sides.  The *loop side* (`append`, `read`, `maintain`, `close`) never blocks.
The *job side* are plain calls on named files that may block; they are made only inside a job that
was handed to `read` or `maintain`, and never on the event loop.  Files live in one flat directory.

Rules of every disk:

- `append` is one operation at a time: the caller waits for `done` before the next one.  Success
  means that the bytes, the file's length and (for a new file) its name are durable.
- After a failed `append` nothing is known about the bytes behind the last successful one, not
  even that a later sync would write them.  The caller cuts them off and goes on in a new file.
- `read` jobs run beside each other; `maintain` jobs run one after the other.
- Nothing done by `write`, `truncate`, `rename` or `unlink` is durable before `sync` of the file or
  `sync_directory`.

The real disk appends in one dedicated thread, which completes a group by a single call back into
the loop.
"""

import asyncio
import errno
import mmap
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from config import bounds
from storage.ledger.local.codec import Mapped
from storage.ledger.store import DiskFull, LedgerError

T = TypeVar("T")

AppendDone = Callable[[OSError | None], None]

IOV_MAX = os.sysconf("SC_IOV_MAX")

_log = structlog.get_logger(__name__)


def ledger_error(error: OSError, what: str) -> LedgerError:
    """The error that appends and life-cycle calls report for a failed disk operation."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"{what} failed because the disk is full; nothing acknowledged is lost. "
            "Free space or add some, appends work again then."
        )
    return LedgerError(
        f"{what} failed: {error.strerror or error}; nothing acknowledged is lost. "
        "Check the disk and the kernel's log, then retry."
    )


class Disk(ABC):
    """Interface: the file operations of the embedded ledger log. Job-side calls raise `OSError`."""

    @abstractmethod
    def append(
        self, name: str, buffers: Sequence[bytes], *, create: bool, done: AppendDone
    ) -> None:
        """Append to `name` (made first if `create`), make it durable, then `done` on the loop."""

    @abstractmethod
    async def read(self, job: Callable[[], T]) -> T:
        """Run a job that only reads."""

    @abstractmethod
    async def maintain(self, job: Callable[[], T]) -> T:
        """Run a job that may write, behind the maintenance jobs before it."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what runs, release everything."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Job side: all files and their lengths."""

    @abstractmethod
    def pread(self, name: str, offset: int, length: int) -> bytes:
        """Job side: up to `length` bytes, fewer at the end of the file."""

    @abstractmethod
    def map(self, name: str) -> Mapped:
        """Job side: the file's content, read when touched."""

    @abstractmethod
    def write(self, name: str, offset: int, buffers: Sequence[bytes]) -> None:
        """Job side: write all of it there, making the file if it is not there."""

    @abstractmethod
    def truncate(self, name: str, length: int) -> None:
        """Job side: cut the file to this length."""

    @abstractmethod
    def sync(self, name: str) -> None:
        """Job side: make the file's bytes and length durable."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Job side: give a file another name."""

    @abstractmethod
    def unlink(self, name: str) -> None:
        """Job side: remove a file; fine if it is gone."""

    @abstractmethod
    def sync_directory(self) -> None:
        """Job side: make creations, renames and removals durable."""

    def write_whole(self, name: str, buffers: Sequence[bytes]) -> None:
        """Job side: a durable file with this content, wholly there or not at all."""
        temporary = name + TEMPORARY
        self.unlink(temporary)
        self.write(temporary, 0, buffers)
        self.sync(temporary)
        self.rename(temporary, name)
        self.sync_directory()


TEMPORARY = ".tmp"
"""Ending of files that have no meaning yet; a start removes them."""


def write_all(fd: int, buffers: Sequence[bytes], offset: int | None = None) -> None:
    """Write every byte, at `offset` or at the end, in as few system calls as IOV_MAX allows."""
    for start in range(0, len(buffers), IOV_MAX):
        chunk = buffers[start : start + IOV_MAX]
        size = sum(map(len, chunk))
        if not size:
            continue
        done = os.writev(fd, chunk) if offset is None else os.pwritev(fd, chunk, offset)
        while done < size:
            rest = memoryview(b"".join(chunk))[done:]
            more = os.write(fd, rest) if offset is None else os.pwrite(fd, rest, offset + done)
            if more == 0:
                raise OSError(errno.EIO, "the disk took no bytes and named no error")
            done += more
        if offset is not None:
            offset += size


class _Appender(threading.Thread):
    """The thread that writes and syncs groups.  Keeps the file it appends to open."""

    def __init__(self, root: Path, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="ledger-log", daemon=True)
        self._root = root
        self._loop = loop
        self._fd = -1
        self._open_file = ""
        self.jobs: queue.SimpleQueue[tuple[str, Sequence[bytes], bool, AppendDone] | None] = (
            queue.SimpleQueue()
        )

    def run(self) -> None:
        """Take appends until None comes."""
        while (job := self.jobs.get()) is not None:
            name, buffers, create, done = job
            error: OSError | None = None
            try:
                self._append(name, buffers, create)
            except OSError as failure:
                error = failure
            except Exception as failure:  # noqa: BLE001 - a dead thread would hang every append
                error = OSError(errno.EIO, f"{type(failure).__name__}: {failure}")
            if error is not None:
                self._release()
            try:
                self._loop.call_soon_threadsafe(done, error)
            except RuntimeError:
                _log.warning("ledger_append_outlived_loop", file=name)
            del job, buffers, done
        self._release()

    def _append(self, name: str, buffers: Sequence[bytes], create: bool) -> None:
        if create or name != self._open_file:
            self._release()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
            if create:
                flags |= os.O_CREAT | os.O_EXCL
            self._fd = os.open(self._root / name, flags, 0o640)
            self._open_file = name
        write_all(self._fd, buffers)
        os.fdatasync(self._fd)
        if create:
            _sync_directory(self._root)

    def _release(self) -> None:
        if self._fd >= 0:
            try:
                os.close(self._fd)
            except OSError as error:
                _log.warning("ledger_log_close_failed", file=self._open_file, error=str(error))
        self._fd = -1
        self._open_file = ""


class RealDisk(Disk):
    """A directory of the operating system.  Make it on the loop that will use it."""

    def __init__(self, root: Path, *, reader_threads: int = bounds.LEDGER_READER_THREADS) -> None:
        self._root = root
        self._loop = asyncio.get_running_loop()
        root.mkdir(parents=True, exist_ok=True)
        self._appender = _Appender(root, self._loop)
        self._appender.start()
        self._readers = ThreadPoolExecutor(reader_threads, thread_name_prefix="ledger-read")
        self._maintenance = ThreadPoolExecutor(1, thread_name_prefix="ledger-maintain")

    def append(
        self, name: str, buffers: Sequence[bytes], *, create: bool, done: AppendDone
    ) -> None:
        """See `Disk`."""
        self._appender.jobs.put((name, buffers, create, done))

    async def read(self, job: Callable[[], T]) -> T:
        """See `Disk`."""
        return await self._loop.run_in_executor(self._readers, job)

    async def maintain(self, job: Callable[[], T]) -> T:
        """See `Disk`."""
        return await self._loop.run_in_executor(self._maintenance, job)

    async def close(self) -> None:
        """See `Disk`."""
        self._appender.jobs.put(None)
        await self._loop.run_in_executor(None, self._join)

    def _join(self) -> None:
        self._appender.join()
        self._maintenance.shutdown()
        self._readers.shutdown()

    def sizes(self) -> dict[str, int]:
        """See `Disk`."""
        with os.scandir(self._root) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def pread(self, name: str, offset: int, length: int) -> bytes:
        """See `Disk`."""
        fd = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, length, offset)
            while len(data) < length:
                more = os.pread(fd, length - len(data), offset + len(data))
                if not more:
                    break
                data += more
            return data
        finally:
            os.close(fd)

    def map(self, name: str) -> Mapped:
        """See `Disk`."""
        fd = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            return mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b""
        finally:
            os.close(fd)

    def write(self, name: str, offset: int, buffers: Sequence[bytes]) -> None:
        """See `Disk`."""
        fd = os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            write_all(fd, buffers, offset)
        finally:
            os.close(fd)

    def truncate(self, name: str, length: int) -> None:
        """See `Disk`."""
        os.truncate(self._root / name, length)

    def sync(self, name: str) -> None:
        """See `Disk`."""
        fd = os.open(self._root / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """See `Disk`."""
        os.rename(self._root / old, self._root / new)

    def unlink(self, name: str) -> None:
        """See `Disk`."""
        (self._root / name).unlink(missing_ok=True)

    def sync_directory(self) -> None:
        """See `Disk`."""
        _sync_directory(self._root)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
