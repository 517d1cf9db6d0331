"""Where copies are kept: named objects in one place, written whole or not at all.

Rules:

- An object is there under its name only when all of it is durable; what a crash leaves of one that
  was being written has another name (`.writing` in a directory), or none (an upload in parts).
- What is written comes in parts, of which a bounded number is in memory.
- Errors are `OffloadFailed`, or `OffloadedDataLost` when what is read is not there.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import NamedTuple

WRITING = ".writing"
"""What is added to the name of a file that is not whole yet."""


class StoredObject(NamedTuple):
    """One object, or what a crash left of one."""

    key: str
    size_bytes: int
    modified_ms: int


class Objects(ABC):
    """Interface: named objects in one place, written whole or not at all."""

    @abstractmethod
    async def put(self, key: str, parts: AsyncIterator[bytes]) -> None:
        """Store what the parts are together.  What was there under that name is replaced."""

    async def put_whole(self, key: str, data: bytes) -> None:
        """The same of something small."""

        async def parts() -> AsyncIterator[bytes]:
            yield data

        await self.put(key, parts())

    @abstractmethod
    async def read(self, key: str, start: int, length: int) -> bytes:
        """That range, which may be cut short by the end of the object."""

    @abstractmethod
    async def size(self, key: str) -> int:
        """Bytes of an object."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove it, and what a crash left of it.  Deleting what is gone is fine."""

    @abstractmethod
    def list(self) -> AsyncIterator[StoredObject]:
        """Every object in this place, in no order; what has another kind of name too."""
