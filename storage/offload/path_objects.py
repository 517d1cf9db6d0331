"""Objects as files of one directory; system calls run in threads."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.data_directory import sync_directory
from storage.offload.context import Location
from storage.offload.errors import OffloadedDataLost, OffloadFailed
from storage.offload.objects import WRITING, Objects, StoredObject


class PathObjects(Objects):
    """`Objects` as files: written under another name, synced, and renamed."""

    def __init__(self, location: Location) -> None:
        self._directory = Path(location.bucket)

    async def put(self, key: str, parts: AsyncIterator[bytes]) -> None:
        """See `Objects`."""
        file = await asyncio.to_thread(self._begin, key)
        try:
            async for part in parts:
                await asyncio.to_thread(self._write, file, part)
            await asyncio.to_thread(self._finish, file, key)
        except BaseException:
            with suppress(OSError):
                (self._directory / (key + WRITING)).unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def _begin(self, key: str) -> int:
        with self._offload_errors("written to"):
            self._directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            return os.open(self._directory / (key + WRITING), flags, 0o640)

    def _write(self, file: int, part: bytes) -> None:
        with self._offload_errors("written to"):
            left = memoryview(part)
            while left:
                left = left[os.write(file, left) :]

    def _finish(self, file: int, key: str) -> None:
        with self._offload_errors("written to"):
            os.fsync(file)
            (self._directory / (key + WRITING)).rename(self._directory / key)
            sync_directory(self._directory)

    async def read(self, key: str, start: int, length: int) -> bytes:
        """See `Objects`."""
        return await asyncio.to_thread(self._read, key, start, length)

    def _read(self, key: str, start: int, length: int) -> bytes:
        with (
            self._offload_errors("read", key),
            (self._directory / key).open("rb", buffering=0) as file,
        ):
            found = bytearray()
            while len(found) < length:
                part = os.pread(file.fileno(), length - len(found), start + len(found))
                if not part:
                    break
                found += part
            return bytes(found)

    async def size(self, key: str) -> int:
        """See `Objects`."""

        def ask() -> int:
            with self._offload_errors("read", key):
                return (self._directory / key).stat().st_size

        return await asyncio.to_thread(ask)

    async def delete(self, key: str) -> None:
        """See `Objects`."""

        def remove() -> None:
            with self._offload_errors("deleted from"):
                for name in (key, key + WRITING):
                    (self._directory / name).unlink(missing_ok=True)

        await asyncio.to_thread(remove)

    async def list(self) -> AsyncIterator[StoredObject]:
        """See `Objects`."""
        for found in await asyncio.to_thread(self._scan):
            yield found

    def _scan(self) -> Sequence[StoredObject]:
        found = []
        with (
            self._offload_errors("read"),
            suppress(FileNotFoundError),
            os.scandir(self._directory) as files,
        ):
            for file in files:
                with suppress(FileNotFoundError):
                    if file.is_file():
                        known = file.stat()
                        modified_ms = int(known.st_mtime * 1000)
                        found.append(StoredObject(file.name, known.st_size, modified_ms))
        return found

    @contextmanager
    def _offload_errors(self, action: str, key: str | None = None) -> Iterator[None]:
        """Raise errors of the file system as `OffloadedDataLost` or `OffloadFailed`."""
        try:
            yield
        except FileNotFoundError as error:
            if key is None:
                raise
            raise OffloadedDataLost(
                f"The file {self._directory / key} with offloaded entries is gone: mount its disk, "
                "or restore it."
            ) from error
        except OSError as error:
            raise OffloadFailed(
                f"The directory {self._directory} for offloaded entries could not be {action} "
                f"({error.strerror}): mend it, or offload to another place."
            ) from error
