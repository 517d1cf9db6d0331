"""`Objects`, the interface to the storage of copies."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import NamedTuple

WRITING = ".writing"
"""Suffix of the name of a file that is not whole yet."""


class StoredObject(NamedTuple):
    """One object, or the rest that a crash left of one."""

    key: str
    size_bytes: int
    modified_ms: int


class Objects(ABC):
    """Interface: named objects in one location, written whole or not at all.

    An object exists under its name only when all of it is durable.  A crash while it is written
    leaves a file with another name (`.writing`), or nothing (an upload in parts).  All methods
    raise `OffloadFailed`; `read` and `size` raise `OffloadedDataLost` if there is no such object.
    """

    @abstractmethod
    async def put(self, key: str, parts: AsyncIterator[bytes]) -> None:
        """Store the parts as one object, which replaces an object of the same name.

        Only a bounded number of parts is in memory.
        """

    async def put_whole(self, key: str, data: bytes) -> None:
        """Store a small object, which replaces an object of the same name."""

        async def parts() -> AsyncIterator[bytes]:
            yield data

        await self.put(key, parts())

    @abstractmethod
    async def read(self, key: str, start: int, length: int) -> bytes:
        """Read a range; fewer bytes if the object ends before."""

    @abstractmethod
    async def size(self, key: str) -> int:
        """Size of an object in bytes."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove an object, and the rest that a crash left of it; no error if there is none."""

    @abstractmethod
    def list(self) -> AsyncIterator[StoredObject]:
        """Every object in the location, in no order, those that are no copies included."""
