"""The disk under the ledger log: the interface, which a simulation replaces, and the real one."""

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
    """The error with which appends and other calls report a failed disk operation."""
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
    """Interface: the file operations of the embedded ledger log, in one flat directory.

    The loop side (`append`, `read`, `maintain`, `close`) never blocks.  The job side are calls on
    named files that may block and raise `OSError`: make them only inside a job that was handed to
    `read` or `maintain`.  What they do is durable after `sync` of the file (`write`, `truncate`) or
    `sync_directory` (new names, `rename`, `unlink`).
    """

    @abstractmethod
    def append(
        self, name: str, buffers: Sequence[bytes], *, create: bool, done: AppendDone
    ) -> None:
        """Append to `name` (made first if `create`), make that durable, call `done` on the loop.

        Wait for `done` before the next call.  Success means that the bytes, the file's length and
        the name of a new file are durable.  After a failure the bytes behind the last successful
        append are unknown, and a later sync may not write them: truncate the file, use a new one.
        """

    @abstractmethod
    async def read(self, job: Callable[[], T]) -> T:
        """Run a job that only reads; such jobs run beside each other."""

    @abstractmethod
    async def maintain(self, job: Callable[[], T]) -> T:
        """Run a job that may write; such jobs run one after the other."""

    @abstractmethod
    async def close(self) -> None:
        """Finish running jobs, release all files and threads."""

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
        """Job side: write all buffers at `offset`; make the file if it does not exist."""

    @abstractmethod
    def truncate(self, name: str, length: int) -> None:
        """Job side: truncate the file to this length."""

    @abstractmethod
    def sync(self, name: str) -> None:
        """Job side: make the file's bytes and length durable."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Job side: give a file another name."""

    @abstractmethod
    def unlink(self, name: str) -> None:
        """Job side: remove a file; no error if it does not exist."""

    @abstractmethod
    def sync_directory(self) -> None:
        """Job side: make creations, renames and removals durable."""

    def write_whole(self, name: str, buffers: Sequence[bytes]) -> None:
        """Job side: make a durable file with this content; after a crash it is whole or absent."""
        temporary = name + TEMPORARY
        self.unlink(temporary)
        self.write(temporary, 0, buffers)
        self.sync(temporary)
        self.rename(temporary, name)
        self.sync_directory()


TEMPORARY = ".tmp"
"""Suffix of unfinished files; a start removes them."""


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
    """The thread that writes and syncs groups; it keeps the file that it appends to open."""

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
                # The loop is closed: nobody waits for this append.
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
    """A directory of the operating system.  Make it in the running loop that uses it.

    One thread appends; it calls back into the loop once for each group.
    """

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
