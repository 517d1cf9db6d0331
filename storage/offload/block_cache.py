"""The cache of blocks of offloaded ledgers."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import NamedTuple


class CachedBlock(NamedTuple):
    """Consecutive entries from `first_entry` on.

    `next_offset` is where the next entry of the block begins, None if these are its last entries.
    """

    first_entry: int
    entries: list[bytes]
    size_bytes: int
    next_offset: int | None


Fetch = Callable[[], Awaitable[CachedBlock]]


class BlockCache:
    """Blocks of offloaded ledgers, bounded in bytes; the least recently used goes first.

    Callers that want the same block share one fetch, which goes on if they are cancelled.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[Hashable, CachedBlock] = OrderedDict()
        self._fetches: dict[Hashable, asyncio.Task[CachedBlock]] = {}
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0
        """Calls of `get` that began a fetch."""

    def has(self, key: Hashable) -> bool:
        """Whether a block is in memory or being fetched."""
        return key in self._blocks or key in self._fetches

    async def get(self, key: Hashable, fetch: Fetch) -> CachedBlock:
        """The block, fetched if it is not in memory.  Raises what `fetch` raises."""
        found = self._blocks.get(key)
        if found is not None:
            self.hits += 1
            self._blocks.move_to_end(key)
            return found
        if key not in self._fetches:
            self.misses += 1
        return await asyncio.shield(self.fetch(key, fetch))

    def fetch(self, key: Hashable, fetch: Fetch) -> asyncio.Task[CachedBlock]:
        """The fetch of a block, begun unless it runs already."""
        task = self._fetches.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._fetched(key, fetch))
            self._fetches[key] = task
            task.add_done_callback(_retrieve_error)
        return task

    async def _fetched(self, key: Hashable, fetch: Fetch) -> CachedBlock:
        try:
            block = await fetch()
        finally:
            del self._fetches[key]
        self._blocks[key] = block
        self.size_bytes += block.size_bytes
        while self.size_bytes > self._max_bytes and len(self._blocks) > 1:
            _, oldest = self._blocks.popitem(last=False)
            self.size_bytes -= oldest.size_bytes
        return block

    async def close(self) -> None:
        """Cancel all fetches."""
        for task in (fetches := list(self._fetches.values())):
            task.cancel()
        if fetches:
            await asyncio.wait(fetches)


def _retrieve_error(task: asyncio.Task[CachedBlock]) -> None:
    """Retrieve the error of a fetch, so that asyncio does not report it."""
    # Nobody may wait for a fetch ahead of its reader; the reader fetches the block again.
    if not task.cancelled():
        task.exception()
