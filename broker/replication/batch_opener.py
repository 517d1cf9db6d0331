"""`BatchOpener`: opens large batches in threads, of which other clusters get parts."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from config.bounds import OPENED_BATCHES_BYTES, REPLICATED_BATCH_BYTES
from magnetar.protocol.pulsar_pb2 import MessageMetadata

T = TypeVar("T")


class BatchOpener:
    """Opens and divides large batches in threads, within a budget of bytes, in the order of calls.

    All replicators of a broker share it.
    """

    def __init__(self, budget_bytes: int = OPENED_BATCHES_BYTES) -> None:
        self._budget_bytes = self._free_bytes = budget_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Do the work on a batch of this size, unpacked.  Raises what it raises."""
        size_bytes = min(size_bytes, self._budget_bytes)
        await self._take(size_bytes)
        try:
            return await asyncio.to_thread(work)
        finally:
            self._free_bytes += size_bytes
            self._grant()

    async def _take(self, size_bytes: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free_bytes += size_bytes
            self._grant()
            raise

    def _grant(self) -> None:
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
                continue
            if size_bytes > self._free_bytes:
                return
            self._waiting.popleft()
            self._free_bytes -= size_bytes
            turn.set_result(None)


def is_large(entry: bytes, metadata: MessageMetadata) -> bool:
    """Whether a batch is opened and divided in a thread."""
    return unpacked_bytes(entry, metadata) > REPLICATED_BATCH_BYTES


def unpacked_bytes(entry: bytes, metadata: MessageMetadata) -> int:
    """The size of a batch in memory when it is opened."""
    return max(len(entry), metadata.uncompressed_size)
