"""A disk in memory that fails, tears and crashes on demand.

Every change is one numbered step.  `crash_at` stops the world before a step; `survivors` then says
what another start would find: everything that was written, only what was made durable, or what a
seed picks in between.
"""

import asyncio
import errno
import random
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from storage.ledger.local.codec import Mapped
from storage.ledger.local.disk import AppendDone, Disk

T = TypeVar("T")
Survival = Literal["written", "durable", "torn"]


class Crash(Exception):
    """The machine stopped here."""


class Inode:
    """A file's bytes: as written, and as the disk has them for sure."""

    def __init__(self, data: bytes = b"") -> None:
        self.written = bytearray(data)
        self.durable = data


Directory = dict[str, Inode]


class SimulatedDisk(Disk):
    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.directory: Directory = {name: Inode(data) for name, data in (files or {}).items()}
        self.directories: list[Directory] = [dict(self.directory)]
        self.steps = 0
        self.crash_at: int | None = None
        self.fail_append: Callable[[], OSError | None] = lambda: None
        self.fail_sync: Callable[[], OSError | None] = lambda: None
        self.fail_write: Callable[[str], OSError | None] = lambda name: None
        self.hold: asyncio.Event | None = None
        self.appended: list[int] = []
        self._held: set[asyncio.Task[None]] = set()

    @property
    def files(self) -> dict[str, bytes]:
        return self.survivors("written")

    def survivors(self, how: Survival, rng: random.Random | None = None) -> dict[str, bytes]:
        """Names come and go in order (file systems journal them), sectors in any order."""
        if how == "written":
            return {name: bytes(inode.written) for name, inode in self.directory.items()}
        if how == "durable":
            return {name: inode.durable for name, inode in self.directories[0].items()}
        assert rng is not None
        directory = rng.choice(self.directories)
        torn = {
            id(inode): _torn(inode.durable, bytes(inode.written), rng)
            for inode in directory.values()
        }
        return {name: torn[id(inode)] for name, inode in directory.items()}

    def _changed(self) -> None:
        self.directories.append(dict(self.directory))

    def _step(self) -> None:
        self.steps += 1
        if self.crash_at is not None and self.steps >= self.crash_at:
            raise Crash

    def append(
        self, name: str, buffers: Sequence[bytes], *, create: bool, done: AppendDone
    ) -> None:
        loop = asyncio.get_running_loop()
        if self.hold is not None:
            task = loop.create_task(self._append_later(self.hold, name, buffers, create, done))
            self._held.add(task)
        else:
            loop.call_soon(self._append, name, buffers, create, done)

    async def _append_later(
        self,
        hold: asyncio.Event,
        name: str,
        buffers: Sequence[bytes],
        create: bool,
        done: AppendDone,
    ) -> None:
        await hold.wait()
        self._append(name, buffers, create, done)

    def _append(self, name: str, buffers: Sequence[bytes], create: bool, done: AppendDone) -> None:
        try:
            self._write_and_sync(name, b"".join(buffers), create)
        except Crash:
            return
        except OSError as error:
            done(error)
            return
        self.appended.append(len(buffers))
        done(None)

    def _write_and_sync(self, name: str, data: bytes, create: bool) -> None:
        self._step()
        if create:
            assert name not in self.directory
            self.directory[name] = Inode()
            self._changed()
        inode = self.directory[name]
        error = self.fail_append()
        if error is not None:
            inode.written += data[: len(data) // 2]
            raise error
        inode.written += data
        self._step()
        error = self.fail_sync()
        if error is not None:
            raise error
        inode.durable = bytes(inode.written)
        if create:
            self._step()
            self.directories = [dict(self.directory)]

    async def read(self, job: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        return job()

    async def maintain(self, job: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        return job()

    async def close(self) -> None:
        pass

    def _inode(self, name: str) -> Inode:
        if name not in self.directory:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self.directory[name]

    def sizes(self) -> dict[str, int]:
        return {name: len(inode.written) for name, inode in self.directory.items()}

    def pread(self, name: str, offset: int, length: int) -> bytes:
        return bytes(self._inode(name).written[offset : offset + length])

    def map(self, name: str) -> Mapped:
        return bytes(self._inode(name).written)

    def write(self, name: str, offset: int, buffers: Sequence[bytes]) -> None:
        self._step()
        error = self.fail_write(name)
        if error is not None:
            raise error
        if name not in self.directory:
            self.directory[name] = Inode()
            self._changed()
        data = b"".join(buffers)
        self.directory[name].written[offset : offset + len(data)] = data

    def truncate(self, name: str, length: int) -> None:
        self._step()
        del self._inode(name).written[length:]

    def sync(self, name: str) -> None:
        self._step()
        inode = self._inode(name)
        inode.durable = bytes(inode.written)

    def rename(self, old: str, new: str) -> None:
        self._step()
        self.directory[new] = self._inode(old)
        del self.directory[old]
        self._changed()

    def unlink(self, name: str) -> None:
        self._step()
        if self.directory.pop(name, None) is not None:
            self._changed()

    def sync_directory(self) -> None:
        self._step()
        self.directories = [dict(self.directory)]


def _torn(durable: bytes, written: bytes, rng: random.Random) -> bytes:
    """Each sector that differs has reached the disk or not, and so has the length."""
    length = rng.choice([len(durable), len(written)])
    data = bytearray(durable[:length].ljust(length, b"\0"))
    for start in range(0, min(length, len(written)), 512):
        if rng.random() < 0.5:
            piece = written[start : min(start + 512, length)]
            data[start : start + len(piece)] = piece
    return bytes(data)


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def io_error() -> OSError:
    return OSError(errno.EIO, "Input/output error")
